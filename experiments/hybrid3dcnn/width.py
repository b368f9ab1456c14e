"""Error of networks on boxes of several widths, cut from the same universes."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from hpcjax import core, data, runs, train
from hpcjax.core import checks, config
from hpcjax.data import UniversesConfig, universes
from hpcjax.optim import AdamWConfig, CosineConfig

if TYPE_CHECKING:
    import jax

PARAMETERS = universes.Cosmology._fields
# Of ridge regression; the one that does best on a fifth of the boxes of training.
_PENALTIES = 10.0 ** np.arange(-3, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Universes, the boxes that are cut of them, and a network's training.

    Attributes:
      universes: that are simulated.
      width: of boxes, a power of two.
      shuffled: whether each box of training has the parameters of another one, the
        negative control.
      channels: of the first convolution; each of the next ones has twice as many.
      hidden: size of the fully connected layer before the last.
      optimizer: of the training.
      steps: of the training.
      batch: universes of a step, whose boxes have as many cells for all widths.
      seed: of parameters, order and the control's labels.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"universes.count": "8", "universes.width": "8", "width": "4"},
        **{"channels": "2", "hidden": "4", "steps": "2", "batch": "2"},
    }
    figures: ClassVar[Mapping[str, str]] = {
        "averaged": "parameter: squared error of the mean over a universe's boxes",
        "single": "parameter: likewise of each box alone",
        "ridge_averaged ridge_single": "parameter: the same of ridge regression",
        "mean": "parameter: of the mean of the universes of training",
        "cells": "y x: ln(1 + counts) of a slice through a universe of the test",
    }

    universes: UniversesConfig = UniversesConfig(count=2000)
    width: Annotated[int, config.AtLeast(4)] = 16
    shuffled: bool = False
    channels: config.Size = 8
    hidden: config.Size = 64
    optimizer: AdamWConfig = AdamWConfig(
        lr=3e-3, weight_decay=0.0, schedule=CosineConfig()
    )
    steps: config.Size = 1500
    batch: config.Size = 16
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "width must be a power of two that divides the universe's"
        good = self.width & (self.width - 1) == 0 == self.universes.width % self.width
        checks.require(good, rule, width=self.width, of=self.universes.width)
        rule = "universes are cut by width"
        checks.require(self.universes.boxes == 1, rule, boxes=self.universes.boxes)

    def labels(self) -> "runs.Labels":
        """Returns the parameters' names, and the cells along the slice."""
        cells = self.universes.width
        return {"parameter": PARAMETERS, "y": cells, "x": cells}


@functools.lru_cache(1)
def _simulate(cfg: UniversesConfig) -> "data.Dataset":
    """Returns whole universes, once for all runs of a table."""
    return cfg.load()


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains on boxes, and scores universes that were held out."""
    whole = _simulate(cfg.universes)
    boxes = (cfg.universes.width // cfg.width) ** 3
    own, test = cut(cfg, whole.train), cut(cfg, whole.validation)
    if cfg.shuffled:
        rng = np.random.Generator(np.random.Philox(cfg.seed))
        own = {"x": own["x"], "y": rng.permutation(own["y"])}
    trained, held = (universes.VolumeSource(e["x"], e["y"]) for e in (own, test))
    inputs = own["x"].shape[1:]
    dataset = data.Dataset(trained, held, inputs, len(PARAMETERS), whole.objective)
    predict = _learn(cfg, ctx, dataset, cfg.batch * boxes)
    guesses = {"": predict(test["x"]), "ridge_": fit_ridge(own)(test["x"])}
    found: dict[str, Any] = {"mean": _errors(own["y"].mean(0), test["y"])}
    for name, guess in guesses.items():
        found[f"{name}single"] = _errors(guess, test["y"])
        means = guess.reshape(-1, boxes, len(PARAMETERS)).mean(1)
        found[f"{name}averaged"] = _errors(means, test["y"][::boxes])
    named = {name: (("parameter",), value) for name, value in found.items()}
    shown = whole.validation.gather(np.arange(1))["x"][0, 0, :, :, 0]
    return runs.measured(
        {**named, "cells": (("y", "x"), shown)}, coords={"parameter": list(PARAMETERS)}
    )


def cut(cfg: Config, source: Any) -> dict[str, np.ndarray]:
    """Returns the boxes of universes, those of one after another, and their numbers."""
    rows = source.gather(np.arange(len(source)))
    boxes = cfg.universes.width // cfg.width
    x = np.concatenate([universes.cut_boxes(cube, boxes) for cube in rows["x"]])
    return {"x": x, "y": np.repeat(rows["y"], boxes**3, axis=0)}


def _errors(guess: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns mean squared errors of the parameters."""
    return np.asarray(np.mean((guess - wanted) ** 2, axis=0, dtype=np.float64))


