"""Energy a query against the batch, on this machine; clocks are left as they are."""

import dataclasses
import time
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from experiments.polythrottle.forward import compile_batches
from hpcjax import perf, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network, and what counts the joules of its forward passes.

    Attributes:
      model: the network.
      batches: queries in a batch.
      counter: "nvml" or "rapl"; "assumed" takes `watts` at all times.
      watts: of the assumed counter, whose figures are simulated.
      seconds: least length of a measurement.
      repetitions: measurements of each batch, in turns.
      seed: of weights and inputs.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "resnet8",
        "batches": "[1,2]",
        "counter": "assumed",
        "seconds": "0.02",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "joules": "batch repetition: a query with all that flows",
        "idle_watts": "batch repetition: just before",
        "p95": "batch repetition: seconds of a batch",
    }

    model: Literal["resnet8", "resnet50", "resnet101", "bert_base"] = "resnet50"
    batches: tuple[config.Size, ...] = (1, 2, 4, 8, 16, 32)
    counter: Literal["nvml", "rapl", "assumed"] = "nvml"
    watts: config.Positive = 100.0
    seconds: config.Positive = 2.0
    repetitions: config.Size = 5
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"batch": self.batches, "repetition": self.repetitions}


class Assumed:
    """A counter of constant watts."""

    def __init__(self, watts: float) -> None:
        self._watts, self._start = watts, time.perf_counter()

    def read_joules(self) -> float:
        """Returns the joules since this counter was made."""
        return self._watts * (time.perf_counter() - self._start)


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Measures every batch."""
    del ctx
    assumed = cfg.counter == "assumed"
    counter = Assumed(cfg.watts) if assumed else perf.open_counter(cfg.counter)
    calls = compile_batches(cfg.model, cfg.batches, cfg.seed)
    shape = (len(cfg.batches), cfg.repetitions)
    columns = {name: np.empty(shape) for name in ("joules", "idle_watts", "p95")}
    for repetition in range(cfg.repetitions):
        for row, (batch, call) in enumerate(calls.items()):
            window = perf.measure_energy(call, counter, batch, seconds=cfg.seconds)
            for name, values in columns.items():
                values[row, repetition] = getattr(window, name)
    make = runs.simulated if assumed else runs.measured
    return make(
        {name: (("batch", "repetition"), values) for name, values in columns.items()},
        coords={"batch": list(cfg.batches), "repetition": range(cfg.repetitions)},
    )
