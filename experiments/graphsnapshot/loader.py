"""What a batch of sampled neighbours costs: entries, pages and time, by policy."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.graphs.snapshot_policies import FullBatch, FullRefresh, OnTheFly

if TYPE_CHECKING:
    from hpcjax import graphs

FULL, FCR, SHARED, LAZY = "full batch", "FCR", "FCR, shared", "FCR, lazy"
PARTIAL = "PR-PF"
POLICIES = (
    *(FULL, FCR, SHARED, LAZY, "PR-FF", "PR-FF, shared", "FR-FF", "FR-PF", PARTIAL),
)
THRESHOLDS = (10, 30, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A drawn graph, and how its neighbours are kept.

    Attributes:
      scale: of 2^scale vertices.
      edges: how many.
      fanouts: of each layer.
      batch: targets, of vertices that receive an edge.
      batches: of each policy, in turns, with the same targets.
      alpha: width of rows over the fan-out.
      period: batches between refreshes.
      threshold: lists longer than it have rows.
      refresh_rate: γ of the policies on the fly.
      fetch_rate: φ of FR-PF.
      fetch_period: batches between those that FR-PF takes from the store.
      seed: of targets and draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "scale": "8",
        "edges": "4000",
        "batch": "8",
        "batches": "4",
        "period": "2",
        "threshold": "12",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "policy batch: of a processor, to sample",
        "pages": "policy batch: of 4 KiB, that are read",
        "entries": "policy batch: neighbours that are read",
        "hits": "policy batch: neighbours from rows",
        "moved": "policy batch: bytes of these",
        "snapshot": "policy: bytes of all that is in memory",
        "rows": "policy: bytes of entries of rows among these",
        "store": ": bytes of the lists",
        "stored": "threshold: entries of FCR's rows of a layer over edges",
    }

    scale: config.Size = 19
    edges: config.Size = 8_000_000
    fanouts: tuple[config.Size, ...] = (10, 10)
    batch: config.Size = 128
    batches: config.Size = 300
    alpha: float = 1.5
    period: config.Size = 50
    threshold: config.Count = 30
    refresh_rate: config.Fraction = 0.3
    fetch_rate: config.Fraction = 0.4
    fetch_period: config.Size = 3
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        batches = range(self.batches)
        return {"policy": POLICIES, "batch": batches, "threshold": THRESHOLDS}

    def policies(self) -> "list[tuple[FullBatch | FullRefresh | OnTheFly, bool]]":
        """Returns them in order, and whether layers have rows in common."""
        width = {"alpha": self.alpha, "period": self.period}
        rate = {"refresh_rate": self.refresh_rate}
        part = {"fetch_rate": self.fetch_rate, "fetch_period": self.fetch_period}
        row, fly = FullRefresh(**width), OnTheFly(**width, **rate)
        return [
            *((FullBatch(), False), (row, False), (row, True)),
            (dataclasses.replace(row, lazy=True), False),
            *((fly, False), (fly, True)),
            (dataclasses.replace(fly, refresh="full"), False),
            (dataclasses.replace(fly, refresh="full", fetch="partial", **part), False),
            (dataclasses.replace(fly, fetch="partial"), False),
        ]


def run(cfg: Config, _: "runs.Context") -> "runs.Dataset":
    """Makes the same batches with all policies, in turns."""
    from hpcjax import graphs

    csr = graphs.Csr.of(graphs.rmat(cfg.scale, cfg.edges, cfg.seed))
    store = graphs.VersionedCsr(csr)
    made = [
        graphs.Snapshot(
            *(store, cfg.fanouts, policy), shared=shared, threshold=cfg.threshold
        )
        for policy, shared in cfg.policies()
    ]
    read, seconds = _measure(cfg, made, np.flatnonzero(csr.degrees))
    dims = ("policy", "batch")
    memory = {
        name: [each.memory_report()[key] for each in made]
        for name, key in (("snapshot", "snapshot"), ("rows", "entries"))
    }
    return runs.measured(
        {
            **{name: (dims, read[name]) for name in read},
            "seconds": (dims, seconds),
            **{name: ("policy", each) for name, each in memory.items()},
            "store": made[0].memory_report()["store"],
            "stored": ("threshold", [_store(cfg, store, at) for at in THRESHOLDS]),
        },
        coords={"policy": list(POLICIES), "threshold": list(THRESHOLDS)},
    )


def _measure(
    cfg: Config, made: list, targets: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns what each batch of each policy read, and seconds."""
    from hpcjax import graphs

    shape = (len(made), cfg.batches)
    seconds = np.zeros(shape)
    read = {name: np.zeros(shape) for name in ("pages", "entries", "hits", "moved")}
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    for number in range(cfg.batches):
        own = rng.choice(targets, cfg.batch, replace=False)
        for place, snapshot in enumerate(made):
            start = time.thread_time()
            snapshot(own, graphs.Draw(cfg.seed, number))
            seconds[place, number] = time.thread_time() - start
            found = snapshot.reads()._asdict()
            for name, values in read.items():
                values[place, number] = found[name]
    return read, seconds


def _store(cfg: Config, store: "graphs.VersionedCsr", threshold: int) -> float:
    """Returns the entries of the first layer's rows over all edges."""
    from hpcjax import graphs

    row = cfg.policies()[1][0]
    snapshot = graphs.Snapshot(store, cfg.fanouts[:1], row, threshold=threshold)
    snapshot(np.arange(1), graphs.Draw(cfg.seed))
    return snapshot.reads().refreshed / len(store.csr.neighbours)
