"""How long an iteration takes by the way gradients are averaged; when compressing pays.

T = T_fwd + max(gamma · T_comp, what is sent beside) + T_encdec + what is sent after.
Gamma is 1 where nothing is sent beside the backward pass, or next to nothing, as the
vectors of PowerSGD. The baseline is synchronous SGD in buckets.

References:
  Agarwal, Wang, Venkataraman and Papailiopoulos, On the Utility of Gradient Compression
  in Distributed Training Systems, MLSys 2022.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.perf.exchange_methods import (
    WORD_BYTES,
    Dense,
    Method,
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
_POINTS = 100
_EXACT = 1e-9


class Breakdown(NamedTuple):
    """Seconds of an iteration.

    Attributes:
      forward_s: T_fwd.
      backward_s: T_comp, of the backward pass alone.
      encode_decode_s: T_encdec.
      exposed_s: what communication adds, by a slower backward pass too.
    """

    forward_s: float
    backward_s: float
    encode_decode_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


class Speedup(NamedTuple):
    """The seconds of a baseline over those of a method, and the baseline's label."""

    value: float
    baseline: str


class Crossover(NamedTuple):
    """Where a method begins or ceases to pay.

    Attributes:
      value: of what was varied: bytes/s, workers, examples, or how many times as fast.
      pays: on which side of it the method is faster than the baseline.
    """

    value: float
    pays: Literal["below", "above"]


def predict(method: Method, workload: Workload, system: System) -> Breakdown:
    """Returns how long an iteration takes.

    Args:
      method: how gradients are averaged.
      workload: what is computed.
      system: by how many, and what is between them.

    Raises:
      ConfigError: the method's `encode_decode_s` is not known.

    Examples:
      >>> from hpcjax.perf import PowerSgd
      >>> work = Workload(shapes=((4096, 4096),), backward_s=0.1)
      >>> net = System(processes=8, bytes_per_s=1.25e9)
      >>> f"{predict(PowerSgd(rank=4, encode_decode_s=0.02), work, net).total_s:.4f}"
      '0.1202'
    """
    if method.encode_decode_s is None:
        raise ConfigError(
            f"encode_decode_s of {method.label} is not known: measure it on this "
            f"device with `{CALIBRATE}`"
        )
    plan = method.plan(workload, system)
    slower = method.slows_backward and plan.beside and system.processes > 1
    backward = workload.backward_s * (workload.slowdown if slower else 1)
    beside = max(backward, system.seconds(plan.beside)) - workload.backward_s
    after = system.seconds(plan.after)
    return Breakdown(
        workload.forward_s, workload.backward_s, method.encode_decode_s, beside + after
    )


def speedup(
    method: Method,
    workload: Workload,
    system: System,
    *,
    baseline: Baseline = "bucketed",
) -> Speedup:
    """Returns how many times as fast as synchronous SGD a method is.

    Args:
      method: what is compared.
      workload: what is computed.
      system: where.
      baseline: "bucketed" sends while the backward pass goes on; "naive" one whole
        gradient after it, which nobody does and which makes compression look good.

    Raises:
      ConfigError: an unknown baseline, or gradients of one bucket, of which nothing can
        be sent early, with a baseline that should.
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
    theirs = predict(against, workload, system).total_s
    ours = predict(method, workload, system).total_s
    ratio = theirs / ours if ours else math.nan
    return Speedup(ratio, against.label)


def scaling_gap(workload: Workload, system: System) -> float:
    """Returns the seconds that communication adds to synchronous SGD.

    No scheme can gain more than these in an iteration.
    """
    return predict(Dense(), workload, system).exposed_s


def required_ratio(workload: Workload, system: System) -> float:
    """Returns the least ratio of compression at which one all-reduce can be hidden.

    The smallest r ≥ 1 for which an all-reduce of 4n / r bytes takes no longer than
    gamma · T_comp; infinite if its latency alone does.
    """
    one = system.all_reduce(WORD_BYTES * workload.size)
    room = workload.slowdown * workload.backward_s
    if system.seconds([one]) <= room:
        return 1.0
    left = room - system.alpha_s * one.rounds
    return one.sent_bytes / system.bytes_per_s / left if left > 0 else math.inf


def crossover(
    method: Method,
    workload: Workload,
    system: System,
    over: Over = "bandwidth",
    *,
    baseline: Baseline = "bucketed",
) -> tuple[Crossover, ...]:
    """Returns where a method begins or ceases to be faster than synchronous SGD.

    Args:
      method: what is compared.
      workload: what is computed.
      system: where.
      over: what is varied: "bandwidth" from 1 kB/s to 1 PB/s; "p" from 2 to 65,536
        workers, T_encdec staying as it is; "batch" from 1 to 10⁶ examples;
        "compute_speed" from 10⁻³ to 10³ times as fast, T_encdec with it.
      baseline: as in `speedup`.

    Returns:
      In ascending order; none if the answer is the same everywhere. Two that are less
      than a third apart may be missed.

    Raises:
      ConfigError: as `speedup` does, an unknown `over`, or "p" of a method that does
        not take every number of workers, as gTopk does not.

    Examples:
      >>> from hpcjax.perf import PowerSgd
      >>> work = Workload(shapes=((4096, 4096),), backward_s=0.1)
      >>> net = System(processes=8, bytes_per_s=1.25e9)
      >>> found = crossover(PowerSgd(rank=4, encode_decode_s=0.02), work, net)
      >>> [(f"{each.value:.2e}", each.pays) for each in found]
      [('1.27e+09', 'below')]
    """
    checks.require_choice("over", over, tuple(_VARIED))
    low, high, vary = _VARIED[over]

    def pays(value: float) -> bool:
        return speedup(*vary(value, method, workload, system), baseline=baseline)[0] > 1

    points = np.geomspace(low, high, _POINTS)
    values = np.unique(np.rint(points) if over == "p" else points).tolist()
    answers = [pays(value) for value in values]
    found = []
    for place in range(len(values) - 1):
        if answers[place] != answers[place + 1]:
            edge = _edge(pays, values[place], values[place + 1], whole=over == "p")
            found.append(Crossover(edge, "below" if answers[place] else "above"))
    return tuple(found)


def _edge(
    pays: Callable[[float], bool], low: float, high: float, *, whole: bool
) -> float:
    """Returns the last value at which the answer is that at `low`; in whole steps."""
    first = pays(low)
    while high - low > (1 if whole else _EXACT * high):
        middle = (low + high) // 2 if whole else math.sqrt(low * high)
        if pays(middle) == first:
            low = middle
        else:
            high = middle
    return low


Point = tuple[Method, Workload, System]


def _bandwidth(value: float, method: Method, work: Workload, system: System) -> Point:
    return method, work, dataclasses.replace(system, bytes_per_s=value)


def _processes(value: float, method: Method, work: Workload, system: System) -> Point:
    return method, work, dataclasses.replace(system, processes=int(value))


def _batch(value: float, method: Method, work: Workload, system: System) -> Point:
    return method, work.with_batch(value), system


def _speed(value: float, method: Method, work: Workload, system: System) -> Point:
    encode = method.encode_decode_s
    if encode is not None:
        method = dataclasses.replace(method, encode_decode_s=encode / value)
    return method, work.faster(value), system


_VARIED: Mapping[str, tuple[float, float, Callable[..., Point]]] = {
    "bandwidth": (1e3, 1e15, _bandwidth),
    "p": (2.0, 65_536.0, _processes),
    "batch": (1.0, 1e6, _batch),
    "compute_speed": (1e-3, 1e3, _speed),
}
