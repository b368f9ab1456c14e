"""The least energy of all clocks, by network and batch; simulated, without noise."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.polythrottle import workloads
from experiments.polythrottle.simulator import Simulated
from experiments.polythrottle.workloads import Network
from hpcjax import cost, runs
from hpcjax.core import checks, config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A device, and networks.

    Attributes:
      device: whose clocks are chosen.
      models: networks that are served.
      slack: the objective over the latency at the greatest clocks: of the same batch
        where that is fixed, of one query where it is chosen, too.
      batches: queries in a batch, from 1.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "models": "[efficientnet_b0]",
        "batches": "[1,2]",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "fixed": "model batch: percent of energy saved over the greatest clocks",
        "gpu_place mem_place": "model batch: best clock, of 0 to 1",
        "race": "model batch: gpu_place if nothing but the GPU took power",
        "joint": "model: percent saved over one query, with the best batch",
        "joint_batch": "model: that batch",
    }

    device: cost.DevicePower
    models: tuple[Network, ...] = (
        *("resnet50", "bert_base", "efficientnet_b0", "efficientnet_b4"),
    )
    slack: config.Positive = 1.5
    batches: tuple[config.Size, ...] = (1, 2, 4, 8, 16, 32)
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "batches must ascend from 1"
        good = tuple(sorted({1, *self.batches})) == self.batches
        checks.require(good, rule, batches=self.batches)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"model": self.models, "batch": self.batches}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Looks through all clocks."""
    del ctx
    shape = len(cfg.models), len(cfg.batches)
    columns = {n: np.empty(shape) for n in ("fixed", "gpu_place", "mem_place", "race")}
    joint, chosen = np.empty(len(cfg.models)), np.empty(len(cfg.models))
    for m, model in enumerate(cfg.models):
        device = Simulated(cfg.device, workloads.work_of(model), cfg.batches, (0,))
        form = [len(values) for values in device.grid.values.values()]
        ends = [max(count - 1, 1) for count in form]
        joules, seconds = (each.reshape(form) for each in device.spend_all())
        alone = [device.spend(device.grid.point(n)) for n in range(len(device.grid))]
        of_gpu = np.reshape([s.gpu * s.seconds for s in alone], form)
        for b in range(len(cfg.batches)):
            within = seconds[:, :, b] <= cfg.slack * seconds[-1, -1, b]
            least = np.where(within, joules[:, :, b], np.inf).min()
            columns["fixed"][m, b] = 100 * (1 - least / joules[-1, -1, b])
            best = np.unravel_index(joules[:, :, b].argmin(), form[:2])
            columns["gpu_place"][m, b] = best[0] / ends[0]
            columns["mem_place"][m, b] = best[1] / ends[1]
            lone = np.unravel_index(of_gpu[:, :, b].argmin(), form[:2])
            columns["race"][m, b] = lone[0] / ends[0]
        within = seconds <= cfg.slack * seconds[-1, -1, 0]
        allowed = np.where(within, joules, np.inf)
        joint[m] = 100 * (1 - allowed.min() / joules[-1, -1, 0])
        chosen[m] = cfg.batches[np.unravel_index(allowed.argmin(), form)[2]]
    return runs.simulated(
        {
            **{name: (("model", "batch"), own) for name, own in columns.items()},
            "joint": ("model", joint),
            "joint_batch": ("model", chosen),
        },
        coords={"model": list(cfg.models), "batch": list(cfg.batches)},
    )
