import functools

import chex
import jax
import numpy as np
import optax
import pytest

from hpcjax import optim, perf, sharding, train
from hpcjax.collectives import DenseConfig
from hpcjax.core import ConfigError, trees
from hpcjax.models import MlpConfig, ResNetConfig
from hpcjax.optim import kfac
from tests.train import tiny

CONFIGS = {"mlp": MlpConfig(widths=(8, 7)), "cnn": ResNetConfig(depth=8, width=2)}


class Images(tiny.Points):
    """The points as images of 8×8."""

    def __init__(self, count=96, seed=0):
        super().__init__(count, seed)
        self.inputs = np.repeat(self.inputs, 16, axis=1).reshape(-1, 8, 8, 1)


@functools.cache
def made(name):
    dataset = tiny.dataset()._replace(train=Images(), inputs=(8, 8, 1))
    model = CONFIGS[name].make(dataset.inputs, dataset.outputs)
    x = jax.ShapeDtypeStruct((4, 8, 8, 1), "float32")
    layers = optim.layers_of_model(model, x)
    return dataset, model, layers


def state_of(model):
    return model.init(jax.random.key(0))[1]


def backward_of(name, k, **options):
    layers = made(name)[2]
    cuts = optim.partition([1.0] * len(layers), k)
    return optim.PartialBackward(blocks=optim.cut_layers(layers, cuts), **options)


def method_of(backward):
    if backward is None:
        return optim.data_parallel(optax.sgd(0.1, 0.9))
    return optim.data_parallel(
        optax.sgd(0.1, 0.9),
        mean=functools.partial(optim.contributor_mean, backward),
        gradients=optim.gradients_of_roles(backward),
    )


def step_of(name, backward, devices):
    """Returns the step, its first state, the mesh and a batch."""
    dataset, model, _ = made(name)
    task = train.supervised(model, method_of(backward), dataset)
    mesh = sharding.data_mesh(devices)
    state = train.init_state(task, 0, mesh)
    batch = dataset.train.gather(np.arange(32))
    return train.train_step(task, mesh, state), state, mesh, batch


def run(name, backward, devices=4, steps=2, spoil=None):
    step, state, mesh, batch = step_of(name, backward, devices)
    for number in range(steps):
        given = {name: rows.copy() for name, rows in batch.items()}
        if number == spoil:
            given["x"][0] = np.inf
        state, metrics = step(state, sharding.place_batch(given, mesh))
    return state, metrics


def trained(state):
    return jax.device_get((state.params, state.model_state, state.opt_state))


@pytest.mark.quick("contributors-mlp")
@pytest.mark.acceptance("spb-jigsaw", 2)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", ["zeros", "contributors"])
def test_one_block_is_ordinary_data_parallelism(name, mode):
    ordinary, metrics = run(name, None)
    state, same = run(name, backward_of(name, 1, mode=mode))
    chex.assert_trees_all_equal(state.params, ordinary.params)
    chex.assert_trees_all_equal(state.model_state, ordinary.model_state)
    chex.assert_trees_all_equal(same, metrics)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zeros", "contributors"])
def test_replicas_stay_the_same_and_so_do_both_modes(mode):
    state, _ = run("cnn", backward_of("cnn", 4, mode=mode), steps=4)
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.model_state)):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first)
    zeros, _ = run("cnn", backward_of("cnn", 4, mode="zeros"), steps=4)
    chex.assert_trees_all_close(trained(state)[0], trained(zeros)[0], atol=1e-5)


@pytest.mark.slow
def test_workers_of_one_device_are_as_good_as_devices():
    backward = backward_of("cnn", 4, mode="zeros")
    many, metrics = run("cnn", backward, devices=4, steps=3)
    for devices, workers in ((1, 4), (2, 2)):
        backward = backward_of("cnn", 4, mode="zeros", workers=workers)
        few, others = run("cnn", backward, devices=devices, steps=3)
        chex.assert_trees_all_close(trained(few), trained(many), atol=1e-6)
        np.testing.assert_allclose(others["loss"], metrics["loss"], rtol=1e-5)


