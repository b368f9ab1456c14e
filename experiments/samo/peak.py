"""Most memory that a compiled training step needs, dense and compressed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hpcjax import core, perf, runs
from hpcjax.core import config
from hpcjax.optim import sparse_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A stack of square matrices, and the form of its training.

    Attributes:
      form: "dense"; "int32" or "bitmap", compressed with these positions; or "after",
        as "int32", with all dense gradients before any is gathered, a mistake to be
        seen.
      sparsity: of every matrix.
      depth: matrices.
      width: rows and columns of each.
      rows: of a batch.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {"depth": "2", "width": "64"}
    figures: ClassVar[Mapping[str, str]] = {
        "peak": ": bytes for each element, of arguments, results and temporaries",
    }

    form: Literal["dense", "int32", "bitmap", "after"] = "int32"
    sparsity: config.Share = 0.9
    depth: config.Size = 24
    width: config.Size = 1024
    rows: config.Size = 64
    seed: config.Seed = 0


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Compiles a step of Adam in float32, which donates its state."""
    del ctx
    program = _compile_dense(cfg) if cfg.form == "dense" else _compile_sparse(cfg)
    elements = cfg.depth * cfg.width**2
    return runs.measured({"peak": perf.peak_memory(program) / elements})


def _loss(params: Any, x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def layer(x: Any, params: Any) -> Any:
        return jnp.tanh(x @ core.realize(params)["w"]), None

    body = jax.checkpoint(layer, prevent_cse=False)
    return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)


def _shapes(cfg: Config) -> tuple[Any, Any]:
    """Returns those of the weights and of a batch."""
    import jax

    weights = jax.ShapeDtypeStruct((cfg.depth, cfg.width, cfg.width), "float32")
    return weights, jax.ShapeDtypeStruct((cfg.rows, cfg.width), "float32")


def _compile_dense(cfg: Config) -> Any:
    import jax
    import optax

    tx, (weights, x) = optax.adam(1e-3), _shapes(cfg)

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(_loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": weights}
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.lower(params, jax.eval_shape(tx.init, params), x).compile()


def _compile_sparse(cfg: Config) -> Any:
    import jax
    import optax

    weights, x = _shapes(cfg)
    node = sparse_state.Pruned(weights=weights, positions=_locate(cfg))
    optimizer = sparse_state.wrap(optax.adam(1e-3))
    compressed = sparse_state.Compressed({"w": node}, None)
    state = jax.eval_shape(optimizer.init, compressed)

    def step(state: Any, x: Any) -> Any:
        if cfg.form == "after":
            grads = _gather_after(state.params, x)
        else:
            grads = sparse_state.value_and_grad(_loss)(state.params, x)[1]
        return optimizer.step(state, grads)

    return jax.jit(step, donate_argnums=0).lower(state, x).compile()


def _locate(cfg: Config) -> "sparse_state.Positions":
    """Returns the shapes of the positions."""
    import jax

    size = cfg.width**2
    kept = round((1 - cfg.sparsity) * size)
    places = jax.ShapeDtypeStruct((cfg.depth, kept), "int32")
    if cfg.form == "bitmap":
        places = jax.ShapeDtypeStruct((cfg.depth, -(-size // 8)), "uint8")
    block = cfg.width, cfg.width
    return sparse_state.Positions(places=places, kept=kept, block=block, grid=(1, 1))


def _gather_after(params: Any, x: Any) -> Any:
    import jax

    node = params["w"]
    dense = jax.grad(_loss)({"w": node.realize()}, x)
    return {"w": node.positions.gather(dense["w"])}
