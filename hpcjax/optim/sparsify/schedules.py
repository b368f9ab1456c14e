"""When masks change, and how sparse they then are; importing loads no JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import ClassVar

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Size
from hpcjax.optim.sparsify.distributions import Sparsity, exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneShot(Config):
    """Masks change once.

    Attributes:
      step: the step that changes them.
    """

    smoke: ClassVar[Mapping[str, str]] = {"step": "0"}

    step: Count = 0

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that change masks."""
        return (self.step,)

    def sparsity(self, number: int, final: Fraction) -> Fraction:
        """Returns the sparsity from change `number` on."""
        del number
        return final


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradual(Config):
    """Base of schedules that change masks `updates` times after the first change.

    Attributes:
      begin: the step of the first change, t₀.
      every: steps between changes, Δt.
      updates: their number after the first, n.
      initial: sparsity of the first change, s₀.
    """

    smoke: ClassVar[Mapping[str, str]] = {"begin": "0", "every": "1", "updates": "1"}

    begin: Count = 0
    every: Size = 100
    updates: Size = 100
    initial: Sparsity = 0.0

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that change masks."""
        return tuple(self.begin + i * self.every for i in range(self.updates + 1))

    def sparsity(self, number: int, final: Fraction) -> Fraction:
        """Returns the sparsity from change `number` on."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cubic(Gradual):
    """Fast at first: s = s_f + (s₀ − s_f)(1 − i/n)³ at change i.

    References:
      Zhu and Gupta, To Prune, or Not to Prune, arXiv 1710.01878, 2017, §3.
    """

    def sparsity(self, number: int, final: Fraction) -> Fraction:
        """Returns the sparsity from change `number` on."""
        left = 1 - Fraction(number, self.updates)
        return final + (exact(self.initial) - final) * left**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Gradual):
    """s = s_f + (s₀ − s_f)(1 − i/n) at change i."""

    def sparsity(self, number: int, final: Fraction) -> Fraction:
        """Returns the sparsity from change `number` on."""
        left = 1 - Fraction(number, self.updates)
        return final + (exact(self.initial) - final) * left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exponential(Gradual):
    """Every change removes the same share of what is left: 1 − s falls geometrically.

    This is iterative pruning; `at_init` has it for SNIP and SynFlow.
    """

    def sparsity(self, number: int, final: Fraction) -> Fraction:
        """Returns the sparsity from change `number` on."""
        first, done = 1 - exact(self.initial), number / self.updates
        ratio = float((1 - final) / first)
        return final if number == self.updates else 1 - first * Fraction(ratio**done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternating(Config):
    """Sparse and dense phases in turn, the last one sparse (AC/DC).

    Attributes:
      begin: the step of the first change, which makes the network sparse.
      sparse: steps of a sparse phase.
      dense: steps of a dense phase.
      rounds: number of dense phases.

    References:
      Peste et al., AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural
      Networks, NeurIPS 2021, Algorithm 1.
    """

    begin: Count = 0
    sparse: Size = 100
    dense: Size = 100
    rounds: Size = 4

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that change masks."""
        found = [self.begin]
        for _ in range(self.rounds):
            found += [found[-1] + self.sparse, found[-1] + self.sparse + self.dense]
        return tuple(found)

    def sparsity(self, number: int, final: Fraction) -> Fraction:
        """Returns the sparsity from change `number` on."""
        return Fraction(0) if number % 2 else final


Schedule = OneShot | Cubic | Linear | Exponential | Alternating


def ramp(schedule: Schedule, number: int) -> Callable[[Fraction], Fraction]:
    """Returns the function from final sparsities to those from change `number` on.

    Examples:
      >>> ramp(Linear(updates=4), 1)(exact(0.8))
      Fraction(1, 5)
    """
    changes = len(schedule.steps())
    checks.require(0 <= number < changes, "no such change", number=number)
    return lambda final: schedule.sparsity(number, final)
