"""One training loop, its state, checkpoints and writers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {"state": {"row_cache": "RowCacheConfig"}}
