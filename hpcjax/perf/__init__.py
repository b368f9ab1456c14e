"""What measures: counters of compiled programs, the benchmark harness, profiles."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
