"""What K-FAC keeps and sends on a grid of simulated devices, by KAISA's knob."""

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Literal

from hpcjax.core import environment
from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.models.config import ResNetConfig

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

FIGURES = (
    *("factors", "decompositions", "imbalance"),
    *("reduced", "broadcast", "decomposition_broadcast", "factors_reduced"),
    *("reduced_formula", "broadcast_formula"),
    *("decomposition_broadcast_formula", "factors_reduced_formula"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model whose memory is read, a model whose program is read, and the knob.

    Attributes:
      model: what the memory is of.
      inputs: shape of its images.
      classes: its outputs.
      compiled: the model of whose step the bytes are read, on 8x8 grey images.
      devices: P.
      grad_worker_fraction: f.
      cost: what columns are balanced by.
      seed: not used; nothing is drawn.
    """

    model: ResNetConfig = ResNetConfig(depth=50)
    inputs: tuple[int, int, int] = (224, 224, 3)
    classes: int = 1000
    compiled: ResNetConfig = ResNetConfig(depth=8, width=4, norm="group")
    devices: int = 8
    grad_worker_fraction: float = 1.0
    cost: Literal["compute", "memory"] = "memory"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"devices must be at least 1: got {self.devices}")


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Reads shards and a compiled step in a process with simulated devices.

    Returns:
      Bytes per device of factors and decompositions, the longest column over the mean
      one, and bytes of collectives beside what the formulas say.
    """
    import xarray as xr

    del ctx
    asked = json.dumps(dataclasses.asdict(cfg))
    env = environment.child(JAX_PLATFORMS="cpu", **environment.simulated(cfg.devices))
    child = subprocess.run(
        [sys.executable, "-m", "experiments.kaisa.sharing", asked],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise HpcjaxError(f"the process with simulated devices failed: {child.stderr}")
    found = json.loads(child.stdout.splitlines()[-1])
    figures = {name: found[name] for name in FIGURES}
    return xr.Dataset(figures, attrs={"source": "simulated"})


def measured(cfg: Config) -> dict[str, float]:
    """Returns the figures of `run`, in a process that has the devices."""
    import jax
    import jax.numpy as jnp

    from hpcjax import sharding
    from hpcjax.core import per_device
    from hpcjax.optim import kfac

    grid = kfac.Distribution(cfg.devices, cfg.grad_worker_fraction, cfg.cost)
    mesh = sharding.make_mesh(grid.mesh_shape)
    model = cfg.model.make(cfg.inputs, cfg.classes)
    chosen = kfac.plan(model)
    transform = kfac.scale_by_kfac(chosen, distribution=grid)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))

    def init() -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), shapes)
        return per_device.expand(transform.init(zeros), mesh)

    shardings = sharding.state_shardings(jax.eval_shape(init), mesh)
    state = jax.jit(init, out_shardings=shardings)()
    layout = kfac.make_layout(chosen, kfac.KfacOptions(), grid)
    return {**kfac.memory_usage(state), "imbalance": layout.imbalance} | sent(cfg, grid)


def sent(cfg: Config, grid: Any) -> dict[str, float]:
    """Returns the bytes that a compiled training step moves, and the formulas'.

    Permutations count over all devices together, all-reduces once for each device.
    """
    import jax

    from hpcjax import data, perf, train
    from hpcjax.optim import kfac
    from hpcjax.optim.config import SgdConfig
    from hpcjax.optim.kfac.config import KfacConfig

    shape, classes = (8, 8, 1), 10
    model = cfg.compiled.make(shape, classes)
    optimizer = KfacConfig(
        base=SgdConfig(),
        grad_worker_fraction=cfg.grad_worker_fraction,
        cost=cfg.cost,
        factor_update_steps=10,
        inv_update_steps=100,
    )
    made, curvature = optimizer.make(1, model, cfg.devices)
    dataset = data.noise_images(2 * cfg.devices, shape, classes, seed=0)
    task = train.supervised(model, made, dataset, curvature=curvature)
    mesh = task.mesh(cfg.devices)
    state = train.state_shapes(task, mesh)
    batch = train.batch_shapes(task, 2 * cfg.devices, mesh)
    # Without the check for finite numbers, whose counts are not K-FAC's.
    step = train.train_step(task, mesh, state, check=False)
    always, sometimes = perf.collectives_by_branch(step.lower(state, batch).compile())
    volume = kfac.comm_volume(curvature.plan, optimizer, grid)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    def total(found: Any, kind: str, by: str) -> int:
        return sum(getattr(each, by) for each in found if each.kind == kind)

    return {
        "reduced": total(always, "all-reduce", "total"),
        "reduced_formula": 4 * parameters,
        "broadcast": total(always, "collective-permute", "pair_bytes"),
        "broadcast_formula": 4 * volume["gradients"],
        "decomposition_broadcast": total(sometimes, "collective-permute", "pair_bytes"),
        "decomposition_broadcast_formula": 4 * volume["decompositions"],
        "factors_reduced": total(sometimes, "all-reduce", "total"),
        "factors_reduced_formula": 4 * volume["factors"],
    }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for name in ("model", "compiled"):
        given[name] = ResNetConfig(**given[name])
    print(json.dumps(measured(Config(**given))))
