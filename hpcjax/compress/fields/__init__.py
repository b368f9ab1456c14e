"""Gridded fields compressed into neural networks, and by what these are compared to."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
