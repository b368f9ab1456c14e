"""Index expressions and ranges: exact integers, affine in parameters and symbols."""

import ast
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hpcjax.core.errors import ConfigError

Index: TypeAlias = "int | str | Affine"
Values = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Affine:
    """A sum of names times integers, and an integer.

    Attributes:
      terms: names in order, with coefficients that are not 0.
      constant: the integer.

    Examples:
      >>> print(Affine.of("2 * (i - 1) + n") - "n")
      2*i - 2
    """

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, index: Index) -> "Affine":
        """Reads an expression such as `2 * i + n - 1`.

        Raises:
          ConfigError: it is not affine with integers.
        """
        if isinstance(index, Affine):
            return index
        if isinstance(index, str):
            return _read(_parse(index, "an index must be affine"))
        return cls((), int(index))

    def __add__(self, other: Index) -> "Affine":
        other = Affine.of(other)
        if not other.terms:
            return Affine(self.terms, self.constant + other.constant)
        sums = dict(self.terms)
        for name, factor in other.terms:
            sums[name] = sums.get(name, 0) + factor
        kept = tuple(sorted((name, n) for name, n in sums.items() if n))
        return Affine(kept, self.constant + other.constant)

    def __mul__(self, factor: int) -> "Affine":
        if not factor:
            return Affine()
        terms = tuple((name, n * factor) for name, n in self.terms)
        return Affine(terms, self.constant * factor)

    def __sub__(self, other: Index) -> "Affine":
        return self + Affine.of(other) * -1

    def __str__(self) -> str:
        text = ""
        for name, n in (*self.terms, ("", self.constant)):
            if n or not (name or text):
                sign = ("-" if n < 0 else "") if not text else " - " if n < 0 else " + "
                factor = "" if name and abs(n) == 1 else str(abs(n))
                text += sign + "*".join(part for part in (factor, name) if part)
        return text

    @property
    def names(self) -> frozenset[str]:
        """Names that it depends on."""
        return frozenset(name for name, _ in self.terms)

    @property
    def number(self) -> int | None:
        """Its value if it depends on no name."""
        return None if self.terms else self.constant

    def factor(self, name: str) -> int:
        """Returns the coefficient of a name."""
        return dict(self.terms).get(name, 0)

    def put(self, values: Mapping[str, Index]) -> "Affine":
        """Returns it with expressions in the place of names."""
        if not any(name in values for name, _ in self.terms):
            return self
        made = Affine((), self.constant)
        for name, n in self.terms:
            made += Affine.of(values.get(name, Affine(((name, 1),)))) * n
        return made

    def at(self, values: Values) -> int:
        """Returns its value."""
        return self.constant + sum(n * values[name] for name, n in self.terms)


class Range(NamedTuple):
    """Integers from a first to a last.

    Attributes:
      start: the first.
      ends: the last is at most the least of these, inclusive.
      step: between neighbours, at least 1.
    """

    start: Affine
    ends: tuple[Affine, ...]
    step: int = 1

    def __str__(self) -> str:
        if self.ends == (self.start,):
            return str(self.start)
        ends = [str(end + 1) for end in self.ends]
        stop = ends[0] if len(ends) == 1 else f"min({', '.join(ends)})"
        return f"{self.start}:{stop}" + (f":{self.step}" if self.step > 1 else "")

    @property
    def names(self) -> frozenset[str]:
        """Names that it depends on."""
        return self.start.names.union(*(end.names for end in self.ends))

    def put(self, values: Mapping[str, Index]) -> "Range":
        """Returns it with expressions in the place of names."""
        ends = (end.put(values) for end in self.ends)
        return Range(self.start.put(values), tuple(dict.fromkeys(ends)), self.step)

    def at(self, values: Values) -> range:
        """Returns its integers."""
        first = self.start.at(values)
        if self.ends == (self.start,):
            return range(first, first + 1)
        last = min(end.at(values) for end in self.ends)
        return range(first, last + 1, self.step)

    @classmethod
    def of(cls, text: str) -> "Range":
        """Reads an index or a slice, whose end is exclusive as in Python."""
        (_, subset) = read_subset(f"_[{text}]")
        return subset[0] if subset else point(text)


