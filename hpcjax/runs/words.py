"""The words `inf`, `-inf` and `nan`, which JSON holds in place of such numbers."""

import math
from typing import Any

WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def plain(value: Any) -> Any:
    """Returns the word for a float that JSON cannot represent, other values unchanged.

    Examples:
      >>> plain(float("-inf")), plain(0.5), plain("text")
      ('-inf', 0.5, 'text')
    """
    unheld = isinstance(value, float) and not math.isfinite(value)
    return str(float(value)) if unheld else value


def number(value: Any) -> Any:
    """Returns the float that a word stands for, other values unchanged."""
    return WORDS.get(value, value) if isinstance(value, str) else value
