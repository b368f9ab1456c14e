"""What methods of averaging gradients send, and what overlaps with the backward pass.

The amounts come from the exchanges themselves, see `collectives.Exchange.transfers`.
Times are in seconds and sizes in bytes; gradients are float32.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from hpcjax.collectives import Count, ExchangeConfig, Transfer, all_reduce
from hpcjax.core import checks
from hpcjax.cost import traffic
from hpcjax.cost.networks import Network
from hpcjax.hostcomm import MessageCost

WORD_BYTES = 4
BUCKET_BYTES = 25 * 2**20  # the default of PyTorch's DistributedDataParallel
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...] | Mapping[str, Shape]


class Plan(NamedTuple):
    """What is sent in an iteration.

    Attributes:
      after: operations after the backward pass, in order.
      beside: operations that overlap with the backward pass, in order.
    """

    after: Sequence[Transfer]
    beside: Sequence[Transfer] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """Workers and the links between them.

    A collective of b bytes takes alpha · rounds + b / bandwidth seconds. On a network
    alpha is that of a hop, and the bandwidth that of all links of a worker, of which
    passes have the network's `ring_share` and messages its `alltoall_share`: as if
    all accelerators did the same at once.

    Attributes:
      processes: p, the number of workers.
      link: alpha and bandwidth of a worker's link.
      topology: p − 1 rounds around a "ring", or log₂ p through a "tree".
      hops: "counted" if alpha is the latency of one message: the rounds of an
        all-reduce then count twice, for reduce-scatter and all-gather. "fitted" if
        alpha was fitted to times of whole collectives: the rounds count once.
      network: what the links are of; None for links between all neighbours. Its routes
        replace those of a tree: `topology` must be "ring".
    """

    processes: int
    link: MessageCost
    topology: Literal["ring", "tree"] = "ring"
    hops: Literal["fitted", "counted"] = "fitted"
    network: Network | None = None

    def __post_init__(self) -> None:
        checks.require_count(1, processes=self.processes)
        checks.require_choice("topology", self.topology, ("ring", "tree"))
        checks.require_choice("hops", self.hops, ("fitted", "counted"))
        if self.network is not None:
            rule = "a network has its own routes, and goes with topology='ring'"
            checks.require(self.topology == "ring", rule, topology=self.topology)
            most = self.network.accelerators
            rule = f"the network has {most} accelerators"
            checks.require(self.processes <= most, rule, processes=self.processes)

    def with_bandwidth(self, bytes_per_s: float) -> "System":
        """Returns the system with links of another bandwidth."""
        link = MessageCost.of_rate(bytes_per_s, self.link.alpha)
        return dataclasses.replace(self, link=link)

    def rounds(self, transfer: Transfer) -> float:
        """Returns how many times alpha the operation takes."""
        ring = self.topology == "ring"
        per_pass = self.processes - 1.0 if ring else math.log2(self.processes)
        per_pass = per_pass if transfer.per_pass is None else transfer.per_pass
        passes = transfer.passes if self.hops == "counted" else min(1, transfer.passes)
        if self.network is None:
            return per_pass * passes + transfer.messages
        near, far = traffic.ring_hops(self.network), traffic.diameter(self.network)
        return near * per_pass * passes + far * transfer.messages

    def share(self, transfer: Transfer) -> float:
        """Returns the share of the bandwidth that the operation has."""
        if self.network is None:
            return 1.0
        if transfer.passes:
            return traffic.ring_share(self.network)
        return traffic.alltoall_share(self.network)

    def seconds(self, transfers: Iterable[Transfer]) -> float:
        """Returns the time of operations that run one after the other."""
        times = (
            self.link.seconds(
                WORD_BYTES * each.words / self.share(each), self.rounds(each)
            )
            for each in transfers
        )
        return sum(times, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration of training on one worker, without communication.

    Attributes:
      shapes: of the gradients; a mapping from paths for an exchange that uses paths.
      backward_s: T_comp, seconds of the backward pass.
      forward_s: T_fwd, seconds of the forward pass; the same for all methods.
      slowdown: gamma ≥ 1, the factor by which communication that overlaps with the
        backward pass slows it down.
      bucket_bytes: size of the buckets in which overlapped gradients are averaged.
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
        """n, the number of gradient values."""
        return sum(math.prod(shape) for _, shape in self.by_path)

    @functools.cached_property
    def by_path(self) -> tuple[tuple[str, Shape], ...]:
        """Paths and shapes; without paths, positions take their place."""
        if isinstance(self.shapes, Mapping):
            return tuple(self.shapes.items())
        return tuple((str(place), shape) for place, shape in enumerate(self.shapes))

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of the buckets in backward order; the last may be smaller."""
        full, rest = divmod(WORD_BYTES * self.size, self.bucket_bytes)
        return (self.bucket_bytes,) * full + ((rest,) if rest else ())

    def with_speed(self, factor: float) -> "Workload":
        """Returns the workload on a device that computes `factor` times as fast."""
        checks.require_positive(factor=factor)
        return dataclasses.replace(
            self,
            backward_s=self.backward_s / factor,
            forward_s=self.forward_s / factor,
        )

    def with_batch(self, batch: Count) -> "Workload":
        """Returns the workload with another batch, and times proportional to it."""
        checks.require_positive(batch=batch)
        changed = self.with_speed(self.batch / batch)
        return dataclasses.replace(changed, batch=batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PricedExchange(abc.ABC):
    """A method of averaging gradients.

    Attributes:
      encode_decode_s: T_encdec, the seconds of encoding and decoding in an iteration,
        for the number of workers it is used with; None: not known.
      slows_backward: whether communication beside the backward pass slows it by
        `Workload.slowdown`.
    """

    encode_decode_s: float | None = None
    slows_backward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.encode_decode_s is not None:
            checks.require_finite(0.0, encode_decode_s=self.encode_decode_s)

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Its name in tables."""

    @abc.abstractmethod
    def plan(self, workload: Workload, processes: int) -> Plan:
        """Returns what is sent in an iteration."""

    def sent_bytes(self, shapes: Shapes, processes: int) -> float:
        """Returns the bytes that each worker sends in an iteration."""
        plan = self.plan(Workload(shapes=shapes, backward_s=0.0), processes)
        return WORD_BYTES * sum((x.words for x in (*plan.beside, *plan.after)), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(PricedExchange):
    """Synchronous SGD, whose buckets are all-reduced as soon as they are complete.

    Attributes:
      value_bytes: bytes of a value as it is sent; 2 for 16-bit floats.
      overlapped: False for one all-reduce of everything after the backward pass.
    """

    encode_decode_s: float | None = 0.0
    value_bytes: Literal[2, 4] = 4
    overlapped: bool = True
    slows_backward: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """Its name in tables."""
        name = "dense" if self.value_bytes == WORD_BYTES else "fp16"
        return name if self.overlapped else f"naive {name} (no buckets, no overlap)"

    def plan(self, workload: Workload, processes: int) -> Plan:
        """Returns what is sent in an iteration.

        The last bucket is complete only when the backward pass is, and is sent after
        it.
        """
        whole = (WORD_BYTES * workload.size,)
        # `all_reduce` counts words of four bytes, whatever a value's size is.
        *early, last = (
            all_reduce(self.value_bytes / WORD_BYTES * size / WORD_BYTES, processes)
            for size in (workload.buckets if self.overlapped else whole)
        )
        return Plan([last], early)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanged(PricedExchange):
    """An exchange of `collectives`, whose own amounts are used.

    Gradients that need no encoding, such as the vectors of PowerSGD, are sent beside
    the backward pass. All others wait for its end: encoding them earlier would compete
    with the backward pass for the device.

    Attributes:
      name: in tables.
      exchange: how gradients are averaged.
      place: where the amount depends on how the largest entries are spread over
        regions, a value between that of the fewest words (0) and of the most (1).
    """

    name: str
    exchange: ExchangeConfig
    place: float = 1.0

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name

    def plan(self, workload: Workload, processes: int) -> Plan:
        """Returns what is sent in an iteration."""
        transfers = _list_transfers(
            self.exchange, workload.by_path, processes, self.place
        )
        return Plan(
            [transfer for transfer in transfers if not transfer.early],
            [transfer for transfer in transfers if transfer.early],
        )


# Cached: `crossover` asks for the same plan at hundreds of bandwidths.
@functools.lru_cache(maxsize=1024)
def _list_transfers(
    config: ExchangeConfig,
    by_path: tuple[tuple[str, Shape], ...],
    processes: int,
    place: float,
) -> tuple[Transfer, ...]:
    import jax

    tree = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in by_path}
    return config.make().transfers(tree, processes, place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReducible(PricedExchange):
    """A hypothetical method that all-reduces 1 / `ratio` of the bytes.

    Attributes:
      ratio: of compression, at least 1.
    """

    ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_finite(1.0, ratio=self.ratio)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"all-reducible, {self.ratio:g} times smaller"

    def plan(self, workload: Workload, processes: int) -> Plan:
        """Returns what is sent in an iteration."""
        return Plan([all_reduce(workload.size / self.ratio, processes)])
