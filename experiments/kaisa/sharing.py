"""What K-FAC keeps and sends on a grid of simulated devices, by KAISA's knob."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hpcjax import data, hostcomm, perf, runs, sharding, train
from hpcjax.core import config
from hpcjax.models import ResNetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
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

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "8",
        "model.width": "4",
        "inputs": "[8,8,1]",
        "classes": "10",
        "compiled.width": "2",
        "devices": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "factors decompositions": ": bytes of a device",
        "imbalance": ": the longest column over the mean one",
        "reduced broadcast": ": bytes of a device's collectives",
        "decomposition_broadcast factors_reduced": ": bytes of the same at other steps",
        "reduced_formula broadcast_formula": ": what the formulas say",
        "decomposition_broadcast_formula factors_reduced_formula": ": what they say",
    }

    model: ResNetConfig = ResNetConfig(depth=50)
    inputs: tuple[int, int, int] = (224, 224, 3)
    classes: int = 1000
    compiled: ResNetConfig = ResNetConfig(depth=8, width=4, norm="group")
    devices: config.Size = 8
    grad_worker_fraction: float = 1.0
    cost: Literal["compute", "memory"] = "memory"
    seed: int = 0


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Reads shards and a compiled step in a process with simulated devices."""
    (found,) = runs.in_processes(work, cfg, 1, devices=cfg.devices)
    return runs.simulated(found)


def work(transport: "hostcomm.Transport", cfg: Config) -> dict[str, float]:
    """Returns the figures of `run`, in a process that has the devices."""
    import jax
    import jax.numpy as jnp

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

    from hpcjax.optim import SgdConfig, kfac
    from hpcjax.optim.kfac import KfacConfig

    shape, classes = (8, 8, 1), 10
    model = cfg.compiled.make(shape, classes)
    optimizer = KfacConfig(
        base=SgdConfig(),
        grad_worker_fraction=cfg.grad_worker_fraction,
        cost=cfg.cost,
        factor_update_steps=10,
        inv_update_steps=100,
    )
    dataset = data.noise_images(2 * cfg.devices, shape, classes, seed=0)
    method = train.compose(
        model,
        dataset,
        optimizer,
        batch_size=2 * cfg.devices,
        steps=1,
        devices=cfg.devices,
    )
    task = train.supervised(model, method, dataset)
    mesh = task.mesh(cfg.devices)
    state = train.state_shapes(task, mesh)
    batch = train.batch_shapes(task, 2 * cfg.devices, mesh)
    # Without the check for finite numbers, whose counts are not K-FAC's.
    step = train.train_step(task, mesh, state, check=False)
    always, sometimes = perf.collectives_by_branch(step.lower(state, batch).compile())
    volume = kfac.comm_volume(kfac.plan(model), optimizer, grid)
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
