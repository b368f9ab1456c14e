"""What predicts, from values that others have measured: formulas, simulated events."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
