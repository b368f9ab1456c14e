"""Training on batches of several sizes, and calibrated batch norms."""

import dataclasses
import types

import jax
import numpy as np
import optax
import pytest

from hpcjax import data, models, train
from hpcjax.core import Policy, trees
from hpcjax.core.errors import ConfigError
from hpcjax.train import loop
from hpcjax.train.config import TrainConfig
from tests.train import tiny

CONFIG = data.MixedSizesConfig(
    of=data.DigitsConfig(limit=160, augment=data.CropFlipConfig(pad=1))
)
TRAIN = TrainConfig(steps=8, batch_size=16, eval_every=8, checkpoint_every=4)


RESNET = models.ResNetConfig(width=2, norm="group")
NORMED = models.ResNetConfig(width=2)


def make(config=CONFIG, model=RESNET):
    dataset = config.load()
    net = model.make(dataset.inputs, dataset.outputs, Policy())
    return train.supervised(net, optax.sgd(0.05, 0.9), dataset)


@pytest.fixture(scope="module")
def task():
    return make()


def fit(task, devices=1, directory=None, config=TRAIN, records=None):
    records = tiny.Records() if records is None else records
    options = {"seed": 0, "mesh": task.mesh(devices), "recorder": records}
    if directory is None:
        return train.fit(task, config, **options), records
    with train.Checkpoints(directory) as checkpoints:
        return train.fit(task, config, checkpoints=checkpoints, **options), records


@pytest.mark.acceptance("mixsize", 6)
def test_all_steps_are_compiled_before_the_first(task, monkeypatch, tmp_path):
    compiled = []
    step = loop.compile_step

    def count(task, mesh, state, batch):
        compiled.append(batch["x"].shape)
        return step(task, mesh, state, batch)

    monkeypatch.setattr(loop, "compile_step", count)
    longer = dataclasses.replace(TRAIN, steps=16)
    state, records = fit(task, config=longer)
    assert compiled == [(64, 4, 4, 1), (16, 8, 8, 1)]
    shapes = [r for r in records if "shapes" in r]
    assert [(r["step"], r["shapes"]) for r in shapes] == [(0, 2)]
    assert task.dataset.train.slots(16) == 80 // 64 + 80 // 16
    # A run that goes on after step 8 takes the slots that are left, to the bit.
    _, halves = fit(task, directory=tmp_path)
    again, halves = fit(task, directory=tmp_path, config=longer, records=halves)
    losses = [[r["loss"] for r in each if "loss" in r] for each in (records, halves)]
    assert losses[0] == losses[1]
    jax.tree.map(np.testing.assert_array_equal, state.params, again.params)


@pytest.mark.acceptance("mixsize", 7)
def test_eight_devices_train_as_one_on_batches_that_they_divide():
    config = dataclasses.replace(CONFIG, sizes=(6,), probs=(1.0,))  # in batches of 28
    losses = []
    for devices, multiple in ((8, 8), (1, 8)):
        made = make(config)
        train_on = made.dataset.train.aligned(multiple)
        if devices == 1:  # the same images, on one device
            train_on.aligned = lambda _, own=train_on: own
        made = made.replace(dataset=made.dataset._replace(train=train_on))
        short = dataclasses.replace(TRAIN, steps=4, eval_every=4)
        _, records = fit(made, devices, config=short)
        losses.append([r["loss"] for r in records if "loss" in r])
    assert [len(b["y"]) for b in train_on.shapes(16)] == [24]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.acceptance("mixsize", 4)
def test_the_gradient_of_copies_is_the_mean_of_each_ones():
    alone = {"sizes": (4,), "probs": (1.0,), "base_size": 4, "copies": 4}
    config = dataclasses.replace(CONFIG, mode="D+", **alone)
    made = make(config, models.MlpConfig())
    batch = made.dataset.train.sample(0, 8, 0, (0, 1))
    assert len(batch["y"]) == 32
    params, state = made.model.init(jax.random.key(0))

    @jax.jit
    def gradient(x, y):
        def loss(params):
            outputs, _ = made.model.apply(params, state, x, train=True)
            totals = made.objective(outputs, {"x": x, "y": y})
            return totals.sums["loss"] / totals.count

        return jax.grad(loss)(params)

    whole = gradient(batch["x"], batch["y"])
    parts = [gradient(batch["x"][i::4], batch["y"][i::4]) for i in range(4)]
    mean = jax.tree.map(lambda *each: sum(each) / 4, *parts)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), whole, mean
    )
    for part in parts:
        each = zip(*map(jax.tree.leaves, (whole, part)), strict=True)
        assert any(np.abs(one - other).max() > 1e-4 for one, other in each)


