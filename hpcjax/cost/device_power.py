"""Time and energy of a forward pass on a device whose clocks can be chosen: a model.

References:
  Yan, Wang, Venkataraman: PolyThrottle, arXiv 2310.19991, whose devices it resembles;
  Williams, Waterman, Patterson: Roofline, CACM 2009.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import numpy as np

from hpcjax.core import checks, config

Clocks = Mapping[str, float]
KNOBS = ("gpu_mhz", "mem_mhz", "cpu_mhz")


class Work(NamedTuple):
    """What a forward pass does, layer by layer; a layer is what one kernel does.

    Attributes:
      flops: floating-point operations a query, `[layers]`.
      query_bytes: bytes moved a query, `[layers]`.
      batch_bytes: bytes moved once a batch, such as weights, `[layers]`.
      kernels: launches of each layer, `[layers]`.
      cpu_cycles: of preprocessing, a query.
    """

    flops: np.ndarray
    query_bytes: np.ndarray
    batch_bytes: np.ndarray
    kernels: np.ndarray
    cpu_cycles: float = 0.0


class Spent(NamedTuple):
    """Of one batch: seconds, watts by part, and joules a query.

    Attributes:
      seconds: from the first query's preprocessing to the last layer.
      idle: watts that flow in any case.
      gpu: watts of the GPU above that, and
      mem: of the memory, and
      cpu: of the CPU; means over the batch.
      joules: a query, idle power included.
      dynamic: the same without.
    """

    seconds: float
    idle: float
    gpu: float
    mem: float
    cpu: float
    joules: float
    dynamic: float


def _is_grid(name: str, value: tuple[float, ...]) -> None:
    good = bool(value) and min(value) > 0 and tuple(sorted(set(value))) == value
    checks.require(good, f"{name} must ascend, all > 0", **{name: value})


ClockGrid = Annotated[tuple[float, ...], _is_grid]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePower(config.Config):
    """A device: clocks that can be set, and what they cost.

    Attributes:
      gpu_mhz: clocks of the GPU, ascending.
      mem_mhz: clocks of the memory, ascending.
      cpu_mhz: clocks of the CPU, ascending.
      peak: FLOP/s at the greatest GPU clock.
      bandwidth: bytes per second at the greatest memory clock.
      memory_efficiency: share of the bandwidth that kernels reach.
      half_batch: batch at which kernels reach half of the peak.
      overlap: share of the shorter of computing and moving that is not hidden.
      launch_s: seconds to launch a kernel at the greatest CPU clock.
      idle_w: watts that flow in any case.
      gpu_w: further watts of a busy GPU, all at their greatest clocks, and
      mem_w: of the memory, and
      cpu_w: of the CPU.
      mem_static: watts of an unused memory at a clock, over those of a busy one.
      v_least: lowest voltage.
      v_most: voltage at the greatest clock.
      v_knee: share of the greatest clock below which the voltage falls no further.
    """

    gpu_mhz: ClockGrid
    mem_mhz: ClockGrid
    cpu_mhz: ClockGrid
    peak: config.Positive
    bandwidth: config.Positive
    memory_efficiency: config.Fraction = 0.75
    half_batch: config.NotNegative = 1.5
    overlap: config.Decay = 0.15
    launch_s: config.NotNegative = 12e-6
    idle_w: config.Positive
    gpu_w: config.Positive
    mem_w: config.Positive
    cpu_w: config.Positive
    mem_static: config.NotNegative = 0.3
    v_least: config.Positive = 0.62
    v_most: config.Positive = 1.04
    v_knee: config.Share = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "v_least must be at most v_most"
        levels = {"v_least": self.v_least, "v_most": self.v_most}
        checks.require(self.v_least <= self.v_most, rule, **levels)

    @property
    def greatest(self) -> dict[str, float]:
        """The greatest clocks, which a governor without limits chooses."""
        return {knob: getattr(self, knob)[-1] for knob in KNOBS}

    def spend(self, work: Work, clocks: Clocks, batch: int) -> Spent:
        """Returns what a batch takes; clocks that are not given are the greatest.

        With c the clocks over the greatest and η = batch / (batch + half_batch),

          t_gpu = Σ_l (max + overlap · min)(F_l / (η peak c_gpu), B_l / (β c_mem))
                  + kernels · launch / c_cpu,
          t = cycles · batch / f_cpu + t_gpu,
          P = idle + gpu v(c_gpu)² c_gpu u_gpu
              + mem c_mem (u_mem + static) / (1 + static) + cpu v(c_cpu)² c_cpu u_cpu

        where u is the share of t that a part is busy, the GPU while any kernel runs,
        and v the voltage over that of the greatest clock. Energy is P · t / batch.

        Args:
          work: of the network.
          clocks: of `KNOBS`, in MHz.
          batch: queries in it.

        Raises:
          ConfigError: a clock off its grid, an unknown knob, or no batch.
        """
        at = self._check(clocks, batch)
        c = {knob: at[knob] / self.greatest[knob] for knob in KNOBS}
        rate = self.peak * c["gpu_mhz"] * batch / (batch + self.half_batch)
        compute = batch * work.flops / rate
        speed = self.memory_efficiency * self.bandwidth * c["mem_mhz"]
        move = (work.batch_bytes + batch * work.query_bytes) / speed
        longer, shorter = np.maximum(compute, move), np.minimum(compute, move)
        launch = work.kernels.sum() * self.launch_s / c["cpu_mhz"]
        prepare = work.cpu_cycles * batch / (at["cpu_mhz"] * 1e6)
        kernels = (longer + self.overlap * shorter).sum()
        seconds = kernels + launch + prepare
        busy = {
            "gpu_mhz": kernels / seconds,
            "mem_mhz": move.sum() / seconds,
            "cpu_mhz": (launch + prepare) / seconds,
        }
        return self._power(c, busy, float(seconds), batch)

    def _power(
        self, c: Clocks, busy: Mapping[str, float], seconds: float, batch: int
    ) -> Spent:
        parts = {
            knob: watts * self._voltage(c[knob]) ** 2 * c[knob] * busy[knob]
            for knob, watts in (("gpu_mhz", self.gpu_w), ("cpu_mhz", self.cpu_w))
        }
        used = (busy["mem_mhz"] + self.mem_static) / (1 + self.mem_static)
        memory = self.mem_w * c["mem_mhz"] * used
        dynamic = parts["gpu_mhz"] + memory + parts["cpu_mhz"]
        each = seconds / batch
        return Spent(
            seconds=seconds,
            idle=self.idle_w,
            gpu=parts["gpu_mhz"],
            mem=memory,
            cpu=parts["cpu_mhz"],
            joules=(self.idle_w + dynamic) * each,
            dynamic=dynamic * each,
        )

    def _voltage(self, c: float) -> float:
        """Returns the voltage at a share of the greatest clock, over that at 1."""
        above = max(0.0, (c - self.v_knee) / (1 - self.v_knee))
        return (self.v_least + above * (self.v_most - self.v_least)) / self.v_most

    def _check(self, clocks: Clocks, batch: int) -> dict[str, float]:
        checks.require_count(1, batch=batch)
        for knob, value in clocks.items():
            checks.require_choice("knob", knob, KNOBS)
            checks.require_on_grid(knob, value, getattr(self, knob))
        return {**self.greatest, **clocks}
