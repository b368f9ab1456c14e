from ._broadcast import broadcast as broadcast
from ._triangle import pack_triangle as pack_triangle
from ._triangle import unpack_triangle as unpack_triangle
