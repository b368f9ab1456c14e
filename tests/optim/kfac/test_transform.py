"""K-FAC as a link: intervals, refusals, what is not finite, half precision, kernels."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError

from hpcjax import core, models, optim, sharding
from hpcjax.core import ConfigError, LayerSpec, Model
from hpcjax.optim import kfac
from hpcjax.optim.kfac import _blocks
from tests.optim.kfac import problems


@pytest.fixture(scope="module")
def problem():
    """Plan, parameters, gradients and statistics of one batch of eight."""
    model, (x, y) = problems.mlp(), problems.batch(8)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    found = problems.differentiated(chosen, model, params, x, y)
    return chosen, params, found.grads, found.statistics


def update(
    problem, state=None, *, taps=None, grads=None, terms=8, extras=None, **options
):
    chosen, params, own, statistics = problem
    tx = kfac.scale_by_kfac(chosen, **options)
    return tx.update(
        own if grads is None else grads,
        tx.init(params) if state is None else state,
        params,
        taps=statistics if taps is None else taps,
        loss_terms=terms,
        **(extras or {}),
    )


@pytest.mark.slow
def test_factors_start_from_the_identity_or_forget_it(problem):
    statistics = problem[3]["head"]["a"]
    _, slow = update(problem, factor_decay=0.9)
    expected = 0.9 * np.eye(5) + 0.1 * np.asarray(statistics)
    np.testing.assert_allclose(slow.factors["head"]["a"][0], expected, rtol=1e-5)
    _, ramp = update(problem, factor_ramp=True)
    np.testing.assert_allclose(ramp.factors["head"]["a"][0], statistics, rtol=1e-6)
    chosen, params, grads, taps = problem
    tx, state = kfac.scale_by_kfac(chosen, factor_ramp=True), ramp
    doubled = jax.tree.map(lambda s: 2 * s, taps)
    for _ in range(2):
        _, state = tx.update(grads, state, params, taps=doubled, loss_terms=8)
    # Steps 1 and 2 keep 0 and 1/2 of what was.
    np.testing.assert_allclose(
        state.factors["head"]["a"][0], 2 * np.asarray(statistics), rtol=1e-6
    )


def test_only_due_steps_change_factors_and_decompositions(problem):
    chosen, params, grads, taps = problem
    tx = kfac.scale_by_kfac(chosen, factor_update_steps=2, inv_update_steps=4)
    state, step = tx.init(params), jax.jit(functools.partial(tx.update, loss_terms=8))
    factors, decompositions = [], []
    for number in range(6):
        scaled = jax.tree.map(lambda s, n=number: (n + 1.0) * s, taps)
        _, state = step(grads, state, params, taps=scaled)
        factors.append(state.factors["head"]["a"])
        decompositions.append(state.decompositions["layers"]["head/0"]["quotients"])
    same = [bool((a == b).all()) for a, b in itertools.pairwise(factors)]
    assert same == [True, False, True, False, True]
    same = [bool((a == b).all()) for a, b in itertools.pairwise(decompositions)]
    assert same == [True, True, True, False, True]


def test_missing_statistics_name_the_layer(problem):
    chosen, params, grads, taps = problem
    tx = kfac.scale_by_kfac(chosen)
    with pytest.raises(ValueError, match=r"dense_0.*dense_1.*head"):
        tx.update(grads, tx.init(params), params)
    less = {path: each for path, each in taps.items() if path != "head"}
    with pytest.raises(ValueError, match=r"missing for layers \['head'\]"):
        update(problem, taps=less)
    with pytest.raises(ValueError, match="loss_terms"):
        update(problem, terms=None)
    wrong = {**taps, "head": {"a": jnp.eye(4), "g": jnp.eye(3)}}
    with pytest.raises(
        ValueError, match=r"'a' of 'head' must be \(1, 5, 5\): got \(4, 4\)"
    ):
        update(problem, taps=wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"damping": 0.0}, "damping"),
        ({"damping": float("nan")}, "damping"),
        ({"factor_decay": 0.0}, r"factor_decay must be in \(0, 1\]"),
        ({"factor_decay": 1.5}, "factor_decay"),
        ({"kl_clip": 0.0}, "kl_clip"),
        ({"kl_clip": -1.0}, "kl_clip"),
        ({"factor_update_steps": 0}, "factor_update_steps"),
        ({"inv_update_steps": 0}, "inv_update_steps"),
        ({"method": "eigne"}, "eigen"),
        ({"factor_dtype": "int8"}, "factor_dtype"),
    ],
)
def test_impossible_options_are_refused_before_anything_runs(problem, options, words):
    with pytest.raises((ConfigError, TypeCheckError), match=words):
        kfac.KfacOptions(**options)


def test_quotients_need_both_factors_on_one_device(problem):
    grid = kfac.Distribution(4, 0.5, colocate_factors=False)
    with pytest.raises(ConfigError, match="prediv=True needs colocate_factors=True"):
        kfac.scale_by_kfac(problem[0], distribution=grid)
    with pytest.raises(ConfigError, match="axis_name or distribution"):
        kfac.scale_by_kfac(
            problem[0], distribution=kfac.Distribution(4), axis_name="data"
        )


def test_parameters_of_no_block_are_named(problem):
    params = {**problem[1], "loose": {"weight": jnp.ones(3)}}
    with pytest.raises(ConfigError, match=r"no rule of skip: \['loose/weight'\]"):
        kfac.scale_by_kfac(problem[0]).init(params)
    model = problems.mlp()
    chosen = kfac.plan(model, skip=(*kfac.SKIP, "^head$", "^loose/"))
    with pytest.raises(ConfigError, match="head/"):
        # The layer is left out, its parameters' paths are matched by no rule.
        kfac.scale_by_kfac(chosen).init(params)
    idle = kfac.plan(model, skip=(*kfac.SKIP, "^nothing$"))
    with pytest.raises(ConfigError, match="match no parameter"):
        kfac.scale_by_kfac(idle).init(problem[1])
    with pytest.raises(ConfigError, match="no layer is left"):
        kfac.plan(model, skip=("",))


def test_a_layer_says_its_sizes_and_the_rest_if_it_must():
    def planned(kind="dense", **options):
        return kfac.plan(Model(None, None, (LayerSpec("layer", kind, options),)))

    (block,) = planned(inputs=3, outputs=2).blocks
    assert (block.a, block.g, block.depth, block.stacked) == (4, 2, 1, False)
    (block,) = planned(inputs=3, outputs=2, use_bias=False, depth=5).blocks
    assert (block.a, block.g, block.depth, block.stacked) == (3, 2, 5, True)
    with pytest.raises(ConfigError, match=r"'layer' must say \['outputs'\]"):
        planned(inputs=3)
    with pytest.raises(ConfigError, match=r"conv layer.* must say \['kernel_size'"):
        planned("conv", inputs=3, outputs=2)
    bare = {"layer": {"kernel": jnp.ones((3, 2))}}
    with pytest.raises(ConfigError, match=r"\['layer/bias'\].* use_bias=False"):
        kfac.scale_by_kfac(planned(inputs=3, outputs=2)).init(bare)


def test_parameters_of_another_shape_than_the_plan_are_refused(problem):
    chosen, params, _, _ = problem
    other = {**params, "head": {**params["head"], "kernel": jnp.ones((4, 4))}}
    with pytest.raises(ConfigError, match=r"head/kernel.* 12 numbers.*\(4, 4\)"):
        kfac.scale_by_kfac(chosen).init(other)


def test_what_is_explained_is_every_parameter():
    model = models.resnet((8, 8, 1), 3, depth=8, width=2, norm="group")
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    text = kfac.explain(kfac.plan(model, skip=(*kfac.SKIP, "^head")), params)
    lines = dict(line.split(" ", 1) for line in text.splitlines())
    assert set(lines) == set(core.trees.flatten(params))
    assert "skip '^head'" in lines["head/kernel"]
    assert sum("first order" in line for line in lines.values()) == 2 + 2 * 7


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_statistics_that_are_not_finite_change_nothing_but_a_counter(problem, bad):
    taps = problem[3]
    _, state = update(problem)
    broken = {**taps, "head": {**taps["head"], "g": taps["head"]["g"] * bad}}
    updates, after = update(problem, state, taps=broken)
    assert after.skipped == 1
    np.testing.assert_array_equal(
        after.factors["head"]["a"], state.factors["head"]["a"]
    )
    moved = after.factors["dense_0"]["a"] != state.factors["dense_0"]["a"]
    assert moved.any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


def test_a_decomposition_that_fails_keeps_the_old_one(problem):
    """There is no Cholesky root of a matrix with negative eigenvalues."""
    options = {"method": "inverse", "damping": 1e-2, "factor_decay": 1e-30}
    _, state = update(problem, **options)
    huge = jax.tree.map(lambda s: jnp.full_like(s, -1.0), problem[3])
    updates, after = update(problem, state, taps=huge, **options)
    assert after.skipped == 1
    for left, right in zip(
        jax.tree.leaves(after.decompositions),
        jax.tree.leaves(state.decompositions),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


def test_a_loss_scale_is_divided_out_of_g(problem):
    _, plain = update(problem)
    scaled = {
        path: {"a": each["a"], "g": each["g"] * 1024.0**2}
        for path, each in problem[3].items()
    }
    _, state = update(problem, taps=scaled, extras={"loss_scale": 1024.0})
    chex.assert_trees_all_close(state.factors, plain.factors, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_factors_in_half_precision(problem, dtype):
    exact, _ = update(problem, damping=0.1)
    rounded, state = update(problem, damping=0.1, factor_dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.factors)} == {jnp.dtype(dtype)}
    for left, right in zip(
        jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True
    ):
        assert left.dtype == jnp.float32
        assert jnp.abs(left - right).max() < 0.05 * jnp.abs(right).max()


@pytest.mark.slow
def test_parameters_in_bfloat16_get_updates_in_bfloat16():
    policy = core.Policy(param="bfloat16", compute="bfloat16", output="float32")
    model, (x, y) = problems.mlp(policy), problems.batch(8)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    found = problems.differentiated(chosen, model, params, x, y)
    tx = kfac.scale_by_kfac(chosen)
    updates, state = tx.update(
        found.grads, tx.init(params), params, taps=found.statistics, loss_terms=8
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.factors)} == {
        jnp.dtype("float32")
    }


def test_adaptive_damping_asks_the_loss_every_five_steps():
    model, (x, y) = problems.mlp(), problems.batch(32)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    options = {"adaptive_damping": True, "prediv": False, "damping": 1.0}
    tx = kfac.scale_by_kfac(chosen, learning_rate=0.5, kl_clip=None, **options)

    def value_fn(params):
        outputs = model.apply(params, {}, x, train=True)[0]
        return problems.cross_entropy(outputs, y)[0]

    @jax.jit
    def step(params, state):
        found = problems.differentiated(chosen, model, params, x, y)
        updates, state = tx.update(
            found.grads, state, params, taps=found.statistics, loss_terms=32,
            value=found.value, value_fn=value_fn,
        )  # fmt: skip
        return jax.tree.map(lambda p, u: p - 0.5 * u, params, updates), state

    state, seen = tx.init(params), []
    for _ in range(10):
        params, state = step(params, state)
        seen.append(float(state.damping))
    assert seen[:4] == [1.0] * 4
    assert seen[4] == pytest.approx(0.95**5, rel=1e-5)
    assert seen[5:9] == [seen[4]] * 4
    assert seen[9] != seen[4]
    with pytest.raises(ValueError, match="value="):
        tx.update(
            params,
            tx.init(params),
            params,
            taps=problems.identities(chosen),
            loss_terms=1,
        )


@pytest.mark.parametrize(
    ("share", "factor"),
    [(0.24, 0.95**-5), (0.26, 1.0), (0.74, 1.0), (0.76, 0.95**5), (np.nan, 0.95**-5)],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_damping_moves_by_the_share_of_the_predicted_change(
    problem, share, factor, devices
):
    """The model's change of the loss is −(η − η²/2) times the inner product."""
    chosen, params, grads, statistics = problem
    rate = 0.5
    tx = kfac.scale_by_kfac(
        chosen, learning_rate=rate, kl_clip=None, adaptive_damping=True, prediv=False,
        damping=1.0, axis_name="data",
    )  # fmt: skip
    inner = optax.tree.vdot(update(problem, kl_clip=None, damping=1.0)[0], grads)
    predicted = -(rate - rate**2 / 2) * inner

    def body(params):
        state = tx.init(params)._replace(count=jnp.int32(4), due=jnp.bool_(True))
        # Each device's own loss: what counts is their mean.
        own = 1.0 + 2.0 * jax.lax.axis_index("data")
        gained = share * predicted * (own if devices > 1 else 1.0) / (devices or 1)
        _, state = tx.update(
            grads, state, params, taps=statistics, loss_terms=8,
            value=own, value_fn=lambda _: own + gained,
        )  # fmt: skip
        return state.damping

    mesh = sharding.data_mesh(devices)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    np.testing.assert_allclose(jax.jit(run)(params), factor, rtol=1e-5)


