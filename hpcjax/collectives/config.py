"""Configs of exchanges; importing this module imports no JAX."""

import abc
import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from hpcjax.core import checks
from hpcjax.core.patterns import check_patterns

if TYPE_CHECKING:
    from hpcjax.collectives.exchange import Exchange, Method, VectorMethod

Count = int | float


def entries_wanted(density: float, n: int) -> int:
    """Returns k = max(1, floor(d n)), at most n.

    Examples:
      >>> entries_wanted(0.01, 1000), entries_wanted(0.01, 5), entries_wanted(0.29, 100)
      (10, 1, 29)
    """
    # 0.29 times 100 is a little less than 29.
    return min(n, max(1, int(density * n * (1 + 1e-12))))


def dense_words(n: Count, members: int) -> float:
    """Returns what each of P members sends in a ring all-reduce of n words, or bytes.

    That is 2 n (P - 1) / P. Between processes messages of less than 128 KiB go by
    recursive doubling: fewer messages, up to n log2 P words.

    Examples:
      >>> dense_words(1000, 4)
      1500.0
    """
    return 2 * n * (members - 1) / members


def _check_correction(name: str, value: tuple[float, ...]) -> None:
    good = len(value) == 4 and all(math.isfinite(each) for each in value)
    if good:
        low, high, down, up = value
        good = 0 <= low <= 1 <= high and min(down, up) >= 1
    rule = f"{name} must be (low, high, down, up), low <= 1 <= high, factors >= 1"
    checks.require(good, rule, **{name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeConfig(abc.ABC):
    """What every way to average gradients has.

    Attributes:
      error_feedback: adds what was not sent to the next gradient.
      dense_steps: first averages that are exact.
    """

    error_feedback: bool = True
    dense_steps: int = 0

    def __post_init__(self) -> None:
        checks.require_count(0, dense_steps=self.dense_steps)

    def make(self) -> "Exchange":
        """Returns the exchange."""
        from hpcjax.collectives.exchange import Exchange

        return Exchange(self._method(), self.error_feedback, self.dense_steps)

    @abc.abstractmethod
    def _method(self) -> "Method":
        """Returns the method; imports JAX."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorConfig(ExchangeConfig):
    """What is averaged as a vector, or as many.

    Attributes:
      by_leaf: each array of the gradients by itself instead of all as one vector.
      min_size: by leaf, arrays of fewer numbers are averaged exactly.
    """

    by_leaf: bool = False
    min_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(0, min_size=self.min_size)

    def _method(self) -> "Method":
        from hpcjax.collectives.exchange import Flat

        return Flat(self._vector_method(), self.by_leaf, self.min_size)

    @abc.abstractmethod
    def _vector_method(self) -> "VectorMethod":
        """Returns the method; imports JAX."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig(VectorConfig):
    """What sends a share of the entries.

    Attributes:
      density: the share, k = max(1, floor(density · n)) of n entries.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        good = 0 < self.density <= 1
        checks.require(good, "density must be in (0, 1]", density=self.density)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKConfig(SparseConfig):
    """Exactly the k largest of every member, gathered by all (TopkA)."""

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.gathered import TopK

        return TopK(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianKConfig(SparseConfig):
    """As `TopKConfig`, above the quantile of a normal distribution fitted to them.

    The threshold is divided by `correction` while it lets fewer than 3/4 k through, and
    multiplied while more than 5/4 k.

    Attributes:
      correction: above 1.
      tries: corrections at most.
      capacity_factor: most entries sent, over k.
    """

    correction: float = 1.02
    tries: int = 20
    capacity_factor: float = 1.34

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_finite(1.0, correction=self.correction)
        checks.require_finite(1.0, capacity_factor=self.capacity_factor)
        checks.require_count(0, tries=self.tries)

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.gathered import GaussianK

        return GaussianK(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MsTopKConfig(SparseConfig):
    """As `TopKConfig`, with a threshold found by sampling some, without sorting.

    Between the mean and the largest magnitude thresholds are tried by bisection; what
    is above the lowest that lets at most k through is taken, and the rest of the k is a
    random run of the entries below it.

    Attributes:
      samples: thresholds to try.
      seed: of the runs.

    References:
      Agarwal et al., On the Utility of Gradient Compression in Distributed Training
      Systems, MLSys 2022, compare it; Shi et al., MSTop-K, 2021, propose it.
    """

    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(0, samples=self.samples, seed=self.seed)

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.gathered import MsTopK

        return MsTopK(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkDsaConfig(SparseConfig):
    """The k largest of every member, added up by regions and gathered (TopkDSA).

    Where the sums fill a third of the vector they are gathered densely. On devices the
    buffers have room for that: they are larger than those of `TopKConfig`.

    Attributes:
      capacity_factor: entries of one member for one region that a padded buffer holds,
        over k / P.
    """

    capacity_factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_finite(1.0, capacity_factor=self.capacity_factor)

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.topk_dsa import TopkDsa

        return TopkDsa(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopkConfig(SparseConfig):
    """gTopk: pairs of members merge their k entries and keep k, log2 P times.

    As published an entry that one merge drops is lost if its index survives by another
    branch; `CommStats.lost` counts them.

    Attributes:
      exact_residual: what a merge drops so is kept by the member that merged.
    """

    exact_residual: bool = False

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.gtopk import GTopk

        return GTopk(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomKConfig(SparseConfig):
    """k entries at random places, the same for all members, who need no indices.

    Attributes:
      seed: of the places.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(0, seed=self.seed)

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.random_k import RandomK

        return RandomK(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(VectorConfig):
    """The mean of all numbers, exactly."""

    error_feedback: bool = False

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.exchange import Dense

        return Dense()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfConfig(VectorConfig):
    """The mean in float16; numbers beyond its range are cut off.

    What the sum itself rounds, in float16 too, is in no residual.
    """

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.half import Half

        return Half()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignConfig(VectorConfig):
    """One bit for each number: its sign, zero counting as positive.

    Without error feedback the result is the sign that most members have, and 0 where as
    many have the one as the other (signSGD with majority vote): the learning rate is
    the length of a step. With it every member sends the mean magnitude too, and the
    result is the mean of scale times sign (EF-signSGD).
    """

    error_feedback: bool = False

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.signs import Signs

        return Signs(scaled=self.error_feedback)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSgdConfig(ExchangeConfig):
    """PowerSGD: matrices as products of two thin ones, by a step of power iteration.

    An array is the matrix of its last dimension against all others; those of one
    dimension or none are averaged exactly.

    Attributes:
      rank: columns of the thin matrices, at most those of the matrix.
      stacked: regexes of arrays whose first axis is a stack of layers: each layer is a
        matrix of its own.
      warm_start: goes on from the last step's factor instead of a random one.
      seed: of the first factors.

    References:
      Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, algorithm 1.
    """

    rank: int = 4
    stacked: tuple[str, ...] = ()
    warm_start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(1, rank=self.rank)
        check_patterns("stacked", self.stacked)
        checks.require_count(0, seed=self.seed)

    def _method(self) -> "Method":
        from hpcjax.collectives.low_rank import LowRank

        return LowRank(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopkConfig(SparseConfig):
    """Ok-Topk: each member adds up a region, and about k survivors are shared.

    Every member selects about k entries of largest magnitude and sends each to the
    owner of its region; owners add up, the members select about k of all sums together,
    and all gather these. What was not sent, and what was but did not survive, stays in
    the residual.

    Attributes:
      tau: steps after which regions are chosen anew, so that owners get alike much.
      tau_prime: steps after which thresholds are exact; between, they are corrected by
        a percent or so a step.
      capacity_factor: room of buffers and most entries sent, over k; k over least
        entries sent. A threshold is exact, too, when it would let through more or
        fewer: corrections are too small where gradients change fast.
      balance: whether survivors are spread before they are gathered; "auto": where it
        is needed. On devices "never" gathers whole buffers, far more words.
      global_threshold: the k-th sum from 31 counts ("bisect"), from four histograms,
        for links of high latency, or from all sums gathered, as in the released code:
        then there is no bound on the words of steps with exact thresholds.
      repartition: regions from the average of the members' cuts, from counts of all
        members' entries ("pooled"), or "even".
      strict_volume: never more than k entries selected, locally and jointly: below 6 k
        words in every step.
      local_correction: (low, high, down, up): below low · k selected entries the
        threshold is divided by down, above high · k multiplied by up.
      joint_correction: likewise, of the joint threshold.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
      2022.
    """

    tau: int = 64
    tau_prime: int = 32
    capacity_factor: float = 1.34
    balance: Literal["auto", "always", "never"] = "auto"
    global_threshold: Literal["bisect", "histogram", "gather"] = "bisect"
    repartition: Literal["mean", "pooled", "even"] = "mean"
    strict_volume: bool = False
    local_correction: tuple[float, float, float, float] = (2 / 3, 5 / 4, 1.012, 1.012)
    joint_correction: tuple[float, float, float, float] = (2 / 3, 4 / 3, 1.008, 1.008)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(1, tau=self.tau, tau_prime=self.tau_prime)
        checks.require_finite(1.0, capacity_factor=self.capacity_factor)
        checks.require_choice("balance", self.balance, ("auto", "always", "never"))
        searches = ("bisect", "histogram", "gather")
        checks.require_choice("global_threshold", self.global_threshold, searches)
        cuts = ("mean", "pooled", "even")
        checks.require_choice("repartition", self.repartition, cuts)
        _check_correction("local_correction", self.local_correction)
        _check_correction("joint_correction", self.joint_correction)

    def _vector_method(self) -> "VectorMethod":
        from hpcjax.collectives.ok_topk import OkTopk

        return OkTopk(self)


AnyExchangeConfig = (
    DenseConfig
    | HalfConfig
    | TopKConfig
    | TopkDsaConfig
    | GTopkConfig
    | GaussianKConfig
    | MsTopKConfig
    | RandomKConfig
    | OkTopkConfig
    | SignConfig
    | PowerSgdConfig
)
