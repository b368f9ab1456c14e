"""Timing of candidates against a named baseline, interleaved in rounds.

Times taken in different processes, or minutes apart, cannot be compared: clock rates,
caches and other users of the machine change. So every round times every candidate once,
the order rotates from round to round, and results are ratios to the baseline's time in
the same round.
"""

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from hpcjax.core import drift as drifts
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.perf.intervals import bootstrap_median

if TYPE_CHECKING:
    import xarray as xr

log = logging.getLogger(__name__)
Clock = Callable[[], float]
_CACHE = "jax_enable_compilation_cache"


class Ratio(NamedTuple):
    """A candidate's time divided by the baseline's: below 1 the candidate is faster.

    Attributes:
      median: median over rounds of the ratio within a round.
      low: lower end of the bootstrap interval of that median.
      high: upper end of that interval.
      rounds: number of rounds.
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
    take: Callable[[Callable[[], Any]], float] | None = None,
) -> "xr.Dataset":
    """Times thunks against each other and returns every measurement.

    In round r the candidates run in their order rotated by r. Each is called `inner`
    times, and each call ends when its result is ready. The garbage collector is off.

    Args:
      candidates: functions without arguments, by name, that return the arrays to wait
        for; see `stepper` for training steps that donate their state.
      baseline: name of the candidate to which ratios refer.
      repetitions: number of timed rounds; a claim needs at least 20.
      warmup: rounds before those, which compile and are not timed.
      inner: calls per measurement; raise it where one call is short compared with the
        clock's resolution.
      clock: returns seconds and never runs backwards.
      take: a measurement of one candidate to use instead of this clock, for instance
        one that several processes take together; it gets the candidate's function and
        returns the seconds of one call.

    Returns:
      A dataset with `seconds` per call [candidate, repetition] and the attributes
      `baseline`, `warmup`, `inner`, and `drift`: by how much of itself a candidate's
      median over the second half of the rounds differs from the first's, at the most.
      Above 5 % a warning says that the times are unstable, and so does a table of
      the run.

    Raises:
      ConfigError: an unknown baseline, or a count that is too small.

    Examples:
      >>> measured = compare({"a": lambda: 1, "b": lambda: 2}, "a", repetitions=3)
      >>> dict(measured.sizes)
      {'candidate': 2, 'repetition': 3}
    """
    import xarray as xr

    _check(candidates, baseline, repetitions, warmup, inner)
    take = take or functools.partial(_time, inner=inner, clock=clock)
    names = list(candidates)
    seconds = np.full((len(names), repetitions), np.nan)
    with _without_garbage_collection():
        # Negative rounds are the warm-up.
        for number in range(-warmup, repetitions):
            for offset in range(len(names)):
                # Rotated, so that no candidate always runs after the same one, which
                # may have heated the chip or evicted the caches.
                row = (number + offset) % len(names)
                call_seconds = take(candidates[names[row]])
                if number >= 0:
                    seconds[row, number] = call_seconds
    drift = _find_drift(dict(zip(names, seconds, strict=True)))
    drifts.tell(drift)
    return xr.Dataset(
        {"seconds": (("candidate", "repetition"), seconds, {"units": "s"})},
        coords={"candidate": names, "repetition": np.arange(repetitions)},
        attrs={
            "source": "measured",
            "baseline": baseline,
            "warmup": warmup,
            "inner": inner,
            "drift": drift,
        },
    )


def ratios(
    measured: "xr.Dataset", *, confidence: float = 0.95, seed: int = 0
) -> dict[str, Ratio]:
    """Returns each candidate's time relative to the baseline's in the same round.

    The interval is the percentile bootstrap interval of the median over rounds.

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
    by_name = {}
    for name in measured["candidate"].values.tolist():
        # A ratio in each round, then the median: what slows a whole round cancels.
        values = seconds.sel(candidate=name).values / reference
        low, high = bootstrap_median(values, confidence=confidence, seed=seed)
        by_name[name] = Ratio(float(np.median(values)), low, high, rounds)
    return by_name