def _double_kernel(x_ref, y_ref):
    y_ref[...] = 2.0 * x_ref[...]


@jax.custom_vjp
def doubled(x):
    """2x by a Pallas kernel, which has no derivative of its own."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double_kernel, out_shape=shape, interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2.0 * g,))


def kernel_model(use_kernel):
    """Two dense layers with 2x between them, by a kernel or by multiplication."""
    layer = {"inputs": 4, "outputs": 4, "use_bias": False, "depth": None}
    specs = tuple(LayerSpec(path, "dense", layer) for path in ("one", "two"))

    def init(key):
        keys = jax.random.split(key)
        made = [jax.random.normal(k, (4, 4)) for k in keys]
        return {"one": {"kernel": made[0]}, "two": {"kernel": made[1]}}, {}

    def apply(params, state, x, *, train, key=None, taps=None):
        taps, seen = taps or {}, {}
        for path in ("one", "two"):
            y = x @ params[path]["kernel"]
            y, record = core.observe(taps.get(path), x, y)
            if record is not None:
                seen[path] = record
            x = doubled(jnp.tanh(y)) if use_kernel else 2.0 * jnp.tanh(y)
        return x, {**state, core.SEEN: seen} if seen else state

    return Model(init, apply, specs)


def test_a_model_with_a_pallas_kernel_is_preconditioned_alike():
    x = jax.random.normal(jax.random.key(1), (6, 4))
    y = jnp.arange(6) % 4
    found = []
    for use_kernel in (False, True):
        model = kernel_model(use_kernel)
        chosen = kfac.plan(model)
        params, _ = model.init(jax.random.key(0))
        tx, step = problems.alone(chosen, model)
        found.append(step(params, tx.init(params), x, y)[0])
    chex.assert_trees_all_close(*found, rtol=1e-6)


@pytest.mark.slow
def test_a_chain_with_momentum_trains_and_compiles_once(compilations):
    model, (x, y) = problems.mlp(), problems.batch(32)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    tx = optax.chain(
        kfac.scale_by_kfac(chosen, learning_rate=0.1, inv_update_steps=3, kl_clip=0.1),
        optax.trace(0.9),
        optax.scale_by_learning_rate(0.1),
    )
    step = jax.jit(functools.partial(problems.step, chosen, model, tx))
    state = tx.init(params)
    params, state = step(params, state, x, y)
    assert compilations
    first = problems.differentiated(chosen, model, params, x, y).value
    compilations.clear()
    for _ in range(30):
        params, state = step(params, state, x, y)
    assert not compilations
    assert problems.differentiated(chosen, model, params, x, y).value < 0.7 * first
    assert {"kfac_nu", "kfac_damping"} <= set(optim.inspect(state))


def test_steps_that_take_no_statistics_need_none(problem):
    chosen, params, grads, statistics = problem
    options = {"factor_update_steps": 2, "inv_update_steps": 2}
    tx = kfac.scale_by_kfac(chosen, **options)
    given = {"taps": statistics, "loss_terms": 8}
    _, state = tx.update(grads, tx.init(params), params, **given)
    assert not bool(kfac.statistics_due(state))
    expected = tx.update(grads, state, params, **given)
    found = tx.update(grads, state, params, taps={}, loss_terms=8)
    chex.assert_trees_all_equal(found, expected)
    # In the step after it some are due: to leave them out is told.
    _, state = found
    _, late = jax.jit(tx.update)(grads, state, params, taps={})
    assert (int(state.skipped), int(late.skipped)) == (0, 1)
    chex.assert_trees_all_equal(late.factors, state.factors)


def test_taps_in_place_of_statistics_are_told(problem):
    chosen, params, _, _ = problem
    tx, model = kfac.scale_by_kfac(chosen), problems.mlp()
    taps = kfac.make_taps(chosen, model, params, {}, problems.batch(8)[0])
    # Not by `update`, whose types are checked in tests.
    with pytest.raises(ValueError, match="these are the taps themselves"):
        _blocks.check_statistics(chosen, taps, tx.init(params).factors)


def test_axes_that_are_not_there_are_named(problem):
    chosen, params, grads, statistics = problem
    tx = kfac.scale_by_kfac(chosen, axis_name=("data", "more"))
    state = tx.init(params)

    def run():
        return tx.update(grads, state, params, taps=statistics, loss_terms=8)[0]

    with pytest.raises(ConfigError, match=r"K-FAC's update communicates over .*'more'"):
        run()
    inside = jax.shard_map(
        run, mesh=sharding.data_mesh(2), in_specs=(), out_specs=P(), check_vma=False
    )
    told = r"\['more'\] is not among the axes here, \['data'\]"
    with pytest.raises(ConfigError, match=told):
        jax.jit(inside)()
