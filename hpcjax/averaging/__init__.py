"""Workers that train models of their own and average them, on a mesh and on hosts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "averaging": {
        "adpsgd": "AdpsgdConfig",
        "dpsgd": "DpsgdConfig",
        "eager": "EagerConfig",
        "local_sgd": "LocalSgdConfig",
        "sgp": "SgpConfig",
        "wagma": "WagmaConfig",
    }
}