def activations(params, x):
    """What the first norm of a ResNet gets, in NumPy: a 3×3 convolution."""
    kernel = np.asarray(params["conv_in"]["kernel"], np.float64)
    x = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    side = x.shape[1] - 2
    return sum(
        x[:, i : i + side, j : j + side] @ kernel[i, j]
        for i in range(3)
        for j in range(3)
    )


@pytest.mark.acceptance("mixsize", 5)
@pytest.mark.parametrize("devices", [1, 2])
def test_calibrated_statistics_are_the_moments_of_activations(devices):
    made = make(model=NORMED)
    mesh = made.mesh(devices)
    state = train.init_state(made, 3, mesh)
    brighter = Brighter(made.dataset.train)
    made = made.replace(dataset=made.dataset._replace(train=brighter))
    options = {"batch_size": 16, "seed": 5}
    pooled = train.calibrate(made, state, 4, 3, **options)
    again = train.calibrate(made, state, 4, 3, **options)
    paper = train.calibrate(made, state, 4, 3, variance="paper", **options)
    stream = data.batches(brighter.at(4), 16, 5)
    rows = [activations(state.params, stream[n]["x"]) for n in range(3)]
    parts = [half for row in rows for half in np.split(row, devices)]
    every = np.concatenate(rows)
    for found, variance in (
        (pooled, every.var((0, 1, 2))),
        (paper, np.mean([part.var((0, 1, 2)) for part in parts], 0)),
    ):
        own = found.model_state["norm_in"]
        np.testing.assert_allclose(own["variance"], variance, rtol=1e-5)
        np.testing.assert_allclose(
            own["mean"], every.mean((0, 1, 2)), atol=1e-5 * variance.max()
        )
        jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    spread, mean = (each.model_state["norm_in"]["variance"] for each in (pooled, paper))
    assert (spread > 1.1 * mean).all()
    jax.tree.map(np.testing.assert_array_equal, pooled.model_state, again.model_state)
    # All norms, and each of them, have changed.
    for path, new in trees.flatten(pooled.model_state).items():
        assert not np.array_equal(new, trees.flatten(state.model_state)[path]), path


class Brighter:
    """Batches of mixed sizes that differ in brightness."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def at(self, size):
        return Brighter(self.inner.at(size))

    def sample(self, number, batch_size, seed, shard):
        batch = self.inner.sample(number, batch_size, seed, shard)
        return {**batch, "x": batch["x"] + np.float32(3 * number)}


@pytest.mark.acceptance("mixsize", 5)
def test_every_norm_has_the_moments_of_a_pass_in_training_mode():
    """Of one batch they are what momentum 0.9 makes of it, whose start is known."""
    made = make(model=NORMED)
    state = train.init_state(made, 0, made.mesh(1))
    found = train.calibrate(made, state, 8, 1, batch_size=16)
    batch = data.batches(made.dataset.train.at(8), 16, 0)[0]
    _, after = made.model.apply(state.params, state.model_state, batch["x"], train=True)
    for path, old in trees.flatten(state.model_state).items():
        own = (trees.flatten(after)[path] - 0.9 * old) / 0.1
        np.testing.assert_allclose(
            trees.flatten(found.model_state)[path], own, rtol=1e-4, atol=2e-6
        )


def test_calibration_refuses_what_it_cannot_do():
    made = make(data.MixedSizesConfig())
    state = train.init_state(made, 0, made.mesh(1))
    with pytest.raises(ConfigError, match="the model must have batch norms"):
        train.calibrate(made, state, 8, 1, batch_size=8)
    made = make(data.MixedSizesConfig(), NORMED)
    state = train.init_state(made, 0, made.mesh(1))
    with pytest.raises(ConfigError, match="variance must be one of"):
        train.calibrate(made, state, 8, 1, variance="none")
    plain = make(data.DigitsConfig(), NORMED)
    with pytest.raises(ConfigError, match="size must be 8, the data set's"):
        train.calibrate(plain, train.init_state(plain, 0, plain.mesh(1)), 4, 1)


def test_too_many_sizes_are_refused_before_any_is_compiled():
    stream = types.SimpleNamespace(shapes=lambda: [{}] * 13)
    with pytest.raises(ConfigError, match="compiled: there are 13; pad"):
        loop.Steps(*[None] * 5).prepare(None, stream)
