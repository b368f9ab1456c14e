"""A model spread over devices, in the loop: its numbers, its bytes, its checkpoints."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import core, data, models, optim, perf, sharding, train
from hpcjax.core import ConfigError, trees
from hpcjax.models import CausalLmConfig
from hpcjax.sharding import ZeroConfig
from hpcjax.train.step import list_guarded
from tests import guides
from tests.train import hlo_order

MODEL = CausalLmConfig(depth=2, width=32, heads=2)
TOKENS, CONTEXT, ROWS = 16, 4, 8
# With a large ε, for the keys' biases have no gradient but rounding.
ADAM = optim.AdamWConfig(lr=1e-2, eps=1e-3)
STAGES = (None, 1, 2, 3)


@functools.cache
def task(stage, devices=8, model=MODEL):
    dataset = data.noise_tokens(4 * ROWS, CONTEXT, TOKENS)
    made = model.make((CONTEXT,), TOKENS)
    parallel = stage and ZeroConfig(stage=stage, stacked=model.stacks)
    method = train.compose(
        made,
        dataset,
        ADAM,
        parallel=parallel,
        batch_size=ROWS,
        steps=4,
        devices=devices,
    )
    return train.supervised(made, method, dataset)


@functools.cache
def program(stage, devices=8, model=MODEL):
    made = task(stage, devices, model)
    mesh = made.mesh(devices)
    state = train.state_shapes(made, mesh)
    batch = train.batch_shapes(made, ROWS, mesh)
    return train.train_step(made, mesh, state).lower(state, batch).compile()


def batch(number, mesh):
    rows = task(None).dataset.train.gather(np.arange(ROWS) + ROWS * number)
    return sharding.place_batch(rows, mesh)


@functools.cache
def begin():
    """The numbers before the first step, of a loop in which nothing is cut."""
    made = task(None)
    return numbers(train.init_state(made, 0, made.mesh(8)))


@functools.cache
def trained(stage, steps=2):
    """The numbers after a few steps on eight devices, and their losses."""
    made, losses = task(stage), []
    mesh = made.mesh(8)
    state = place(begin(), train.state_shapes(made, mesh))
    for number in range(steps):
        state, metrics = program(stage)(state, batch(number, mesh))
        losses.append(float(metrics["loss"]))
    return numbers(state), losses


def numbers(state):
    return jax.device_get(
        dataclasses.replace(state, key=jax.random.key_data(state.key))
    )


def place(saved, like):
    keyed = dataclasses.replace(saved, key=jax.random.wrap_key_data(saved.key))
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), keyed, like)


@functools.cache
def sizes():
    """Elements of all parameters, and of those gathered again by layers of stacks.

    The backward pass needs no biases, but all else.
    """
    flat = trees.flatten(jax.eval_shape(task(None).model.init, jax.random.key(0))[0])
    again = [p for p in flat if p.startswith("blocks/") and not p.endswith("bias")]
    return sum(x.size for x in flat.values()), sum(flat[p].size for p in again)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_every_stage_trains_as_data_parallelism_does(stage):
    ours, theirs = trained(stage), trained(None)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
    for path, leaf in trees.flatten(theirs[0].params).items():
        apart = np.linalg.norm(trees.flatten(ours[0].params)[path] - leaf)
        assert apart <= 1e-5 * np.linalg.norm(leaf) + 1e-6 * np.sqrt(leaf.size), path


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.acceptance("how-to-train", 2)
def test_arguments_are_those_of_the_formula(stage):
    held = {None: 3, 1: 1 + 2 / 8, 2: 3 / 8, 3: 3 / 8}[stage]
    batch = 2 * 4 * CONTEXT * ROWS // 8
    measured = perf.argument_memory(program(stage)) - batch
    assert measured / (4 * sizes()[0]) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.acceptance("how-to-train", 3)
def test_a_step_sends_what_the_formula_says_and_nothing_else(stage):
    made, (all_of, again) = task(stage), sizes()
    mesh = made.mesh(8)
    counts = 4 * len(list_guarded(train.state_shapes(made, mesh)))
    means = 4 * 2  # loss and error
    gathered = {None: 0, 1: all_of, 2: all_of, 3: all_of + again}[stage]
    expected = {"all-reduce": counts + means}
    if stage:
        expected |= {"reduce-scatter": 4 * all_of, "all-gather": 4 * gathered // 8}
    else:
        expected["all-reduce"] += 4 * all_of
    assert perf.bytes_by_axis(program(stage), mesh) == {
        (("data",), kind): sent for kind, sent in expected.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_all_devices_take_collectives_in_one_order(stage):
    # Those of stage 2 and 3 are in loops, which others must not overtake.
    assert not hlo_order.swappable(program(stage).as_text())


def test_stage_3_keeps_no_whole_copy():
    kept = {stage: perf.temporary_memory(program(stage)) for stage in (1, 2, 3)}
    whole = 4 * sizes()[0]
    assert kept[3] < kept[2] - 0.7 * whole
    assert kept[3] < kept[1] - 0.7 * whole


def test_a_checkpoint_goes_on_under_any_other_layout(tmp_path):
    ways = ((None, 8), (1, 8), (3, 4), (None, 1), (3, 8))
    saved, losses = trained(3)[0], []
    made = task(3)
    state = place(saved, train.state_shapes(made, made.mesh(8)))
    for step, (stage, devices) in enumerate(ways):
        made = task(stage, devices)
        mesh = made.mesh(devices)
        with train.Checkpoints(tmp_path / str(step)) as checkpoints:
            checkpoints.save(step, state, {})
            like = train.state_shapes(made, mesh)
            state = checkpoints.restore(like, mesh=mesh).state
        chex.assert_trees_all_equal(numbers(state), saved)
        places = jax.tree.map(lambda leaf: leaf.sharding, (state, like))
        assert places[0] == places[1]
        if devices == 8:
            given = place(saved, like)  # the step donates it
            _, metrics = program(stage)(given, batch(2, mesh))
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.faults(10)
def test_a_number_that_one_device_alone_holds_stops_the_step_on_all():
    made = task(3)
    mesh = made.mesh(8)
    state = place(begin(), train.state_shapes(made, mesh))

    def spoil(path, leaf):
        if not path.endswith("mu/blocks/mlp/up/kernel"):
            return leaf
        # m̂ / (√v̂ + ε) overflows, in the columns of one device.
        return jax.device_put(leaf.at[0, 0, -1].set(3e38), leaf.sharding)

    flat = trees.flatten(state.opt_state)
    spoiled = {path: spoil(path, leaf) for path, leaf in flat.items()}
    state = dataclasses.replace(
        state, opt_state=trees.unflatten(state.opt_state, spoiled)
    )
    before = numbers(state)
    names = list_guarded(state)
    state, metrics = program(3)(state, batch(0, mesh))
    counts = dict(zip(names, np.asarray(metrics["nonfinite"]), strict=True))
    assert {name: n for name, n in counts.items() if n} == {
        "params blocks/mlp/up/kernel": 1
    }
    chex.assert_trees_all_equal(numbers(state).params, before.params)
    chex.assert_trees_all_equal(numbers(state).opt_state, before.opt_state)
    assert int(state.skipped) == 1


def test_validation_scores_the_parts_as_the_whole():
    scores = []
    for stage in (3, None):
        made = task(stage)
        mesh = made.mesh(8)
        state = place(begin(), train.state_shapes(made, mesh))
        rows = made.dataset.train.gather(np.arange(ROWS))
        placed = sharding.place_batch({**rows, "weight": np.ones(ROWS, "f4")}, mesh)
        score = train.eval_step(made, mesh)
        given = state.params, state.model_state, placed
        assert not hlo_order.swappable(score.lower(*given).compile().as_text())
        totals = score(*given)
        scores.append(float(totals.means()["loss"]))
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_parameters_that_no_device_count_divides_are_whole_and_counted():
    shapes = {
        "blocks": {"kernel": jax.ShapeDtypeStruct((8, 3, 16), "float32")},
        "empty": jax.ShapeDtypeStruct((0, 8), "float32"),
        "odd": jax.ShapeDtypeStruct((3, 5), "float32"),
        "square": jax.ShapeDtypeStruct((8, 8), "float32"),
        "scalar": jax.ShapeDtypeStruct((), "float32"),
    }
    init = lambda key: (jax.tree.map(lambda s: jnp.zeros(s.shape), shapes), {})  # noqa: E731
    spread = sharding.spread_state(core.Model(init, None), 8, 2, ("^blocks/",))
    assert spread.held == {"blocks/kernel": P(None, None, "data"), "square": P("data")}
    assert spread.facts == {"replicated": 3}
    with pytest.raises(ConfigError, match="spread over 8 devices: got devices=4"):
        spread.mesh_shape(4)


@pytest.mark.quick("3")
@pytest.mark.parametrize("stage", STAGES[1:])
def test_passes_of_a_weighted_batch_add_up_to_one_device_s(stage):
    rows = task(None).dataset.train.gather(np.arange(2 * ROWS))
    weight = np.arange(2 * ROWS, dtype=np.float32) // 4 % 3  # none on the first device
    batch = {**rows, "weight": weight}

    def step(made, devices, passes):
        mesh = made.mesh(devices)
        config = train.TrainConfig(batch_size=2 * ROWS, accumulate=passes)
        made = train.accumulating(made, config, mesh)
        like, placed = train.state_shapes(made, mesh), sharding.place_batch(batch, mesh)
        state = place(begin(), like)
        program = train.train_step(made, mesh, state).lower(state, placed).compile()
        assert not hlo_order.swappable(program.as_text())
        state, metrics = program(state, placed)
        return state.params, metrics["loss"]

    found, wanted = step(task(stage, 4), 4, 2), step(task(None, 1), 1, 1)
    chex.assert_trees_all_close(
        *map(jax.device_get, (found, wanted)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_recomputed_changes_nothing_of_what_is_gathered(stage, compute, remat):
    model = dataclasses.replace(MODEL, remat=remat)
    dataset = data.noise_tokens(ROWS, CONTEXT, TOKENS)
    made = model.make((CONTEXT,), TOKENS, core.Policy(compute=compute))
    method = train.compose(
        made,
        dataset,
        ADAM,
        parallel=ZeroConfig(stage=stage, stacked=model.stacks),
        batch_size=ROWS,
        steps=4,
        devices=8,
    )
    made = train.supervised(made, method, dataset)
    mesh = made.mesh(8)
    state = train.state_shapes(made, mesh)
    shapes = train.batch_shapes(made, ROWS, mesh)
    step = train.train_step(made, mesh, state).lower(state, shapes).compile()
    assert not hlo_order.swappable(step.as_text())
    all_of, again = sizes()
    sent = perf.bytes_by_axis(step, mesh)[("data",), "all-gather"] * 8 / 4
    least = all_of if stage == 2 else all_of + 0.9 * again
    assert least <= sent <= (all_of if stage == 2 else 2 * all_of)


@pytest.mark.slow
@pytest.mark.acceptance("how-to-train", 9)
def test_the_largest_model_is_deeper_at_stage_3():
    def deepen(stage, depth):
        return program(stage, 8, dataclasses.replace(MODEL, depth=depth))

    memory = 2**20
    depths = {
        stage: perf.largest_model(functools.partial(deepen, stage), memory)
        for stage in (None, 3)
    }
    assert depths[3] >= 3 * depths[None]
    assert perf.peak_memory(deepen(3, depths[3])) <= memory
    assert perf.peak_memory(deepen(3, depths[3] + 1)) > memory


@pytest.mark.slow
def test_a_network_of_flax_layers_and_one_without_stacks_train_at_every_stage():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(TOKENS, 16, rngs=rngs)
            self.inner = nnx.Linear(16, 24, rngs=rngs)
            self.outer = nnx.Linear(24, TOKENS, rngs=rngs)

        def __call__(self, x, *, train, key):
            return self.outer(nnx.relu(self.inner(self.table(x))))

    model = models.from_nnx(Net)
    dataset = data.noise_tokens(ROWS, CONTEXT, TOKENS)
    ends = []
    for stage, devices in ((None, 1), (1, 8), (2, 8), (3, 8)):
        parallel = stage and ZeroConfig(stage=stage)
        method = train.compose(
            model,
            dataset,
            optim.SgdConfig(lr=0.5),
            parallel=parallel,
            batch_size=ROWS,
            steps=3,
            devices=devices,
        )
        made = train.supervised(model, method, dataset)
        mesh = made.mesh(devices)
        state = train.init_state(made, 0, mesh)
        step = train.train_step(made, mesh, state)
        for _ in range(3):
            state, _ = step(state, batch_of(dataset, mesh))
        ends.append(jax.device_get(state.params))
    for end in ends[1:]:
        chex.assert_trees_all_close(end, ends[0], atol=1e-6)


def batch_of(dataset, mesh):
    return sharding.place_batch(dataset.train.gather(np.arange(ROWS)), mesh)


def test_the_guide_runs():
    names = guides.run("parallel.md")
    assert names["cut"] == {"kernel": P(None, "data")}
    parts = {
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(names["state"])
        if leaf.shape == (8, 16)
    }
    assert parts == {(8, 2)}
    assert 10 < names["deepest"] < 256
