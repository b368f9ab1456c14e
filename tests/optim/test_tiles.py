"""Optimizer state in tiles: the step of any tile is that of the whole tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import optim, perf
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, Diverged
from hpcjax.optim import LossScale, TiledConfig
from hpcjax.optim.loss_scale import advance, begin_scaling
from hpcjax.optim.tiles import TiledState, TiledTransform, cut_tiles

# Shapes, and the size of a tile, which few of theirs divide by.
TREES = {
    "several": ({"a": (7,), "d": (4, 4), "s": ()}, 8),
    "deep": ({"x": {"w": (2, 3, 4)}, "y": ()}, 10),
    "matrix": ({"w": (6, 6)}, 12),
    "one": ({"s": ()}, 1),
    "with nothing": ({"e": (0, 3), "w": (11,)}, 8),
}
IS_SHAPE = {"is_leaf": lambda node: isinstance(node, tuple)}


def draw(shapes, rng, dtype="float32"):
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype), shapes, **IS_SHAPE
    )


def tiled(tx, params, **options):
    shapes = jax.eval_shape(lambda: params)
    return TiledTransform(tx, shapes, TiledConfig(**options))


def begin(tx, made, params, scaling=None):
    copied = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
    return made.cut(copied, TiledState(inner=tx.init(params), scaling=scaling))


def train(tx, shapes, steps=20, **options):
    """Parameters and state as they are saved, after some steps."""
    params, rng = draw(shapes, np.random.default_rng(0)), np.random.default_rng(1)
    made = tiled(tx, params, **options)
    weights, state = begin(tx, made, params)
    for _ in range(steps):
        grads = draw(shapes, rng, options.get("dtype", "float32"))
        weights, state = made.update(grads, state, weights)
        if options.get("space") == "host":
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.tiles)}
            assert kinds == {"pinned_host"}
    return jax.device_get(made.join(weights, state))


def train_whole(tx, shapes, dtype="float32", steps=20):
    @jax.jit
    def step(params, state, grads):
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(wide, state, params)
        return optax.apply_updates(params, updates), state

    params, rng = draw(shapes, np.random.default_rng(0)), np.random.default_rng(1)
    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state, draw(shapes, rng, dtype))
    return jax.device_get((params, state))


def assert_same(ours, others):
    for path, leaf in trees.flatten(ours).items():
        other = trees.flatten(others)[path]
        np.testing.assert_array_equal(leaf, other, err_msg=path)


def assert_near(ours, others, ulp):
    """To so many units in the last place of an array's largest entry."""
    for path, leaf in trees.flatten(ours).items():
        if leaf.size:
            other = trees.flatten(others)[path]
            unit = np.spacing(np.abs(other).max().astype(np.float32))
            assert np.abs(leaf - other).max() <= ulp * unit, path


@pytest.mark.acceptance("axonn-myelin", 4)
@pytest.mark.acceptance("ted", 6)
@pytest.mark.parametrize("name", TREES)
def test_all_tiles_give_what_jitted_adam_gives(name):
    tx, (shapes, tile) = optax.adam(1e-2), TREES[name]
    whole = train(tx, shapes, tile=10**6)
    assert_same(whole, train(tx, shapes, tile=tile, space="host"))
    params, state = train_whole(tx, shapes)
    # A unit a step: XLA contracts other multiply-adds in another program.
    assert_near(whole[0], params, 20)
    assert_near(whole[1].inner, state, 20)


def test_sixteen_bits_step_float32_parameters():
    tx, shapes = optim.adamw(1e-2, weight_decay=0.1), {"w": (4, 4), "e": (0, 3)}
    options = {"space": "host", "dtype": "bfloat16"}
    ours = train(tx, shapes, tile=8, **options)
    assert_same(ours, train(tx, shapes, tile=999, **options))
    assert_near(ours[0], train_whole(tx, shapes, "bfloat16")[0], 20)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours[0])} == {np.dtype("float32")}


def matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


ADAMW = optim.adamw(
    optax.linear_schedule(0.1, 0.0, 30), decay_rules=(("b", False), (".*", True))
)
# What contains a transform goes inside: all see the paths and dimensions of the tree.
# Our adamw has its rate by `optax.inject_hyperparams`.
CONTAINERS = {
    "masked, injected": optax.chain(ADAMW, optax.masked(optax.trace(0.9), matrices)),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"w": "a", "b": "b"}
    ),
    "several gradients": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_transforms_are_those_of_the_whole_tree(name):
    tx, shapes = CONTAINERS[name], {"w": (3, 4), "b": (5,)}
    ours = train(tx, shapes, steps=5, tile=6)
    params, state = train_whole(tx, shapes, steps=5)
    assert_near(ours[0], params, 10)
    assert jax.tree.structure(ours[1].inner) == jax.tree.structure(state)
    pairs = zip(*map(jax.tree.leaves, (ours[1].inner, state)), strict=True)
    counts = [(a, b) for a, b in pairs if b.dtype == np.int32]
    assert counts
    assert all(a == b for a, b in counts)  # one of all tiles


def test_an_update_of_tiles_is_not_traced():
    """So that no jit, nnx.jit or shard_map takes it: it donates by itself."""
    params = {"w": jnp.ones(3)}
    made = tiled(optax.sgd(0.1), params, tile=2)
    weights, state = begin(optax.sgd(0.1), made, params)
    with pytest.raises(ConfigError, match=r"not traced.*outside of jit"):
        jax.jit(made.update)(params, state, weights)


