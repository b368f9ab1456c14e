"""One graph over devices, by the ordinary step, against one written in numpy."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from hpcjax import core, data, graphs, models, optim, train
from hpcjax.averaging import LocalSgdConfig
from hpcjax.models import _gnn_parts
from hpcjax.runs import training
from hpcjax.sharding import place_batch
from hpcjax.train.config import TrainConfig

SOURCE = data.CommunityGraphConfig(vertices=40, degree=6.0, classes=3)
RATE = 0.5


def config(partitions=4, **fields):
    return training.TrainingConfig(
        dataset=data.PartitionedVerticesConfig(
            source=SOURCE, partitions=partitions, method="hash"
        ),
        model=models.GnnConfig(hidden=5, dropout=0.0, **fields),
        optimizer=optim.SgdConfig(lr=RATE, momentum=0.0),
        train=TrainConfig(steps=9, batch_size=partitions, checkpoint_every=0),
    )


def compose(cfg, devices):
    task = training.task(cfg, pathlib.Path(), devices)
    mesh = task.mesh(devices)
    state = train.init_state(task, 0, mesh)
    return task, mesh, state


def steps(cfg, devices, count):
    """Losses, the last state, and all but the states of the task."""
    task, mesh, state = compose(cfg, devices)
    first = jax.device_get(state.params)
    step = train.train_step(task, mesh, train.state_shapes(task, mesh))
    stream = data.batches(task.dataset.train, cfg.train.batch_size, 0)
    losses = []
    for number in range(count):
        state, metrics = step(state, place_batch(stream[number], mesh))
        losses.append(float(metrics["loss"]))
    return losses, state, first, task, mesh


def by_hand(params, owner, count, stale=0, mean=0.0):
    """Losses of a graph convolution of two layers, rows of others being late, by SGD.

    Before anything has arrived, it is zeros.
    """
    whole = SOURCE.load()
    graph = graphs.add_self_loops(whole.graph)
    a = np.zeros((40, 40))
    np.add.at(a, (graph.receivers, graph.senders), 1)
    root = a.sum(1) ** -0.5
    a = root[:, None] * a * root
    own = a * (owner[:, None] == owner)
    x, labels, chosen = whole.graph.features, whole.train.labels, whole.train.numbers
    w0, b0, w1, b1 = (
        np.asarray(params[f"layer_{i}"][name], float)
        for i in (0, 1)
        for name in ("kernel", "bias")
    )
    late = [np.zeros((40, 5))] * stale
    losses = []
    for _ in range(count):
        z = a @ x @ w0 + b0
        h = np.maximum(z, 0)
        if stale:
            late.insert(0, mean * late[0] + (1 - mean) * h)
        taken = own @ h + (a - own) @ late.pop() if stale else a @ h
        logits = taken @ w1 + b1
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses.append(-np.log(shares[chosen, labels[chosen]]).mean())
        g = np.zeros_like(logits)
        g[chosen] = (shares - np.eye(3)[labels])[chosen] / len(chosen)
        gz = (own if stale else a).T @ g @ w1.T * (z > 0)
        w1, b1 = w1 - RATE * taken.T @ g, b1 - RATE * g.sum(0)
        w0, b0 = w0 - RATE * (a @ x).T @ gz, b0 - RATE * gz.sum(0)
    return losses, (w0, b0, w1, b1)


@pytest.mark.acceptance("gnn-parallelism", 6)
@pytest.mark.parametrize(
    "late", [{"stale": 0}, {"stale": 1}, {"stale": 3, "stale_mean": 0.5}]
)
def test_steps_are_those_of_numpy(late):
    """Two parts a device; the mean of losses and slopes is of all labels."""
    cfg = config(**late)
    found, state, first, task, _ = steps(cfg, 2, 6)
    owner = task.dataset.owner // 2
    assert 0.2 < (owner == 0).mean() < 0.8
    hand = {"mean": late.get("stale_mean", 0.0), "stale": late["stale"]}
    losses, params = by_hand(first, owner, 6, **hand)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    own = jax.device_get(state.params)
    ours = (own[f"layer_{i}"][name] for i in (0, 1) for name in ("kernel", "bias"))
    for one, other in zip(ours, params, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # Another staleness is another trajectory.
    assert abs(found[-1] - by_hand(first, owner, 6, stale=2)[0][-1]) > 1e-3


def test_ages_are_a_pairs_and_a_steps_and_at_most_those_asked_for():
    found = config(stale=3, delay="random").model
    dataset = config().dataset.load()
    parts = _gnn_parts.Parts(found, dataset.graph, dataset.owner, 4, [3, 5])
    drawn = np.stack(
        [
            [parts._ages(place, core.derive(jax.random.key(0), "step", step))]
            for step in range(40)
            for place in range(4)
        ]
    ).reshape(40, 4, -1)
    assert (drawn.min(), drawn.max()) == (0, 3)
    assert len({tuple(own.ravel()) for own in drawn}) == 40
    for place in range(4):
        for sender in {*range(4)} - {place}:
            own = drawn[:, place, parts.sources[place] == sender]
            assert (own == own[:, :1]).all()
    with pytest.raises(core.ConfigError, match="delay=random needs a key"):
        parts._ages(0, None)


def test_what_is_fresh_has_no_ring_and_what_is_late_has_one_a_hidden_layer():
    dataset = config().dataset.load()
    shapes = {}
    for late in (0, 2):
        cfg = dataclasses.replace(config(stale=late).model, depth=3)
        model = cfg.make(dataset.inputs, dataset.outputs, **dataset.given, devices=4)
        params, state = jax.eval_shape(model.init, jax.random.key(0))
        shapes[late] = params
        assert bool(state) == bool(late)
        if late:
            rings = state["stale"].value
            assert {*rings} == {"layer_1", "layer_2"}
            assert {ring.shape[::2] for ring in rings.values()} == {(2, 5)}
    assert shapes[0] == shapes[2]


@pytest.mark.acceptance("gnn-parallelism", 10)
def test_what_is_refused_before_anything_is_compiled():
    dataset = config().dataset.load()

    def make(devices=2, owner=dataset.owner, **fields):
        given = {**dataset.given, "owner": owner, "devices": devices}
        given = {name: each for name, each in given.items() if each is not None}
        cfg = models.GnnConfig(**fields)
        return cfg.make(dataset.inputs if owner is not None else (), 3, **given)

    refused = core.ConfigError
    with pytest.raises(refused, match="devices must divide the 4 parts"):
        make(3)
    with pytest.raises(refused, match="sgc propagates without a layer"):
        make(layer="sgc")
    for fields in ({"stale": 1}, {"scheme": "allgather"}):
        with pytest.raises(refused, match="dataset=partitioned_vertices"):
            make(owner=None, **fields)
    with pytest.raises(refused, match="depth must be at least 2"):
        models.GnnConfig(stale=1, depth=1)
    with pytest.raises(refused, match="sees edges"):
        models.GnnConfig(stale=1, layer="mlp")
    for fields in ({"stale_mean": 0.5}, {"delay": "random"}):
        with pytest.raises(refused, match="give stale, steps"):
            models.GnnConfig(**fields)
    for parts in (0, 41):
        with pytest.raises(refused, match="part"):
            data.PartitionedVerticesConfig(source=SOURCE, partitions=parts).load()
    with pytest.raises(refused, match="source must be of vertices"):
        data.PartitionedVerticesConfig(source=data.DigitsConfig())
    cfg, size = config(), TrainConfig(batch_size=8)
    with pytest.raises(refused, match=r"take train\.batch_size=4"):
        dataclasses.replace(cfg, train=size)
    with pytest.raises(refused, match="accumulate must be 1"):
        dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, accumulate=2))
    with pytest.raises(refused, match="in every pass, of one model"):
        dataclasses.replace(cfg, averaging=LocalSgdConfig())
    with pytest.raises(refused, match="divide by the 3 devices"):
        cfg.check_devices(3)


def test_a_batch_is_all_parts_in_their_order():
    dataset = config().dataset.load()
    one, other = (dataset.train.sample(n, 4, n, (0, 1)) for n in (0, 7))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    half = dataset.train.sample(0, 4, 0, (1, 2))
    np.testing.assert_array_equal(half["y"], one["y"][2:])
    whole = SOURCE.load()
    assert one["scored"].sum() == len(whole.train)
    held = dataset.validation.gather(np.arange(4))["scored"].sum()
    assert held == len(whole.validation)
    with pytest.raises(core.ConfigError, match="all 4 parts"):
        dataset.train.sample(0, 2, 0, (0, 1))
