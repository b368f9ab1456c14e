"""The networks of HammingMesh's table II, of about 1,000 and 16,000 accelerators."""

from collections.abc import Mapping

from hpcjax.cost.mesh_networks import HxMesh, Torus
from hpcjax.cost.networks import Network
from hpcjax.cost.switched_networks import Dragonfly, FatTree


def _square(board: int, boards: int) -> HxMesh:
    return HxMesh(a=board, b=board, x=boards, y=boards)


NETWORKS: Mapping[str, Network] = {
    "fat_tree": FatTree(),
    "fat_tree_50": FatTree(down=42, up=22),
    "fat_tree_75": FatTree(down=51, up=13),
    "hyperx": _square(1, 32),
    "hx2mesh": _square(2, 16),
    "hx4mesh": _square(4, 8),
    "torus": Torus(),
    "fat_tree_16k": FatTree(endpoints=16384, levels=3),
    "fat_tree_50_16k": FatTree(endpoints=16384, levels=3, down=42, up=22),
    "fat_tree_75_16k": FatTree(endpoints=16384, levels=3, down=51, up=13),
    "dragonfly_16k": Dragonfly(),
    "hyperx_16k": _square(1, 128),
    "hx2mesh_16k": _square(2, 64),
    "hx4mesh_16k": _square(4, 32),
    "torus_16k": Torus(rows=128, cols=128),
}
