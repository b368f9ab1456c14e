"""The axes of a sweep, as written on the command line, and the points it visits.

`key=a,b,c` lists values. `key=uniform(0,1)`, `log(1e-3,1)`, `int(16,256)` and
`logint(1,64)` are ranges with both ends included; a grid needs lists.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import overrides

Value = int | float | str
Sampler = Literal["grid", "random", "halton", "tpe", "gp"]
ADAPTIVE = ("tpe", "gp")
_RANGE = re.compile(r"(?P<kind>[a-z]+)\((?P<low>[^,()]+),(?P<high>[^,()]+)\)")
_BOUND = re.compile(r"(?P<name>\w+)\s*<=\s*(?P<bound>\S+)")
_FORM = "sweep must list the values of each key, such as {'lr': (0.1, 0.3)}"
# Values that differ by this factor are drawn on a logarithmic axis.
SPREAD = 10.0
_KINDS = ("uniform", "log", "int", "logint")


def spans(values: Any) -> bool:
    """Says whether values are positive and differ by a factor of `SPREAD`; skips NaN.

    Examples:
      >>> spans([0.1, 0.3]), spans([0.01, 0.1]), spans([0, 9])
      (False, True, False)
    """
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return bool(known.size and 0 < known.min() <= known.max() / SPREAD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One key and the values it takes.

    Attributes:
      key: of the config, such as `optimizer.lr`.
      values: texts of a list; empty for a range.
      kind: of a range: `uniform`, `log`, `int` or `logint`; empty for a list.
      low: least value of a range.
      high: greatest value of a range.
    """

    key: str
    values: tuple[str, ...] = ()
    kind: str = ""
    low: float = 0.0
    high: float = 0.0

    def __str__(self) -> str:
        if self.values:
            return f"{self.key}={','.join(self.values)}"
        return f"{self.key}={self.kind}({self.low:g},{self.high:g})"

    @property
    def whole(self) -> bool:
        """Whether a range is of integers."""
        return self.kind in ("int", "logint")

    @property
    def log(self) -> bool:
        """Whether a range is uniform in the logarithm."""
        return self.kind in ("log", "logint")

    @property
    def logarithmic(self) -> bool:
        """Whether its values are drawn so: it was given so, or its list spans much."""
        with contextlib.suppress(ValueError):
            return self.log or spans([float(value) for value in self.values])
        return False

    @property
    def ends(self) -> tuple[str, ...]:
        """All values of a list, or the two ends of a range."""
        return self.values or (self.text(self.low), self.text(self.high))

    def text(self, value: Value) -> str:
        """Returns a value as an override's text."""
        if isinstance(value, str):
            return value
        return str(round(value)) if self.whole else repr(float(value))

    @property
    def count(self) -> float:
        """Number of values; infinite for a range of real numbers."""
        inside = self.high - self.low + 1 if self.whole else math.inf
        return len(self.values) or inside

    def share(self, value: Value) -> float:
        """Returns a share of the axis, in [0, 1), at which it has a value."""
        if self.values:
            return (self.values.index(str(value)) + 0.5) / len(self.values)
        low, high, place = self.low, self.high, float(value)
        if self.whole:
            low, high = low - 0.5, high + 0.5
        if self.log:
            low, high, place = math.log(low), math.log(high), math.log(place)
        return min((place - low) / (high - low), math.nextafter(1.0, 0.0))

    def at(self, share: float) -> Value:
        """Returns the value below which `share` of the axis lies, share in [0, 1)."""
        if self.values:
            return self.values[int(share * len(self.values))]
        # An integer has the share of the unit interval around it, so that the ends are
        # as likely as others.
        low, high = self.low, self.high
        if self.whole:
            low, high = low - 0.5, high + 0.5
        if self.log:
            value = math.exp(math.log(low) + share * math.log(high / low))
        else:
            value = low + share * (high - low)
        # Rounding errors may have left the range.
        within = min(max(value, self.low), self.high)
        return round(within) if self.whole else within


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a trial's result must keep.

    Attributes:
      name: a variable of the result: a scalar, or a column whose last value counts.
      bound: its largest allowed value.
    """

    name: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}<={self.bound:g}"


def parse_constraint(text: str) -> Constraint:
    """Returns the constraint that `NAME<=BOUND` means.

    Raises:
      ConfigError: another form, or a bound that is not finite.

    Examples:
      >>> parse_constraint("seconds<=20")
      Constraint(name='seconds', bound=20.0)
    """
    match = _BOUND.fullmatch(text.strip())
    with contextlib.suppress(ValueError):
        if match and math.isfinite(bound := float(match["bound"])):
            return Constraint(name=match["name"], bound=bound)
    raise ConfigError(f"a constraint is written such as seconds<=20: got {text!r}")


def parse(pairs: Mapping[str, str]) -> tuple[list[Axis], dict[str, str]]:
    """Separates keys that are varied from keys that are set.

    Raises:
      ConfigError: an invalid range, or a value listed twice.

    Examples:
      >>> axes, fixed = parse({"lr": "0.1,0.3", "model.widths": "[64,10]"})
      >>> str(axes[0]), fixed
      ('lr=0.1,0.3', {'model.widths': '[64,10]'})
    """
    axes, fixed = [], {}
    for key, text in pairs.items():
        match = _RANGE.fullmatch(text)
        items = _split(text)
        if match:
            axes.append(_range(key, **match.groupdict()))
        elif len(items) > 1:
            axes.append(_list(key, items))
        else:
            fixed[key] = text
    return axes, fixed


def from_mapping(
    listed: Any, config: Any, fixed: Mapping[str, str] | None = None
) -> list[Axis]:
    """Returns the axes of a config file's `sweep = {"optimizer.lr": (0.1, 0.3)}`.

    Args:
      listed: `{key: values}`; texts are those of overrides.
      config: which has the keys.
      fixed: what is set for all, and therefore not varied.

    Raises:
      ConfigError: values that are no list, a key that the config does not have, or a
        value that cannot be written as an override.
    """
    if not isinstance(listed, Mapping):
        raise ConfigError(f"{_FORM}: got {listed!r}")
    for key, items in listed.items():
        listing = isinstance(items, Sequence | np.ndarray)
        if not listing or isinstance(items, str) or not len(items):
            raise ConfigError(f"{_FORM}: got {key}: {items!r}")
    fixed = fixed or {}
    lists = {key: list(map(_plain, items)) for key, items in listed.items()}
    # Which keys exist may depend on the choice of another key.
    firsts = {key: items[0] for key, items in lists.items()}
    config = overrides.parse(config, {**firsts, **fixed})
    return [
        _list(key, [overrides.write(config, key, item) for item in items])
        for key, items in lists.items()
        if key not in fixed
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _split(text: str) -> list[str]:
    """Splits at commas that no bracket encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _list(key: str, items: Iterable[str]) -> Axis:
    values = tuple(items)
    twice = {value for value in values if values.count(value) > 1}
    if twice or "" in values:
        raise ConfigError(
            f"{key} must list different values: got {key}={','.join(values)}"
        )
    return Axis(key=key, values=values)


