"""How long a run waits for its input: the readers of `data`, simulated event by event.

The simulator and the real reader share the order of reads and the plan of who keeps
what (`data.AccessStream`, `data.plan`). What a policy does is in `_input_policies`.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hpcjax.core import checks
from hpcjax.cost._input_policies import SOURCES, Policy, simulate
from hpcjax.data.access import AccessStream
from hpcjax.data.placement import PLACEMENTS, Placement, Plan, StorageClass, plan

InputPolicy = Literal["perfect", "naive", "read_ahead", "data_store", "clairvoyant"]
POLICIES: tuple[InputPolicy, ...] = (
    "perfect",
    "naive",
    "read_ahead",
    "data_store",
    "clairvoyant",
)


class InputSystem(NamedTuple):
    """What the input of a run goes through; rates are bytes per second.

    Attributes:
      storage_rate: of the shared storage, in all; or by the number of workers that read
        it at once, {1: …, 2: …}, between which it is interpolated.
      consume_rate: at which each worker trains.
      classes: of memory that each worker has, from fast to slow.
      network_rate: into each worker.
      preprocess_rate: of each staging thread.
      latency: seconds that a request to the storage takes before its first byte.
      threads: that stage records, of each worker.
      staging: records that each worker reads ahead.
      send_rate: out of each worker, to all others together.
    """

    storage_rate: float | Mapping[int, float]
    consume_rate: float
    classes: tuple[StorageClass, ...] = ()
    network_rate: float = np.inf
    preprocess_rate: float = np.inf
    latency: float = 0.0
    threads: int = 1
    staging: int = 1
    send_rate: float = np.inf

    def storage(self, readers: int) -> float:
        """Returns the rate of the storage in all, for so many workers that read."""
        if not isinstance(self.storage_rate, Mapping):
            return self.storage_rate
        known = sorted(self.storage_rate)
        return float(np.interp(readers, known, [self.storage_rate[n] for n in known]))


class InputTimes(NamedTuple):
    """What a run's input has cost, in seconds and bytes.

    Attributes:
      total: seconds of the run.
      stall: seconds of it in which nothing was trained for want of input. All workers
        wait at the end of a batch for the slowest.
      epochs: seconds of each epoch, to the end of the batch with its last example.
      bytes: that all workers together have got from "storage", "neighbours" and
        "memory"; the storage's include what was fetched to be kept.
    """

    total: float
    stall: float
    epochs: Float[np.ndarray, " epochs"]
    bytes: dict[str, float]


def simulate_input(
    policy: InputPolicy,
    stream: AccessStream,
    sizes: Int[np.ndarray, " examples"],
    system: InputSystem,
    *,
    placement: Placement | Plan = "frequency",
    neighbours: bool = True,
) -> InputTimes:
    """Simulates a run that waits for its input.

    Workers train batch by batch and meet after each. The bandwidth of the storage is
    shared equally by all requests, that into and out of a worker by what it is being
    sent, or sends.

    - "perfect": everything is there already.
    - "naive": a worker reads a batch, one record after the other, then trains on it.
    - "read_ahead": threads read the next records while it trains.
    - "data_store": likewise, and each worker keeps what it reads first, in its fastest
      class with room, so that the storage is not read again.
    - "clairvoyant": `placement.plan` says what is kept, and when it is fetched.

    Args:
      policy: one of these.
      stream: what is read, in whole batches.
      sizes: bytes of each record.
      system: rates and rooms.
      placement: of "clairvoyant"; or a plan.
      neighbours: whether "clairvoyant" asks the memory of other workers.

    Raises:
      ConfigError: another policy, a rate or room that is not positive, sizes of another
        number of records, or a data store that does not hold all of them.

    Examples:
      >>> order = np.arange(8).reshape(2, 4)
      >>> stream = AccessStream(order, examples=8, workers=2)
      >>> system = InputSystem(storage_rate=10.0, consume_rate=5.0, staging=2)
      >>> simulate_input("naive", stream, np.full(8, 5), system).total  # 4 (1 + 1) s
      8.0
    """
    checks.require_choice("policy", policy, POLICIES)
    _check(system, sizes, stream)
    rows = sizes[stream.order].reshape(len(stream.order), stream.workers, -1)
    perfect = np.cumsum(rows.sum(-1).max(-1) / system.consume_rate)
    if policy == "perfect":
        ends, received = perfect, dict.fromkeys(SOURCES, 0.0)
    else:
        made = _policy(policy, stream, sizes, system, placement, neighbours)
        ends, received = simulate(made, stream, sizes, system)
    each = stream.examples / stream.order.shape[1]  # batches of an epoch
    last = np.ceil(np.arange(1, len(ends) / each + 1e-9) * each - 1e-9).astype(int) - 1
    epochs = np.diff(ends[last], prepend=0.0)
    return InputTimes(float(ends[-1]), float(ends[-1] - perfect[-1]), epochs, received)


def choose_placement(
    stream: AccessStream,
    sizes: Int[np.ndarray, " examples"],
    system: InputSystem,
    *,
    neighbours: bool = True,
) -> Placement:
    """Returns the placement by which "clairvoyant" is simulated to be the fastest.

    Of equals it is the first of `data.placement.PLACEMENTS`. Takes about half a
    millisecond for each read; see `simulate_input` for arguments and errors.
    """
    seconds = {
        placement: simulate_input(
            "clairvoyant",
            stream,
            sizes,
            system,
            placement=placement,
            neighbours=neighbours,
        ).total
        for placement in PLACEMENTS
    }
    return min(seconds, key=seconds.__getitem__)


def _check(
    system: InputSystem, sizes: Int[np.ndarray, " examples"], stream: AccessStream
) -> None:
    rule, many = "sizes must hold one for each record", len(sizes)
    checks.require(many == stream.examples, rule, sizes=many, records=stream.examples)
    rule = "sizes must be positive, and something must be read"
    good = stream.order.size > 0 and bool((sizes > 0).all())
    checks.require(good, rule, batches=len(stream.order))
    rates = system.storage_rate
    rule = "storage_rate must be a rate, or hold one for some number of readers"
    checks.require(rates != {}, rule, storage_rate=rates)
    rates = rates if isinstance(rates, Mapping) else {"": rates}
    named = {f"storage_rate{n or ''}": rate for n, rate in rates.items()}
    for name in ("consume_rate", "network_rate", "send_rate", "preprocess_rate"):
        named[name] = getattr(system, name)
    for name, rate in named.items():
        checks.require(rate > 0, f"{name} must be positive", **{name: rate})
    checks.require_count(1, threads=system.threads, staging=system.staging)
    checks.require_finite(0.0, latency=system.latency)
    for each in system.classes:
        good = each.read_rate > 0 and each.threads > 0 and each.bytes >= 0
        rule = "a class must have a read_rate and threads above 0, and no negative room"
        checks.require(good, rule, **{each.name: each})


def _policy(
    policy: InputPolicy,
    stream: AccessStream,
    sizes: Int[np.ndarray, " examples"],
    system: InputSystem,
    placement: Placement | Plan,
    neighbours: bool,
) -> Policy:
    if policy == "naive":
        return Policy(threads=1, window=stream.rows, overlap=False)
    rule = f"staging must hold a batch of {stream.rows} records of a worker"
    checks.require(system.staging >= stream.rows, rule, staging=system.staging)
    ahead = Policy(threads=system.threads, window=system.staging)
    if policy == "read_ahead":
        return ahead
    if policy == "data_store":
        _check_store(stream, sizes, system)
        return ahead._replace(keeps_first=True)
    if not isinstance(placement, Plan):
        placement = plan(stream, sizes, system.classes, placement)
    held = {len(own) for own in placement.held}
    rule = "a plan must be of the workers and classes"
    good = len(placement.held) == stream.workers and held == {len(system.classes)}
    checks.require(good, rule, workers=stream.workers, classes=len(system.classes))
    return ahead._replace(plan=placement, neighbours=neighbours)


def _check_store(
    stream: AccessStream, sizes: Int[np.ndarray, " examples"], system: InputSystem
) -> None:
    room = sum(each.bytes for each in system.classes)
    checks.require(
        sizes.sum() <= room * stream.workers,
        f"a data store must hold all {sizes.sum()} bytes in the memory of the workers",
        memory=room,
        workers=stream.workers,
    )
