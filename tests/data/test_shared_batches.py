"""A step is the same step however its batch is shared out over devices and passes.

For every data set: its own batch and objective, with weights that differ by device and
are zero on one; and for whatever draws.
"""

import dataclasses
import logging
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, data, models, sharding, train
from hpcjax.core import ConfigError, Model, Totals, keys, parts
from hpcjax.core.errors import DataFormatError
from hpcjax.optim.kfac import KfacConfig
from hpcjax.optim.kfac._transform import states
from hpcjax.runs import overrides
from tests.data.registry import REGISTRY
from tests.models import helpers
from tests.models.registry import REGISTRY as MODELS
from tests.train import tiny

# Two rows for each of four devices: the first scores nothing.
WEIGHTS = np.array([0, 0, 1, 0.5, 2, 1, 0, 3], np.float32)
ROWS, DEVICES = len(WEIGHTS), (1, 4)
# One of each objective; a new one is found by the test below.
QUICK = (
    *("digits", "python-reference", "kjv-masked", "phantoms", "clicks"),
    *("lorenz96", "heat", "karate", "universes", "phantoms-volumes"),
)


class Rows(data.Source):
    """Examples that are there, of any tree of arrays."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(jax.tree.leaves(self.arrays)[0])

    def gather(self, indices):
        return jax.tree.map(lambda leaf: leaf[indices], self.arrays)


def scaled(outputs):
    """Returns a network that puts out what an example holds, times a parameter each."""
    count = len(jax.tree.leaves(outputs))

    def apply(params, state, x, *, train, key=None, taps=None):
        leaves, form = jax.tree.flatten(x)
        return form.unflatten(
            [leaf * params["scale"][i] for i, leaf in enumerate(leaves)]
        ), state

    return Model(lambda key: ({"scale": jnp.ones(count)}, {}), apply)


def outputs_of(dataset):
    """Returns shapes of what a model puts out for the data set's examples."""
    takes = (cls for cls in parts.classes("model").values())
    cls = next(cls for cls in takes if cls.takes(dataset.objective))
    given = {"graph": dataset.graph} if dataset.graph is not None else {}
    if dataset.tables:
        given["tables"] = dataset.tables
    model = overrides.parse(cls(), cls.smoke).make(
        dataset.inputs, dataset.outputs, **given
    )
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    like = train.task.rows_like(dataset, ROWS)["x"]
    return jax.eval_shape(
        lambda p, s, x: model.apply(p, s, x, train=False)[0], params, state, like
    )


def weighted_task(dataset):
    """Returns the data set's objective of a network of one parameter an output."""
    like, rng = outputs_of(dataset), np.random.default_rng(0)
    # Positive, for some outputs are standard deviations.
    drawn = jax.tree.map(
        lambda leaf: rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32), like
    )
    batch = dict(data.batches(dataset.train, ROWS, 0, augment=dataset.augment)[0])
    rows = {**batch, "x": drawn, "inputs": batch["x"], "weight": WEIGHTS}

    def score(outputs, batch):
        return dataset.objective(outputs, {**batch, "x": batch["inputs"]})

    own = data.Dataset(Rows(rows), Rows(rows), (), 1, dataset.objective)
    task = train.supervised(scaled(drawn), optax.sgd(0.01), own)
    return task.replace(objective=score), rows


def steps(task, batch, devices, passes=1, count=2):
    """Returns state and metrics after some steps on one batch."""
    mesh = sharding.data_mesh(devices)
    config = train.TrainConfig(batch_size=len(batch["y"]), accumulate=passes)
    task = train.accumulating(task, config, mesh)
    state = train.init_state(task, 0, mesh)
    step = train.train_step(task, mesh, state)
    for _ in range(count):
        state, metrics = step(state, sharding.place_batch(batch, mesh))
    return jax.device_get((state, metrics))


def same(found, expected, rtol=1e-5):
    (state, metrics), (wanted, told) = found, expected
    chex.assert_trees_all_close(state.params, wanted.params, rtol=rtol, atol=1e-6)
    assert metrics.keys() == told.keys()
    for name in told:
        np.testing.assert_allclose(metrics[name], told[name], rtol=rtol, atol=1e-6)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", REGISTRY)