def _range(key: str, kind: str, low: str, high: str) -> Axis:
    given = f"{key}={kind}({low},{high})"
    if kind not in _KINDS:
        raise ConfigError(f"unknown range {given}{nearest(kind, _KINDS)}")
    try:
        axis = Axis(key=key, kind=kind, low=float(low), high=float(high))
    except ValueError as error:
        raise ConfigError(
            f"the ends of a range must be numbers: got {given}"
        ) from error
    whole = not axis.whole or (axis.low.is_integer() and axis.high.is_integer())
    whole = whole and (not axis.whole or max(-axis.low, axis.high) < 2**53)
    if not (math.isfinite(axis.low) and axis.low < axis.high < math.inf and whole):
        kind_of = "whole numbers" if axis.whole else "finite numbers"
        raise ConfigError(f"a range needs two {kind_of}, the lower first: got {given}")
    if axis.log and axis.low <= (0.5 if axis.whole else 0):
        raise ConfigError(f"the ends of a logarithmic range must be > 0: got {given}")
    return axis


def points(
    axes: Sequence[Axis], sampler: Sampler, trials: int | None, seed: int
) -> list[dict[str, Value]]:
    """Returns the points to visit, in order; none for an adaptive sampler.

    Args:
      axes: what is varied.
      sampler: `grid` visits every combination of lists, `random` draws independently,
        `halton` fills the space evenly (scrambled Halton sequence).
      trials: number of points; a grid has its own.
      seed: of the draws. A longer sequence begins with the same points.

    Raises:
      ConfigError: nothing is varied, a grid of ranges, or no number of trials.
    """
    check_sampler(axes, sampler, trials)
    if sampler == "grid":
        cells = itertools.product(*(axis.values for axis in axes))
        return [dict(zip(_keys(axes), cell, strict=True)) for cell in cells]
    if sampler in ADAPTIVE:
        return []
    from scipy.stats import qmc

    count = trials or 0
    if sampler == "random":
        shares = np.random.Generator(np.random.Philox(seed)).random((count, len(axes)))
    else:
        shares = qmc.Halton(len(axes), rng=np.random.default_rng(seed)).random(count)
    return [
        {axis.key: axis.at(float(share)) for axis, share in zip(axes, row, strict=True)}
        for row in shares
    ]


def check_sampler(axes: Sequence[Axis], sampler: str, trials: int | None) -> None:
    """Raises ConfigError for a sampler that cannot visit these axes."""
    if sampler not in get_args(Sampler):
        allowed = get_args(Sampler)
        raise ConfigError(f"unknown sampler {sampler!r}{nearest(sampler, allowed)}")
    if not axes:
        raise ConfigError(
            "nothing is varied: give an axis such as optimizer.lr=0.1,0.3"
        )
    if sampler == "grid":
        ranges = [str(axis) for axis in axes if not axis.values]
        if ranges:
            raise ConfigError(
                f"a grid needs lists of values: got {', '.join(ranges)}; "
                "other samplers take ranges"
            )
        if trials is not None:
            raise ConfigError("a grid has its own number of trials: leave --trials out")
    elif trials is None or trials < 1:
        raise ConfigError(f"sampler {sampler!r} needs a number of trials: got {trials}")
    elif sampler == "gp" and trials > (most := math.prod(a.count for a in axes)):
        raise ConfigError(
            f"sampler 'gp' repeats no point: of {most:g} it can make no {trials} trials"
        )


def _keys(axes: Sequence[Axis]) -> list[str]:
    return [axis.key for axis in axes]