def ratio_table(measured: "xr.Dataset") -> "xr.Dataset":
    """Returns times and ratios as a table with a row for each candidate.

    Args:
      measured: what `compare` returned.

    Returns:
      A dataset along `row`: `milliseconds` of a call (median over rounds), `ratio` to
      the baseline, and the ends of its interval `ratio_low`, `ratio_high`.

    Examples:
      >>> measured = compare({"a": lambda: 1, "b": lambda: 2}, "a", repetitions=3)
      >>> ratio_table(measured)["ratio"].sel(row="a").item()
      1.0
    """
    import xarray as xr

    by_name = ratios(measured)
    seconds = measured["seconds"].median("repetition").sel(candidate=list(by_name))
    columns = {
        "milliseconds": 1e3 * seconds.values,
        "ratio": [ratio.median for ratio in by_name.values()],
        "ratio_low": [ratio.low for ratio in by_name.values()],
        "ratio_high": [ratio.high for ratio in by_name.values()],
    }
    return xr.Dataset(
        {name: ("row", column) for name, column in columns.items()},
        coords={"row": list(by_name)},
    )


def compile_seconds(
    function: Callable[..., Any], *arguments: Any, clock: Clock = time.perf_counter
) -> Compilation:
    """Compiles `function` for `arguments` and returns the program with its time.

    The persistent compilation cache is neither read nor written, so the time is that of
    a first run.

    Args:
      function: is jitted, unless it already has a `lower` method.
      *arguments: arrays or `ShapeDtypeStruct`s.
      clock: returns seconds and never runs backwards.
    """
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    with _without_compilation_cache():
        start = clock()
        program = jitted.lower(*arguments).compile()
        return Compilation(program, clock() - start)


def stepper(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any
) -> Callable[[], Any]:
    """Returns a thunk that takes one training step further with each call.

    Args:
      step: `step(state, batch) -> (state, metrics)`; may donate its state.
      state: the first call's state.
      batch: the batch of every call.
    """
    # A copy: a step that donates its state would delete the caller's arrays.
    current = jax.tree.map(
        lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, state
    )

    def call() -> Any:
        nonlocal current
        current, metrics = step(current, batch)
        return current, metrics

    return call


def chain_calls(
    call: Callable[[Any, Any, int], Any], x: Any, operands: Any, times: int
) -> Callable[[], Any]:
    """Returns a thunk of one program in which each call waits for the one before it.

    Use it for functions so short that the overhead of launching a program would
    dominate their time.

    Args:
      call: `call(x, operands, number) -> y`, with `number` = 0 … `times` − 1. All
        dimensions of `y` but the last are those of `x`, and the last is not empty.
      x: the first call's input; each later input depends on the previous `y` and
        differs from `x` by at most 1e-30 of it.
      operands: passed to every call.
      times: number of calls in the program.
    """

    # The operands are arguments of the program: XLA would fold constants.
    @jax.jit
    def program(x: Any, operands: Any) -> Any:
        for number in range(times):
            # Only `y[..., :1]` is used below. Without the barrier XLA may move that
            # slice into the call and compute no other output.
            y = jax.lax.optimization_barrier(call(x, operands, number))
            # Makes the next call depend on this one, and hardly changes its input.
            x = x + (1e-30 * y[..., :1]).astype(x.dtype)
        return x

    return lambda: program(x, operands)


def _find_drift(seconds: Mapping[str, np.ndarray]) -> float:
    """Returns `drift` of `compare`, 0 of one round; warns if it is large."""
    moved = dict.fromkeys(seconds, 0.0)
    for name, own in seconds.items():
        if half := len(own) // 2:
            first, second = np.median(own[:half]), np.median(own[-half:])
            moved[name] = abs(second - first) / first if first else 0.0
    name = max(moved, key=lambda name: moved[name])
    if moved[name] > drifts.STEADY:
        told = "unstable: the median of %s moved by %.0f %% within the measurement"
        log.warning(told, name, 100 * moved[name])
    return moved[name]


def _time(thunk: Callable[[], Any], inner: int, clock: Clock) -> float:
    start = clock()
    for _ in range(inner):
        # JAX dispatches asynchronously: a call that returns may still be computing.
        jax.block_until_ready(thunk())
    return (clock() - start) / inner


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
def _without_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector, after one full collection."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Disables the persistent compilation cache."""
    before = getattr(jax.config, _CACHE)
    jax.config.update(_CACHE, False)
    # JAX reads the setting once, when it first uses the cache; a reset makes it read
    # the setting again.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(_CACHE, before)
        compilation_cache.reset_cache()
