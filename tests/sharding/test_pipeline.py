"""Schedules as they run: against accumulation without a pipeline, and their bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import perf, sharding
from hpcjax.core.errors import ConfigError
from hpcjax.optim import kfac
from hpcjax.sharding import schedules
from tests.sharding import pipelines

SCHEDULES = {
    "gpipe": sharding.gpipe(4, 4),
    "one_f_one_b": sharding.one_f_one_b(4, 8),
    "zero_bubble_h1": sharding.zero_bubble_h1(4, 4),
    "interleaved": sharding.interleaved(8, 4, 2),
    "chimera": sharding.chimera(4, 8),
    "chimera on two": sharding.chimera(2, 2),
    "one device": sharding.interleaved(3, 2, 3),
}
# Every program once: what holds to ten digits needs no second look at five.
DTYPES = dict.fromkeys(SCHEDULES, "float64")
DTYPES |= {"chimera on two": "float32", "one device": "float32"}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@functools.cache
def compiled(name):
    """The program of a step, and parameters and batch to call it with."""
    schedule, dtype = SCHEDULES[name], DTYPES[name]
    with jax.enable_x64(dtype == "float64"):
        params = pipelines.spread(schedule, pipelines.params(schedule.stages, dtype))
        mesh = sharding.make_mesh({"stage": schedule.devices})
        inputs = params, pipelines.batch(0, dtype)
        inputs = jax.device_put(inputs, sharding.stage_shardings(inputs, mesh))
        run = pipelines.step(schedule, pipelines.functions(dtype))
        return run.lower(*inputs).compile(), inputs


@pytest.mark.quick("zero_bubble_h1")
@pytest.mark.acceptance("pipefisher", 7)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_gradients_of_accumulation(name):
    schedule, dtype = SCHEDULES[name], DTYPES[name]
    program, inputs = compiled(name)
    with jax.enable_x64(dtype == "float64"):
        batch = pipelines.batch(0, dtype)
        params = pipelines.params(schedule.stages, dtype)
        found = program(*inputs)
        value, (grads, _) = pipelines.accumulated(
            pipelines.functions(dtype), params, batch, schedule.micro_batches
        )
    assert found.value.dtype == dtype
    assert pipelines.distance(found.value, value) < TOLERANCE[dtype]
    own = pipelines.collect(schedule, found.grads)
    for part in grads:
        assert pipelines.distance(own[part], grads[part]) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "check_vma"),
    [
        ("one_f_one_b", None, True),
        ("one_f_one_b", 2, True),
        ("zero_bubble_h1", 2, True),
        ("chimera", 2, False),
    ],
)
def test_gradients_and_statistics_are_those_of_the_whole_batch(name, data, check_vma):
    """A and G of every layer, as one pass over all rows at once forms them."""
    schedule = getattr(sharding, name)(4, 4)
    functions, params = pipelines.functions(), pipelines.params(4)
    one = jax.tree.map(lambda leaf: leaf[0], params["stages"])
    model = pipelines.stage_model()
    x = jax.ShapeDtypeStruct((1, pipelines.WIDTH), jnp.float32)
    taps = kfac.make_taps(kfac.plan(model), model, one, {}, x)
    run = pipelines.step(schedule, functions, data=data, check_vma=check_vma, taps=taps)
    found = run(pipelines.spread(schedule, params), pipelines.batch())
    rows = jax.tree.map(lambda t: jnp.stack([t] * 4), taps)
    value, (grads, expected) = pipelines.accumulated(
        functions, params, pipelines.batch(), 1, rows
    )
    assert pipelines.distance(found.value, value) < 1e-5
    assert pipelines.distance(pipelines.collect(schedule, found.grads), grads) < 1e-5
    parts = [part.stage for part in sharding.stage_rows(schedule)]
    for path, tap in found.taps.items():
        for side, rows in tap.slot.items():
            for row, stage in zip(rows, parts, strict=True):
                np.testing.assert_allclose(
                    row, expected[path].slot[side][stage], rtol=1e-4, atol=1e-7
                )


def mapped(schedule, functions, params, **options):
    """The step inside `shard_map`, on four devices or one."""
    specs, P = sharding.stage_specs(params), jax.sharding.PartitionSpec
    return jax.shard_map(
        sharding.pipelined_value_and_grad(schedule, functions, **options),
        mesh=sharding.make_mesh({"stage": 1 if schedule.devices == 1 else 4}),
        in_specs=(specs, P()),
        out_specs=sharding.Pipelined(P(), specs, None),
    )


def test_what_is_of_low_precision_is_summed_in_full():
    functions = sharding.StageFunctions(
        first=lambda params, visit: visit.batch * params["scale"],
        stage=lambda w, x, visit: x * w,
        last=lambda params, x, visit: x.mean(),
    )
    # In bfloat16, where 1/2 + 1/512 is 1/2, every sum would end at 1/2.
    one = jnp.ones((), jnp.bfloat16)
    params = {"scale": one, "stages": one[None]}
    run = mapped(sharding.one_f_one_b(1, 512), functions, params)
    found = jax.jit(run)(params, jnp.ones(512, jnp.bfloat16))
    assert found.value == 1
    assert jax.tree.leaves(found.grads) == [one, one[None]]


@pytest.mark.slow
def test_a_stage_knows_where_it_is_and_passes_on_a_tree():
    """Dropout by keys of the batch, and a second stream beside the first."""

    def noise(visit):
        key = jax.random.wrap_key_data(visit.batch["key"][0])
        key = jax.random.fold_in(key, visit.stage)
        return jax.random.bernoulli(key, 0.5, (pipelines.WIDTH,))

    plain = pipelines.functions()

    def stage(params, x, visit):
        scale = 1 + 0.1 * visit.micro_batch + 0.01 * visit.stage
        y = plain.stage(params, x["x"], visit) * noise(visit) * scale
        return {"x": y, "mask": x["mask"] + y.mean()}

    functions = dataclasses.replace(
        plain,
        first=lambda params, visit: {
            "x": plain.first(params, visit), "mask": jnp.zeros(())
        },
        stage=stage,
        last=lambda params, x, visit: plain.last(params, x["x"], visit) + x["mask"],
    )  # fmt: skip
    schedule, params = sharding.chimera(4, 4), pipelines.params(4)
    batch = pipelines.batch()
    keys = jax.random.split(jax.random.key(0), pipelines.ROWS)
    batch["key"] = jax.random.key_data(keys)
    found = pipelines.step(schedule, functions)(
        pipelines.spread(schedule, params), batch
    )
    expected = pipelines.accumulated(functions, params, batch, 4)
    own = found.value, (pipelines.collect(schedule, found.grads), None)
    assert pipelines.distance(own, expected) < 1e-5
    other = pipelines.accumulated(plain, params, batch, 4)
    assert pipelines.distance(expected, other) > 0.1


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_moves_one_activation_between_neighbours_at_every_tick(name):
    schedule, (program, _) = SCHEDULES[name], compiled(name)
    always, sometimes = perf.collectives_by_branch(program)
    assert not sometimes
    assert all(each.bounded for each in always)
    stages, count, devices = schedule.stages, schedule.micro_batches, schedule.devices
    ticks = sharding.tick_table(schedule).op.shape[1]
    if name in ("gpipe", "one_f_one_b"):
        assert ticks == 2 * (count + stages - 1)
    size = np.dtype(DTYPES[name]).itemsize
    activation = size * pipelines.WIDTH * pipelines.ROWS // count
    # Both ways along the line of devices; chunks also pass from its end to its begin.
    pairs = 2 * devices if name.startswith("interleaved") else 2 * (devices - 1)
    # Two devices are each other's neighbour below and above: one exchange is both.
    pairs = {1: 0, 2: 2}.get(devices, pairs)
    moved = [each for each in always if each.kind == "collective-permute"]
    in_ticks = [each for each in moved if each.times == ticks]
    assert sum(each.pair_bytes for each in in_ticks) == ticks * activation * pairs
    # After the ticks: gradients of replicas, those of the ends, the loss.
    parameters = size * (4 * 5 + 5 + 5 * 4 + 4)
    rest = sum(each.pair_bytes for each in moved) - ticks * activation * pairs
    assert rest == (2 * stages * parameters if schedule.replicas == 2 else 0)
    reduced = sum(each.total for each in always if each.kind == "all-reduce")
    assert reduced == size * (6 * 4 + 4 * 3 + 1)
    assert {each.kind for each in always} <= {"collective-permute", "all-reduce"}


def test_rows_are_the_parts_of_the_devices_in_order():
    stages = jnp.arange(4.0)
    schedule = sharding.interleaved(4, 4, 2)
    rows = sharding.spread_stages(schedule, stages)
    assert rows.tolist() == [0, 2, 1, 3]
    assert sharding.collect_stages(schedule, rows).tolist() == stages.tolist()
    rows = sharding.spread_stages(sharding.chimera(4, 4), stages)
    assert rows.tolist() == [0, 3, 1, 2, 2, 1, 3, 0]
    back = sharding.collect_stages(sharding.chimera(4, 4), rows)
    assert back.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [3, 5])
def test_another_number_of_stages_is_refused(count):
    with pytest.raises(ConfigError, match=rf"schedule's 4 stages.*\[\({count},\)\]"):
        sharding.spread_stages(sharding.gpipe(4, 4), {"kernel": jnp.ones((count, 2))})
    with pytest.raises(ConfigError, match=rf"schedule's 8 rows.*\[\({count},\)\]"):
        sharding.collect_stages(sharding.chimera(4, 4), jnp.ones(count))
    with pytest.raises(ConfigError, match=r"\[\(\)\]"):
        sharding.spread_stages(sharding.gpipe(4, 4), 1.0)


def test_what_cannot_be_one_program_is_refused():
    uneven = schedules.Schedule(
        name="uneven",
        micro_batches=1,
        holders=((0, 1, 1),),
        orders=(
            (schedules.Op(0, "F", 0, 0), schedules.Op(0, "B", 0, 0)),
            tuple(
                schedules.Op(1, kind, stage, 0)
                for kind, stage in (("F", 1), ("F", 2), ("B", 2), ("B", 1))
            ),
        ),
    )
    with pytest.raises(ConfigError, match=r"equally many stages.*\[1, 2\]"):
        sharding.pipelined_value_and_grad(uneven, pipelines.functions())


ROWS = r"micro_batches must divide the rows.*got 4, leaves with "
SCALAR = "last must return a floating-point scalar: got "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": {"x": (6, 6)}}, ROWS + r"\[\(6,\)\]"),
        ({"batch": {"x": (0, 6)}}, ROWS + r"\[\(0,\)\]"),
        ({"batch": {"x": (4, 6), "t": ()}}, ROWS + r"\[\(\), \(4,\)\]"),
        ({"batch": {"x": (4, 6), "y": (8,)}}, ROWS + r"\[\(4,\), \(8,\)\]"),
        ({"stages": 2}, r"need 1 rows on each device.*stage_rows"),
        ({"stage": lambda p, x, visit: x[:1]}, "output must be like its input"),
        ({"first": lambda p, visit: visit.batch["y"]}, "floating-point arrays"),
        ({"last": lambda p, x, visit: x[0]}, SCALAR + r"float32 of shape \(4,\)"),
        ({"last": lambda p, x, visit: x.sum().astype(int)}, SCALAR + "int32 of"),
        ({"last": lambda p, x, visit: (x.mean(), 1)}, SCALAR + r"\(.*, 1\)"),
        ({"last": lambda p, x, visit: 1.5}, SCALAR + "1.5"),
        ({"devices": 2}, "needs 2 devices along axis 'stage': got 4"),
        ({"axis_name": "pipe"}, r"shard_map .*got 'pipe', .*\('stage',\)"),
        ({"data_axis": "data"}, r"shard_map .*got 'data', .*\('stage',\)"),
    ],
)
def test_wrong_use_is_told(change, message):
    change = dict(change)
    stages, wanted = change.pop("stages", 1), change.pop("devices", 4)
    batch = change.pop("batch", {"x": (16, pipelines.INPUTS), "y": (16,)})
    like = {"x": jnp.float32, "y": jnp.int32, "t": jnp.float32}
    batch = {name: jnp.zeros(shape, like[name]) for name, shape in batch.items()}
    options = {
        name: change.pop(name) for name in ("axis_name", "data_axis") if name in change
    }
    if "first" in change:
        change["stage"] = lambda p, x, visit: x
        change["last"] = lambda p, x, visit: x.mean()
    functions = dataclasses.replace(pipelines.functions(), **change)
    params = pipelines.params(4 * stages)
    run = mapped(sharding.gpipe(wanted, 4), functions, params, **options)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(run, params, batch)
