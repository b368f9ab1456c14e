"""Training of links whose table is on disk, in an order of partitions or in memory."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.bagpipe.lookahead import Steps
from hpcjax import data, runs
from hpcjax.core import config
from hpcjax.runs import training

if TYPE_CHECKING:
    from hpcjax.data import LinksConfig

task = training.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run of links; see `TrainingConfig`.

    Attributes:
      pace: seconds that a step lasts at least, from when its rows are there.
      evict_first: whether partitions leave before a batch has updated them: a mistake.
    """

    smoke: ClassVar[Mapping[str, str]] = {"train.eval_every": "4"}
    figures: ClassVar[Mapping[str, str]] = {  # pyrefly: ignore[bad-override]
        "waited computed": ": seconds of a step, for rows and by itself; means",
        "bytes": ": read and written by moves of partitions",
        "order_bytes": ": of the first load and the swaps of the order, there and back",
        "resident": ": rows of the cache over those of the table",
        "mrr": ": on held-out links, after the last step",
        "digest": ": of all losses, and of the table at the end",
        "loss": "step",
    }

    pace: config.NotNegative = 0.0
    evict_first: bool = False

    def labels(self) -> "runs.Labels":
        """Returns the numbers of the steps."""
        return {"step": range(1, self.train.steps + 1)}


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Trains once."""
    made = task(cfg, ctx.data_root, ctx.mesh.size)
    paced = made.replace(method=Steps(cfg, made.method).method())
    history = ctx.train(paced, cfg.train, seed=cfg.seed, source="measured")
    assert ctx.trained is not None
    table, facts = np.asarray(ctx.trained.params["table"]), made.method.facts
    if getattr(cfg.state, "store", None) == "disk":
        path = ctx.directory.path / "checkpoints/rows/params.table"
        with data.RowFile(path, writable=False) as file:
            table = np.asarray(file)
    every: dict[str, Any] = {
        str(name): column.values for name, column in history.items()
    }
    losses = every["loss"].astype(np.float32)
    digest = hashlib.sha256(losses.tobytes() + table.tobytes()).hexdigest()
    moved = sum(np.sum(every.get(f"rows_{w}", 0)) for w in ("fetched", "evicted"))
    sampler: Any = made.dataset.train
    epochs = cfg.train.steps // sampler.epoch_batches(cfg.train.batch_size)
    swapped = count_rows(cfg.dataset, cfg.seed, epochs, len(table))
    row_bytes = facts.get("row_bytes", 0.0)
    return {
        "waited": np.mean(every.get("wait_seconds", 0.0)),
        "computed": every["computed"].mean(),
        "bytes": moved * row_bytes,
        "order_bytes": 2 * swapped * row_bytes,
        "resident": facts.get("cache_rows", len(table)) / len(table),
        "mrr": every["val_mrr"][-1],
        "digest": float(int(digest[:12], 16)),
        "loss": losses,
    }


def count_rows(links: "LinksConfig", seed: int, epochs: int, rows: int) -> int:
    """Returns the rows that whole epochs fetch by the states of their orders alone."""
    orders = [links.draw(seed, epoch) for epoch in range(epochs)]
    if not orders:
        return 0
    size = -(-rows // len(orders[0].buckets))
    states = [{*state} for order in orders for state in order.states.tolist()]
    fetched = [new - old for new, old in zip(states, [set(), *states], strict=False)]
    # Those at the end may be empty.
    sizes = np.clip(rows - size * np.arange(len(orders[0].buckets)), 0, size)
    return sum(int(sizes[part]) for each in fetched for part in each)
