"""Late inverses: on one device, in pipelines, in numpy, and against plain K-FAC."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import cost, sharding
from hpcjax.core.errors import ConfigError
from hpcjax.optim import kfac
from tests import guides
from tests.oracles import pipefisher as oracle
from tests.sharding import pipelines

SCHEDULES = {
    "gpipe": sharding.gpipe(4, 4),
    "one_f_one_b": sharding.one_f_one_b(4, 4),
    "interleaved": sharding.interleaved(4, 4, 2),
    "chimera": sharding.chimera(4, 4),
}
DAMPING, RATE, STEPS = 0.03, 0.05, 10
PLAN = kfac.plan(pipelines.stage_model())
LAYERS = [block.path for block in PLAN.blocks]


@functools.cache
def filled(name):
    """K-FAC's work in the bubbles of a schedule."""
    schedule = SCHEDULES[name]
    layers = [[cost.Layer(block.a, block.g) for block in PLAN.blocks]] * 4
    costs = cost.KfacCosts(t_curv=3.0, t_inv=20.0)
    line = cost.simulate(schedule, cost.StageCosts(t_f=4.0, t_b=8.0))
    tasks = cost.kfac_tasks(schedule, layers, costs)
    return cost.assign(line, tasks, gate="layer", panel=1.0)


FRESH = {
    0: [(stage, layer, side) for stage in range(4) for layer in (0, 1) for side in "AB"]
}


def transform(visible, rows=None, **options):
    """PipeFisher and gradient descent for the rows of a pipeline."""
    chosen = kfac.stage_plan(PLAN, len(rows or range(4)), skip=("^head$",))
    scale = kfac.scale_by_pipefisher(
        chosen, visible, rows=rows, damping=DAMPING, **options
    )
    return optax.chain(scale, optax.scale_by_learning_rate(RATE))


def slots(dtype="float32"):
    """The taps of one stage."""
    x = jax.ShapeDtypeStruct((1, pipelines.WIDTH), dtype)
    one = jax.tree.map(lambda leaf: leaf[0], pipelines.params(4, dtype)["stages"])
    return kfac.make_taps(PLAN, pipelines.stage_model(dtype), one, {}, x)


@functools.cache
def zero_taps(dtype):
    taps = slots(dtype)
    return jax.tree.map(lambda slot: jnp.zeros((4, *slot.shape), slot.dtype), taps)


def observed(params, batch, dtype, micro_batches=4):
    """Loss, gradients and averaged statistics, one micro-batch after another."""
    value, (grads, taps) = pipelines.accumulated(
        pipelines.functions(dtype), params, batch, micro_batches, zero_taps(dtype)
    )
    found = kfac.statistics_of(taps)
    return value, grads, {f"stages/{path}": each for path, each in found.items()}


def on_one_device(dtype, visible=None, tx=None):
    """The parameters after all steps, micro-batches one after another."""
    tx = tx or transform(visible)
    params = pipelines.params(4, dtype)
    state = tx.init(params)

    @jax.jit
    def update(grads, state, params, taps):
        # The mean loss is that of a micro-batch, G its mean over micro-batches.
        terms = pipelines.ROWS // 4
        updates, state = tx.update(grads, state, params, taps=taps, loss_terms=terms)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        _, grads, taps = observed(params, pipelines.batch(number, dtype), dtype)
        params, state = update(grads, state, params, taps)
    return params


@functools.cache
def emulated(dtype, name):
    return on_one_device(dtype, FRESH if name is None else filled(name).visible)


