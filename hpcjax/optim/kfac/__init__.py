"""K-FAC: Kronecker-factored curvature, on one device or distributed over many."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
