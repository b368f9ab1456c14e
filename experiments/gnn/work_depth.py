"""Work and depth of graph layers, counted from their programs at many shapes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from experiments.gnn.names import (
    LOGS,
    MOVED,
    NAMES,
    NO_RETURN,
    TERMS,
    UNMOVED,
)
from hpcjax import runs
from hpcjax.core import config

_ALPHA, _STEPS = 0.1, 20  # of APPNP's distance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Shapes at which programs are counted.

    Attributes:
      points: of vertices, edges, widths and degrees, drawn.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {"points": "8"}
    figures: ClassVar[Mapping[str, str]] = {
        "work": "model term: coefficients of a forward pass's work",
        "work_off": "model: of the work, the farthest that the fit is from it",
        "depth": "model log: coefficients of a forward pass's depth",
        "depth_off": "model: steps that the fit is from it, the farthest",
        "backward": "model: work with gradients over a forward pass's, a third of them",
        "compiled": "model: work over XLA's operations of one shape, compiled",
        "distance": "start: from PPNP over the bound, the largest of 20 steps",
    }

    points: config.Several = 30
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"model": NAMES, "term": TERMS, "log": LOGS} | {
            "start": ("appnp", NO_RETURN)
        }


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> Mapping[str, Any]:
    """Counts all layers at all points, and fits the formulas' terms; nothing runs."""
    del ctx
    rng = np.random.default_rng(cfg.seed)
    n = 2 ** rng.integers(6, 13, cfg.points)
    points = np.stack(
        [
            n,
            n * 2 ** rng.integers(1, 6, cfg.points),
            2 ** rng.integers(2, 9, cfg.points),
            2 ** rng.integers(1, 7, cfg.points),
        ]
    )
    rows = [_measure(name, points) for name in NAMES]
    from experiments.gnn import layers

    figures = [np.array(own) for own in zip(*rows, strict=True)]
    figures.append(np.array(layers.distances(cfg.seed, _ALPHA, _STEPS)))
    return dict(zip(cfg.figures, figures, strict=True))


def _measure(name: str, points: np.ndarray) -> tuple[Any, ...]:
    """Returns the figures of a layer."""
    from experiments.gnn import layers

    layer = layers.layer_of(name)
    sizes = [tuple(map(int, point)) for point in points.T]
    forward = [layers.count(layer, *each) for each in sizes]
    both = [layers.count(layer, *each, backward=True) for each in sizes[::3]]
    free = MOVED if name == UNMOVED else ()
    work = np.array(
        [c.work - sum(c.by_operator.get(each, 0) for each in free) for c in forward],
        float,
    )
    depth = np.array([each.depth for each in forward], float)
    terms, off = fit_work(points, work)
    logs, steps = fit_depth(points, depth)
    more = np.mean([b.work / f.work for b, f in zip(both, forward[::3], strict=True)])
    return terms, off, logs, steps, more, layers.over_compiled(layer)


def fit_work(points: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coefficients of TERMS, none below 0, and the farthest relative residual.

    Args:
      points: n, m, k and d, [4, points].
      work: counted, [points].
    """
    from scipy.optimize import nnls

    n, m, k, _ = points.astype(float)
    terms = np.stack([m * k, m * k**2, n * k, n * k**2, m, n], axis=1)
    fitted, _ = nnls(terms / work[:, None], np.ones(len(work)))
    return fitted, float(np.abs(terms @ fitted / work - 1).max())


def fit_depth(points: np.ndarray, depth: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coefficients of LOGS, and by how many steps the farthest is off."""
    logs = np.log2(points[[2, 3, 0]].astype(float))
    terms = np.stack([*logs, np.ones(len(depth))], axis=1)
    fitted = np.linalg.lstsq(terms, depth, rcond=None)[0]
    return fitted, float(np.abs(terms @ fitted - depth).max())
