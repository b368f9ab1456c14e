"""The words `inf`, `-inf` and `nan`, which JSON holds in place of such numbers."""

import math
from typing import Any

WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def plain(value: Any) -> Any:
    """Returns the word of a float that JSON cannot hold, anything else as it is.

    Examples:
      >>> plain(float("-inf")), plain(0.5), plain("text")
      ('-inf', 0.5, 'text')
    """
    unheld = isinstance(value, float) and not math.isfinite(value)
    return str(float(value)) if unheld else value


def number(value: Any) -> Any:
    """Returns the float that a word stands for, anything else as it is."""
    return WORDS.get(value, value) if isinstance(value, str) else value
