"""Scientific solvers: quantum transport of electrons and phonons that scatter."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
