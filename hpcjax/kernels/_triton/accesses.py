"""What a kernel has read and written."""

import collections
from typing import NamedTuple


class Accesses(NamedTuple):
    """The elements of its operands that a kernel has read and written.

    Attributes:
      kernel: the name of the `triton.jit` function.
      sizes: elements of each input and output, by the parameter's name.
      loaded: elements, those under a mask that is false left out.
      stored: likewise. What is added atomically counts as neither.
    """

    kernel: str
    sizes: dict[str, int]
    loaded: collections.Counter[str]
    stored: collections.Counter[str]
