"""A small model cut into stages, and steps of it on a pipeline and on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from hpcjax import core, models, sharding

INPUTS, WIDTH, INNER, LABELS, ROWS = 6, 4, 5, 3, 16


class _Stage(nnx.Module):
    def __init__(self, policy):
        self.up = models.Dense(WIDTH, INNER, policy=policy)
        self.down = models.Dense(INNER, WIDTH, policy=policy)

    def __call__(self, x, *, train, key):
        return x + jnp.tanh(self.down(jnp.tanh(self.up(x))))


@functools.cache
def stage_model(dtype="float32"):
    policy = core.Policy(param=dtype, compute=dtype, output=dtype)
    return models.from_nnx(lambda: _Stage(policy))


@functools.cache
def functions(dtype="float32"):
    model = stage_model(dtype)

    def stage(params, x, visit):
        return model.apply(params, {}, x, train=True, taps=visit.taps)[0]

    def last(params, x, visit):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["head"], visit.batch["y"]
        )
        return losses.mean()

    return sharding.StageFunctions(
        first=lambda params, visit: jnp.tanh(visit.batch["x"] @ params["embed"]),
        stage=stage,
        last=last,
    )


def params(stages, dtype="float32"):
    """Parameters with leaves `[stages, ...]`; none is zero."""
    rng = np.random.Generator(np.random.Philox(0))

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, dtype)

    return {
        "embed": draw(INPUTS, WIDTH),
        "head": draw(WIDTH, LABELS),
        "stages": {
            "up": {"kernel": draw(stages, WIDTH, INNER), "bias": draw(stages, INNER)},
            "down": {"kernel": draw(stages, INNER, WIDTH), "bias": draw(stages, WIDTH)},
        },
    }


def batch(step=0, dtype="float32", rows=ROWS):
    rng = np.random.Generator(np.random.Philox(100 + step))
    x = jnp.asarray(rng.normal(size=(rows, INPUTS)), dtype)
    return {"x": x, "y": jnp.asarray(rng.integers(0, LABELS, rows), jnp.int32)}


def one_micro_batch(functions, params, taps, batch, number):
    """The loss of one micro-batch, stage after stage; taps are a row for each."""
    visit = functools.partial(sharding.Visit, batch, micro_batch=number)
    x = functions.first(params, visit(stage=0))
    stages = jax.tree.leaves(params["stages"])[0].shape[0]
    for s in range(stages):
        own = jax.tree.map(lambda leaf, s=s: leaf[s], (params["stages"], taps))
        x = functions.stage(own[0], x, visit(stage=s, taps=own[1]))
    return functions.last(params, x, visit(stage=stages - 1))


@functools.cache
def slope(functions):
    """`(params, taps, batch, number) -> (loss, gradients of the first two)`, jitted."""
    one = functools.partial(one_micro_batch, functions)
    return jax.jit(jax.value_and_grad(one, argnums=(0, 1)))


def accumulated(functions, params, batch, micro_batches, taps=None):
    """Loss and gradients, micro-batch after micro-batch, without a pipeline."""
    totals = []
    for m in range(micro_batches):
        rows = slice(*(ROWS * np.array([m, m + 1]) // micro_batches))
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        totals.append(slope(functions)(params, taps, own, m))
    return jax.tree.map(lambda *each: sum(each) / micro_batches, *totals)


def spread(schedule, params):
    """The parameters as the devices of a schedule hold them."""
    return params | {"stages": sharding.spread_stages(schedule, params["stages"])}


def collect(schedule, params):
    stages = sharding.collect_stages(schedule, params["stages"])
    return params | {"stages": stages}


def step(schedule, functions, *, data=None, check_vma=True, taps=None):
    """The jitted `(params, batch) -> Pipelined` on a mesh, and where params lie."""
    shape = {"stage": schedule.devices}
    mesh = sharding.make_mesh(shape if data is None else {"data": data} | shape)
    axis = None if data is None else "data"
    like = jax.eval_shape(lambda: params(schedule.stages))
    specs = sharding.stage_specs(like)
    differentiate = sharding.pipelined_value_and_grad(
        schedule, functions, data_axis=axis
    )
    mapped = jax.shard_map(
        lambda params, batch: differentiate(params, batch, taps),
        mesh=mesh,
        in_specs=(specs, P(axis)),
        out_specs=sharding.Pipelined(P(), specs, P("stage")),
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def distance(left, right):
    """The norm of the difference, relative to that of `right`, over a whole tree."""
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    off = sum(np.sum(np.square(np.asarray(a) - np.asarray(b))) for a, b in pairs)
    return float(np.sqrt(off / sum(np.sum(np.square(np.asarray(b))) for _, b in pairs)))
