"""Programs as graphs of control, data and call relations, and analyses of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
