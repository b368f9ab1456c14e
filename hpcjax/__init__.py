"""hpcjax: published ML-systems, HPC and weather methods as composable JAX functions.

Importing the package starts no device and loads no JAX: every room resolves its public
names when they are first used.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