def pipelined(name, tx, dtype):
    """The step on the devices of a schedule, update included, and where it begins."""
    schedule, model = SCHEDULES[name], pipelines.stage_model(dtype)
    differentiate = sharding.pipelined_value_and_grad(
        schedule, pipelines.functions(dtype)
    )

    def body(params, state, batch):
        x = jax.ShapeDtypeStruct((1, pipelines.WIDTH), dtype)
        one = jax.tree.map(lambda leaf: leaf[0], params["stages"])
        active = kfac.statistics_due(state)
        taps = kfac.make_taps(PLAN, model, one, {}, x, active=active)
        found = differentiate(params, batch, taps)
        updates, state = tx.update(
            found.grads, state, params,
            taps={"stages": kfac.statistics_of(found.taps)},
            loss_terms=pipelines.ROWS,
        )  # fmt: skip
        return optax.apply_updates(params, updates), state

    mesh = sharding.make_mesh({"stage": schedule.devices})
    params = pipelines.spread(schedule, pipelines.params(4, dtype))
    start = params, tx.init(params)
    specs = sharding.stage_specs(start)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(*specs, P()), out_specs=specs)
    start = jax.device_put(start, sharding.stage_shardings(start, mesh))
    return jax.jit(mapped), start


@functools.cache
def in_numpy(name):
    def fresh(step):
        return dict.fromkeys(FRESH[0], 0)

    with jax.enable_x64(True):
        params = pipelines.params(4, "float64")
        batches = [pipelines.batch(number, "float64") for number in range(STEPS)]
    return oracle.train(
        params,
        batches,
        LAYERS,
        fresh if name is None else filled(name).inverse_ages,
        DAMPING,
        RATE,
    )


@functools.cache
def in_pipeline(dtype, name):
    """The collected parameters after all steps, and the rows after each of them."""
    schedule = SCHEDULES[name]
    share = functools.partial(sharding.sum_replicas, schedule)
    tx = transform(
        filled(name).visible,
        sharding.stage_rows(schedule),
        axis_name="stage",
        sum_replicas=share if schedule.replicas > 1 else None,
    )
    step, (params, state) = pipelined(name, tx, dtype)
    rows = []
    for number in range(STEPS):
        params, state = step(params, state, pipelines.batch(number, dtype))
        rows.append(jax.device_get(params["stages"]))
    return pipelines.collect(schedule, params), rows


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_spread_a_refresh_over_steps(name):
    found = filled(name)
    assert found.period >= 2
    assert not found.unplaced
    assert len([factors for factors in found.visible.values() if factors]) >= 2