def test_a_step_of_every_data_set_is_that_of_one_device(name, tiny_root):
    task, batch = weighted_task(REGISTRY[name]().load(tiny_root))
    one = steps(task, batch, 1)
    assert np.isfinite(one[1]["loss"])
    assert (one[0].params["scale"] != 1).any()
    same(steps(task, batch, 4, passes=2), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_nor_does_another_number_of_devices_change_it(name, tiny_root):
    task, batch = weighted_task(REGISTRY[name]().load(tiny_root))
    one = steps(task, batch, 1)
    same(steps(task, batch, 2), one)
    same(steps(task, batch, 1, passes=4), one)


def test_every_objective_is_tried_in_the_quick_suite(tiny_root):
    names = {name: REGISTRY[name]().load(tiny_root).objective.name for name in REGISTRY}
    assert {names[name] for name in QUICK} == set(names.values())


@pytest.mark.slow
def test_bert_on_four_devices_is_that_of_one(tiny_root):
    """Words to predict are drawn, so that each device has another number of them."""
    dataset = REGISTRY["kjv-masked"]().load(tiny_root)
    config = models.BertConfig(width=8, heads=2, depth=1)
    model = config.make(dataset.inputs, dataset.outputs)
    task = train.supervised(model, optax.sgd(0.1), dataset)
    batch = dict(data.batches(dataset.train, ROWS, 0, augment=dataset.augment)[0])
    assert len({*batch["scored"].reshape(4, -1).sum(1)}) > 1
    one = steps(task, batch, 1)
    same(steps(task, batch, 4), one)
    same(steps(task, batch, 2, passes=2), one)


def dropping():
    """Returns softmax regression whose inputs are dropped, a row by its own key."""
    linear = tiny.linear()

    def apply(params, state, x, *, train, key=None, taps=None):
        if train:
            own = keys.each_row(keys.derive(key, "dropout"), len(x))
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (4,)))(own)
            x = jnp.where(kept, 2 * x, 0)
        return linear.apply(params, state, x, train=train)

    return linear._replace(apply=apply)


def weighted_points():
    return {**tiny.Points().gather(np.arange(ROWS)), "weight": WEIGHTS}


def drawing(name):
    """Returns a task that draws, and its batch."""
    if name == "dropout":
        task = train.supervised(dropping(), optax.sgd(0.1), tiny.dataset())
        return task, weighted_points()
    dataset = data.KarateConfig().load()
    config = models.GnnConfig(layer=name, hidden=4, dropout=0.5)
    model = config.make(dataset.inputs, dataset.outputs, graph=dataset.graph)
    batch = {**dataset.train.gather(np.arange(ROWS) % 2), "weight": WEIGHTS}
    return train.supervised(model, optax.sgd(0.1), dataset), batch


@pytest.mark.quick("dropout", "gcn")
@pytest.mark.parametrize("name", ["dropout", "gcn", "gat"])
def test_what_is_drawn_for_a_row_depends_on_its_place_alone(name):
    task, batch = drawing(name)
    one = steps(task, batch, 1)
    same(steps(task, batch, 4, passes=2), one)
    # Another draw would show.
    other = dataclasses.replace(
        train.init_state(task, 0, sharding.data_mesh(1)), key=jax.random.key(5)
    )
    step = train.train_step(task, sharding.data_mesh(1), other)
    _, metrics = step(other, sharding.place_batch(batch, sharding.data_mesh(1)))
    first = steps(task, batch, 1, count=1)[1]
    assert abs(float(metrics["loss"]) - float(first["loss"])) > 1e-3


def weighted_model(name):
    """Returns a task of the model's mean squared distance from -1, and its batch.

    Rows of models with batch norms or experts, whose statistics are of a device, are
    the same on each device; their weights are not.
    """
    made, _, state, _, _ = helpers.instance(name)
    x, _ = helpers.batch_of(MODELS[name], ROWS)
    if jax.tree.leaves(state) or name.startswith("moe"):
        x = jax.tree.map(
            lambda leaf: jnp.tile(leaf[:2], (4,) + (1,) * (leaf.ndim - 1)), x
        )

    def score(outputs, batch):
        rows = [leaf.reshape(len(batch["y"]), -1) for leaf in jax.tree.leaves(outputs)]
        each = sum(jnp.square(1 + leaf).mean(1) for leaf in rows)
        return Totals(
            {"loss": jnp.sum(batch["weight"] * each)}, jnp.sum(batch["weight"])
        )

    batch = jax.device_get({"x": x, "y": np.arange(ROWS), "weight": WEIGHTS})
    own = tiny.dataset()._replace(train=Rows(batch), validation=Rows(batch))
    task = train.supervised(made, optax.sgd(0.01), own)
    return task.replace(objective=score), batch


# Experts of a whole batch have other capacities than those of a device's rows; those of
# "moe_gated" take all. Batch norms of "resnet50" see two rows at one place: inputs that
# differ in the last bit change its gradients by four times themselves.
@pytest.mark.quick("linear")
@pytest.mark.parametrize("name", sorted({*MODELS} - {"moe", "raw", "resnet50"}))
def test_a_step_of_every_model_is_that_of_one_device(name):
    task, batch = weighted_model(name)
    one = steps(task, batch, 1, count=1)
    assert float(one[1]["loss"]) > 0
    same(steps(task, batch, 4, count=1), one)


def test_a_model_that_draws_by_one_key_for_all_rows_is_refused():
    def apply(params, state, x, *, train, key=None, taps=None):
        noise = jax.random.normal(key, (len(x), 3)) if train else 0
        return x @ params["w"] + noise, state

    model = Model(lambda key: ({"w": jnp.zeros((4, 3))}, {}), apply)
    task = train.supervised(model, optax.sgd(0.1), tiny.dataset())
    with pytest.raises(TypeError, match="BatchKey"):
        steps(task, weighted_points(), 2)


