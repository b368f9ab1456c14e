"""How long a training iteration's passes take on this device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hpcjax import optim
from hpcjax.cost import Job
from hpcjax.perf.bench import compare

_FORWARD = "forward"


class IterationTimes(NamedTuple):
    """Seconds of a worker's part of an iteration.

    Attributes:
      forward: of the forward pass.
      roles: of forward and partial backward pass, of role 1 to k.
    """

    forward: float
    roles: tuple[float, ...]

    @property
    def backward(self) -> float:
        """Seconds of the whole backward pass."""
        return max(0.0, self.roles[-1] - self.forward)

    def job(self, name: str, **options: Any) -> Job:
        """Returns a job of these times for `cost.simulate_cluster`.

        Args:
          name: of the job.
          **options: the rest of `cost.Job`, such as `replicas`, `iterations` and `sync`
            (`cost.System(...).seconds(transfers)` of an exchange).

        Examples:
          >>> IterationTimes(1.0, (2.0, 3.0)).job("a").seconds(1)
          2.0
        """
        times = {"forward": self.forward, "backward": self.backward}
        return Job(name=name, k=len(self.roles), **times, **options)


def iteration_times(
    loss: Callable[..., Any],
    blocks: optim.Blocks,
    params: Any,
    *arguments: Any,
    repetitions: int = 5,
) -> IterationTimes:
    """Times the forward pass and the program of each role, in turns.

    Args:
      loss: `(params, *arguments) -> scalar`.
      blocks: of the parameters, k of them.
      params: parameters.
      *arguments: of the loss, such as a batch.
      repetitions: of each, of which the median counts.
    """
    roles = range(1, len(blocks.paths) + 1)
    programs: dict[str, Any] = {_FORWARD: jax.jit(loss)}
    for role in roles:
        partial = optim.partial_value_and_grad(loss, blocks, role)
        programs[str(role)] = jax.jit(partial)
    thunks = {
        name: lambda program=program: program(params, *arguments)
        for name, program in programs.items()
    }
    timed = compare(thunks, _FORWARD, repetitions=repetitions, warmup=1)["seconds"]
    median = {n: float(np.median(timed.sel(candidate=n))) for n in thunks}
    return IterationTimes(median[_FORWARD], tuple(median[str(role)] for role in roles))
