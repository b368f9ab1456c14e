"""Words that exchanges send: real entries, padded buffers, and the formulas."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from hpcjax import collectives, optim, perf, runs, sharding
from hpcjax.collectives import OkTopkConfig
from hpcjax.core import config
from hpcjax.core.parts import Part

if TYPE_CHECKING:
    import jax

Inputs = Literal["gaussian", "clustered", "halves"]
# What they are called in the exchange's statistics.
COUNTS = {
    "sent": "sent_words",
    "received": "received_words",
    "selected": "selected",
    "kept": "kept",
    "summed": "summed",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """An exchange of vectors that nobody trains with.

    Attributes:
      exchange: how.
      members: P, all on one device.
      numbers: n.
      inputs: "gaussian"; "clustered", a thousand times as large in the last twentieth;
        or "halves": so in the first part for one half of the members and in the last
        one for the others.
      steps: averages.
      compiled: also compiles the program for P devices and reads what it sends.
      seed: of the vectors.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "numbers": "500",
        "members": "4",
        "steps": "2",
    }

    exchange: Annotated[Any, Part("exchange")] = OkTopkConfig(density=0.01)
    members: config.Several = 8
    numbers: config.Several = 100_000
    inputs: Inputs = "gaussian"
    steps: config.Size = 40
    compiled: bool = False
    seed: config.Seed = 0

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """What is found; wire only if asked for."""
        found = {
            "sent received": "step member: words",
            "selected kept summed": "step member: entries; those summed are for others",
        }
        if self.compiled:
            found["wire"] = ": words that a compiled program of P devices sends at most"
        return found

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"step": range(self.steps), "member": range(self.members)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Averages random vectors of members that are a mapped axis of one program."""
    import jax
    import jax.numpy as jnp

    exchange, group = cfg.exchange.make(), "members"
    first = exchange.init(jax.ShapeDtypeStruct((cfg.numbers,), jnp.float32))
    states = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * cfg.members), first)

    def step(x: Any, state: Any) -> Any:
        return exchange.average(collectives.MeshGroup(group), x, state)[1]

    average = jax.jit(jax.vmap(step, axis_name=group))
    stats = []
    for number in range(cfg.steps):
        states = average(vectors(cfg, number), states)
        stats.append(jax.device_get(states.stats))
    found = {
        name: (("step", "member"), np.stack([getattr(each, field) for each in stats]))
        for name, field in COUNTS.items()
    }
    dataset = runs.simulated(found)
    return dataset.assign(wire=words_on_the_wire(cfg)) if cfg.compiled else dataset


def vectors(cfg: Config, step: int) -> np.ndarray:
    """Returns the members' vectors of a step, [P, n]."""
    draws = np.random.default_rng([cfg.seed, step])
    made = draws.normal(size=(cfg.members, cfg.numbers)).astype(np.float32)
    part = max(1, cfg.numbers // 20)
    if cfg.inputs == "clustered":
        made[:, -part:] *= 1000
    if cfg.inputs == "halves":
        made[: cfg.members // 2, :part] *= 1000
        made[cfg.members // 2 :, -part:] *= 1000
    return made


def words_on_the_wire(cfg: Config) -> float:
    """Returns the 32-bit words that one device sends in one step, at most.

    Both branches of a conditional are counted, and buffers with all their padding.
    """
    return perf.ring_bytes(_program(cfg), cfg.members) / 4


def _program(cfg: Config) -> "jax.stages.Compiled":
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from hpcjax.core import per_device

    mesh = sharding.data_mesh(cfg.members)
    tx = optim.exchange_gradients(cfg.exchange, sharding.mesh.DATA_AXIS)
    x = jax.ShapeDtypeStruct((cfg.members, cfg.numbers), jnp.float32)

    def start() -> Any:
        return per_device.expand(tx.init(jnp.zeros(cfg.numbers)), mesh)

    def body(x: Any, state: Any) -> Any:
        mean, new = tx.update(x[0], per_device.enter(state))
        return mean, per_device.leave(new)

    shapes = jax.eval_shape(start)
    split, specs = PartitionSpec(sharding.mesh.DATA_AXIS), per_device.specs(shapes)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(split, specs), out_specs=(PartitionSpec(), specs)
    )
    return jax.jit(mapped).lower(x, shapes).compile()
