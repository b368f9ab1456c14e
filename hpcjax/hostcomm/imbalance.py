"""Delays that make ranks late, as tables: the same for every method and process."""

from typing import Literal

import numpy as np

from hpcjax.core import checks

Pattern = Literal["none", "random_one", "random_two", "linear_skew"]  # that are drawn
_PATTERNS = ("none", "random_one", "random_two", "linear_skew", "trace")


def inject_delays(
    pattern: Pattern | Literal["trace"],
    steps: int,
    ranks: int,
    *,
    delay: float = 0.0,
    seed: int = 0,
    recorded: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the seconds by which each rank is to be delayed in each step.

    "random_one": one rank, drawn anew in each step, by `delay`. "random_two": two
    draws, so one rank or two. "linear_skew": every rank, by 1 to P times `delay`, in
    turns. "trace": what was recorded elsewhere, from its beginning again when it ends.

    Args:
      pattern: who is late.
      steps: how many.
      ranks: P.
      delay: seconds.
      seed: of the draws; more steps begin with the same ones.
      recorded: seconds for "trace", `[any, ranks]`.

    Returns:
      `[steps, ranks]`.

    Raises:
      ConfigError: an unknown pattern, or a recorded table that does not fit.

    Examples:
      >>> inject_delays("linear_skew", 2, 4, delay=0.1).tolist()
      [[0.1, 0.2, 0.30000000000000004, 0.4], [0.2, 0.30000000000000004, 0.4, 0.1]]
    """
    checks.require_choice("pattern", pattern, _PATTERNS)
    checks.require_count(1, steps=steps, ranks=ranks)
    checks.require_finite(0.0, delay=delay)
    if pattern == "trace":
        shape = () if recorded is None else recorded.shape
        fits = len(shape) == 2 and shape[0] > 0 and shape[1] == ranks
        checks.require(fits, f"recorded must be [any, {ranks}]", recorded=shape)
        return np.resize(np.asarray(recorded, float), (steps, ranks))
    if pattern == "linear_skew":
        turn = np.add.outer(np.arange(steps), np.arange(ranks)) % ranks
        return delay * (turn + 1)
    drawn = {"none": 0, "random_one": 1, "random_two": 2}[pattern]
    # A stream of its own: who is late must not be who starts the round.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(1,)))
    who = np.random.Generator(bits).integers(ranks, size=(steps, drawn))
    table = np.zeros((steps, ranks))
    np.put_along_axis(table, who, delay, axis=1)
    return table