def _learn(cfg: Config, ctx: "runs.Context", own: "data.Dataset", rows: int) -> Any:
    """Trains, and returns what predicts."""
    import jax

    model = network(cfg)
    method = train.compose(
        *(model, own, cfg.optimizer),
        **{"batch_size": rows, "steps": cfg.steps, "seed": cfg.seed},
    )
    task = train.supervised(model, method, own)
    length = train.TrainConfig(
        **{"steps": cfg.steps, "batch_size": rows},
        **{"eval_every": cfg.steps, "checkpoint_every": 0},
    )
    ctx.train(task, length, seed=cfg.seed, source="measured")
    apply = jax.jit(model.apply, static_argnames="train")
    assert ctx.trained is not None
    params = ctx.trained.params
    pieces = max(1, len(own.train) * math.prod(own.inputs) // 2**22)
    return lambda x: np.concatenate(
        [apply(params, {}, part, train=False)[0] for part in np.array_split(x, pieces)]
    )


def network(cfg: Config) -> "core.Model":
    """Returns pairs of a 3³ convolution and a mean of 2³ until 2³, and two layers."""
    import jax

    from hpcjax import layers

    depth = cfg.width.bit_length() - 2
    sizes = [1, *(cfg.channels * 2**n for n in range(depth))]
    shapes = {
        f"conv_{n}/kernel": (3, 3, 3, *sizes[n : n + 2]) for n in range(depth)
    } | {
        "fc_0/kernel": (8 * sizes[-1], cfg.hidden),
        "fc_1/kernel": (cfg.hidden, len(PARAMETERS)),
    }

    def init(key: "jax.Array") -> Any:
        start = jax.nn.initializers.he_normal()
        params = {
            name: start(core.derive(key, name), shape) for name, shape in shapes.items()
        } | {
            name.replace("kernel", "bias"): jax.numpy.zeros(shape[-1])
            for name, shape in shapes.items()
        }
        return params, {}

    def apply(params: Any, state: Any, x: "jax.Array", **_: Any) -> Any:
        for n in range(depth):
            kernel, bias = (params[f"conv_{n}/{each}"] for each in ("kernel", "bias"))
            x = jax.nn.leaky_relu(layers.conv(x, kernel, bias))
            x = layers.pool(x, (2, 2, 2), "mean")
        x = x.reshape(len(x), -1) @ params["fc_0/kernel"] + params["fc_0/bias"]
        x = jax.nn.leaky_relu(x) @ params["fc_1/kernel"] + params["fc_1/bias"]
        return x, state

    return core.Model(init, apply)


def describe(x: np.ndarray) -> np.ndarray:
    """Returns 1, variance, skewness and the power in each band of waves, of boxes."""
    x = x[..., 0].astype(np.float64)
    x = x - x.mean((1, 2, 3), keepdims=True)
    variance, width = np.mean(x**2, (1, 2, 3)), x.shape[1]
    skewness = np.mean(x**3, (1, 2, 3)) / np.maximum(variance, 1e-9) ** 1.5
    power = np.abs(np.fft.fftn(x, axes=(1, 2, 3))) ** 2 / width**6
    whole = np.fft.fftfreq(width, 1 / width)
    wave = np.sqrt(sum(k**2 for k in np.meshgrid(whole, whole, whole))).round()
    bands = [power[:, wave == n].mean(1) for n in range(1, width // 2 + 1)]
    logs = np.log([variance + 1e-6, *(band + 1e-9 for band in bands)])
    return np.stack([np.ones(len(x)), variance, skewness, *logs, *bands], axis=1)


def fit_ridge(own: Mapping[str, np.ndarray]) -> Any:
    """Returns what predicts parameters by ridge regression on `describe`."""
    features = describe(own["x"])
    center, scale = features.mean(0), features.std(0) + 1e-12
    center[0], scale[0] = 0, 1
    features, level = (features - center) / scale, own["y"].mean(0)
    kept = len(features) * 4 // 5

    def solve(rows: int, penalty: float) -> np.ndarray:
        a, y = features[:rows], own["y"][:rows] - level
        return np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T @ y)

    left = features[kept:], own["y"][kept:] - level
    errors = [np.mean((left[0] @ solve(kept, p) - left[1]) ** 2) for p in _PENALTIES]
    weights = solve(len(features), _PENALTIES[int(np.argmin(errors))])
    return lambda x: (describe(x) - center) / scale @ weights + level
