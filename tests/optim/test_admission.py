"""Who may be cut, compressed or cached does so what is done without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import data, models, optim, sharding, train
from hpcjax.core import ConfigError, trees
from hpcjax.optim import sparse_state
from hpcjax.optim.admission import check_cuttable
from hpcjax.sharding import ZeroConfig
from tests.optim.transforms import (
    AFTERWARDS,
    BY_RANK,
    CUTTABLE,
    LATE,
    NORMS,
    WHOLE,
    each,
)

SPECS = {"kernel": P(None, "data"), "bias": P("data")}
SHAPES = {
    "kernel": jax.ShapeDtypeStruct((4, 8), "float32"),
    "bias": jax.ShapeDtypeStruct((8,), "float32"),
}
QUICK = ("adam", "our lamb", "in steps")


def drawn(number, *, scale=1.0):
    rng = np.random.default_rng(number)
    return jax.tree.map(
        lambda leaf: scale * rng.normal(size=leaf.shape).astype("f4"), SHAPES
    )


def run(tx, params, steps=4, **told):
    """Returns the last updates of some steps from drawn gradients."""
    update = optax.with_extra_args_support(tx).update
    state, updates = tx.init(params), params
    for number in range(steps):
        updates, state = update(
            drawn(number + 1) if not told else told["grads"](number + 1),
            state,
            params,
            **({"cut": told["cut"]} if told else {}),
        )
        params = optax.apply_updates(params, updates)
    return updates


def parts(tree, count):
    """Returns each array as [parts, ...], cut along its last dimension."""
    return jax.tree.map(lambda x: jnp.stack(jnp.split(x, count, axis=-1)), tree)


@pytest.mark.quick(*(f"{name}-2" for name in QUICK))
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CUTTABLE)
def test_who_is_admitted_gives_parts_what_the_whole_gets(name, count):
    tx = CUTTABLE[name]()
    check_cuttable(tx, SHAPES, SPECS)
    cut = {"kernel": ("part",), "bias": ("part",)}

    def one(part, grads):
        return run(tx, part, cut=cut, grads=lambda number: grads[number - 1])

    grads = [parts(drawn(number), count) for number in range(1, 5)]
    mapped = jax.vmap(one, axis_name="part")
    found = jax.jit(mapped)(parts(drawn(0), count), grads)
    wanted = parts(jax.jit(lambda params: run(tx, params))(drawn(0)), count)
    for path, leaf in trees.flatten(wanted).items():
        mine = trees.flatten(found)[path]
        np.testing.assert_allclose(mine, leaf, rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", WHOLE)
def test_who_would_give_parts_something_else_is_refused(name):
    with pytest.raises(ConfigError, match="works on elements"):
        check_cuttable(WHOLE[name](), SHAPES, SPECS)


def test_a_size_that_is_not_cut_may_be_used():
    fan_out = each(lambda g: g / g.shape[0] if g.ndim > 1 else g)
    check_cuttable(fan_out, SHAPES, SPECS)
    with pytest.raises(ConfigError, match=r"works by the size.* div has \['111.0'\]"):
        check_cuttable(fan_out, SHAPES, {"kernel": P("data", None)})


def test_a_sum_along_one_of_two_cut_dimensions_is_of_a_part():
    rows = each(lambda g: g / g.sum(0) if g.ndim > 1 else g)
    with pytest.raises(ConfigError, match="by reduce_sum"):
        check_cuttable(rows, SHAPES, {"kernel": P("data", "depth")})
    turned = each(lambda g: g + g.T if g.ndim > 1 else g)
    square = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
    with pytest.raises(ConfigError, match="cannot be looked at"):
        check_cuttable(turned, square, {"kernel": P("data", "depth")})


def test_a_branch_that_a_part_chooses_is_refused():
    def update(updates, params=None):
        large = jnp.sum(updates["kernel"]) > 0
        less = jax.tree.map(lambda g: g / 2, updates)
        return jax.lax.cond(large, lambda: updates, lambda: less)

    with pytest.raises(ConfigError, match="depend on sums"):
        check_cuttable(optax.stateless(update), SHAPES, SPECS)


def pruned(share, shape=(12, 10)):
    """Returns compressed parameters of which a share is kept, and the masks."""
    rng = np.random.default_rng(7)
    masks = {"kernel": rng.random(shape) < share}
    params = {"kernel": rng.normal(size=shape).astype("f4") * masks["kernel"]}
    return sparse_state.compress(params, masks), params, masks


# A zero in gives more than a zero: moments begin at 1e-6, or nothing is below zero.
NO_ZEROS = "positive", "yogi"
COMPRESSIBLE = {name: tx for name, tx in CUTTABLE.items() if name not in NO_ZEROS}
COMPRESSIBLE |= {name: WHOLE[name] for name in NORMS}


@pytest.mark.quick("adam", "fromage")
@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_who_may_be_compressed_gives_the_kept_what_masked_training_does(name):
    tx = COMPRESSIBLE[name]()
    for share in (0.1, 0.5):
        made, params, masks = pruned(share)
        sparse_state.check_elementwise(tx, made.params)
        mask = masks["kernel"]
        rng = np.random.default_rng(8)
        grads = [rng.normal(size=mask.shape).astype("f4") * mask for _ in range(3)]
        kept = params["kernel"][mask]
        state, short = tx.init(params), tx.init({"kernel": kept})
        update = optax.with_extra_args_support(tx).update
        for gradient in grads:
            whole, state = update({"kernel": gradient}, state, params)
            mine, short = update({"kernel": gradient[mask]}, short, {"kernel": kept})
        np.testing.assert_allclose(
            mine["kernel"], whole["kernel"][mask], rtol=1e-4, atol=1e-6
        )
        assert not np.any(whole["kernel"][~mask])


@pytest.mark.parametrize(
    "name",
    [
        *("by size", "by root", "mean", "adafactor whole", "block rms", "clip rms"),
        *("softmax", "places", "row 0", "centralize"),
        *LATE,
        *BY_RANK,
    ],
)
def test_who_counts_elements_or_moves_pruned_ones_is_refused(name):
    with pytest.raises(ConfigError, match="elementwise"):
        sparse_state.check_elementwise(
            {**WHOLE, **LATE, **BY_RANK}[name](), pruned(0.5)[0].params
        )


@pytest.mark.parametrize("name", AFTERWARDS)
def test_what_comes_to_a_row_later_is_not_by_rows(name):
    with pytest.raises(ConfigError, match="changes rows that have no gradient"):
        optim.check_rows_apart(AFTERWARDS[name]())


def test_a_rule_for_the_part_s_own_size_is_refused():
    tx = each(lambda g: 2 * g if g.shape[-1] == 4 else g)
    check_cuttable(tx, SHAPES, SPECS, {"data": 4})  # parts of 2
    with pytest.raises(ConfigError, match="another program"):
        check_cuttable(tx, SHAPES, SPECS, {"data": 2})


def test_a_rule_for_large_tables_is_refused():
    with pytest.raises(ConfigError, match="another size"):
        optim.check_rows_apart(each(lambda g: g * 2 if g.shape[0] > 500 else g * 3))


def test_norms_of_rows_are_refused_of_a_matrix_of_any_size():
    by_rows = BY_RANK["norm of rows"]()
    for rows in (2, 11, 12, 97):
        params = pruned(0.5, (rows, 10))[0].params
        with pytest.raises(ConfigError, match="by reduce_sum"):
            sparse_state.check_elementwise(by_rows, params)


def test_arrays_that_are_cut_or_pruned_in_other_ways_may_not_be_added():
    total = optax.stateless(
        lambda updates, params=None: jax.tree.map(
            lambda g: sum(jax.tree.leaves(updates)), updates
        )
    )
    shapes = dict.fromkeys("ab", jax.ShapeDtypeStruct((8,), "float32"))
    check_cuttable(total, shapes, dict.fromkeys("ab", P("data")))
    with pytest.raises(ConfigError, match="cannot be looked at"):
        check_cuttable(total, shapes, {"a": P("data"), "b": P("model")})
    masks = {"a": np.arange(8) < 4, "b": np.arange(8) > 3}
    kept = sparse_state.compress(
        {name: jnp.ones(8) * masks[name] for name in "ab"}, masks
    )
    with pytest.raises(ConfigError, match="cannot be looked at"):
        sparse_state.check_elementwise(total, kept.params)


def test_a_refusal_says_where():
    tx = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))
    with pytest.raises(ConfigError, match=r"reduce_sum in \w+ \(\w+\.py, line \d+\)"):
        check_cuttable(tx, SHAPES, SPECS)


def test_the_whole_s_shape_may_be_used():
    """A rate by the fan-in of the whole, on parts in a real loop."""

    def update(updates, state, params=None, *, cut=None, **extra):
        del params, extra
        shapes = {path: leaf.shape for path, leaf in trees.flatten(updates).items()}
        shapes |= getattr(cut, "global_shape", {})
        flat = trees.flatten(updates)
        scaled = {path: leaf / shapes[path][0] for path, leaf in flat.items()}
        return trees.unflatten(updates, scaled), state

    init = optax.init_empty_state
    tx = optax.chain(
        optax.GradientTransformationExtraArgs(init, update), optax.sgd(1.0)
    )
    check_cuttable(tx, SHAPES, SPECS, {"data": 4})
    wide = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), SHAPES)
    spread = optim.update_shards(tx, SPECS, axes="data")

    def step(grads):
        return spread.update(grads, spread.init(grads), grads)[0]

    mapped = jax.shard_map(
        step, mesh=sharding.data_mesh(4), in_specs=P(), out_specs=P(), check_vma=False
    )
    found, wanted = mapped(wide), tx.update(wide, tx.init(wide), wide)[0]
    jax.tree.map(np.testing.assert_allclose, found, wanted)


class Given:
    """A part of kind optimizer that is this transform."""

    def __init__(self, tx):
        self.tx = tx

    def make(self, steps):
        del steps
        return self.tx


@functools.cache
def in_the_loop(name, stage, devices):
    """Returns parameters after four steps of a tiny network, and the losses."""
    own = data.noise_images(16, (4, 4, 1), 4, seed=0)
    model = models.mlp(own.inputs, own.outputs, widths=(8,))
    method = train.compose(
        model,
        own,
        Given(CUTTABLE[name]()),
        parallel=stage and ZeroConfig(stage=stage),
        batch_size=8,
        steps=4,
        devices=devices,
    )
    task = train.supervised(model, method, own)
    mesh = task.mesh(devices)
    state, losses = train.init_state(task, 0, mesh), []
    step = train.train_step(task, mesh, state)
    for number in range(4):
        rows = own.train.gather(np.arange(8) + 8 * (number % 2))
        state, metrics = step(state, sharding.place_batch(rows, mesh))
        losses.append(float(metrics["loss"]))
    return jax.device_get(state.params), losses


# Their first steps go by signs, and gradients of devices are added up otherwise.
BY_SIGNS = "sign", "lion", "rprop", "cocob"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", sorted({*CUTTABLE} - {*BY_SIGNS}))
def test_who_is_admitted_trains_in_parts_as_whole(name, stage):
    wanted = in_the_loop(name, None, 1)
    for devices in (2, 4):
        found = in_the_loop(name, stage, devices)
        np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4)