@pytest.mark.parametrize("tile", [1, 3, 5, 8, 9])
def test_tiles_cover_each_entry_once_and_in_order(tile):
    sizes = [3, 0, 1, 4]
    cut = cut_tiles(sizes, tile)
    covered = [(s.leaf, s.start + i) for s in cut for i in range(s.size)]
    assert covered == [(i, n) for i, size in enumerate(sizes) for n in range(size)]
    assert len(cut) == sum(-(-size // tile) for size in sizes)


def live_bytes(kind):
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == kind)


@pytest.mark.acceptance("ted", 6)
@pytest.mark.parametrize("tile", [10**5, 10**6])
def test_a_tile_needs_no_more_of_a_larger_model(tile):
    """At most 4 bytes an entry in a program, with what it returns."""
    tx, needed = optax.adam(1e-3), set()
    for size in (10**7, 10**8):
        shapes = {"w": jax.ShapeDtypeStruct((size,), "float32")}
        made = TiledTransform(tx, shapes, TiledConfig(tile=tile, dtype="float16"))
        inner = jax.eval_shape(tx.init, shapes)
        weights, state = made.cut(shapes, TiledState(inner=inner))
        programs = [p.compile() for p in made.lower(0, weights, state, weights)]
        own = [perf.peak_memory(p) - perf.argument_memory(p) for p in programs]
        needed.add((*map(perf.temporary_memory, programs), *own))
    (found,) = needed
    assert max(found) <= 4 * tile  # so that state is donated, too
    assert 2 * tile + max(found) <= 20 * tile  # where the weights are written


@pytest.mark.acceptance("axonn-myelin", 5)  # on a CPU
def test_the_device_has_the_state_of_no_more_tiles_for_a_larger_model():
    """Bytes of live arrays between tiles, and of a tile's step while it is taken.

    Not of bfloat16, of which a CPU copies a parameter to write a part of it.
    """
    tile, tx, seen = 1000, optax.adam(1e-3), []
    options = {"tile": tile, "space": "host", "dtype": "float16"}
    for count in (4, 16, 64):
        before = {kind: live_bytes(kind) for kind in ("device", "pinned_host")}
        params = {"w": jnp.ones((count, tile))}
        made = tiled(tx, params, **options)
        weights, state = begin(tx, made, params)
        del params
        grads = jax.tree.map(jnp.ones_like, weights)
        programs = [p.compile() for p in made.lower(0, grads, state, weights)]
        known, beyond = before["device"] + trees.num_bytes((grads, weights)), []

        def watch(known=known, beyond=beyond):
            beyond.append(live_bytes("device") - known)

        assert live_bytes("pinned_host") - before["pinned_host"] == 12 * count * tile
        weights, state = made.update(grads, state, weights, watch=watch)
        assert len(beyond) == count
        seen.append(max(beyond) + max(map(perf.temporary_memory, programs)))
        assert live_bytes("pinned_host") - before["pinned_host"] == 12 * count * tile
        del weights, state, grads
    assert max(seen) <= 32 * tile
    assert max(seen) - min(seen) <= tile  # a flag of each tile


def test_numbers_that_overflow_end_the_run_by_name():
    """A square of 10^20 is infinite, of which the step is 0: no gradient would tell."""
    params = {"b": jnp.ones(4)}
    made = tiled(optax.adam(1e-2), params, tile=2)
    weights, state = begin(optax.adam(1e-2), made, params)
    grads = {"b": jnp.ones(4).at[3].set(1e20)}
    with pytest.raises(Diverged, match=r"of b are non-finite, in 1 of 2 tiles"):
        made.update(grads, state, weights)


REFUSED = {
    "lamb": optim.lamb(1e-3),
    "clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "factored": optax.adafactor(1e-3),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "centred": optax.chain(optax.centralize(), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_entries_is_refused(name):
    with pytest.raises(ConfigError, match="state in tiles"):
        tiled(REFUSED[name], {"w": jnp.ones((200, 200))})


def test_a_norm_of_numbers_is_refused():
    with pytest.raises(ConfigError, match="state in tiles"):
        tiled(REFUSED["clipping"], {"s": jnp.ones(()), "t": jnp.ones(())})


def test_other_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"float32 parameters.*'w': 'bfloat16'"):
        tiled(optax.sgd(0.1), {"w": jnp.ones(3, jnp.bfloat16)})
    with pytest.raises(ConfigError, match="tile"):
        TiledConfig(tile=0)
    with pytest.raises(ConfigError, match="most must be at least start"):
        LossScale(start=4.0, most=2.0)


def test_the_loss_scale_is_that_of_axonn():
    """Against its rule written down: doubled after 200 clean steps, within bounds."""
    rule = LossScale(start=2.0**16, every=200, least=2.0**10, most=2.0**24)
    rng, scaling = np.random.default_rng(0), begin_scaling(rule)
    step = jax.jit(lambda state, finite: advance(rule, state, finite))
    scale, clean, seen = 2.0**16, 0, set()
    for number in range(3500):
        finite = (
            number < 2000 or (number < 2030 and rng.random() < 0.2) or number > 2060
        )
        clean = clean + 1 if finite else 0
        if not finite:
            scale = max(scale / 2, 2.0**10)
        elif clean == 200:
            scale, clean = min(scale * 2, 2.0**24), 0
        scaling = step(scaling, finite)
        assert float(scaling.scale) == scale, number
        seen.add(scale)
    assert {2.0**10, 2.0**24} <= seen
