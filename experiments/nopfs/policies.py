"""Simulated time of a run by how its input is read, where memory is large or small."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import cost, runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    from hpcjax import data

PLAIN, AUTO = ("perfect", "naive", "read_ahead"), "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """What is read, by whom, and through what; rates are bytes per second.

    Attributes:
      ram: share of all records that a worker's RAM holds, and
      ssd: its SSD.
      files: number of records.
      bytes: of a record.
      workers: that share a batch.
      batch_size: of all.
      epochs: in which each record is read once.
      rate: of the storage in all.
      latency: seconds of each of its requests besides.
      consume_rate: of a worker that trains.
      ssd_rate: of a worker's SSD.
      network_rate: of a worker's link, into it and out of it.
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
        "seconds lost": "policy: of the run, and of these to input",
        "storage_reads": "policy: of the storage over all reads",
        "slower": "policy: seconds over those of the best that is not the perfect one",
        "ideal": "policy: seconds over those of the perfect one",
    }

    ram: config.Positive = 0.2
    ssd: config.NotNegative = 0.0
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
        """Returns the policies."""
        return {"policy": self.policies}

    @property
    def policies(self) -> list[str]:
        """The policies; a data store only where it has room for all records."""
        from hpcjax.data.placement import PLACEMENTS

        holds_all = (self.ram + self.ssd) * self.workers >= 1
        plain = (*PLAIN, "data_store") if holds_all else PLAIN
        return [*plain, *PLACEMENTS, AUTO]


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Simulates every policy, and every placement of the clairvoyant one."""
    names, given = cfg.policies, describe(cfg)
    times = {name: simulate(name, *given) for name in names if name != AUTO}
    times[AUTO] = times[cost.choose_placement(*given)]
    seconds = np.array([times[name].total for name in names])
    total = cfg.bytes * cfg.files * cfg.epochs
    return {
        "seconds": seconds,
        "lost": [times[name].stall for name in names],
        "storage_reads": [times[name].bytes["storage"] / total for name in names],
        "slower": seconds / np.delete(seconds, names.index("perfect")).min(),
        "ideal": seconds / times["perfect"].total,
    }


def describe(cfg: Config) -> "tuple[data.AccessStream, np.ndarray, cost.InputSystem]":
    """Returns what is read, the sizes, and what it goes through."""
    from hpcjax import data

    order = data.shuffled_epochs(cfg.files, cfg.epochs, cfg.seed)
    order = order.reshape(-1, cfg.batch_size)
    share = cfg.files * cfg.bytes
    classes = [data.StorageClass("RAM", int(cfg.ram * share), np.inf)]
    if cfg.ssd:
        room = int(cfg.ssd * share)
        classes.append(data.StorageClass("SSD", room, cfg.ssd_rate, 2))
    system = cost.InputSystem(
        storage_rate=cfg.rate,
        latency=cfg.latency,
        consume_rate=cfg.consume_rate,
        network_rate=cfg.network_rate,
        send_rate=cfg.network_rate,
        classes=tuple(classes),
        threads=cfg.threads,
        staging=cfg.staging,
    )
    stream = data.AccessStream(order, cfg.files, cfg.workers)
    return stream, np.full(cfg.files, cfg.bytes), system


def simulate(
    name: Any,
    stream: "data.AccessStream",
    sizes: np.ndarray,
    system: "cost.InputSystem",
) -> "cost.InputTimes":
    """Simulates a policy, or a placement of the clairvoyant one."""
    if name in (*PLAIN, "data_store"):
        return cost.simulate_input(name, stream, sizes, system)
    return cost.simulate_input("clairvoyant", stream, sizes, system, placement=name)
