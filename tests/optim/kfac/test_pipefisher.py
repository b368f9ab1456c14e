"""Late inverses: on one device, in pipelines, in numpy, and against plain K-FAC."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import perf, sharding
from hpcjax.optim import kfac
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
    layers = [[perf.Layer(block.a, block.g) for block in PLAN.blocks]] * 4
    costs = perf.KfacCosts(t_curv=3.0, t_inv=20.0)
    line = perf.simulate(schedule, perf.StageCosts(t_f=4.0, t_b=8.0))
    tasks = perf.kfac_tasks(schedule, layers, costs)
    return perf.assign(line, tasks, gate="layer", panel=1.0)


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


def observed(params, batch, dtype, micro_batches=4):
    """Loss, gradients and averaged statistics, one micro-batch after another."""
    x = jax.ShapeDtypeStruct((1, pipelines.WIDTH), dtype)
    one = jax.tree.map(lambda leaf: leaf[0], params["stages"])
    taps = kfac.make_taps(PLAN, pipelines.stage_model(dtype), one, {}, x)
    taps = jax.tree.map(lambda slot: jnp.zeros((4, *slot.shape), slot.dtype), taps)
    value, (grads, taps) = pipelines.accumulated(
        pipelines.functions(dtype), params, batch, micro_batches, taps
    )
    return value, grads, {"stages": kfac.statistics_of(taps)}


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
        active = kfac.curvature_due(state)
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

    return oracle.train(
        pipelines.params(4, "float64"),
        [pipelines.batch(number, "float64") for number in range(STEPS)],
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


@pytest.mark.acceptance("pipefisher", 6)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pipeline_trains_as_one_device_does(name):
    expected = emulated("float32", name)
    start = pipelines.params(4)
    assert pipelines.distance(start, expected) > 0.05
    assert pipelines.distance(in_pipeline("float32", name)[0], expected) < 1e-5
    # Old inverses are another method, not a rounding error.
    assert pipelines.distance(expected, emulated("float32", None)) > 1e-3


@pytest.mark.acceptance("pipefisher", 6)
@pytest.mark.parametrize("name", ["one_f_one_b", "chimera"])
def test_in_float64_it_is_equal_to_ten_digits(name):
    with jax.enable_x64(True):
        expected = emulated("float64", name)
        found = in_pipeline("float64", name)[0]
        assert jax.tree.leaves(found)[0].dtype == jnp.float64
        assert pipelines.distance(found, expected) < 1e-10


@pytest.mark.acceptance("pipefisher", 6)
@pytest.mark.parametrize("name", [None, "one_f_one_b", "chimera"])
def test_one_device_trains_as_numpy_does(name):
    with jax.enable_x64(True):
        found = emulated("float64", name)
        assert pipelines.distance(found, in_numpy(name)) < 1e-10


@pytest.mark.acceptance("pipefisher", 8)
def test_replicas_of_a_stage_hold_the_same_weights_after_every_step():
    parts = sharding.stage_rows(SCHEDULES["chimera"])
    _, history = in_pipeline("float32", "chimera")
    assert len(history) == STEPS
    for rows in history:
        for leaf in jax.tree.leaves(rows):
            for stage in range(4):
                own = [leaf[i] for i, part in enumerate(parts) if part.stage == stage]
                assert len(own) == 2
                np.testing.assert_array_equal(*own)
