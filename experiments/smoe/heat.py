"""Heat on a plate of several materials: what a network finds out about each place."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcjax import core, data, runs
from hpcjax.core import checks
from hpcjax.data import HeatConfig, heat
from hpcjax.runs import training

task = training.task
# The forecast of a trained network, and two of networks that know no place.
FORECASTS = ("trained", "persistence", "one stencil")
CLOSE = 0.01  # of the truth
PAIRS = 2_000  # of training, by which the one stencil is fitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run on heat, judged by material; see `TrainingConfig`.

    It is validated, and so tuned, by one part, and judged by another, that of tests.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.dataset, HeatConfig)
        checks.require(good, "dataset must be heat", dataset=self.dataset)

    @property
    def figures(self) -> Mapping[str, str]:
        """Those of a training, and scores of the pairs of tests."""
        found = {
            "close": "forecast: percentage of points within 1 % of the truth",
            "close_by_material": "forecast material: likewise",
            "worst": "forecast: likewise, of the material with the fewest",
            "early": "forecast: likewise, in the first 20 steps of runs",
            "left": "forecast: squared error over that of persistence",
            "parameters kept": ": numbers of the network, and those inference needs",
        }
        if _has_map(self):
            found["agreement"] = ": share of places whose expert is the material's"
            found["filter_error"] = ": the farthest filter from its material's stencil"
        return {**super().figures, **found}

    def labels(self) -> "runs.Labels":
        """Returns steps, forecasts and materials."""
        own = {"forecast": FORECASTS, "material": self.dataset.diffusivities}
        return {**super().labels(), **own}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains, and judges by the pairs of tests.

    Returns:
      The history with these scores. Experts are matched with materials so that most
      places agree.
    """
    import jax

    history = training.run(cfg, ctx)
    assert ctx.trained is not None
    params, state = jax.device_get((ctx.trained.params, ctx.trained.model_state))
    made = training.task(cfg, ctx.data_root, ctx.mesh.size)
    materials, stencil = _materials(cfg), fit_stencil(made.dataset.train)
    apply = jax.jit(functools.partial(made.model.apply, train=False))
    forecasts = (
        lambda x: apply(params, state, x)[0],
        lambda x: x,
        lambda x: _convolve(x, stencil),
    )
    tests = dataclasses.replace(cfg.dataset, holdout="test").load().validation
    scores = [judge(each, tests, materials, cfg) for each in forecasts]
    figures: dict[str, Any] = {
        name: (("forecast", *(["material"] if "by" in name else [])), values)
        for name in scores[0]
        if (values := [each[name] for each in scores])
    }
    figures["parameters"] = figures["kept"] = core.trees.num_params(params)
    if _has_map(cfg):
        figures |= compare_map(params, materials, cfg.dataset.diffusivities)
    labels = {"forecast": list(FORECASTS), "material": list(cfg.dataset.diffusivities)}
    return history.assign(figures).assign_coords(labels)


def judge(
    forecast: Any, source: "data.Source", materials: np.ndarray, cfg: Config
) -> dict[str, Any]:
    """Returns the scores of a function of fields on all pairs of a source."""
    places = [materials == each for each in range(len(cfg.dataset.diffusivities))]
    close, square, still = [], 0.0, 0.0
    for rows in np.array_split(np.arange(len(source)), max(1, len(source) // 100)):
        batch = source.gather(rows)
        x, y = (np.asarray(batch[name], np.float64) for name in ("x", "y"))
        error = np.abs(np.asarray(forecast(batch["x"]), np.float64) - y)
        close.append((error <= CLOSE * y)[..., 0])
        square, still = square + (error**2).sum(), still + ((x - y) ** 2).sum()
    hits = 100.0 * np.concatenate(close)
    first = np.arange(len(source)) % cfg.dataset.steps < 20
    by_material = [hits[:, each].mean() for each in places]
    return {
        "close": hits.mean(),
        "close_by_material": by_material,
        "worst": min(by_material),
        "early": hits[first].mean(),
        "left": square / still,
    }


def fit_stencil(source: "data.Source") -> np.ndarray:
    """Returns the 3×3 filter of least squares that is the same at all places."""
    rows = np.linspace(0, len(source) - 1, min(PAIRS, len(source)), dtype=int)
    batch = source.gather(rows)
    taken = _patches(batch["x"]).reshape(-1, 9)
    normal, right = taken.T @ taken, taken.T @ batch["y"].ravel()
    return np.linalg.solve(normal, right)


def _patches(x: np.ndarray) -> np.ndarray:
    padded = np.pad(x[..., 0].astype(np.float64), ((0, 0), (1, 1), (1, 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))


def _convolve(x: np.ndarray, stencil: np.ndarray) -> np.ndarray:
    return np.einsum("bhwij,ij->bhw", _patches(x), stencil.reshape(3, 3))[..., None]


def compare_map(
    params: Any, materials: np.ndarray, diffusivities: tuple[float, ...]
) -> dict[str, float]:
    """Returns how well a map of experts and its filters are those of the materials."""
    from scipy.optimize import linear_sum_assignment

    chosen = np.asarray(params["gate"]).argmax(-1)
    experts, count = params["gate"].shape[-1], len(diffusivities)
    both = np.zeros((count, experts), int)
    np.add.at(both, (materials, chosen), 1)
    which, owners = linear_sum_assignment(both, maximize=True)
    filters = np.asarray(params["kernel"])[:, :, 0]
    errors = [
        np.abs(filters[..., owner] - heat.stencil(diffusivities[material])).max()
        for material, owner in zip(which, owners, strict=True)
    ]
    return {
        "agreement": both[which, owners].sum() / materials.size,
        "filter_error": float(max(errors)),
        "kept": filters.size + materials.size,
    }


def _has_map(cfg: Config) -> bool:
    """Says whether the network is one layer whose gates depend on the place alone."""
    return getattr(cfg.model, "gate", None) == "tensor" and not cfg.model.widths


def _materials(cfg: Config) -> np.ndarray:
    return heat.place_materials(cfg.dataset.size, len(cfg.dataset.diffusivities))
