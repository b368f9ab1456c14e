"""Bytes of the state of a language model, pruned and not, as live arrays hold them."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from hpcjax import core, cost, metrics, optim, perf, runs, sharding
from hpcjax.core import config
from hpcjax.core.structures import count_kept
from hpcjax.models import CausalLmConfig
from hpcjax.optim import sparse_state

Form = Literal["dense", "int32", "bitmap", "rematerialize"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """The state of one model in one form.

    Attributes:
      form: "dense", or compressed with these positions, or without dense weights.
      sparsity: of every matrix; none of its values is pruned in the dense form.
      model: the network; stacks of blocks are pruned layer by layer.
      characters: of its vocabulary.
      context: length of a sequence.
      rows: sequences on a device, for gradients.
      seed: of the parameters.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "1",
        "model.width": "8",
        "model.heads": "2",
        "context": "4",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "held formula": ": bytes of live arrays between steps, and by formula",
        "paper": ": bytes that the paper counts in all",
        "gradients": ": bytes of a step",
        "sent": ": bytes, operands of its all-reduces in float32",
    }

    form: Form = "int32"
    sparsity: float = 0.9
    model: CausalLmConfig = CausalLmConfig(depth=6, width=128, heads=4, remat="full")
    characters: config.Several = 64
    context: config.Several = 32
    rows: config.Size = 2
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        config.Within("[0, 1)")("sparsity", self.sparsity)


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Makes the state of mixed precision with Adam, its gradients and its program."""
    import jax
    import optax

    model = cfg.model.make((cfg.context,), cfg.characters, core.Policy())
    params = jax.device_get(model.init(jax.random.key(cfg.seed))[0])
    chosen = jax.device_get(_choose(cfg, params))
    optimizer = sparse_state.wrap(
        optax.adam(1e-3), mean=optim.all_reduce_mean(core.DATA_AXIS)
    )

    def make(dtype: str) -> Any:
        device = jax.device_put(params)
        made = sparse_state.compress(
            device,
            chosen,
            dtype=dtype,
            index="bitmap" if cfg.form == "bitmap" else "int32",
            mode="rematerialize" if cfg.form == "rematerialize" else "dense",
            stacked=cfg.model.stacks,
        )
        return optimizer.init(made)

    before = _live_bytes()
    state = make("bfloat16")
    held = _live_bytes() - before
    program = _compile(cfg, model, optimizer, make("float32"), ctx.mesh.size)
    grads = jax.eval_shape(
        sparse_state.value_and_grad(_objective(model)), state.params, _batch(cfg)
    )[1]
    formula, paper = _predict(cfg, params, chosen)
    return runs.measured(
        {
            "held": held,
            "formula": formula,
            "paper": paper,
            "gradients": core.trees.num_bytes(grads),
            "sent": perf.collective_bytes(program, "all-reduce"),
        }
    )


def _choose(cfg: Config, params: Any) -> Any:
    """Returns masks of the largest values of every matrix, in stacks of every layer."""
    import jax
    import jax.numpy as jnp

    chosen = {}
    for path, leaf in core.trees.flatten(params).items():
        stacked = path.startswith("blocks/")
        if cfg.form == "dense" or leaf.ndim < 2 + stacked:
            chosen[path] = None
            continue
        layers = jnp.abs(leaf if stacked else leaf[None])
        kept = count_kept(layers[0].size, cfg.sparsity)
        keep = jax.jit(jax.vmap(functools.partial(core.masks.keep_largest, k=kept)))
        chosen[path] = keep(layers).reshape(leaf.shape)
    return core.trees.unflatten(params, chosen)


def _predict(cfg: Config, params: Any, chosen: Any) -> Iterator[float]:
    """Yields the bytes of the formula in JAX's account, and all in the paper's."""
    sizes = {path: leaf.size for path, leaf in core.trees.flatten(params).items()}
    pruned = sum(sizes[path] for path in core.trees.flatten(chosen))
    others = sum(sizes.values()) - pruned
    for account in ("jax", "paper"):
        if cfg.form == "dense":
            memory = cost.dense_memory(others, account=account)
        else:
            memory = cost.sparse_memory(
                pruned,
                cfg.sparsity,
                others=others,
                account=account,
                index="bitmap" if cfg.form == "bitmap" else "int32",
                mode="rematerialize" if cfg.form == "rematerialize" else "dense",
            )
        yield memory.persistent if account == "jax" else memory.total


def _live_bytes() -> int:
    import jax

    return sum(array.nbytes for array in jax.live_arrays())


def _batch(cfg: Config, devices: int = 1) -> dict[str, Any]:
    import jax

    tokens = jax.ShapeDtypeStruct((devices * cfg.rows, cfg.context), "int32")
    return {"x": tokens, "y": tokens}


def _objective(model: Any) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        logits, _ = model.apply(params, {}, batch["x"], train=True)
        return metrics.label_totals(logits, batch).means()["loss"]

    return loss


def _compile(cfg: Config, model: Any, optimizer: Any, state: Any, devices: int) -> Any:
    """Returns the program of a step on so many devices."""
    import jax
    from jax.sharding import PartitionSpec

    differentiate = sparse_state.value_and_grad(
        _objective(model), axis_name=core.DATA_AXIS
    )

    def step(state: Any, batch: Any) -> Any:
        return optimizer.step(state, differentiate(state.params, batch)[1])

    mapped = jax.shard_map(
        step,
        mesh=sharding.data_mesh(devices),
        in_specs=(PartitionSpec(), PartitionSpec(core.DATA_AXIS)),
        out_specs=PartitionSpec(),
    )
    return jax.jit(mapped).lower(state, _batch(cfg, devices)).compile()
