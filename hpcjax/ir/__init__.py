"""Programs as graphs of operators: what they move, what fuses, the best layouts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
