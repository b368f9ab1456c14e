"""In how many setups compression takes less time than synchronous SGD; by a model."""

import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from hpcjax import cost, hostcomm, perf, runs
from hpcjax.core import checks, config

CALIBRATIONS = pathlib.Path(__file__).parent / "calibrations"
GBIT = 1e9 / 8
PAYS = 0.03
ALWAYS = 8e6  # Gbit/s, the end of where crossovers are looked for
FIELDS = {
    "model": "model",
    "batch": "examples a worker",
    "method": "method",
    "processes": "workers",
    "gbit_per_s": "Gbit/s",
    "forward_s": "s",
    "backward_s": "s",
    "encode_decode_s": "s",
    "exposed_s": "s",
    "total_s": "s",
    "speedup": "over dense, 1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Setups that are compared; models, batches and workers are the calibration's.

    Attributes:
      calibration: name of a file in `calibrations/`, or the path of one.
      any_device: takes a calibration of another device than this one.
      gbit_per_s: bandwidths of a worker's link.
      alpha_s: seconds for each round of a collective.
      topology: of the collectives.
      network: one of `cost.NETWORKS`, whose links have the bandwidth together; "none"
        for links between all neighbours.
      slowdown: gamma; 1 is in favour of synchronous SGD.
      bucket_bytes: of synchronous SGD.
      compute_speed: how many times as fast a device would compute, and encode.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "gbit_per_s": "[1.0,10.0]",
        "compute_speed": "[1.0,4.0]",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "speedup": "setup gbit_per_s compute_speed: over sending all",
        "required_ratio": "setup gbit_per_s: of compression",
        "pays_below": "setup: Gbit/s; 0 if it pays nowhere, `ALWAYS` if everywhere",
        "share": "gbit_per_s: of those counted that pay",
        "threshold": ": Gbit/s from which on fewer than 3 % pay",
        "model batch processes method": "setup: what it is",
        "counted": "setup: whether it is, as all but fp16 are",
    }

    calibration: str = "cpu"
    any_device: bool = True
    gbit_per_s: tuple[config.Positive, ...] = (10.0, 25.0, 100.0, 200.0, 400.0)
    alpha_s: config.NotNegative = 1e-5
    topology: Literal["ring", "tree"] = "ring"
    network: str = "none"
    slowdown: Annotated[float, config.AtLeast(1.0)] = 1.0
    bucket_bytes: int = 25 * 2**20
    compute_speed: tuple[config.Positive, ...] = (1.0, 2.0, 3.0, 4.0)
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_choice("network", self.network, ("none", *cost.NETWORKS))

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "setup": range(len(describe_setups(self)["model"])),
            "gbit_per_s": self.gbit_per_s,
            "compute_speed": self.compute_speed,
        }

    def typical(self) -> Mapping[str, Any]:
        """Returns what the table wants more of than that it is positive."""
        return describe_setups(self)


class Setup(NamedTuple):
    """A method and where it is used."""

    model: str
    method: "cost.PricedExchange"
    workload: "cost.Workload"
    system: "cost.System"

    def at(self, bytes_per_s: float, speed: float = 1.0) -> "Setup":
        """Returns it with another bandwidth, on a device so many times as fast."""
        encode = self.method.encode_decode_s or 0.0
        return self._replace(
            method=dataclasses.replace(self.method, encode_decode_s=encode / speed),
            workload=self.workload.with_speed(speed),
            system=self.system.with_bandwidth(bytes_per_s),
        )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Predicts every setup; leaves all of them as `utility.csv` in the run's folder."""
    from hpcjax.core import files

    made = list(setups(cfg))
    files.write_atomic(ctx.directory.path / "utility.csv", as_csv(cfg, made))
    return figures(cfg, made)


def setups(cfg: Config) -> Iterator[Setup]:
    """Yields every setup of the calibration, at the first bandwidth."""
    from experiments.gradcomp.methods import METHODS
    from experiments.gradcomp.networks import shapes_of

    known = calibration(cfg)
    for row, processes, label in combinations(known):
        options = {"slowdown": cfg.slowdown, "bucket_bytes": cfg.bucket_bytes}
        shapes = shapes_of(row.model)
        work = known.workload(row.model, row.batch, shapes, **options)
        system = cost.System(
            processes=processes,
            link=hostcomm.MessageCost.of_rate(cfg.gbit_per_s[0] * GBIT, cfg.alpha_s),
            topology=cfg.topology,
            network=cost.NETWORKS.get(cfg.network),
        )
        timed = known.add_encode_time(METHODS[label], row.model, processes)
        yield Setup(row.model, timed, work, system)


