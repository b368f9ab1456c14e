"""Functions whose words are counted, by hand too, and timed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hpcjax import ir, perf
from hpcjax.core.extremes import largest
from hpcjax.core.keys import BatchKey
from hpcjax.core.method import StepInput
from hpcjax.core.scored import count_scored
from hpcjax.ir import affine
from hpcjax.ir.sdfg import accesses
from hpcjax.optim.methods import whole_backward
from hpcjax.train.task import rows_like


def softmax(x: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the softmax of a sum with a bias, with dropout."""
    return jax.nn.softmax(x + bias) * mask


def norm(
    x: jax.Array, residual: jax.Array, scale: jax.Array, shift: jax.Array
) -> jax.Array:
    """Returns a layer norm of a sum."""
    total = x + residual
    centred = total - total.mean(-1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-6) * scale + shift


def jacobi(x: jax.Array) -> jax.Array:
    """Returns what two sweeps of five points make of a grid."""
    for _ in range(2):
        total = x[1:-1, 1:-1] + x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]
        x = lax.dynamic_update_slice(x, 0.2 * total, (1, 1))
    return x


def mlp(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the weights after a step of gradient descent."""
    loss = lambda w: (jax.nn.gelu(x @ w) ** 2).mean()  # noqa: E731
    return weights - 0.1 * jax.grad(loss)(weights)


def attention(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns an attention of four heads."""
    heads = (x @ weights).reshape(x.shape[0], 4, -1)
    scores = jnp.einsum("qhd,khd->hqk", heads, heads) / heads.shape[-1] ** 0.5
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), heads).reshape(x.shape)


def find(
    cfg: Any,
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]]:
    """Returns functions, their arguments' shapes, and words by hand; 0: not counted."""
    rows, width, n = cfg.rows, cfg.width, cfg.grid
    inner, whole = (n - 2) ** 2, rows * width
    wide, square = (cfg.tokens, cfg.hidden), (cfg.hidden, cfg.hidden)
    return {
        # The sum 2, its maximum 1, exponentials 2, their sum 1, the quotient with the
        # mask 3; of a row's values 6.
        "softmax": (
            softmax,
            ((rows, width), (width,), (rows, width)),
            9 * whole + 6 * rows + width,
        ),
        # The sum 3, its mean 1, centred 2, their squares' sum 1, what follows 2; of a
        # row's values 9.
        "norm": (
            norm,
            ((rows, width), (rows, width), (width,), (width,)),
            9 * whole + 9 * rows + 2 * width,
        ),
        # A sweep reads five neighbours and writes one; the frame is copied.
        "jacobi": (jacobi, ((n, n),), 2 * (6 * inner + 2 * (n**2 - inner))),
        "mlp": (mlp, (square, wide), 0),
        "attention": (attention, (wide, square), 0),
    }


def words(program: "ir.Program") -> int:
    """Returns the words that all edges move."""
    return sum(edge.words for edge in program.graph.movement())


def kept(program: "ir.Program") -> int:
    """Returns the words if iterations wrote what lies within them to memory."""
    own = (
        each
        for _, node in program.graph.nodes()
        for each in accesses(node)
        if each.writes and each.memlet.data in each.private
    )
    return words(program) + sum(affine.count(each.ranges) for each in own)


def measure(
    fn: Callable[..., Any], given: list[np.ndarray], hand: int, repetitions: int
) -> dict[str, float]:
    """Returns the figures of a function."""
    args = [jnp.asarray(each) for each in given]
    first = ir.from_jax(fn, *args)
    flow = first.dataflow()
    groups = {str(n): group for n, group in enumerate(ir.fusion_groups(flow))}
    simple = first.rewrite(ir.simplify)
    fused = simple.rewrite(ir.fuse_maps)
    compiled = jax.jit(fn)
    wanted, found = compiled(*args), jax.jit(fused.to_jax())(*args)
    rounded = compiled(*(a.astype("bfloat16").astype(a.dtype) for a in args))
    runners = {
        "apart_ms": first.to_jax(by_node=True),
        "fused_ms": fused.to_jax(by_node=True),
        "jit_ms": compiled,
    }
    thunks = {name: lambda run=run: run(*args) for name, run in runners.items()}
    timed = perf.compare(thunks, "jit_ms", repetitions=repetitions, warmup=1)["seconds"]
    counts = {
        "listed": ir.movement(flow),
        "simplified": words(simple),
        "fused": words(fused),
        "kernels": ir.movement(ir.fuse(flow, groups)),
        "kept": kept(fused),
    }
    size = max(each.size for each in args)
    return {
        **{name: count / size for name, count in counts.items()},
        "off": abs(counts["fused"] - hand) if hand else 0,
        "off_simplified": abs(counts["simplified"] - hand) if hand else 0,
        "off_kept": abs(counts["kept"] - hand) if hand else 0,
        "apart": float(largest(jnp.abs(found - wanted))),
        "rounded": float(largest(jnp.abs(rounded - wanted))),
        **{name: 1e3 * float(timed.sel(candidate=name).min()) for name in runners},
    }


def of_task(task: Any, what: str, rows: int) -> tuple[Any, ...]:
    """Returns a model's forward pass or its training step, and shapes of arguments.

    Args:
      task: of the model.
      what: "forward" or "step".
      rows: of a batch, if the sampler does not say how many.
    """
    batch = rows_like(task.dataset, rows)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, state = jax.eval_shape(task.model.init, key)

    def forward(params: Any, state: Any, x: Any) -> Any:
        return task.model.apply(params, state, x, train=False)[0]

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        count = count_scored(task.model, task.objective, params, state, batch)
        here = len(jax.tree.leaves(batch)[0])
        keys = BatchKey(key=key, rows=jnp.arange(here, dtype=jnp.int32))
        one_pass = StepInput(
            task.model, task.objective, state, batch, keys, jnp.int32(0), (), count
        )
        made = whole_backward(one_pass, params, None)
        sgd = lambda p, g: p - 0.1 * g  # noqa: E731
        return jax.tree.map(sgd, params, made.grads), made.model_state

    if what == "forward":
        return forward, params, state, batch["x"]
    return step, params, state, batch, key
