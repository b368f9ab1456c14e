"""The one way to time things: candidates against a named baseline, interleaved.

Times of different processes or minutes do not compare: clocks, caches and neighbours
change. So every round times every candidate once, the order rotates from round to
round, and what is reported is the ratio to the baseline of the same round.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.perf.intervals import bootstrap_median

if TYPE_CHECKING:
    import xarray as xr

Clock = Callable[[], float]
_CACHE = "jax_enable_compilation_cache"


class Ratio(NamedTuple):
    """How long a candidate takes, relative to the baseline: below 1 is faster.

    Attributes:
      median: of the ratios of the rounds.
      low: lower end of the bootstrap interval of that median.
      high: its upper end.
      rounds: how many rounds there were.
    """

    median: float
    low: float
    high: float
    rounds: int


class Compilation(NamedTuple):
    """A compiled program and the seconds that tracing, lowering and compiling took."""

    program: jax.stages.Compiled
    seconds: float


def compare(
    candidates: Mapping[str, Callable[[], Any]],
    baseline: str,
    *,
    repetitions: int = 20,
    warmup: int = 3,
    inner: int = 1,
    clock: Clock = time.perf_counter,
) -> "xr.Dataset":
    """Times thunks against each other and returns every measurement.

    In round r the candidates run in their order rotated by r; each is called `inner`
    times, each call timed until its result is there. Garbage collection is off.

    Args:
      candidates: by name, functions of no argument that return what to wait for; see
        `stepper` for steps that donate their state.
      baseline: the name of the one that ratios refer to.
      repetitions: rounds; a claim needs at least 20.
      warmup: rounds before these, which compile and are not timed.
      inner: calls per measurement, for what is short against the clock.
      clock: seconds, ever increasing.

    Returns:
      A dataset with `seconds` per call [candidate, repetition] and the attributes
      `baseline`, `warmup`, `inner`.

    Raises:
      ConfigError: an unknown baseline, or a count that is too small.

    Examples:
      >>> made = compare({"a": lambda: 1, "b": lambda: 2}, "a", repetitions=3)
      >>> dict(made.sizes)
      {'candidate': 2, 'repetition': 3}
    """
    import xarray as xr

    _check(candidates, baseline, repetitions, warmup, inner)
    names = list(candidates)
    seconds = np.full((len(names), repetitions), np.nan)
    with _no_collection():
        for number in range(-warmup, repetitions):
            for offset in range(len(names)):
                row = (number + offset) % len(names)
                taken = _time(candidates[names[row]], inner, clock)
                if number >= 0:
                    seconds[row, number] = taken
    return xr.Dataset(
        {"seconds": (("candidate", "repetition"), seconds, {"units": "s"})},
        coords={"candidate": names, "repetition": np.arange(repetitions)},
        attrs={"baseline": baseline, "warmup": warmup, "inner": inner},
    )


def ratios(
    measured: "xr.Dataset", *, confidence: float = 0.95, seed: int = 0
) -> dict[str, Ratio]:
    """Returns each candidate's time relative to the baseline's of the same round.

    The interval is the percentile bootstrap of the median over rounds.

    Args:
      measured: what `compare` returned; at least two rounds.
      confidence: of the interval, in (0, 1).
      seed: of the resampling.

    Raises:
      ConfigError: fewer than two rounds, or an impossible confidence.
    """
    rounds = measured.sizes["repetition"]
    if rounds < 2:
        raise ConfigError(f"an interval needs at least 2 repetitions: got {rounds}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be in (0, 1): got {confidence}")
    seconds = measured["seconds"]
    reference = seconds.sel(candidate=measured.attrs["baseline"]).values
    found = {}
    for name in measured["candidate"].values.tolist():
        values = seconds.sel(candidate=name).values / reference
        low, high = bootstrap_median(values, confidence=confidence, seed=seed)
        found[name] = Ratio(float(np.median(values)), low, high, rounds)
    return found


def ratio_table(measured: "xr.Dataset") -> "xr.Dataset":
    """Returns times and ratios as a table, a row for each candidate.

    Args:
      measured: what `compare` returned.

    Returns:
      With dimension `row`: `milliseconds` (median over rounds), `ratio` to baseline,
      and its interval `ratio_low`, `ratio_high`.

    Examples:
      >>> made = compare({"a": lambda: 1, "b": lambda: 2}, "a", repetitions=3)
      >>> ratio_table(made)["ratio"].sel(row="a").item()
      1.0
    """
    import xarray as xr

    found = ratios(measured)
    seconds = measured["seconds"].median("repetition").sel(candidate=list(found))
    columns = {
        "milliseconds": 1e3 * seconds.values,
        "ratio": [ratio.median for ratio in found.values()],
        "ratio_low": [ratio.low for ratio in found.values()],
        "ratio_high": [ratio.high for ratio in found.values()],
    }
    return xr.Dataset(
        {name: ("row", column) for name, column in columns.items()},
        coords={"row": list(found)},
    )


def compile_seconds(
    function: Callable[..., Any], *arguments: Any, clock: Clock = time.perf_counter
) -> Compilation:
    """Compiles `function` for `arguments`, which may be shapes, and times that.

    The compilation cache on disk is neither read nor written, so the time is that of a
    first run.

    Args:
      function: to be jitted, or jitted already.
      *arguments: arrays or `ShapeDtypeStruct`s.
      clock: seconds, ever increasing.
    """
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    with _no_cache():
        began = clock()
        program = jitted.lower(*arguments).compile()
        return Compilation(program, clock() - began)


def stepper(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any
) -> Callable[[], Any]:
    """Makes a thunk of a training step: each call goes on from the state before.

    Args:
      step: `step(state, batch) -> (state, metrics)`; may donate its state.
      state: where to start; copied, so that the caller's stays usable.
      batch: given to every call.
    """
    current = jax.tree.map(
        lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, state
    )

    def call() -> Any:
        nonlocal current
        current, metrics = step(current, batch)
        return current, metrics

    return call


def _time(thunk: Callable[[], Any], inner: int, clock: Clock) -> float:
    began = clock()
    for _ in range(inner):
        jax.block_until_ready(thunk())
    return (clock() - began) / inner


def _check(
    candidates: Mapping[str, Any],
    baseline: str,
    repetitions: int,
    warmup: int,
    inner: int,
) -> None:
    if baseline not in candidates:
        raise ConfigError(
            f"baseline must be a candidate: got {baseline!r}"
            f"{nearest(baseline, candidates)}"
        )
    for name, value, least in (
        ("repetitions", repetitions, 1),
        ("warmup", warmup, 0),
        ("inner", inner, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}: got {value}")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switches garbage collection off, after one full collection."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Switches the compilation cache off; JAX looks at the setting after a reset."""
    before = getattr(jax.config, _CACHE)
    jax.config.update(_CACHE, False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(_CACHE, before)
        compilation_cache.reset_cache()
