"""How long deleted edges stay in rows of a snapshot."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.graphs.snapshot_policies import FullRefresh, OnTheFly

PARTIAL, ALL, FCR = "partial refresh", "refresh of all", "FCR"
DROPPED = "partial refresh, invalidated"
NEWEST, REPEATS = "newest kept (control)", "kept drawn again (control)"
ROWS = (PARTIAL, ALL, FCR, DROPPED, NEWEST, REPEATS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A drawn graph of which edges are deleted at once, and rows renewed thereafter.

    Attributes:
      scale: of 2^scale vertices.
      edges: how many.
      fanout: of the layer.
      alpha: width of rows over it.
      threshold: lists longer than it have rows.
      refresh_rate: γ.
      before: refreshes before the deletion.
      refreshes: refreshes after it, each of all rows.
      share: of edges that are deleted, and as many inserted.
      seed: of everything.
    """

    smoke: ClassVar[Mapping[str, str]] = {"scale": "8", "edges": "6000"}
    figures: ClassVar[Mapping[str, str]] = {
        "stale": "row refresh: of entries deleted then, how many rows still hold",
        "deleted": "row: entries of rows that were deleted",
        "law": "row refresh: (1 - r)^k, r the share of a row that is renewed",
        "repeated": "row: entries that a row holds twice, after all",
    }

    scale: config.Size = 16
    edges: config.Size = 2_000_000
    fanout: config.Size = 10
    alpha: float = 1.5
    threshold: config.Count = 30
    refresh_rate: config.Fraction = 0.3
    before: config.Count = 5
    refreshes: config.Size = 5
    share: Annotated[float, config.Within("(0, 0.5]")] = 0.05
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"row": ROWS, "refresh": range(self.refreshes + 1)}


def run(cfg: Config, _: "runs.Context") -> "runs.Dataset":
    """Deletes the same edges below each kind of rows, and counts them after."""
    found = {name: _follow(cfg, name) for name in ROWS}
    rate = [_rate(cfg, name) for name in ROWS]
    law = (1 - np.array(rate)[:, None]) ** np.arange(cfg.refreshes + 1)
    stale, deleted, repeated = zip(*found.values(), strict=True)
    return runs.measured(
        {
            "stale": (("row", "refresh"), np.array(stale)),
            "law": (("row", "refresh"), law),
            "deleted": ("row", list(deleted)),
            "repeated": ("row", list(repeated)),
        },
        coords={"row": list(ROWS), "refresh": range(cfg.refreshes + 1)},
    )


def _rate(cfg: Config, name: str) -> float:
    """Returns ρ = r/C of rows as wide as can be."""
    width = int(np.ceil(cfg.alpha * cfg.fanout))
    if name == FCR:
        return 1.0
    base = width if name == ALL else cfg.fanout
    return max(1, int(cfg.refresh_rate * base)) / width


def _follow(cfg: Config, name: str) -> tuple[list[float], int, int]:
    """Returns shares that are left, how many were deleted, and repeated entries."""
    from hpcjax import graphs

    csr = graphs.Csr.of(graphs.rmat(cfg.scale, cfg.edges, cfg.seed))
    store = graphs.VersionedCsr(csr)
    policy: Any = OnTheFly(
        refresh="full" if name == ALL else "partial",
        **{"alpha": cfg.alpha, "period": 1, "refresh_rate": cfg.refresh_rate},
    )
    if name == FCR:
        policy = FullRefresh(alpha=cfg.alpha, period=1)
    made = _kinds().get(name, graphs.Snapshot)(
        *(store, (cfg.fanout,), policy),
        threshold=cfg.threshold,
        invalidate=name == DROPPED,
    )
    # Lists that stay longer than a row whatever is deleted.
    targets = np.flatnonzero(csr.degrees > 2 * cfg.threshold)
    numbers = range(cfg.before + cfg.refreshes + 1)
    for number in numbers[: cfg.before + 1]:
        made(targets, graphs.Draw(cfg.seed, number))
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    gone = rng.permutation(cfg.edges)[: round(cfg.share * cfg.edges)]
    store.apply(rng.integers(0, 1 << cfg.scale, (len(gone), 2)), gone)
    left = [_count(made, targets, gone)]
    for number in numbers[cfg.before + 1 :]:
        made(targets, graphs.Draw(cfg.seed, number))
        left.append(_count(made, targets, gone))
    held = made.rows(0, targets)
    repeated = sum(len(row) - len(np.unique(row)) for row in held)
    return [each / left[0] for each in left], left[0], repeated


def _count(snapshot: Any, targets: np.ndarray, gone: np.ndarray) -> int:
    """Returns how many entries of the targets' rows are of edges that are gone."""
    return int(np.isin(snapshot.rows(0, targets), gone).sum())


def _kinds() -> Mapping[str, type]:
    """Returns the broken kinds of rows, that are controls."""
    from hpcjax import graphs

    class Newest(graphs.Snapshot):
        """Keeps the entries that came last in place of any."""

        def _keep(
            self, keys: np.ndarray, sizes: np.ndarray, counts: np.ndarray
        ) -> np.ndarray:
            chosen = super()._keep(keys, sizes, counts)
            last = np.arange(len(chosen))[:, None] + sizes - counts
            return np.where(chosen < 0, -1, last)

    class Repeats(graphs.Snapshot):
        """Draws new entries from the whole list, those that are kept as well."""

        def _draw_others(self, vertices, taken, counts, stream, **kept):
            none = taken.take(np.full_like(taken.numbers, -1))
            return super()._draw_others(vertices, none, counts, stream, **kept)

    return {NEWEST: Newest, REPEATS: Repeats}
