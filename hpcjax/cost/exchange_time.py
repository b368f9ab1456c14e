"""Model of an iteration's time with compressed gradients, and of when they pay.

T = T_fwd + max(gamma · T_comp, T_beside) + T_encdec + T_after,

with the forward pass, the backward pass T_comp, the communication beside and after it,
and the time to encode and decode. Gamma is 1 where (almost) nothing is sent beside the
backward pass, such as the vectors of PowerSGD. The baseline is synchronous SGD with
buckets that overlap with the backward pass.

References:
  Agarwal, Wang, Venkataraman and Papailiopoulos, On the Utility of Gradient Compression
  in Distributed Training Systems, MLSys 2022.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from hpcjax.collectives import all_reduce
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.cost.exchange_methods import (
    WORD_BYTES,
    Dense,
    PricedExchange,
    System,
    Workload,
)

Baseline = Literal["bucketed", "naive"]
Over = Literal["bandwidth", "p", "batch", "compute_speed"]
CALIBRATE = "hpcjax run gradcomp/calibration"
BASELINES: Mapping[str, Dense] = {
    "bucketed": Dense(),
    "naive": Dense(overlapped=False),
}
_POINTS = 100  # of the grid on which `crossover` looks for changes of sign
_EXACT = 1e-9  # relative width at which bisection stops


class Breakdown(NamedTuple):
    """Seconds of an iteration.

    Attributes:
      forward_s: T_fwd.
      backward_s: T_comp, the backward pass without communication.
      encode_decode_s: T_encdec.
      exposed_s: what communication adds, the slowdown of the backward pass included.
    """

    forward_s: float
    backward_s: float
    encode_decode_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """T, the sum of the parts."""
        return sum(self)


class Speedup(NamedTuple):
    """How many times as fast as a baseline a method is.

    Attributes:
      value: seconds of the baseline over those of the method.
      baseline: the baseline's label.
    """

    value: float
    baseline: str


class Crossover(NamedTuple):
    """A value at which a method begins or ceases to be faster than the baseline.

    Attributes:
      value: of the varied quantity: bytes/s, workers, examples, or relative speed.
      pays: the side of `value` on which the method is faster.
    """

    value: float
    pays: Literal["below", "above"]


def predict(method: PricedExchange, workload: Workload, system: System) -> Breakdown:
    """Returns how long an iteration takes.

    Args:
      method: how gradients are averaged.
      workload: the computation of one worker.
      system: the workers and their links.

    Raises:
      ConfigError: the method's `encode_decode_s` is not known.

    Examples:
      >>> from hpcjax.collectives import PowerSgdConfig
      >>> from hpcjax.cost import Exchanged
      >>> from hpcjax.hostcomm import MessageCost
      >>> work = Workload(shapes=((4096, 4096),), backward_s=0.1)
      >>> net = System(processes=8, link=MessageCost.of_rate(1.25e9))
      >>> power = Exchanged(
      ...     name="rank 4", exchange=PowerSgdConfig(rank=4), encode_decode_s=0.02
      ... )
      >>> f"{predict(power, work, net).total_s:.4f}"
      '0.1202'
    """
    if method.encode_decode_s is None:
        raise ConfigError(
            f"encode_decode_s of {method.label} is not known: measure it on this "
            f"device with `{CALIBRATE}`"
        )
    plan = method.plan(workload, system.processes)
    slower = method.slows_backward and plan.beside and system.processes > 1
    backward = workload.backward_s * (workload.slowdown if slower else 1)
    # Communication adds max(gamma T_comp, T_beside) - T_comp + T_after.
    beside = max(backward, system.seconds(plan.beside)) - workload.backward_s
    after = system.seconds(plan.after)
    return Breakdown(
        workload.forward_s, workload.backward_s, method.encode_decode_s, beside + after
    )


def speedup(
    method: PricedExchange,
    workload: Workload,
    system: System,
    *,
    baseline: Baseline = "bucketed",
) -> Speedup:
    """Returns how many times as fast as synchronous SGD a method is.

    Args:
      method: the method to compare.
      workload: the computation of one worker.
      system: the workers and their links.
      baseline: "bucketed" overlaps communication with the backward pass; "naive" sends
        the whole gradient after it, which no current framework does and which flatters
        compression.

    Raises:
      ConfigError: an unknown baseline, or "bucketed" with gradients of a single bucket,
        which cannot overlap.
    """
    checks.require_choice("baseline", baseline, tuple(BASELINES))
    if baseline == "bucketed" and len(workload.buckets) == 1:
        raise ConfigError(
            "all gradients are one bucket, so that the baseline would overlap nothing: "
            f"got bucket_bytes={workload.bucket_bytes} for "
            f"{WORD_BYTES * workload.size} bytes; make it smaller, or ask for "
            "baseline='naive'"
        )
    against = BASELINES[baseline]
    baseline_s = predict(against, workload, system).total_s
    method_s = predict(method, workload, system).total_s
    ratio = baseline_s / method_s if method_s else math.nan
    return Speedup(ratio, against.label)


def scaling_gap(workload: Workload, system: System) -> float:
    """Returns the seconds that communication adds to an iteration of synchronous SGD.

    No compression can gain more than these.
    """
    return predict(Dense(), workload, system).exposed_s


def required_ratio(workload: Workload, system: System) -> float:
    """Returns the compression at which one all-reduce fits beside the backward pass.

    It is the smallest ratio r ≥ 1 for which an all-reduce of 4n / r bytes takes no
    longer than gamma · T_comp; infinite if the latency alone takes longer.
    """
    dense = all_reduce(workload.size, system.processes)
    room = workload.slowdown * workload.backward_s
    if system.seconds([dense]) <= room:
        return 1.0
    # latency + sending / r = room, solved for r.
    left = room - system.link.seconds(0.0, system.rounds(dense))
    sending = system.link.seconds(WORD_BYTES * dense.words, 0.0)
    return sending / left if left > 0 else math.inf


def crossover(
    method: PricedExchange,
    workload: Workload,
    system: System,
    over: Over = "bandwidth",
    *,
    baseline: Baseline = "bucketed",
) -> tuple[Crossover, ...]:
    """Returns where a method begins or ceases to be faster than synchronous SGD.

    Args:
      method: the method to compare.
      workload: the computation of one worker.
      system: the workers and their links.
      over: the quantity to vary: "bandwidth" from 1 kB/s to 1 PB/s; "p" from 2 to
        65,536 workers, with T_encdec unchanged; "batch" from 1 to 10⁶ examples;
        "compute_speed" from 10⁻³ to 10³ times as fast, T_encdec included.
      baseline: as in `speedup`.

    Returns:
      The crossovers in ascending order; none if the same side is faster everywhere. Two
      crossovers less than a third apart may be missed.

    Raises:
      ConfigError: as `speedup` does, an unknown `over`, or "p" of a method that does
        not take every number of workers, as gTopk does not.

    Examples:
      >>> from hpcjax.collectives import PowerSgdConfig
      >>> from hpcjax.cost import Exchanged
      >>> from hpcjax.hostcomm import MessageCost
      >>> work = Workload(shapes=((4096, 4096),), backward_s=0.1)
      >>> net = System(processes=8, link=MessageCost.of_rate(1.25e9))
      >>> power = Exchanged(
      ...     name="rank 4", exchange=PowerSgdConfig(rank=4), encode_decode_s=0.02
      ... )
      >>> crossings = crossover(power, work, net)
      >>> [(f"{crossing.value:.2e}", crossing.pays) for crossing in crossings]
      [('1.27e+09', 'below')]
    """
    checks.require_choice("over", over, tuple(_VARIED))
    low, high, vary = _VARIED[over]

    def pays(value: float) -> bool:
        return speedup(*vary(value, method, workload, system), baseline=baseline)[0] > 1

    # A coarse grid finds intervals with a change, bisection the value inside each. The
    # widest range spans 12 decades: neighbours differ by 10^(12 / 99), about a third.
    points = np.geomspace(low, high, _POINTS)
    values = np.unique(np.rint(points) if over == "p" else points).tolist()
    answers = [pays(value) for value in values]
    crossings = []
    for place in range(len(values) - 1):
        if answers[place] != answers[place + 1]:
            edge = _bisect(pays, values[place], values[place + 1], whole=over == "p")
            crossings.append(Crossover(edge, "below" if answers[place] else "above"))
    return tuple(crossings)


def _bisect(
    pays: Callable[[float], bool], low: float, high: float, *, whole: bool
) -> float:
    """Returns the last value with the answer of `low`; `whole` for integers."""
    first = pays(low)
    while high - low > (1 if whole else _EXACT * high):
        # The geometric mean, since the range spans decades.
        middle = (low + high) // 2 if whole else math.sqrt(low * high)
        if pays(middle) == first:
            low = middle
        else:
            high = middle
    return low


Point = tuple[PricedExchange, Workload, System]


def _bandwidth(
    value: float, method: PricedExchange, work: Workload, system: System
) -> Point:
    return method, work, system.with_bandwidth(value)


def _processes(
    value: float, method: PricedExchange, work: Workload, system: System
) -> Point:
    return method, work, dataclasses.replace(system, processes=int(value))


def _batch(
    value: float, method: PricedExchange, work: Workload, system: System
) -> Point:
    return method, work.with_batch(value), system


def _speed(
    value: float, method: PricedExchange, work: Workload, system: System
) -> Point:
    encode = method.encode_decode_s
    if encode is not None:
        method = dataclasses.replace(method, encode_decode_s=encode / value)
    return method, work.with_speed(value), system


_VARIED: Mapping[str, tuple[float, float, Callable[..., Point]]] = {
    "bandwidth": (1e3, 1e15, _bandwidth),
    "p": (2.0, 65_536.0, _processes),
    "batch": (1.0, 1e6, _batch),
    "compute_speed": (1e-3, 1e3, _speed),
}