@pytest.mark.quick("4-1")
@pytest.mark.parametrize(("devices", "workers"), [(4, 1), (1, 4)])
def test_a_worker_runs_the_program_of_its_role_alone(devices, workers):
    """Not all of them, of which it then takes one."""
    backward = backward_of("mlp", 2, mode="zeros", workers=workers)
    step, state, mesh, batch = step_of("mlp", backward, devices)
    compiled = step.lower(state, sharding.place_batch(batch, mesh)).compile()
    assert perf.count_ops(compiled, "conditional") == 1
    # Three products forward; role 1 goes back through two layers, role 2 through three.
    assert [len(paths) // 2 for paths in backward.blocks.paths] == [1, 2]
    assert perf.count_ops(compiled, "dot") == (3 + 3) + (3 + 5)


@pytest.mark.slow
def test_layers_below_the_cut_are_in_training_mode_in_every_worker():
    full, _ = run("cnn", None, steps=1)
    partly, _ = run("cnn", backward_of("cnn", 4), steps=1)
    start = state_of(made("cnn")[1])
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), full.model_state, start)
    assert min(jax.tree.leaves(moved)) > 0
    # Statistics are of the forward pass: those of all workers count.
    chex.assert_trees_all_close(partly.model_state, full.model_state, rtol=1e-6)


@pytest.mark.slow
def test_dense_steps_are_ordinary_ones():
    full, _ = run("cnn", None)
    dense = [run("cnn", backward_of("cnn", 4, dense_steps=n))[0] for n in (2, 1)]
    chex.assert_trees_all_close(dense[0].params, full.params, atol=1e-6)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(dense[1].params, full.params, atol=1e-4)


@pytest.mark.slow
def test_a_step_that_is_left_out_moves_the_roles_on_for_all():
    """The second step, the only one that is taken, is one with the roles of step 1."""
    state, _ = run("mlp", backward_of("mlp", 2), steps=2, spoil=0)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    start, _ = run("mlp", backward_of("mlp", 2), steps=1, spoil=0)
    dataset, model, _ = made("mlp")
    blocks, batch = backward_of("mlp", 2).blocks, dataset.train.gather(np.arange(32))

    def loss(params, part):
        logits, _ = model.apply(params, {}, part["x"], train=True)
        rows = np.arange(len(part["y"]))
        return -jax.nn.log_softmax(logits)[rows, part["y"]].mean()

    parts = [{k: v[8 * w : 8 * w + 8] for k, v in batch.items()} for w in (0, 2)]
    # Workers 0 and 2 have role 2 in step 1: the first block is theirs alone.
    wanted = [jax.grad(loss)(start.params, jax.device_put(part)) for part in parts]
    moved = jax.tree.map(lambda a, b: (a - b) / 0.1, start.params, state.params)
    for path in blocks.paths[0]:
        mean = sum(np.asarray(trees.flatten(each)[path]) for each in wanted) / 2
        np.testing.assert_allclose(trees.flatten(moved)[path], mean, atol=1e-5)


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of k: got workers=4, k=3"):
        run("mlp", backward_of("mlp", 3))
    with pytest.raises(ConfigError, match=r"divide the 32 examples.*workers=3"):
        run("mlp", backward_of("mlp", 3, mode="zeros", workers=3), devices=1)
    dataset, model, _ = made("mlp")
    backward = optim.PartialBackwardConfig(k=2, workers=2)
    for given in ({"optimizer": kfac.KfacConfig()}, {"exchange": DenseConfig()}):
        parts = {"optimizer": optim.SgdConfig(), "backward": backward, **given}
        with pytest.raises(ConfigError, match="a backward pass of its own needs"):
            train.compose(model, dataset, **parts, batch_size=32, steps=1)
