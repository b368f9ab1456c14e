"""Who is late when, and what workers are made for; imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from hpcjax.core.config import Config, NotNegative
from hpcjax.hostcomm.imbalance import Pattern

if TYPE_CHECKING:
    import numpy as np


class Run(NamedTuple):
    """What workers are made for.

    Attributes:
      workers: how many there are.
      steps: that they take.
      seed: of their draws; the same for all.
    """

    workers: int
    steps: int
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateConfig(Config):
    """How long each worker's steps take: simulated on a mesh, slept on hosts.

    Attributes:
      base: seconds of everybody's step, of which 10 % vary; on hosts besides computing.
      pattern: who is delayed besides; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      seconds: of a round; on a mesh.
    """

    base: NotNegative = 0.02
    pattern: Pattern = "random_one"
    delay: NotNegative = 0.2
    seconds: NotNegative = 0.005

    def step_seconds(self, run: Run) -> "np.ndarray":
        """Returns what each step takes each worker, [steps, workers].

        Those of fewer steps are how it begins.
        """
        import numpy as np

        from hpcjax import hostcomm

        rng = np.random.Generator(np.random.Philox(key=[run.seed, 2]))
        shape = run.steps, run.workers
        delays = hostcomm.inject_delays(
            self.pattern, *shape, delay=self.delay, seed=run.seed
        )
        return self.base * rng.lognormal(0.0, 0.1, shape) + delays
