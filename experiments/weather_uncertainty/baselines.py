"""What is known of a full ensemble's spread without a network, by least squares."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import metrics, runs
from hpcjax.core import checks, config
from hpcjax.data import Lorenz96Config
from hpcjax.runs.training import DatasetPart

RAW, SECOND, THIRD = "raw", "corrected variance", "corrected deviation"
CLIMATE, BLEND, FLOOR = "climatology", "blend", "floor"
WINDOWS = (3, 5, 9)
NEAR = [f"blend, {size} points a side" for size in WINDOWS]
METHODS = [RAW, SECOND, THIRD, CLIMATE, BLEND, *NEAR, FLOOR]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Baselines of forecasts whose spread is learnt.

    Attributes:
      dataset: with members.
      seed: is not used.
    """

    figures: ClassVar[Mapping[str, str]] = {"rmse": "method: of the spread"}

    dataset: DatasetPart = Lorenz96Config(members=5, simulated=20, learn="spread")
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the methods."""
        return {"method": METHODS}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Fits what has coefficients to training dates, and scores dates held out.

    Returns:
      `rmse` [method], of the spread in the target's unit; of `floor`, what is left to
      one who knows every point's deviation, of Gaussian members.
    """
    learn = getattr(cfg.dataset, "learn", None)
    rule = "dataset must be of forecasts, with learn=spread or both"
    checks.require(learn in ("spread", "both"), rule, learn=learn)
    made = cfg.dataset.load(ctx.data_root)
    train, test = (
        each.gather(np.arange(len(each))) for each in (made.train, made.validation)
    )
    wide = cfg.dataset.target_members == "all"
    known = cfg.dataset.members
    everyone = made.train.reader.learnt.sizes["number"]
    found = _predict(train, test, known, everyone)

    def score(apart: np.ndarray) -> float:
        dates = np.average(
            apart**2,
            axis=(1, 2),
            weights=np.broadcast_to(test["area"][0], apart.shape[1:]),
        )
        return float(np.sqrt((test["scale"] ** 2 * dates).mean()))

    rmse = {name: score(each - test["spread"]) for name, each in found.items()}
    share = metrics.spread_floor(known, everyone, nested=wide)
    rmse[FLOOR] = share * score(test["spread"] * np.sqrt(everyone / (everyone - 1)))
    values = ("method", [rmse[name] for name in METHODS])
    return runs.measured({"rmse": values}, coords={"method": METHODS})


def _predict(train: Any, test: Any, known: int, everyone: int) -> dict[str, np.ndarray]:
    """Returns the spread of dates held out by each method."""
    own, seen = (each["x"]["members"][..., 0].std(-1) for each in (test, train))
    climate = train["spread"].mean(0)
    found = {
        RAW: own,
        SECOND: metrics.spread_factor(known, everyone) * own,
        THIRD: metrics.spread_factor(known, everyone, "deviation") * own,
        CLIMATE: np.broadcast_to(climate, own.shape),
    }
    around = dict(zip(NEAR, ((size,) for size in WINDOWS), strict=True))
    for name, sizes in {BLEND: (), **around}.items():
        target = train["spread"].ravel()
        flat = _columns(climate, sizes, seen).reshape(len(target), -1)
        fitted = np.linalg.lstsq(flat, target, rcond=None)[0]
        found[name] = _columns(climate, sizes, own) @ fitted
    return found


def _columns(
    climate: np.ndarray, sizes: tuple[int, ...], own: np.ndarray
) -> np.ndarray:
    """Returns 1, s, what it is around each point, and the climate, [..., columns]."""
    around = [_average(own, size) for size in sizes]
    like = [np.ones_like(own), own, *around, np.broadcast_to(climate, own.shape)]
    return np.stack(like, axis=-1).astype(np.float64)


def _average(fields: np.ndarray, size: int) -> np.ndarray:
    """Returns means of so many points a side, all the way round."""
    from scipy import ndimage

    rows = ndimage.uniform_filter1d(fields, size, axis=1, mode="nearest")
    return ndimage.uniform_filter1d(rows, size, axis=2, mode="wrap")