@pytest.mark.parametrize("fisher", ["empirical", "true"])
def test_factors_of_kfac_weigh_rows_as_the_loss_does(fisher):
    dataset = tiny.dataset()
    model = models.mlp(dataset.inputs, dataset.outputs, widths=())
    config = KfacConfig(
        factor_update_steps=1, inv_update_steps=1, damping=0.1, fisher=fisher
    )

    def run(devices, passes=1):
        method = train.compose(
            model, dataset, config, batch_size=ROWS, steps=2, devices=devices, seed=0
        )
        task = train.supervised(model, method, dataset)
        return steps(task, weighted_points(), devices, passes)

    one, four = run(1), run(4, passes=2)
    same(four, one)
    mine, wanted = (states(each[0].opt_state)[0].factors for each in (four, one))
    chex.assert_trees_all_close(mine, wanted, rtol=1e-4, atol=1e-7)


def averaging_values():
    """Returns an objective whose one number an item is its input."""

    def score(outputs, batch):
        weight = batch.get("weight", jnp.ones(len(outputs)))
        return Totals({"loss": jnp.sum(weight * outputs[:, 0])}, jnp.sum(weight))

    objective = core.Objective(
        name="values",
        inputs=core.Numbers(rank=1),
        outputs=core.Numbers(rank=1),
        score=score,
        metrics={"loss": "low"},
    )

    def apply(params, state, x, *, train, key=None, taps=None):
        return x + 0 * params["w"], state

    model = Model(lambda key: ({"w": jnp.zeros(1)}, {}), apply)
    x = np.arange(1, 25, dtype=np.float32)[:, None] ** 2
    weight = np.arange(24, dtype=np.float32) % 3
    rows = {"x": x, "y": x, "weight": weight}
    short = {"x": x[:11], "y": x[:11]}
    own = data.Dataset(Rows(rows), Rows(short), (1,), 1, objective)
    return train.supervised(model, optax.sgd(0.0), own), rows


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_scores_are_sums_over_sums(devices):
    """Of unequal shares, and of a last batch that is short."""
    task, rows = averaging_values()
    config = train.TrainConfig(steps=1, batch_size=24, eval_every=1)
    records = tiny.Records()
    mesh = sharding.data_mesh(devices)
    train.fit(task, config, seed=0, mesh=mesh, recorder=records)
    told = {key: value for record in records for key, value in record.items()}
    weight, x = rows["weight"], rows["x"][:, 0]
    assert told["loss"] == pytest.approx(np.average(x, weights=weight), rel=1e-6)
    assert told["val_loss"] == pytest.approx(x[:11].mean(), rel=1e-6)


def test_a_batch_that_scores_nothing_is_skipped_by_name(caplog):
    task, batch = tiny.task(), weighted_points()
    batches = [batch, {**batch, "weight": np.zeros(ROWS, np.float32)}, batch]
    mesh = sharding.data_mesh(4)
    state = train.init_state(task, 0, mesh)
    step = train.train_step(task, mesh, state)
    seen = []
    for batch in batches:
        before = jax.device_get(state)
        state, metrics = step(state, sharding.place_batch(batch, mesh))
        seen.append((bool(metrics["unscored"]), float(metrics["loss"])))
        if not batch["weight"].any():
            chex.assert_trees_all_equal(state.params, before.params)
            chex.assert_trees_all_equal(state.opt_state, before.opt_state)
    assert [unscored for unscored, _ in seen] == [False, True, False]
    assert math.isnan(seen[1][1])
    assert (int(state.step), int(state.skipped)) == (3, 0)

    guard = train.guards.SkipGuard(["a"], 1)
    with caplog.at_level(logging.WARNING):
        assert guard.check(18, np.zeros(1), np.array(True)) == {"unscored": 1}
        assert guard.check(19, np.zeros(1), np.array(False)) == {}
    assert "batch 17 scores nothing" in caplog.text


class Bad(tiny.Points):
    """Points of which one has a weight that is none."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def gather(self, indices):
        weight = np.where(indices == 7, self.value, 1).astype(np.float32)
        return {**super().gather(indices), "weight": weight}


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_weights_that_are_none_are_refused_with_their_example(value):
    source = Bad(value)
    with pytest.raises(DataFormatError, match=r"'weight' of example 7 .* at least 0"):
        data.batches(source, len(source), 0)[0]


def test_a_count_of_outputs_is_refused():
    def score(outputs, batch):
        found = jnp.sum(outputs > 0).astype(jnp.float32)
        return Totals({"loss": jnp.sum(outputs)}, found)

    task = tiny.task().replace(objective=score)
    with pytest.raises(ConfigError, match="must be of the batch alone"):
        steps(task, weighted_points(), 1)


def test_a_plain_key_is_that_of_the_first_rows():
    key = jax.random.key(3)
    batch = keys.BatchKey(key=key, rows=jnp.arange(4))
    plain, own = keys.each_row(key, 4), keys.each_row(batch, 4)
    assert (plain == own).all()
    later = keys.BatchKey(key=key, rows=jnp.array([3, 1]))
    assert (keys.each_row(later, 2) == own[jnp.array([3, 1])]).all()
    with pytest.raises(ValueError, match="of 2 rows: got 3"):
        keys.each_row(later, 3)
