"""Training, and what the network is worth for test images of several sizes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import core, data, perf, runs, train
from hpcjax.core import checks
from hpcjax.core.config import Size
from hpcjax.runs import training

task = training.task
# The network as trained, with batch norms calibrated at the size of the test images,
# and at the base size, which is none of theirs but for one.
STATISTICS = ("trained", "calibrated", "elsewhere")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run on mixed sizes, tested at several; see `TrainingConfig`.

    Attributes:
      test_sizes: sides of test images.
      calibration: training batches whose statistics batch norms get at a test size.
      calibration_rows: images of each.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "test_sizes": "[4,8]",
        "calibration": "1",
        "calibration_rows": "8",
    }

    test_sizes: tuple[Size, ...] = (8, 12, 16, 20, 24)
    calibration: Size = 10
    calibration_rows: Size = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        mixed = isinstance(self.dataset, data.MixedSizesConfig)
        rule = "dataset must be mixed_sizes, of one size if need be"
        checks.require(mixed, rule, dataset=type(self.dataset).__name__)
        stride = getattr(self.model, "stride", 1)
        rule = f"test_sizes must be at least {stride} px, the model's stride"
        good = min(self.test_sizes, default=0) >= stride
        checks.require(good, rule, test_sizes=self.test_sizes)

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """The figures of a history, and what is found at its end."""
        return {
            **super().figures,
            "accuracy": "statistics test_size: on held-out images, in percent",
            "flops": "test_size: operations for an image",
            "right": "picture: whether each is told right at the base size, calibrated",
            "work": ": pixels of an epoch over those of the base size alone",
        }

    def labels(self) -> "runs.Labels":
        """Returns those of a history, statistics and test sizes."""
        own = {"statistics": STATISTICS, "test_size": self.test_sizes, "picture": 100}
        return {**super().labels(), **own}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains, and tests at each size with each kind of statistics."""
    history = training.run(cfg, ctx)
    assert ctx.trained is not None
    made, base = task(cfg, ctx.data_root, ctx.mesh.size), cfg.dataset.base_size
    states: dict[Any, Any] = {"trained": ctx.trained.model_state}
    many, rows = cfg.calibration, cfg.calibration_rows
    for size in {*cfg.test_sizes, base}:
        found = train.calibrate(
            made, ctx.trained, size, many, batch_size=rows, seed=cfg.seed
        )
        states[size] = found.model_state
    told, flops = {}, {}
    for size in states.keys() - {"trained"}:
        kinds = dict(zip(STATISTICS, ("trained", size, base), strict=True))
        used = {name: states[key] for name, key in kinds.items()}
        told[size], flops[size] = _test(made, ctx.trained.params, used, size, rows)
    sizes = cfg.test_sizes
    accuracy = [[100 * told[s][kind].mean() for s in sizes] for kind in STATISTICS]
    return history.assign(
        accuracy=(("statistics", "test_size"), accuracy),
        flops=("test_size", [flops[size] for size in sizes]),
        right=("picture", told[base]["calibrated"].astype(float)),
        work=_work(made.dataset.train, cfg.train.batch_size, base),
    ).assign_coords(statistics=list(STATISTICS), test_size=list(sizes))


def _test(
    made: "train.Task", params: Any, states: Mapping[str, Any], size: int, rows: int
) -> tuple[dict[str, np.ndarray], float]:
    """Returns for each state which images are told right, and an image's operations."""
    import jax
    import jax.numpy as jnp

    kept: Any = made.dataset.validation
    source = data.ResizedSource(kept.source, size, kept.kind)
    if isinstance(params, core.PerDevice):
        params = jax.tree.map(lambda each: each.mean(0), params.value)
    params, states = jax.device_get((params, dict(states)))

    def tell(params: Any, state: Any, x: Any) -> Any:
        return jnp.argmax(made.model.apply(params, state, x, train=False)[0], -1)

    batches = list(data.evaluation_batches(source, rows))
    first = params, next(iter(states.values())), batches[0]["x"]
    compiled = made.once(
        ("told", size, rows), lambda: jax.jit(tell).lower(*first).compile()
    )
    found = {
        name: np.concatenate(
            [compiled(params, state, b["x"]) == b["y"] for b in batches]
        )[: len(source)]
        for name, state in states.items()
    }
    return found, perf.flops(compiled) / rows


def _work(sampler: Any, batch_size: int, base: int) -> float:
    """Returns the pixels of an epoch over those of one at the base size alone."""
    slots = sampler.plan(batch_size, 0, 0)
    pixels = sum(slot.copies * len(slot.indices) * slot.size**2 for slot in slots)
    return pixels / (len(sampler) // batch_size * batch_size * base**2)