Ranges = Sequence[tuple[str, Range]]


def point(index: Index) -> Range:
    """Returns the range of one integer."""
    index = Affine.of(index)
    return Range(index, (index,))


def read_subset(text: str) -> tuple[str, tuple[Range, ...] | None]:
    """Reads a container's name, and which elements of it; None if it is a name alone.

    Raises:
      ConfigError: it is not of the form `A[i, 0:n:2]`, with steps of at least 1.

    Examples:
      >>> name, subset = read_subset("A[2*i + 1, 0:n:2]")
      >>> name, [str(each) for each in subset]
      ('A', ['2*i + 1', '0:n:2'])
    """
    wanted = "a subset must be like 'A[i, 0:n:2]'"
    body = _parse(text, wanted)
    if isinstance(body, ast.Name):
        return body.id, None
    if not isinstance(body, ast.Subscript) or not isinstance(body.value, ast.Name):
        raise ConfigError(f"{wanted}: got {text!r}")
    part = body.slice
    parts = part.elts if isinstance(part, ast.Tuple) else [part]
    return body.value.id, tuple(_read_range(each) for each in parts)


def _parse(text: str, wanted: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ConfigError(f"{wanted}: got {text!r}") from None


def _read_range(node: ast.expr) -> Range:
    if not isinstance(node, ast.Slice):
        return point(_read(node))
    step = _read(node.step).number if node.step else 1
    if not node.lower or not node.upper or step is None or step < 1:
        raise ConfigError(
            f"a range needs a start, an end, a step >= 1: got {ast.unparse(node)}"
        )
    return Range(_read(node.lower), (_read(node.upper) - 1,), step)


def _read(node: ast.expr) -> Affine:
    """Reads an expression."""
    match node:
        case ast.Constant(value=int(value)):
            return Affine((), value)
        case ast.Name(id=name):
            return Affine(((name, 1),))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _read(inner) * -1
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return _read(left) + _read(right) * (1 if isinstance(op, ast.Add) else -1)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            parts = sorted(
                (_read(left), _read(right)), key=lambda part: len(part.terms)
            )
            if parts[0].number is not None:
                return parts[1] * parts[0].constant
    raise ConfigError(f"an index must be affine: got {ast.unparse(node)!r}")


def iterate(ranges: Ranges, values: Values) -> Iterator[dict[str, int]]:
    """Yields the values of parameters, the last one fastest."""
    if not ranges:
        yield dict(values)
        return
    (name, own), *others = ranges
    for value in own.at(values):
        yield from iterate(others, {**values, name: value})


def elements(subset: Sequence[Range], values: Values) -> Iterator[tuple[int, ...]]:
    """Yields the indices of a subset."""
    return itertools.product(*(each.at(values) for each in subset))


def count(
    ranges: Ranges, subset: Sequence[Range] = (), values: Values | None = None
) -> int:
    """Returns the number of elements of a subset, over all iterations.

    It is exact; only parameters that other ranges depend on are counted one by one.

    Examples:
      >>> i, j = Range.of("0:100"), Range.of("0:i")
      >>> count([("i", i), ("j", j)])
      4950
    """
    values = values or {}
    # How many elements a subset has depends on its length alone, not on its start.
    lengths = (
        Range(Affine(), tuple(end - own.start for end in own.ends), own.step)
        for own in subset
    )
    counted = [*ranges, *(("", each) for each in lengths)]
    if not counted:
        return 1
    (name, own), *others = counted
    taken = own.at(values)
    if not any(name in each.names for _, each in others):
        return len(taken) and len(taken) * count(others, (), values)
    return sum(count(others, (), {**values, name: value}) for value in taken)
