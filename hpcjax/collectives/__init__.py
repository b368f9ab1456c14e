"""Exchanges between devices, for use inside `shard_map`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "exchange": {
        "dense": "DenseConfig",
        "half": "HalfConfig",
        "top_k": "TopKConfig",
        "topk_dsa": "TopkDsaConfig",
        "gtopk": "GTopkConfig",
        "gaussian_k": "GaussianKConfig",
        "ms_top_k": "MsTopKConfig",
        "random_k": "RandomKConfig",
        "ok_topk": "OkTopkConfig",
        "sign": "SignConfig",
        "power_sgd": "PowerSgdConfig",
        "torus": "TorusConfig",
    }
}
