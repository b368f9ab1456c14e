"""Pruning and growing while training: scores, structures, distributions, schedules.

Each is chosen by itself, and one transform is made of all of them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
