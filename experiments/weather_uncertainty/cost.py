"""What a network costs beside the members that it spares, and maps of what it says."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import core, data, perf, runs, train
from hpcjax.core.config import Size
from hpcjax.core.errors import DataMissing
from hpcjax.data import objectives
from hpcjax.models import UNet3dConfig
from hpcjax.runs import training

task = training.task
CIRCLE, GLOBE = "circle", "globe"
DATES, HOURS = 8, 48
# Of the globe's fields: points, leads and levels, and variables.
SIDES, AXES, VARIABLES = (32, 64), (3, 2), 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training on the circle, whose network is then timed; see `TrainingConfig`.

    Attributes:
      deep: a network of the globe, timed on noise.
      globe: whether it, and a member of the model that makes `ens10-light`, are timed.
      repetitions: of each time.
    """

    smoke: ClassVar[Mapping[str, str]] = {"globe": "false", "repetitions": "2"}

    deep: training.ModelPart = UNet3dConfig(base=8, poolings=3)
    globe: bool = True
    repetitions: Size = 10

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """The figures of a history, and what is found at its end."""
        return {
            **super().figures,
            "truth raw predicted": "y x: deviations, a row for each date held out",
            "member": "world repetition: seconds of a member's two days",
            "network": "world repetition: seconds of a date's prediction",
            "train": f"world repetition: seconds of a training step of {DATES} dates",
        }

    def labels(self) -> "runs.Labels":
        """Returns those of a history, and of worlds; dates and points are numbered."""
        worlds = (CIRCLE, GLOBE)[: 1 + self.globe]
        own = {"world": worlds, "repetition": self.repetitions, "y": 3, "x": 4}
        return {**super().labels(), **own}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains, predicts dates held out, and times simulations and networks."""
    import jax

    history = training.run(cfg, ctx)
    assert ctx.trained is not None
    made = training.task(cfg, ctx.data_root, ctx.mesh.size)
    params = core.per_device.average_outside(ctx.trained.params)
    apply = _predictor(made, params, ctx.trained.model_state)
    test = made.dataset.validation.gather(np.arange(len(made.dataset.validation)))
    fields = {
        "truth": test["spread"],
        "raw": test["x"]["members"][..., 0].std(-1),
        "predicted": apply(test["x"]).std,
    }
    unit = test["scale"][:, None]
    found: dict[str, Any] = {
        name: (("y", "x"), unit * np.asarray(each)[:, 0])
        for name, each in fields.items()
    }
    seconds = [_time(cfg, made, apply, _circle())]
    if cfg.globe:
        deep = _on_noise(cfg)
        apply = _predictor(deep, *deep.model.init(jax.random.key(0)))
        seconds.append(_time(cfg, deep, apply, _globe()))
    named = {
        name: (("world", "repetition"), np.stack([each[name] for each in seconds]))
        for name in seconds[0]
    }
    worlds = (CIRCLE, GLOBE)[: len(seconds)]
    return history.assign_coords(world=list(worlds)).assign(found | named)


def _predictor(made: train.Task, params: Any, state: Any) -> Callable[[Any], Any]:
    import jax

    apply = jax.jit(lambda p, s, x: made.model.apply(p, s, x, train=False)[0])
    return lambda x: apply(params, state, x)


def _time(
    cfg: Config, made: train.Task, apply: Any, members: tuple[Callable[[], Any], int]
) -> dict[str, np.ndarray]:
    """Returns seconds of one member, of a date, and of a step, by turns."""
    import jax

    simulate, count = members
    x = jax.device_put(made.dataset.train.gather(np.arange(DATES))["x"])
    candidates = {
        "member": simulate,
        "network": lambda: apply(x),
        "train": train.step_thunk(made, DATES),
    }
    timed = perf.compare(candidates, "member", repetitions=cfg.repetitions, warmup=1)[
        "seconds"
    ]
    parts = {"member": count, "network": DATES, "train": 1}
    return {n: timed.sel(candidate=n).values / part for n, part in parts.items()}


def _circle() -> tuple[Callable[[], Any], int]:
    """Returns a simulation of Lorenz's model, and of how many members."""
    from hpcjax.data import lorenz96

    count = 200
    states = np.random.default_rng(0).normal(5, 3, (count, lorenz96.LARGE))
    advance = lorenz96.forecaster(np.zeros(5), HOURS // 24)
    return lambda: advance(states.astype(np.float32)), count


def _globe() -> tuple[Callable[[], Any], int]:
    """Returns a simulation of the globe, and of how many members."""
    import jax

    try:
        from hpcjax.data import ensembles

        model = ensembles.Atmosphere(np.zeros((64, 32)), ensembles.FORECAST)
    except ImportError as error:
        raise DataMissing(
            f"globe=true simulates by packages: pip install 'hpcjax[weather]' ({error})"
        ) from error
    count = 2
    one = model.start(jax.random.key(0))
    states = jax.tree.map(lambda leaf: np.stack([leaf] * count), one)
    advance = jax.jit(jax.vmap(lambda state: model.run(state, HOURS)))
    return lambda: advance(states), count


def _on_noise(cfg: Config) -> train.Task:
    """Returns the training of the globe's network on noise."""
    channels = AXES[0] * AXES[1] * 2 * VARIABLES
    inputs: Any = {"members": (*SIDES, 5, VARIABLES), "fields": (*SIDES, channels + 3)}
    source = _Noise(inputs)
    dataset = data.Dataset(
        source, source, inputs, 2, objectives.POSTPROCESSING, axes=AXES
    )
    model = cfg.deep.make(inputs, 2, core.Policy(), axes=AXES)
    method = train.compose(model, dataset, cfg.optimizer, batch_size=DATES, steps=1)
    return train.supervised(model, method, dataset)


class _Noise:
    """Dates of noise, whose spread is asked for."""

    def __init__(self, inputs: Mapping[str, tuple[int, ...]]) -> None:
        rng = np.random.default_rng(0)
        self.x = {
            name: rng.normal(size=(DATES, *shape)).astype(np.float32)
            for name, shape in inputs.items()
        }

    def __len__(self) -> int:
        return DATES

    def gather(self, indices: np.ndarray) -> dict[str, Any]:
        """Returns dates by number."""
        x = {name: each[indices] for name, each in self.x.items()}
        y, ones = x["members"][..., 0].mean(-1), np.ones(len(indices), np.float32)
        points = {name: np.ones_like(y) for name in ("area", "efi", "spread")}
        asked = np.tile(np.array([0, 1, 0], np.float32), (len(indices), 1))
        return {"x": x, "y": y, "scale": ones, "asked": asked, **points}
