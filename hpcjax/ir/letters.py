"""Letters of axes and their sizes."""

import math
from collections.abc import Iterable, Mapping

from hpcjax.core.errors import ConfigError


def product(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns the product of the sizes of axes; 1 without any.

    Raises:
      ConfigError: an axis has no size.
    """
    axes = tuple(axes)
    missing = sorted(set(axes) - set(sizes))
    if missing:
        raise ConfigError(f"axes without a size: {missing}; given: {sorted(sizes)}")
    return math.prod(sizes[axis] for axis in axes)


def split_einsum(einsum: str) -> tuple[str, str, str]:
    """Returns the axes of both operands and of the result of a contraction.

    Raises:
      ConfigError: it is not of two operands, an axis is twice in one of them, or the
        result has an axis that neither has.

    Examples:
      >>> split_einsum("phi,ibj->phbj")
      ('phi', 'ibj', 'phbj')
    """
    operands, arrow, result = einsum.partition("->")
    terms = (*operands.split(","), result)
    good = (
        arrow
        and len(terms) == 3
        and all(term.isalpha() or not term for term in terms)
        and all(len(set(term)) == len(term) for term in terms)
        and set(result) <= set(terms[0]) | set(terms[1])
    )
    if not good:
        raise ConfigError(
            "a contraction is 'a,b->c' of letters, none twice in a term, with every "
            f"letter of c in a or b: got {einsum!r}"
        )
    return terms[0], terms[1], terms[2]
