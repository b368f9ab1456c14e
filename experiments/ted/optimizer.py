"""Bytes that an update of a flat group of parameters needs besides what is held."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hpcjax import perf, runs
from hpcjax.core import config
from hpcjax.core.trees import num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Adam of one array: float16 weights and gradients, float32 ones and moments.

    Attributes:
      size: parameters.
      way: "passes" dispatches a program that casts the gradients, one that clips them
        and one of Adam; "fused" is one program that casts and takes the step, "clipped"
        one of all three; "tiled" has one for each tile, and does not clip.
      tile: entries of a tile.
      taken: whether a step is taken; else programs are compiled alone.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"size": "1000", "tile": "300"}
    figures: ClassVar[Mapping[str, str]] = {
        "each": ": most bytes besides those held between steps, of a parameter",
        "tiles": ": the same, of an entry of a tile",
        "temporaries": ": of these in a program, of an entry of a tile",
    }

    size: config.Size = 10_000_000
    way: Literal["passes", "fused", "clipped", "tiled"] = "tiled"
    tile: config.Size = 1_000_000
    taken: bool = True
    seed: config.Seed = 0

    def fill(self, shapes: Any) -> Any:
        """Returns arrays of zeros, or the shapes where no step is taken."""
        import jax
        import jax.numpy as jnp

        def zeros(like: Any) -> Any:
            return jnp.zeros(like.shape, like.dtype)

        return jax.tree.map(zeros, shapes) if self.taken else shapes


@runs.measured
def run(cfg: Config) -> "runs.Figures":
    """Compiles the programs, and takes a step between whose programs arrays count."""
    spike = _tiled(cfg) if cfg.way == "tiled" else _whole(cfg)
    return {
        "each": spike.most / cfg.size,
        "tiles": spike.most / cfg.tile,
        "temporaries": spike.temporaries / cfg.tile,
    }


class Spike:
    """The most bytes besides those that are held, while programs run.

    Attributes:
      most: of all programs.
      own: the most of one, results that take no argument's place included.
      temporaries: the most of one.
    """

    def __init__(self) -> None:
        self.most, self.own, self.temporaries = 0, 0, 0
        self._held = count_alive()

    def add(self, program: Any, beside: int) -> None:
        """Adds a program, before which `beside` bytes are held in addition."""
        own = perf.peak_memory(program) - perf.argument_memory(program)
        self.own = max(self.own, own)
        self.most = max(self.most, beside + own)
        self.temporaries = max(self.temporaries, perf.temporary_memory(program))

    def see(self) -> None:
        """Counts what is alive now, beside which any program may be next."""
        self.most = max(self.most, count_alive() - self._held + self.own)


def count_alive() -> int:
    """Returns bytes of arrays that are alive."""
    import jax

    return sum(each.nbytes for each in jax.live_arrays())


def _whole(cfg: Config) -> Spike:
    """Takes a step of all entries, in one program or in three."""
    import jax
    import jax.numpy as jnp
    import optax

    from hpcjax.optim.first_order import clip_global_norm

    tx, norm = optax.adam(1e-3), clip_global_norm(1.0)

    def cast(slope: Any) -> Any:
        return slope.astype(jnp.float32)

    def clip(slope: Any) -> Any:
        return norm.update(slope, norm.init(slope))[0]

    def step(slope: Any, held: Any) -> Any:
        if cfg.way != "passes":
            slope = cast(slope)
        if cfg.way == "clipped":
            slope = clip(slope)
        _, params, inner = held
        updates, inner = tx.update(slope, inner, params)
        params = params + updates
        return params.astype(jnp.float16), params, inner

    params = jax.ShapeDtypeStruct((cfg.size,), "float32")
    slope = cfg.fill(params.update(dtype="float16"))
    held = cfg.fill((slope, params, jax.eval_shape(tx.init, params)))
    spike, beside = Spike(), 0
    for number, function in enumerate((cast, clip) if cfg.way == "passes" else ()):
        # What is cast may be written over, not the gradients.
        jitted = jax.jit(function, donate_argnums=(0,) if number else ())
        program = jitted.lower(slope).compile()
        spike.add(program, beside)
        slope = program(slope) if cfg.taken else jax.eval_shape(function, slope)
        beside = num_bytes(slope)
    jitted = jax.jit(step, donate_argnums=1, keep_unused=True)
    spike.add(jitted.lower(slope, held).compile(), beside)
    return spike


def _tiled(cfg: Config) -> Spike:
    """Takes a step tile by tile."""
    import jax
    import optax

    from hpcjax.optim import TiledConfig
    from hpcjax.optim.tiles import TiledState, TiledTransform

    tx, shapes = optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((cfg.size,), "float32")}
    made = TiledTransform(tx, shapes, TiledConfig(tile=cfg.tile, dtype="float16"))
    inner = cfg.fill(jax.eval_shape(tx.init, shapes))
    weights, state = made.cut(cfg.fill(shapes), TiledState(inner=inner))
    del inner
    grads = cfg.fill(made.narrow(shapes))
    step, write = (each.compile() for each in made.lower(0, grads, state, weights))
    spike = Spike()
    spike.add(step, 0)
    spike.add(write, num_bytes(made.narrow(shapes)) // cfg.size * cfg.tile)
    if cfg.taken:
        made.update(grads, state, weights, watch=spike.see)
    return spike
