"""What ways of averaging gradients send, and when: beside the backward pass or after.

Times are in seconds and sizes in bytes; gradients are float32.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

from hpcjax.collectives.config import Count, dense_words, entries_wanted
from hpcjax.core import checks
from hpcjax.perf.exchange_volume import comm_volume

WORD_BYTES = 4
SIGNS_PER_WORD = 32
BUCKET_BYTES = 25 * 2**20
Shapes = tuple[tuple[int, ...], ...]


class Transfer(NamedTuple):
    """One collective operation, as each worker sees it.

    Attributes:
      sent_bytes: what it sends.
      rounds: how often alpha passes.
    """

    sent_bytes: float
    rounds: float


class Plan(NamedTuple):
    """What is sent in an iteration.

    Attributes:
      after: when the backward pass is over, in order.
      beside: while it goes on, in order.
    """

    after: Sequence[Transfer]
    beside: Sequence[Transfer] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """Workers and the links between them.

    Attributes:
      processes: p.
      bytes_per_s: bandwidth of a worker's link.
      alpha_s: seconds for each round of a collective.
      topology: p - 1 rounds around a ring, or log₂ p through a tree.
      hops: what alpha is: a constant "fitted" to whole collectives, which is taken once
        for each round of either; or the latency of one message, and the rounds are
        "counted": an all-reduce goes around twice.
    """

    processes: int
    bytes_per_s: float
    alpha_s: float = 0.0
    topology: Literal["ring", "tree"] = "ring"
    hops: Literal["fitted", "counted"] = "fitted"

    def __post_init__(self) -> None:
        checks.require_count(1, processes=self.processes)
        good = self.bytes_per_s > 0
        checks.require(good, "bytes_per_s must be > 0", bytes_per_s=self.bytes_per_s)
        checks.require_finite(0.0, alpha_s=self.alpha_s)
        checks.require_choice("topology", self.topology, ("ring", "tree"))
        checks.require_choice("hops", self.hops, ("fitted", "counted"))

    def all_reduce(self, count: Count) -> Transfer:
        """Returns the sum of all workers' `count` bytes in all."""
        return Transfer(dense_words(count, self.processes), self._rounds(2))

    def all_gather(self, count: Count) -> Transfer:
        """Returns `count` bytes of each worker in all."""
        return Transfer(count * (self.processes - 1), self._rounds(1))

    def seconds(self, transfers: Iterable[Transfer]) -> float:
        """Returns how long operations take, one after the other."""
        each = (
            self.alpha_s * one.rounds + one.sent_bytes / self.bytes_per_s
            for one in transfers
        )
        return sum(each, 0.0)

    def _rounds(self, passes: int) -> float:
        one = self.processes - 1
        each = float(one) if self.topology == "ring" else math.log2(self.processes)
        return each * (passes if self.hops == "counted" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration of training on one worker, without communication.

    Attributes:
      shapes: of the gradients.
      backward_s: T_comp, of the backward pass.
      forward_s: T_fwd; the same for all methods.
      slowdown: gamma, of the backward pass while something is sent.
      bucket_bytes: gradients that are averaged together while the backward pass goes
        on.
      batch: examples; both times are taken to be proportional to it.
    """

    shapes: Shapes
    backward_s: float
    forward_s: float = 0.0
    slowdown: float = 1.0
    bucket_bytes: int = BUCKET_BYTES
    batch: Count = 1

    def __post_init__(self) -> None:
        checks.require(self.size > 0, "there must be gradients", shapes=self.shapes)
        times = {"backward_s": self.backward_s, "forward_s": self.forward_s}
        checks.require_finite(0.0, **times)
        checks.require_finite(1.0, slowdown=self.slowdown)
        checks.require_count(1, bucket_bytes=self.bucket_bytes)
        checks.require_positive(batch=self.batch)

    @functools.cached_property
    def size(self) -> int:
        """Numbers of a gradient, n."""
        return sum(map(math.prod, self.shapes))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of the buckets in the order of the backward pass; the last is less."""
        full, rest = divmod(WORD_BYTES * self.size, self.bucket_bytes)
        return (self.bucket_bytes,) * full + ((rest,) if rest else ())

    def faster(self, factor: float) -> "Workload":
        """Returns the same on a device that computes so many times as fast."""
        checks.require_positive(factor=factor)
        return dataclasses.replace(
            self,
            backward_s=self.backward_s / factor,
            forward_s=self.forward_s / factor,
        )

    def with_batch(self, batch: Count) -> "Workload":
        """Returns it with another batch."""
        checks.require_positive(batch=batch)
        changed = self.faster(self.batch / batch)
        return dataclasses.replace(changed, batch=batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A way of averaging gradients.

    Attributes:
      encode_decode_s: T_encdec, seconds of all that is computed for it in an iteration,
        at this number of workers; None: not known.
    """

    encode_decode_s: float | None = None
    slows_backward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.encode_decode_s is not None:
            checks.require_finite(0.0, encode_decode_s=self.encode_decode_s)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self._label()

    def plan(self, workload: Workload, system: System) -> Plan:
        """Returns what is sent in an iteration."""
        return self._plan(workload, system)

    def sent_bytes(self, shapes: Shapes, processes: int) -> float:
        """Returns the bytes that each worker sends in an iteration."""
        workload = Workload(shapes=shapes, backward_s=0.0)
        system = System(processes=processes, bytes_per_s=1.0)
        plan = self.plan(workload, system)
        return sum((each.sent_bytes for each in (*plan.beside, *plan.after)), 0.0)

    @abc.abstractmethod
    def _label(self) -> str: ...

    @abc.abstractmethod
    def _plan(self, workload: Workload, system: System) -> Plan: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """Synchronous SGD: buckets are all-reduced as soon as they are complete.

    Attributes:
      value_bytes: of a number as it is sent; 2 is the control, 16-bit floats.
      overlapped: False: one all-reduce when the backward pass is over.
    """

    encode_decode_s: float | None = 0.0
    value_bytes: Literal[2, 4] = 4
    overlapped: bool = True
    slows_backward: ClassVar[bool] = True

    def _label(self) -> str:
        name = "dense" if self.value_bytes == WORD_BYTES else "fp16"
        return name if self.overlapped else f"naive {name} (no buckets, no overlap)"

    def _plan(self, workload: Workload, system: System) -> Plan:
        if not self.overlapped:
            return Plan(self._sums((WORD_BYTES * workload.size,), system))
        *early, last = workload.buckets
        return Plan(self._sums((last,), system), self._sums(early, system))

    def _sums(self, buckets: Iterable[int], system: System) -> list[Transfer]:
        share = self.value_bytes / WORD_BYTES
        return [system.all_reduce(share * count) for count in buckets]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSgd(Method):
    """Factors P and Q of every matrix are all-reduced, vectors as they are.

    Vectors are sent beside the backward pass; encoding, which needs the same device, is
    not worth doing beside it.

    Attributes:
      rank: r, of a matrix a × b at most min(a, b).
    """

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(1, rank=self.rank)

    def _label(self) -> str:
        return f"PowerSGD r={self.rank}"

    def factor_sizes(self, shapes: Shapes) -> tuple[int, int]:
        """Returns how many numbers P and Q of all matrices have."""
        return _factor_sizes(shapes, self.rank)

    def _plan(self, workload: Workload, system: System) -> Plan:
        vectors = sum(math.prod(s) for s in workload.shapes if len(s) <= 1)
        sizes = self.factor_sizes(workload.shapes)
        return Plan(
            [system.all_reduce(WORD_BYTES * size) for size in sizes if size],
            [system.all_reduce(WORD_BYTES * vectors)] if vectors else [],
        )


@functools.lru_cache
def _factor_sizes(shapes: Shapes, rank: int) -> tuple[int, int]:
    matrices = [as_matrix(shape) for shape in shapes if len(shape) > 1]
    ranks = [min(rank, *matrix) for matrix in matrices]
    p, q = (
        sum(r * matrix[side] for r, matrix in zip(ranks, matrices, strict=True))
        for side in (0, 1)
    )
    return p, q


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns a kernel's outputs, its last axis, and its inputs, all others.

    Examples:
      >>> as_matrix((3, 3, 64, 128))
      (128, 576)
    """
    return shape[-1], math.prod(shape[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignSgd(Method):
    """Majority vote: the signs of all workers are gathered, 32 in a word."""

    def _label(self) -> str:
        return "signSGD"

    def _plan(self, workload: Workload, system: System) -> Plan:
        words = -(-workload.size // SIGNS_PER_WORD)
        return Plan([system.all_gather(WORD_BYTES * words)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse(Method):
    """What sends a share of the entries.

    Attributes:
      density: k = max(1, floor(density · n)) of n entries.
    """

    density: float
    name: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        good = 0 < self.density <= 1
        checks.require(good, "density must be in (0, 1]", density=self.density)

    def _label(self) -> str:
        return f"{self.name} {100 * self.density:g}%"

    def entries(self, workload: Workload) -> int:
        """Returns k."""
        return entries_wanted(self.density, workload.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """The largest entries of all workers are gathered: values, then int32 indices."""

    name = "Top-k"

    def _plan(self, workload: Workload, system: System) -> Plan:
        return Plan([system.all_gather(WORD_BYTES * self.entries(workload))] * 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MsTopK(TopK):
    """Top-k that finds its threshold by counting, without sorting."""

    name = "MSTop-k"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianK(TopK):
    """Top-k with the threshold of a normal distribution."""

    name = "Gaussiank"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(Sparse):
    """Entries that all workers draw alike; their values are all-reduced."""

    name = "Random-k"

    def _plan(self, workload: Workload, system: System) -> Plan:
        return Plan([system.all_reduce(WORD_BYTES * self.entries(workload))])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAllReduce(Sparse):
    """What sends as many words as `comm_volume` says.

    Attributes:
      place: between the least volume, 0, and the most, 1.
    """

    place: float = 1.0
    algorithm: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            0 <= self.place <= 1, "place must be in [0, 1]", place=self.place
        )

    def _plan(self, workload: Workload, system: System) -> Plan:
        k = self.entries(workload)
        volume = comm_volume(self.algorithm, workload.size, k, system.processes)
        words = volume.between(self.place)
        return Plan([Transfer(WORD_BYTES * words, volume.rounds)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopk(SparseAllReduce):
    """Owners of regions add up what is selected; about k survivors are shared."""

    name, algorithm = "Ok-Topk", "ok_topk"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopk(SparseAllReduce):
    """Pairs merge their selections up a tree, k entries at a time."""

    name, algorithm = "gTopk", "gtopk"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkDsa(SparseAllReduce):
    """Owners of regions add up what is selected; all sums are shared."""

    name, algorithm = "TopkDSA", "topk_dsa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReducible(Method):
    """A scheme that may not exist yet: an all-reduce of so many times fewer bytes.

    Attributes:
      ratio: at least 1.
    """

    ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_finite(1.0, ratio=self.ratio)

    def _label(self) -> str:
        return f"all-reducible, {self.ratio:g} times smaller"

    def _plan(self, workload: Workload, system: System) -> Plan:
        return Plan([system.all_reduce(WORD_BYTES * workload.size / self.ratio)])
