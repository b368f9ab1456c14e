"""Device meshes and what runs on them: the only room that makes a mesh."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "parallel": {
        "zero": "ZeroConfig",
        "tensor3d": "Tensor3dConfig",
        "ted": "TedConfig",
        "pipeline": "PipelineConfig",
        "spatial": "SpatialConfig",
    }
}
