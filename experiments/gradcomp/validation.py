"""Seconds of a training step as they are predicted and as processes measure them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from experiments.gradcomp.chain import ChainConfig
from hpcjax import cost, hostcomm, runs
from hpcjax.core import config

MBIT = 1e6 / 8
COLUMNS = ("measured", "predicted", "encode_decode")
APART = ("alpha", "bytes_per_s", "forward", "backward", "slowdown")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Setups in which steps are predicted and measured.

    Attributes:
      chain: what is trained; four layers 1024 wide have 4 million parameters.
      processes: numbers of workers.
      mbit_per_s: of each worker's link; over the fastest one compression does not pay.
      methods: labels of `METHODS`, and "dense".
      repetitions: of each step.
      seed: of parameters and data.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "[2]",
        "mbit_per_s": "[400.0]",
        "repetitions": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "measured predicted": "processes mbit_per_s method: seconds of a step",
        "encode_decode": "processes mbit_per_s method: seconds",
        "alpha bytes_per_s": "processes mbit_per_s: of the links, measured apart",
        "forward backward": "processes mbit_per_s: seconds, measured apart",
        "slowdown": "processes mbit_per_s: of computing while sending",
    }

    chain: ChainConfig = ChainConfig(rows=512)
    processes: tuple[config.Several, ...] = (2, 4)
    mbit_per_s: tuple[config.Positive, ...] = (50.0, 400.0, 3200.0)
    methods: tuple[str, ...] = (
        "dense",
        "fp16",
        "PowerSGD r=4",
        "MSTop-k 1%",
        "Top-k 1%",
        "signSGD",
    )
    repetitions: config.Size = 3
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "processes": self.processes,
            "mbit_per_s": self.mbit_per_s,
            "method": self.methods,
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Calibrates and measures every setup, each in processes of its own."""
    import xarray as xr

    from experiments.gradcomp import ranks

    made = []
    for count in cfg.processes:
        row = []
        for rate in cfg.mbit_per_s:
            link = hostcomm.Link(rate=rate * MBIT)
            found, *_ = runs.in_processes(ranks.measure, cfg, count, link=link)
            row.append(compared(cfg, count, found))
        links = xr.concat(row, dim="mbit_per_s")
        made.append(links.assign_coords(mbit_per_s=list(cfg.mbit_per_s)))
    together = xr.concat(made, dim="processes")
    return together.assign_coords(processes=list(cfg.processes))


def compared(cfg: Config, count: int, found: Mapping[str, Any]) -> "runs.Dataset":
    """Returns what `ranks.measure` has found beside what follows from its parts."""
    link = hostcomm.MessageCost.of_rate(found["bytes_per_s"], found["alpha_s"])
    system = cost.System(processes=count, link=link)
    work = cost.Workload(
        shapes=cfg.chain.shapes,
        forward_s=found["forward_s"],
        backward_s=found["backward_s"],
        slowdown=found["slowdown"],
        bucket_bytes=cfg.chain.bucket_bytes,
    )
    encoding = [found["encode_decode_s"][label] for label in cfg.methods]
    methods = [
        dataclasses.replace(sent_by(label), encode_decode_s=seconds)
        for label, seconds in zip(cfg.methods, encoding, strict=True)
    ]
    predicted = [cost.predict(method, work, system).total_s for method in methods]
    measured = [found["step_s"][label] for label in cfg.methods]
    columns = dict(zip(COLUMNS, (measured, predicted, encoding), strict=True))
    return runs.measured(
        {
            **{name: ("method", values) for name, values in columns.items()},
            "alpha": link.alpha,
            "bytes_per_s": link.bytes_per_s,
            "forward": work.forward_s,
            "backward": work.backward_s,
            "slowdown": work.slowdown,
        },
        coords={"method": list(cfg.methods)},
    )


def sent_by(label: str) -> "cost.PricedExchange":
    """Returns a method as processes run it here: but dense, nothing overlaps."""
    from experiments.gradcomp.methods import HALF, METHODS

    if label == HALF.label:
        return dataclasses.replace(HALF, overlapped=False)
    return METHODS.get(label, cost.Dense())
