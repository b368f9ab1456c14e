from .quantized_matmul.packing import pack as pack
from .quantized_matmul.packing import packed_rows as packed_rows
from .quantized_matmul.packing import unpack as unpack
