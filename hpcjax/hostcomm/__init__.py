"""Messages between processes, by their hosts: no SPMD program, no JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