def describe_setups(cfg: Config) -> dict[str, list[Any]]:
    """Returns what each setup is, as `Config.figures` says it."""
    from experiments.gradcomp.methods import HALF

    rows, workers, labels = zip(*combinations(calibration(cfg)), strict=True)
    return {
        "model": [row.model for row in rows],
        "batch": [row.batch for row in rows],
        "processes": list(workers),
        "method": list(labels),
        "counted": [label != HALF.label for label in labels],
    }


def combinations(
    known: "perf.Calibration",
) -> "Iterator[tuple[perf.ComputeTime, int, str]]":
    """Yields passes, workers and a method's label of every setup."""
    from experiments.gradcomp.methods import METHODS

    workers = sorted({row.processes for row in known.encoding})
    return itertools.product(known.compute, workers, METHODS)


def calibration(cfg: Config) -> "perf.Calibration":
    """Returns the calibration that the config names."""
    named = CALIBRATIONS / f"{cfg.calibration}.json"
    path = named if named.exists() else pathlib.Path(cfg.calibration)
    return perf.load_calibration(path, force=cfg.any_device)


def speedup(setup: Setup) -> float:
    """Returns how many times as fast as synchronous SGD in buckets it is."""
    return cost.speedup(setup.method, setup.workload, setup.system).value


def as_csv(cfg: Config, made: list[Setup]) -> str:
    """Returns all setups at all bandwidths, units in the second line."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(FIELDS)
    lines.writerow(FIELDS.values())
    for setup, gbit in itertools.product(made, cfg.gbit_per_s):
        own = setup.at(gbit * GBIT)
        parts = cost.predict(own.method, own.workload, own.system)
        times = [f"{value:.6g}" for value in (*parts, parts.total_s, speedup(own))]
        name = own.model, own.workload.batch, own.method.label, own.system.processes
        lines.writerow([*name, f"{gbit:g}", *times])
    return text.getvalue()


def figures(cfg: Config, made: list[Setup]) -> "runs.Dataset":
    """Returns what is read off the setups.

    Returns:
      For each setup its `model`, `batch`, `processes`, `method`, and whether it is
      `counted`, all but fp16; `speedup` [setup, gbit_per_s, compute_speed] and
      `required_ratio` [setup, gbit_per_s]; `pays_below`, the Gbit/s from which on it
      never pays, 0 if it does nowhere, `ALWAYS` if it does everywhere. The
      `share` [gbit_per_s] of those counted that pay, and `threshold`, the Gbit/s from
      which on fewer than 3 % do.
    """
    from experiments.gradcomp.methods import HALF

    gains = np.array(
        [
            [[speedup(s.at(g * GBIT, f)) for f in cfg.compute_speed] for g in gbits]
            for s, gbits in zip(made, itertools.repeat(cfg.gbit_per_s))
        ]
    )
    counted = np.array([s.method.label != HALF.label for s in made])
    below = np.array([pays_below(s) for s in made])
    ratios = [
        [
            cost.required_ratio(own.workload, own.system)
            for own in (s.at(gbit * GBIT) for gbit in cfg.gbit_per_s)
        ]
        for s in made
    ]
    known = calibration(cfg)
    return runs.analytical(
        {
            "speedup": (("setup", "gbit_per_s", "compute_speed"), gains),
            "required_ratio": (("setup", "gbit_per_s"), ratios),
            "pays_below": ("setup", below),
            "counted": ("setup", counted),
            "model": ("setup", [s.model for s in made]),
            "batch": ("setup", [s.workload.batch for s in made]),
            "processes": ("setup", [s.system.processes for s in made]),
            "method": ("setup", [s.method.label for s in made]),
            "share": ("gbit_per_s", (gains[counted, :, 0] > 1).mean(0)),
            "threshold": threshold(below[counted]),
        },
        coords={
            "gbit_per_s": list(cfg.gbit_per_s),
            "compute_speed": list(cfg.compute_speed),
        },
        attrs={
            "device": known.device,
            "times": known.source,
        },
    )


def pays_below(setup: Setup) -> float:
    """Returns the Gbit/s above which a setup never pays; 0 if it pays nowhere."""
    edges = cost.crossover(setup.method, setup.workload, setup.system)
    if not edges:
        return ALWAYS if speedup(setup) > 1 else 0.0
    return edges[-1].value / GBIT if edges[-1].pays == "below" else ALWAYS


def threshold(below: "np.ndarray[Any, Any]") -> float:
    """Returns the least Gbit/s from which on fewer than 3 % of setups pay."""
    ordered = np.sort(below)[::-1]
    # This many may still pay.
    allowed = int(np.ceil(PAYS * len(ordered))) - 1
    return float(ordered[allowed])