@pytest.mark.quick("chimera-float64-1e-10")
@pytest.mark.acceptance("pipefisher", 6)
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("interleaved", "float32", 1e-5),
        ("one_f_one_b", "float64", 1e-10),
        ("chimera", "float64", 1e-10),
    ],
)
def test_the_pipeline_trains_as_one_device_does(name, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        expected = emulated(dtype, name)
        found = in_pipeline(dtype, name)[0]
        start = pipelines.params(4, dtype)
    assert jax.tree.leaves(found)[0].dtype == dtype
    assert pipelines.distance(start, expected) > 0.05
    assert pipelines.distance(found, expected) < tolerance
    # Old inverses are another method, not a rounding error.
    assert pipelines.distance(expected, in_numpy(None)) > 1e-3


@pytest.mark.acceptance("pipefisher", 6)
@pytest.mark.parametrize("name", [None, "one_f_one_b", "chimera"])
def test_one_device_trains_as_numpy_does(name):
    with jax.enable_x64(True):
        found = emulated("float64", name)
        assert pipelines.distance(found, in_numpy(name)) < 1e-10


@pytest.mark.acceptance("pipefisher", 8)
def test_replicas_of_a_stage_hold_the_same_weights_after_every_step():
    parts = sharding.stage_rows(SCHEDULES["chimera"])
    with jax.enable_x64(True):
        _, history = in_pipeline("float64", "chimera")
    assert len(history) == STEPS
    for rows in history:
        for leaf in jax.tree.leaves(rows):
            for stage in range(4):
                own = [leaf[i] for i, part in enumerate(parts) if part.stage == stage]
                assert len(own) == 2
                np.testing.assert_array_equal(*own)


@pytest.mark.acceptance("pipefisher", 6)
def test_with_period_1_it_is_plain_kfac_that_inverts_at_every_step():
    # The smallest decay there is: factors are those of the step alone.
    plain = kfac.scale_by_kfac(
        kfac.stage_plan(PLAN, 4, skip=("^head$",)),
        method="inverse",
        damping=DAMPING,
        factor_decay=1e-30,
        kl_clip=None,
    )
    tx = optax.chain(plain, optax.scale_by_learning_rate(RATE))
    with jax.enable_x64(True):
        expected = on_one_device("float64", tx=tx)
        assert pipelines.distance(emulated("float64", None), expected) < 1e-10


def factors(rng, rows=4):
    """Statistics of every layer, well away from zero."""

    def definite(n):
        root = rng.standard_normal((rows, n, n + 2))
        return jnp.asarray(root @ root.swapaxes(1, 2) / n, jnp.float32)

    own = {b.path: {"a": definite(b.a), "g": definite(b.g)} for b in PLAN.blocks}
    return {"stages": own}


def test_an_inverse_is_of_the_first_step_of_its_refresh_and_is_kept_until_the_next():
    visible = {0: FRESH[0][:5], 1: [], 2: FRESH[0][5:]}
    tx, rng = transform(visible), np.random.default_rng(0)
    params = pipelines.params(4)
    state, seen, due = tx.init(params), [], []
    update = jax.jit(functools.partial(tx.update, loss_terms=1))
    for _ in range(8):
        seen.append(factors(rng))
        due.append(bool(kfac.statistics_due(state)))
        _, state = update(params, state, params, taps=seen[-1])
        count = len(seen)
        for step, each in visible.items():
            # The last step at which this was made, and the refresh that it was of.
            made = max((t for t in range(count) if t % 3 == step), default=0)
            began = max(0, made - step)
            for stage, layer, side in each:
                path = f"stages/{LAYERS[layer]}"
                found = state[0].inverses[path][{"A": "a", "B": "g"}[side]][stage]
                factor = seen[began]["stages"][LAYERS[layer]]
                factor = factor[{"A": "a", "B": "g"}[side]][stage]
                inverse = np.linalg.inv(factor + DAMPING * np.eye(len(factor)))
                np.testing.assert_allclose(found, inverse, rtol=1e-3, atol=1e-4)
    assert due == [True, False, False] * 2 + [True, False]


def test_what_is_not_finite_is_left_out_and_counted():
    tx, params = transform(FRESH), pipelines.params(4)
    good = factors(np.random.default_rng(0))
    _, state = tx.update(params, tx.init(params), params, taps=good, loss_terms=1)
    bad = jax.tree.map(jnp.asarray, good)
    layer = LAYERS[0]
    bad["stages"][layer]["g"] = bad["stages"][layer]["g"].at[2].set(jnp.nan)
    updates, new = tx.update(params, state, params, taps=bad, loss_terms=1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    lost = {
        path: {side: counts.tolist() for side, counts in each.items()}
        for path, each in new[0].skipped.items()
    }
    nothing = {"a": [0] * 4, "g": [0] * 4}
    assert lost.pop(f"stages/{layer}") == {"a": [0] * 4, "g": [0, 0, 1, 0]}
    assert list(lost.values()) == [nothing]


@pytest.mark.slow
def test_replicas_share_the_layers_of_a_stage_out():
    """Each inverts its own half; the update is that of doing all work twice."""
    schedule = SCHEDULES["chimera"]
    parts = sharding.stage_rows(schedule)
    mesh = sharding.make_mesh({"stage": 4})
    start = pipelines.params(4)
    grads = pipelines.spread(schedule, start)
    whole = factors(np.random.default_rng(0))
    taps = {"stages": sharding.spread_stages(schedule, whole["stages"])}
    expected, _ = transform(FRESH).update(
        start, transform(FRESH).init(start), taps=whole, loss_terms=1
    )
    share = functools.partial(sharding.sum_replicas, schedule)
    found = {}
    for name, function in {"alone": None, "shared": share}.items():
        tx = transform(FRESH, parts, axis_name="stage", sum_replicas=function)
        state = tx.init(grads)
        specs = sharding.stage_specs((grads, state, taps))
        mapped = jax.shard_map(
            lambda grads, state, taps, tx=tx: tx.update(
                grads, state, taps=taps, loss_terms=1
            ),
            mesh=mesh,
            in_specs=specs,
            out_specs=specs[:2],
        )
        found[name], state = jax.jit(mapped)(grads, state, taps)
        own = pipelines.collect(schedule, found[name])
        assert pipelines.distance(own, expected) < 1e-6
    # `state` is that of sharing: the other replica's inverses were never made.
    for layer, path in enumerate(LAYERS):
        for row, part in enumerate(parts):
            inverse = state[0].inverses[f"stages/{path}"]["a"][row]
            untouched = bool((inverse == jnp.eye(len(inverse))).all())
            assert untouched == (layer % 2 != part.replica)


def test_over_a_data_axis_statistics_are_averaged():
    rng = np.random.default_rng(0)
    each, grads = [factors(rng), factors(rng)], pipelines.params(4)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *each)
    alone = transform(FRESH)
    expected, _ = alone.update(grads, alone.init(grads), taps=mean, loss_terms=2)
    other, _ = alone.update(grads, alone.init(grads), taps=each[0], loss_terms=2)
    assert pipelines.distance(other, expected) > 0.01
    tx = transform(FRESH, data_axis="data")
    mapped = jax.shard_map(
        lambda grads, taps: tx.update(
            grads, tx.init(grads), loss_terms=2,
            taps=jax.tree.map(lambda leaf: leaf[0], taps),
        )[0],
        mesh=sharding.make_mesh({"data": 2}),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )  # fmt: skip
    found = jax.jit(mapped)(grads, jax.tree.map(lambda *f: jnp.stack(f), *each))
    assert pipelines.distance(found, expected) < 1e-6


def test_layers_of_a_stage_that_is_a_stack_itself_are_counted_block_by_block():
    """Two stages of two blocks, against four stages of one."""
    grads, taps = pipelines.params(4), factors(np.random.default_rng(0))
    rng = np.random.default_rng(1)
    steps = rng.integers(0, 3, len(FRESH[0]))
    visible = {
        step: [f for f, at in zip(FRESH[0], steps, strict=True) if at == step]
        for step in range(3)
    }
    renamed = {
        step: [(s // 2, 2 * (s % 2) + layer, side) for s, layer, side in each]
        for step, each in visible.items()
    }
    stacked = kfac.Plan(
        tuple(block._replace(depth=2, stacked=True) for block in PLAN.blocks), PLAN.skip
    )
    other = kfac.scale_by_pipefisher(
        kfac.stage_plan(stacked, 2, skip=("^head$",)), renamed, damping=DAMPING
    )
    other = optax.chain(other, optax.scale_by_learning_rate(RATE))

    def nested(tree):
        return {
            key: jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), value)
            if key == "stages"
            else value
            for key, value in tree.items()
        }

    found = []
    for tx, form in ((transform(visible), dict), (other, nested)):
        state = tx.init(form(grads))
        update = jax.jit(functools.partial(tx.update, loss_terms=1))
        for step in range(5):
            scaled = jax.tree.map(lambda f, step=step: f * (1 + step), taps)
            updates, state = update(form(grads), state, taps=form(scaled))
        found.append(updates)
    flat = jax.tree.map(lambda a, b: a.reshape(b.shape), found[1], found[0])
    assert pipelines.distance(flat, found[0]) < 1e-6


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ({1: FRESH[0]}, r"every step of a refresh from 0 on.*steps \[1\]"),
        ({0: []}, "each factor once"),
        ({0: FRESH[0], 1: FRESH[0][:1]}, "17 factors, 16 different"),
        ({0: FRESH[0][1:]}, r"missing \[\(0, 0, 'A'\)\], unknown \[\]"),
        ({0: [*FRESH[0], (3, 2, "A")]}, r"unknown \[\(3, 2, 'A'\)\]"),
        ({0: [*FRESH[0], (4, 0, "A")]}, "one depth that 5 rows divide"),
    ],
)
def test_a_table_that_is_not_the_plans_is_refused(visible, message):
    with pytest.raises(ConfigError, match=message):
        transform(visible)


