"""Simulated time of a run by how its input is read, where memory is large or small."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import cost, runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    from hpcjax import data

# Of all data, what one worker's RAM and its SSD hold.
REGIMES = {
    "in RAM": (1.2, 0.0),
    "in RAM and SSD": (0.2, 1.0),
    "in all workers": (0.05, 0.25),
    "in no memory": (0.02, 0.08),
}
POLICIES = (
    *("perfect", "naive", "read_ahead", "data_store"),
    *("frequency", "dedup", "hybrid", "by_number"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """What is read, by whom, and through what; rates are bytes per second.

    Attributes:
      files: number of records.
      bytes: of a record.
      workers: that share a batch.
      batch_size: of all.
      epochs: in which each record is read once.
      rate: of the storage in all.
      latency: seconds of each of its requests besides.
      consume_rate: of a worker that trains.
      ssd_rate: of a worker's SSD.
      network_rate: into a worker.
      threads: that stage records, of each worker.
      staging: records that each worker reads ahead.
      seed: of the order.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "files": "40",
        "batch_size": "8",
        "epochs": "3",
        "staging": "8",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "regime policy: of the run; NaN where a policy cannot be had",
        "lost": "regime policy: of these, to input; NaN likewise",
        "storage_reads": "regime policy: of the storage over all reads; NaN likewise",
    }

    files: config.Size = 1000
    bytes: config.Size = 100_000
    workers: config.Size = 4
    batch_size: config.Size = 40
    epochs: config.Size = 10
    rate: config.Positive = 40e6
    latency: config.NotNegative = 5e-3
    consume_rate: config.Positive = 20e6
    ssd_rate: config.Positive = 500e6
    network_rate: config.Positive = 1e9
    threads: config.Size = 4
    staging: config.Size = 64
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "the files of all epochs must divide by batch_size"
        good = self.files * self.epochs % self.batch_size == 0
        checks.require(good, rule, batch_size=self.batch_size)

    def labels(self) -> "runs.Labels":
        """Returns the memories, and the policies."""
        return {"regime": REGIMES, "policy": POLICIES}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Simulates every policy with every memory."""
    from hpcjax import data

    order = data.shuffled_epochs(cfg.files, cfg.epochs, cfg.seed)
    order = order.reshape(-1, cfg.batch_size)
    stream = data.AccessStream(order, cfg.files, cfg.workers)
    shape = (len(REGIMES), len(POLICIES))
    seconds, lost, reads = (np.full(shape, np.nan) for _ in range(3))
    for i, shares in enumerate(REGIMES.values()):
        for j, policy in enumerate(POLICIES):
            if policy == "data_store" and sum(shares) * cfg.workers < 1:
                continue
            times = simulate(cfg, stream, policy, *shares)
            seconds[i, j], lost[i, j] = times.total, times.stall
            total = cfg.bytes * cfg.files * cfg.epochs
            reads[i, j] = times.bytes["storage"] / total
    return {"seconds": seconds, "lost": lost, "storage_reads": reads}


def simulate(
    cfg: Config, stream: "data.AccessStream", policy: str, ram: float, ssd: float
) -> "cost.InputTimes":
    """Simulates one policy, or one placement of the clairvoyant one."""
    from hpcjax import data

    share = cfg.files * cfg.bytes
    classes = [data.StorageClass("RAM", int(ram * share), np.inf)]
    if ssd:
        classes.append(data.StorageClass("SSD", int(ssd * share), cfg.ssd_rate, 2))
    system = cost.InputSystem(
        storage_rate=cfg.rate,
        latency=cfg.latency,
        consume_rate=cfg.consume_rate,
        network_rate=cfg.network_rate,
        classes=tuple(classes),
        threads=cfg.threads,
        staging=cfg.staging,
    )
    sizes = np.full(cfg.files, cfg.bytes)
    if policy in ("perfect", "naive", "read_ahead", "data_store"):
        return cost.simulate_input(policy, stream, sizes, system)
    placement: Any = policy
    if policy == "by_number":
        placement = plan_by_number(stream, cfg, classes)
    return cost.simulate_input(
        "clairvoyant", stream, sizes, system, placement=placement
    )


def plan_by_number(
    stream: "data.AccessStream", cfg: Config, classes: "list[data.StorageClass]"
) -> "data.Plan":
    """Returns the control: every worker keeps the records with the first numbers.

    They are all the same ones, so that no memory is of use to another worker.
    """
    from hpcjax import data

    bounds = np.cumsum([0, *(each.bytes // cfg.bytes for each in classes)])
    bounds = np.minimum(bounds, cfg.files)
    held = []
    for worker in range(stream.workers):
        use = stream.first_use(worker)
        use = np.where(use < 0, use.max() + 1, use)
        held.append(
            tuple(
                first + np.argsort(use[first:last], kind="stable")
                for first, last in itertools.pairwise(bounds)
            )
        )
    return data.Plan(tuple(held), cfg.files)
