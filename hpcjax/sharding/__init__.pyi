from .gradients import local_value_and_grad as local_value_and_grad
from .gradients import vary as vary
from .gradients import varying_axes as varying_axes
from .mesh import DATA_AXIS as DATA_AXIS
from .mesh import data_mesh as data_mesh
from .mesh import make_mesh as make_mesh
from .mesh import place_batch as place_batch
from .mesh import state_shardings as state_shardings
