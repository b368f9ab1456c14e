"""Pure functions on arrays: dense, convolution, norms, attention, embedding.

A layer is observed by `y, record = core.observe(tap, x, layers.dense(x, kernel))`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
