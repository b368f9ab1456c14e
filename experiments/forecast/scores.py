"""Each score against its definition in float64, and the packages that users have."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import metrics, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

Score = Literal["gaussian", "censored", "fair", "unfair", "rmse", "spread"]
# Geopotential at 500 hPa, m²/s²: its level, and how far members are apart.
OFFSET, SPREAD = 54_000.0, 13.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A score of values that are far from zero.

    Attributes:
      score: CRPS of a Gaussian or of one censored at zero, fair or unfair CRPS of an
        ensemble, RMSE, or the members' spread.
      members: of an ensemble.
      one_pass: whether the spread is that of textbooks, the mean of squares less the
        square of the mean; a control.
      points: that are scored.
      repetitions: of the measurement; with 0 nothing is timed.
      seed: of members and observations.
    """

    smoke: ClassVar[Mapping[str, str]] = {"points": "100", "repetitions": "0"}

    score: Score = "fair"
    members: config.Several = 10
    one_pass: bool = False
    points: config.Size = 1_000_000
    repetitions: config.Count = 20
    seed: config.Seed = 0

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """What is found; ratio and ratio_high only if asked for."""
        found = {
            "distance": ": largest of any point from the definition, over the score",
        }
        if self.repetitions:
            found["ratio ratio_high"] = ": of seconds to the fastest peer's"
        return found


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Computes the score in float32, and the definition and peers in float64."""
    import jax.numpy as jnp

    del ctx
    inputs = _draw(cfg)
    wide = [each.astype(np.float64) for each in inputs]
    ours = functools.partial(_compile(cfg), *map(jnp.asarray, inputs))
    exact = np.asarray(_define(cfg.score, *wide))
    # A fair score may be zero, such as of two members with y between them.
    size = np.maximum(np.abs(exact), 1e-3 * SPREAD)
    figures = {
        "distance": (np.abs(np.asarray(ours(), np.float64) - exact) / size).max()
    }
    if cfg.repetitions:
        figures |= _time(cfg, ours, wide)
    return runs.measured(figures)


def _draw(cfg: Config) -> list[np.ndarray]:
    """Returns the score's arguments, members [members, points], in float32."""
    rng = np.random.default_rng(cfg.seed)
    y = OFFSET + SPREAD * rng.normal(size=cfg.points)
    mean = OFFSET + SPREAD * rng.normal(size=cfg.points)
    std = SPREAD * rng.uniform(0.5, 1.5, cfg.points)
    members = OFFSET + SPREAD * rng.normal(size=(cfg.members, cfg.points))
    arrays = {
        "gaussian": (mean, std, y),
        "censored": (mean - OFFSET, std, np.maximum(y - OFFSET, 0)),
        "rmse": (mean, y),
        "spread": (members,),
    }.get(cfg.score, (members, y))
    return [each.astype(np.float32) for each in arrays]


def _compile(cfg: Config) -> Callable[..., Any]:
    """Returns the score as this project has it."""
    import jax
    import jax.numpy as jnp

    def one_pass(x: jax.Array) -> jax.Array:
        count = x.shape[0]
        variance = jnp.mean(x**2, 0) - jnp.mean(x, 0) ** 2
        return jnp.sqrt(jnp.mean(variance) * count / (count - 1))

    score: dict[str, Callable[..., Any]] = {
        "gaussian": metrics.crps_gaussian,
        "censored": metrics.crps_censored_gaussian,
        "rmse": metrics.rmse,
        "spread": one_pass if cfg.one_pass else metrics.spread,
    }
    if cfg.score in score:
        return jax.jit(score[cfg.score])
    how: Any = {"axis": 0, "estimator": cfg.score}
    return jax.jit(functools.partial(metrics.crps_ensemble, **how))


def _define(score: str, *given: np.ndarray) -> Any:
    """Returns the score as it is defined, in float64."""
    from scipy.special import ndtr

    def density(z: np.ndarray) -> np.ndarray:
        return np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)

    if score == "rmse":
        return np.sqrt(np.mean((given[0] - given[1]) ** 2))
    if score == "spread":
        return np.sqrt(given[0].var(axis=0, ddof=1).mean())
    if score in ("fair", "unfair"):
        x, y = given
        count = len(x)
        pairs = sum(np.abs(x - each).sum(0) for each in x)
        divisor = count * (count - 1) if score == "fair" else count**2
        return np.abs(x - y).mean(0) - pairs / (2 * divisor)
    mean, std, y = given
    z, c = (y - mean) / std, -mean / std
    shape = z * (2 * ndtr(z) - 1) + 2 * density(z)
    if score == "gaussian":
        return std * (shape - 1 / np.sqrt(np.pi))
    below = ndtr(c)
    tail = ndtr(-np.sqrt(2) * c) / np.sqrt(np.pi)
    return std * (shape - tail - 2 * density(c) * below - c * below**2)


def _time(cfg: Config, ours: Callable[[], Any], wide: list[np.ndarray]) -> Any:
    """Returns the ratio of seconds to those of the fastest peer."""
    peers = _peers(cfg.score, cfg.members)
    turned = [np.moveaxis(each, 0, -1).copy() for each in wide]
    thunks: dict[str, Callable[[], Any]] = {"ours": ours}
    for name, peer in peers.items():
        thunks[name] = functools.partial(peer, *turned)
    measured = perf.compare(
        thunks, next(iter(peers)), repetitions=cfg.repetitions, warmup=1
    )
    medians = measured["seconds"].median("repetition").drop_sel(candidate="ours")
    fastest = str(medians.idxmin("candidate").item())
    ratio = perf.ratios(measured.assign_attrs(baseline=fastest))["ours"]
    return {"ratio": ratio.median, "ratio_high": ratio.high}


def _peers(score: str, members: int) -> dict[str, Callable[..., Any]]:
    """Returns peers by name; they get members along the last axis.

    Raises:
      ConfigError: they are not installed.
    """
    try:
        import properscoring
        import scoringrules
        import xarray as xr
        from scores.continuous import rmse
    except ImportError as error:
        raise ConfigError(
            f"timing scores needs peers: pip install 'hpcjax[scores]' ({error})"
        ) from error

    def ensemble(estimator: str) -> Callable[..., Any]:
        return lambda x, y: scoringrules.crps_ensemble(y, x, estimator=estimator)

    def labelled(x: np.ndarray, y: np.ndarray) -> Any:
        return rmse(xr.DataArray(x), xr.DataArray(y))

    # Peers that make all pairs of 50 members of a million points need 20 GB.
    pairs = members <= 10
    table: dict[str, dict[str, Callable[..., Any]]] = {
        "gaussian": {
            "properscoring": lambda m, s, y: properscoring.crps_gaussian(y, m, s),
            "scoringrules": lambda m, s, y: scoringrules.crps_normal(y, m, s),
        },
        "censored": {
            "scoringrules": lambda m, s, y: scoringrules.crps_cnormal(
                y, m, s, 0.0, np.inf
            )
        },
        "fair": {
            "pwm": ensemble("pwm"),
            **({"fair": ensemble("fair")} if pairs else {}),
        },
        "unfair": {"qd": ensemble("qd"), **({"nrg": ensemble("nrg")} if pairs else {})},
        "rmse": {"scores": labelled},
        "spread": {"numpy": lambda x: np.sqrt(x.var(-1, ddof=1).mean())},
    }
    return table[score]
