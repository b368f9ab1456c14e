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
    ONCE,
    REPEATED,
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
      points: of vertices, edges, widths, degrees and repetitions, drawn.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {"points": "8"}
    figures: ClassVar[Mapping[str, str]] = {
        "work": "model term: coefficients of a forward pass's work",
        "work_off": "model: of the work, the farthest that the fit is from it",
        "depth": "model log: coefficients of a forward pass's depth",
        "each": "model term: the same of each repetition, where there are any",
        "each_depth": "model log: likewise",
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
            rng.integers(1, 5, cfg.points),
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

    sizes = [tuple(map(int, point)) for point in points.T]
    own = [(layers.layer_of(name, t), *size) for *size, t in sizes]
    forward = [layers.count(*each) for each in own]
    both = [layers.count(*each, backward=True) for each in own[::3]]
    free = MOVED if name == UNMOVED else ()
    work = np.array(
        [c.work - sum(c.by_operator.get(each, 0) for each in free) for c in forward],
        float,
    )
    depth = np.array([each.depth for each in forward], float)
    told = points if name in (*REPEATED, ONCE) else points[:4]
    (terms, each), off = fit_work(told, work)
    (logs, each_depth), steps = fit_depth(told, depth)
    more = np.mean([b.work / f.work for b, f in zip(both, forward[::3], strict=True)])
    compiled = layers.over_compiled(layers.layer_of(name))
    return terms, off, logs, each, each_depth, steps, more, compiled


def fit_work(points: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coefficients of TERMS, none below 0, and the farthest relative residual.

    Args:
      points: n, m, k and d, and t if some terms may come t times, [4 or 5, points].
      work: counted, [points].

    Returns:
      Coefficients [2, terms], of those that come once and t times, and the residual.
    """
    from scipy.optimize import nnls

    n, m, k, _, *t = points.astype(float)
    terms = np.stack([m * k, m * k**2, n * k, n * k**2, m, n], axis=1)
    terms = _repeat(terms, t)
    shares = terms / work[:, None]
    scale = np.linalg.norm(shares, axis=0)  # or steps of the search are too many
    fitted = nnls(shares / scale, np.ones(len(work)), maxiter=10_000)[0] / scale
    return _by_part(fitted, TERMS), float(np.abs(terms @ fitted / work - 1).max())


def fit_depth(points: np.ndarray, depth: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coefficients of LOGS as `fit_work` does, and the most steps off."""
    logs = np.log2(points[[2, 3, 0]].astype(float))
    terms = _repeat(np.stack([*logs, np.ones(len(depth))], axis=1), points[4:])
    fitted = np.linalg.lstsq(terms, depth, rcond=None)[0]
    return _by_part(fitted, LOGS), float(np.abs(terms @ fitted - depth).max())


def _repeat(terms: np.ndarray, t: Any) -> np.ndarray:
    return np.concatenate([terms, *(terms * each[:, None] for each in t)], axis=1)


def _by_part(fitted: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """Returns coefficients of what comes once and of what comes t times, or zeros."""
    return np.append(fitted, np.zeros(2 * len(names) - len(fitted))).reshape(2, -1)