def test_wrong_use_is_told():
    tx, params = transform(FRESH), pipelines.params(4)
    state, taps = tx.init(params), factors(np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"taps are missing for layers.*'stages/down'"):
        tx.update(params, state, loss_terms=1)
    with pytest.raises(ValueError, match="these are the taps themselves"):
        tx.update(params, state, taps={"stages": slots()}, loss_terms=1)
    with pytest.raises(ValueError, match="needs loss_terms="):
        tx.update(params, state, taps=taps)
    small = jax.tree.map(lambda f: f[:2], taps)
    with pytest.raises(ValueError, match=r"must be \(4, 6, 6\): got \(2, 6, 6\)"):
        tx.update(params, state, taps=small, loss_terms=1)
    half = {**params, "stages": jax.tree.map(lambda p: p[:2], params["stages"])}
    with pytest.raises(ConfigError, match=r"4 layers here: got .*2.*pass axis_name"):
        tx.update(half, tx.init(half), taps=small, loss_terms=1)
    with pytest.raises(ConfigError, match="sum_replicas needs axis_name"):
        transform(FRESH, sum_replicas=lambda rows: rows)
    with pytest.raises(ConfigError, match="damping"):
        kfac.scale_by_pipefisher(kfac.stage_plan(PLAN, 4), FRESH, damping=0.0)
    with pytest.raises(ValueError, match="no state of K-FAC"):
        kfac.statistics_due(optax.sgd(0.1).init(params))
    bare = kfac.scale_by_pipefisher(kfac.stage_plan(PLAN, 4), FRESH)
    with pytest.raises(ConfigError, match="head"):
        bare.init(params)


