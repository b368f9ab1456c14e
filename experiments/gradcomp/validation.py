"""Seconds of a training step as they are predicted and as processes measure them."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.gradcomp.chain import ChainConfig
from experiments.gradcomp.overlap import sizes
from hpcjax.core import checks
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax import perf
    from hpcjax.runs.context import Context

MBIT = 1e6 / 8
COLUMNS = ("measured", "predicted", "encode_decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Setups in which steps are predicted and measured.

    Attributes:
      chain: what is trained; four layers 1024 wide have 4 million parameters.
      processes: numbers of workers.
      mbit_per_s: of each worker's link; over the fastest one compression does not pay.
      methods: labels of `METHODS`, and "dense".
      repetitions: of each step.
      seed: of parameters and data.
    """

    chain: ChainConfig = ChainConfig(rows=512)
    processes: tuple[int, ...] = (2, 4)
    mbit_per_s: tuple[float, ...] = (50.0, 400.0, 3200.0)
    methods: tuple[str, ...] = (
        "dense",
        "fp16",
        "PowerSGD r=4",
        "MSTop-k 1%",
        "Top-k 1%",
        "signSGD",
    )
    repetitions: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(1, repetitions=self.repetitions)
        for count in self.processes:
            checks.require_count(2, processes=count)
        for rate in self.mbit_per_s:
            checks.require_positive(mbit_per_s=rate)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Calibrates and measures every setup, each in processes of its own.

    Returns:
      Seconds of a step `measured` and `predicted`, and `encode_decode`, [processes,
      mbit_per_s, method]; `alpha`, `bytes_per_s`, `forward`, `backward` and `slowdown`
      [processes, mbit_per_s], as they were measured apart.
    """
    import xarray as xr

    from experiments.gradcomp import ranks
    from hpcjax import hostcomm

    made = []
    for count in cfg.processes:
        row = []
        for rate in cfg.mbit_per_s:
            found, *_ = hostcomm.launch(
                ranks.measure,
                count,
                link=hostcomm.Link(rate=rate * MBIT),
                arguments=(sizes(cfg), list(cfg.methods), cfg.repetitions),
            )
            row.append(compared(cfg, count, found))
        links = xr.concat(row, dim="mbit_per_s")
        made.append(links.assign_coords(mbit_per_s=list(cfg.mbit_per_s)))
    together = xr.concat(made, dim="processes")
    return together.assign_coords(processes=list(cfg.processes))


def compared(cfg: Config, count: int, found: Mapping[str, Any]) -> "xr.Dataset":
    """Returns what `ranks.measure` has found beside what follows from its parts."""
    import xarray as xr

    from hpcjax import perf

    system = perf.System(
        processes=count,
        bytes_per_s=found["bytes_per_s"],
        alpha_s=found["alpha_s"],
    )
    work = perf.Workload(
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
    predicted = [perf.predict(method, work, system).total_s for method in methods]
    measured = [found["step_s"][label] for label in cfg.methods]
    columns = dict(zip(COLUMNS, (measured, predicted, encoding), strict=True))
    return xr.Dataset(
        {
            **{name: ("method", values) for name, values in columns.items()},
            "alpha": system.alpha_s,
            "bytes_per_s": system.bytes_per_s,
            "forward": work.forward_s,
            "backward": work.backward_s,
            "slowdown": work.slowdown,
        },
        coords={"method": list(cfg.methods)},
    )


def sent_by(label: str) -> "perf.Method":
    """Returns a method as processes run it here: but dense, nothing overlaps."""
    from experiments.gradcomp.methods import HALF, METHODS
    from hpcjax import perf

    if label == HALF.label:
        return dataclasses.replace(HALF, overlapped=False)
    return METHODS.get(label, perf.Dense())
