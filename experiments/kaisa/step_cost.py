"""What a step of K-FAC costs, by stage: precondition, factors, decompositions.

Three kinds of step are measured: one that only preconditions, one that also updates the
factors, one that also decomposes them. At intervals f and d a step costs
plain + (factors − plain)/f + (decompositions − factors)/d.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from hpcjax.models.config import ResNetConfig
from hpcjax.optim.config import SgdConfig
from hpcjax.optim.kfac.config import KfacConfig
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

NEVER = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, a batch and K-FAC's intervals.

    Attributes:
      model: the network.
      inputs: height, width and channels of the images, which are random.
      classes: number of classes.
      batch_size: images in a step.
      compute: dtype of the model's products.
      precision: of K-FAC's products.
      factor_update_steps: f.
      inv_update_steps: d.
      repetitions: rounds of the measurement.
      seed: of parameters and images.
    """

    model: ResNetConfig = ResNetConfig(depth=20)
    inputs: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    batch_size: int = 128
    compute: Literal["float32", "bfloat16"] = "float32"
    precision: Literal["default", "high", "highest"] = "highest"
    factor_update_steps: int = 10
    inv_update_steps: int = 100
    repetitions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Times the steps, interleaved, in this process.

    Returns:
      `seconds` [row, repetition]: SGD, K-FAC at its intervals, and the three stages'
      shares of that.
    """
    import xarray as xr

    from hpcjax import core, data, perf, train

    dataset = data.noise_images(cfg.batch_size, cfg.inputs, cfg.classes, seed=cfg.seed)
    policy = core.Policy(compute=cfg.compute)
    model = cfg.model.make(cfg.inputs, cfg.classes, policy)
    base = SgdConfig(lr=1e-3)

    def task(optimizer: SgdConfig | KfacConfig) -> Any:
        if isinstance(optimizer, SgdConfig):
            return train.supervised(model, optimizer.make(1), dataset)
        made, curvature = optimizer.make(1, model)
        return train.supervised(model, made, dataset, curvature=curvature)

    def kfac(factors: int, decompositions: int) -> KfacConfig:
        return KfacConfig(
            base=base,
            factor_update_steps=factors,
            inv_update_steps=decompositions,
            precision=cfg.precision,
        )

    kinds = {
        "sgd": base,
        "plain": kfac(NEVER, NEVER),
        "factors": kfac(1, NEVER),
        "decompositions": kfac(1, 1),
    }
    steps = {
        name: train.step_thunk(
            task(kind), cfg.batch_size, devices=ctx.mesh.size, seed=cfg.seed
        )
        for name, kind in kinds.items()
    }
    seconds = perf.compare(steps, "sgd", repetitions=cfg.repetitions)["seconds"]
    sgd, plain, factors, whole = (
        seconds.sel(candidate=name, drop=True) for name in kinds
    )
    rows = {
        "sgd": sgd,
        "kfac": plain
        + (factors - plain) / cfg.factor_update_steps
        + (whole - factors) / cfg.inv_update_steps,
        "precondition": plain - sgd,
        "factors": (factors - plain) / cfg.factor_update_steps,
        "decompositions": (whole - factors) / cfg.inv_update_steps,
    }
    joined = xr.concat(list(rows.values()), dim="row").assign_coords(row=list(rows))
    return xr.Dataset({"seconds": joined})