@pytest.mark.parametrize("axis", ["axis_name", "data_axis"])
def test_axes_that_are_not_there_and_stacks_that_are_not_split_are_told(axis):
    tx, params = transform(FRESH, **{axis: "stage"}), pipelines.params(4)
    state, taps = tx.init(params), factors(np.random.default_rng(0))

    def run():
        return tx.update(params, state, taps=taps, loss_terms=1)[0]

    told = r"PipeFisher's update communicates over the mesh axes \('stage',\)"
    with pytest.raises(ConfigError, match=told):
        run()

    def inside(name):
        mesh = sharding.make_mesh({name: 2})
        return jax.shard_map(
            run, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False
        )

    with pytest.raises(ConfigError, match=r"not among the axes here, \['data'\]"):
        jax.eval_shape(inside("data"))
    if axis == "axis_name":
        with pytest.raises(
            ConfigError, match=r"2 layers here: .*sharding\.stage_specs"
        ):
            jax.eval_shape(inside("stage"))


def test_steps_that_take_no_statistics_need_none():
    rng, params = np.random.default_rng(0), pipelines.params(4)
    late = {0: [f for f in FRESH[0] if f[2] == "A"]}
    late[1] = [f for f in FRESH[0] if f[2] == "B"]
    tx, given = transform(late), {"taps": factors(rng), "loss_terms": 1}
    update = jax.jit(tx.update)
    _, state = update(params, tx.init(params), **given)
    assert not bool(kfac.statistics_due(state))
    expected = update(params, state, taps=factors(rng), loss_terms=1)
    found = update(params, state, taps={"stages": {}})
    chex.assert_trees_all_equal(found, expected)
    # The next step begins a refresh: to leave statistics out there is counted.
    _, state = found
    _, late = update(params, state, taps={"stages": {}})
    chex.assert_trees_all_equal(late[0].curvature, state[0].curvature)
    counts = [leaf.tolist() for leaf in jax.tree.leaves(late[0].skipped)]
    assert counts == [[1] * 4] * len(counts)
    # Where there never were any, the inverses are those of identities.
    _, first = update(params, tx.init(params), taps={"stages": {}})
    for inverse in jax.tree.leaves(first[0].inverses):
        expected = np.broadcast_to(np.eye(inverse.shape[-1]), inverse.shape)
        np.testing.assert_allclose(inverse, expected / (1 + DAMPING), rtol=1e-6)


@pytest.mark.slow
def test_the_documented_example_trains(capsys):
    names = guides.run("pipelines.md")
    assert names["filled"].period == 2
    assert names["losses"][-1] < names["losses"][0] / 2
    assert "with K-FAC" in capsys.readouterr().out
