"""Which orders of axes a contraction can have so that it is one batched matrix product.

The letters of `a,b->c` fall into four groups: batch (in all three terms), sum (in a and
b), rows (in a and c) and columns (in b and c). A term can be a matrix, or a batch of
them at equal distances, if the letters of each of its groups stand together, and in the
same order in all terms that have them; and if its batch is not behind both other
groups, for a matrix needs neighbouring elements along its rows or its columns.

References:
  Ivanov et al., Data Movement Is All You Need, MLSys 2021, §6.1.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.ir.letters import product, split_einsum


class Gemm(NamedTuple):
    """A contraction as a call of a BLAS, whose matrices have neighbouring rows.

    The call computes `c = op(a) · op(b)` for each of `batch`, with `op` a transpose or
    nothing, and c of m rows and n columns. Element (row, column) of matrix number r of
    a lies at `r · stride_a + column · lda + row`; likewise of b and c.

    Attributes:
      einsum: `a,b->c` with the axes in the order in which they are stored.
      swapped: whether the call gets b and a for a and b, and computes the transpose of
        c; the following describe the call.
      m: rows.
      n: columns.
      k: over which is summed.
      batch: matrices.
      trans_a: whether the call transposes the stored matrices of its first operand.
      trans_b: likewise of its second.
      lda: elements between two columns of a stored matrix.
      ldb: likewise.
      ldc: likewise.
      stride_a: elements between two matrices.
      stride_b: likewise.
      stride_c: likewise.
    """

    einsum: str
    swapped: bool
    m: int
    n: int
    k: int
    batch: int
    trans_a: bool
    trans_b: bool
    lda: int
    ldb: int
    ldc: int
    stride_a: int
    stride_b: int
    stride_c: int


class _Groups(NamedTuple):
    """Letters of the four groups, each in one order."""

    batch: str
    sum: str
    rows: str
    columns: str

    @property
    def terms(self) -> tuple[tuple[str, str, str], ...]:
        """Batch and two other groups of each term; the second of c are its columns."""
        return (
            (self.batch, self.rows, self.sum),
            (self.batch, self.sum, self.columns),
            (self.batch, self.rows, self.columns),
        )


class _Matrix(NamedTuple):
    """A term whose first group has rows and whose second has columns."""

    by_columns: bool  # neighbouring elements lie along the first group
    leading: int
    stride: int


def gemm(einsum: str, sizes: Mapping[str, int]) -> Gemm:
    """Returns a contraction, with the axes stored as they are written, as one call.

    Args:
      einsum: `a,b->c`.
      sizes: of its letters.

    Raises:
      ConfigError: it is none; the group that stands in the way is named.

    Examples:
      >>> call = gemm("bij,bjk->bik", {"b": 2, "i": 3, "j": 4, "k": 5})
      >>> call.swapped, (call.m, call.n, call.k), (call.lda, call.ldb, call.ldc)
      (True, (5, 3, 4), (5, 4, 5))
    """
    terms = split_einsum(einsum)
    groups = _groups(einsum, terms)
    matrices = [
        _matrix(einsum, term, parts, sizes)
        for term, parts in zip(terms, groups.terms, strict=True)
    ]
    return _call(einsum, groups, matrices, sizes)


def gemm_layouts(
    einsum: str, sizes: Mapping[str, int], *, outermost: str = ""
) -> list[Gemm]:
    """Returns all orders of axes in which a contraction is one call, sorted.

    Args:
      einsum: `a,b->c`, in any order of the axes of each term.
      sizes: of its letters.
      outermost: letters that must come first in the terms that have them, such as that
        of a stack of tensors which others read one by one.

    Raises:
      ConfigError: a letter has no size or is in one term only, or there is no order.

    Examples:
      >>> sizes = {"i": 2, "j": 3, "k": 4}
      >>> [call.einsum for call in gemm_layouts("ij,jk->ik", sizes)][:3]
      ['ij,jk->ik', 'ij,jk->ki', 'ij,kj->ik']
    """
    terms = split_einsum(einsum)
    found = {}
    for orders in itertools.product(
        *map(itertools.permutations, _letters(einsum, terms))
    ):
        groups = _Groups(*("".join(order) for order in orders))
        stored = [
            [t for t in _arrangements(parts) if _stands_first(t, outermost)]
            for parts in groups.terms
        ]
        for a, b, c in itertools.product(*stored):
            found[f"{a},{b}->{c}"] = None
    if not found:
        raise ConfigError(
            f"no order of the axes of {einsum!r} with {outermost!r} first is a product "
            "of matrices"
        )
    return [gemm(each, sizes) for each in sorted(found)]


def _arrangements(parts: tuple[str, str, str]) -> Iterator[str]:
    """Yields orders of three groups in which the batch is not behind two others."""
    for blocks in itertools.permutations([part for part in parts if part]):
        if len(blocks) < 3 or blocks[-1] != parts[0]:
            yield "".join(blocks)


def _stands_first(term: str, outermost: str) -> bool:
    own = [letter for letter in term if letter in outermost]
    return set(term[: len(own)]) == set(own)


def _letters(einsum: str, terms: tuple[str, str, str]) -> _Groups:
    """Returns the groups, with letters in the order of the first term that has them."""
    a, b, c = terms
    lonely = sorted((set(a) ^ set(b)) - set(c))
    if lonely:
        raise ConfigError(f"{einsum!r} sums letters of one operand alone: {lonely}")
    return _Groups(
        batch="".join(x for x in a if x in b and x in c),
        sum="".join(x for x in a if x in b and x not in c),
        rows="".join(x for x in a if x not in b),
        columns="".join(x for x in b if x not in a),
    )


def _groups(einsum: str, terms: tuple[str, str, str]) -> _Groups:
    """Returns the groups; raises ConfigError for one in unequal orders."""
    groups = _letters(einsum, terms)
    for name, letters in groups._asdict().items():
        for term in terms:
            own = "".join(x for x in term if x in letters)
            if own and own != letters:
                raise ConfigError(
                    f"{einsum!r} is not one product of matrices: {name} group "
                    f"{', '.join(letters)} has another order in {term!r}"
                )
    return groups


def _matrix(
    einsum: str, term: str, parts: tuple[str, str, str], sizes: Mapping[str, int]
) -> _Matrix:
    """Returns how a term is stored, from its batch and its two other groups."""
    batch, first, second = parts
    for group in parts:
        if group not in term:
            raise ConfigError(
                f"{einsum!r} is not one product of matrices: group "
                f"{', '.join(group)} does not stand together in {term!r}"
            )

    def stride(group: str) -> int:
        # An axis of size one, which an empty group is, is never stepped along.
        return product(term[term.index(group) + len(group) :], sizes) if group else 0

    if all(parts) and term.endswith(batch):
        raise ConfigError(
            f"{einsum!r} is not one product of matrices: batch group "
            f"{', '.join(batch)} is last in {term!r}"
        )
    by_columns = term.endswith(first) if first else not term.endswith(second)
    inner, outer = (first, second) if by_columns else (second, first)
    leading = max(stride(outer), product(inner, sizes))
    return _Matrix(by_columns, leading, stride(batch))


def _call(
    einsum: str, groups: _Groups, matrices: list[_Matrix], sizes: Mapping[str, int]
) -> Gemm:
    a, b, c = matrices
    rows, columns = product(groups.rows, sizes), product(groups.columns, sizes)
    # If c's neighbours are along its columns, the transpose of c is computed instead:
    # cᵀ = op(b)ᵀ · op(a)ᵀ, for which b and a count as transposed.
    swapped = not c.by_columns
    first, second = (b, a) if swapped else (a, b)
    return Gemm(
        einsum=einsum,
        swapped=swapped,
        m=columns if swapped else rows,
        n=rows if swapped else columns,
        k=product(groups.sum, sizes),
        batch=product(groups.batch, sizes),
        trans_a=first.by_columns if swapped else not first.by_columns,
        trans_b=second.by_columns if swapped else not second.by_columns,
        lda=first.leading,
        ldb=second.leading,
        ldc=c.leading,
        stride_a=first.stride,
        stride_b=second.stride,
        stride_c=c.stride,
    )
