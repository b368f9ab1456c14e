"""One graph over devices, by the ordinary step, against one written in numpy."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import scipy.sparse
import scipy.special
from sklearn.linear_model import LogisticRegression

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


def by_hand(params, owner, count, stale=0, mean=0.0, ages=None):
    """Losses of a graph convolution of two layers, rows of others being late, by SGD.

    Before anything has arrived, it is zeros. `ages` [steps, from, to] are of devices;
    without, all rows are as old as `stale`.
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
    for step in range(count):
        z = a @ x @ w0 + b0
        h = np.maximum(z, 0)
        taken = a @ h
        if stale:
            known = np.stack([mean * late[0] + (1 - mean) * h, *late])
            late = [*known[:-1]]
            age = np.full((2, 2), stale) if ages is None else ages[step]
            seen = [known[age[owner, to], np.arange(40)] for to in owner]
            taken = own @ h + np.einsum("vu,vuk->vk", a - own, np.stack(seen))
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
    "late",
    [
        {"stale": 0},
        {"stale": 1},
        {"stale": 3, "stale_mean": 0.5},
        {"stale": 0, "scheme": "features"},
    ],
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


def test_drawn_delays_are_those_of_numpy():
    cfg = config(stale=2, delay="random")
    found, state, first, task, _ = steps(cfg, 2, 6)
    keys = [core.derive(state.key, "step", number) for number in range(6)]
    ages = np.stack(
        [jax.random.randint(core.derive(k, "delay"), (2, 2), 0, 3) for k in keys]
    )
    off = np.stack([ages[:, 0, 1], ages[:, 1, 0]])
    assert len(np.unique(off)) == 3
    assert (off[0] != off[1]).any()
    owner = task.dataset.owner // 2
    wanted, _ = by_hand(first, owner, 6, stale=2, ages=ages)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    turned, _ = by_hand(first, owner, 6, stale=2, ages=ages.swapaxes(1, 2))
    assert np.abs(np.array(found) - turned).max() > 1e-4


def test_ages_are_a_pairs_and_a_steps_and_at_most_those_asked_for():
    found = config(stale=3, delay="random").model
    dataset = config().dataset.load()
    parts = _gnn_parts.Parts(found, dataset.graph, dataset.owner, 4, [3, 5, 3])
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


def learn(data, first, second, count=150, rate=0.01):
    """Two layers of a graph convolution on the digits in numpy, by Adam."""
    graph = graphs.add_self_loops(data.graph)
    ends, size = (graph.receivers, graph.senders), graph.vertices
    degree = np.bincount(graph.receivers, minlength=size)
    ones = 1 / np.sqrt(degree[ends[0]] * degree[ends[1]], dtype=np.float32)
    a = scipy.sparse.csr_matrix((ones, ends), (size, size))
    own = data.train.numbers
    y = np.eye(10, dtype="f4")[data.train.labels[own]]
    few, x = a[own], a @ np.asarray(data.graph.features)
    w = [first, np.zeros(64, "f4"), second, np.zeros(10, "f4")]
    m, v = [0 * each for each in w], [0 * each for each in w]
    for step in range(1, count + 1):
        z = x @ w[0] + w[1]
        taken = few @ np.maximum(z, 0)
        logits = taken @ w[2] + w[3]
        g = (scipy.special.softmax(logits, 1) - y) / len(own)
        gz = few.T @ (g @ w[2].T) * (z > 0)
        slopes = x.T @ gz, gz.sum(0), taken.T @ g, g.sum(0)
        for i, slope in enumerate(slopes):
            m[i] = 0.9 * m[i] + 0.1 * slope
            v[i] = 0.999 * v[i] + 0.001 * slope**2
            root = np.sqrt(v[i] / (1 - 0.999**step)) + 1e-8
            w[i] = (w[i] - rate * m[i] / (1 - 0.9**step) / root).astype("f4")
    names = {"kernel": w[::2], "bias": w[1::2]}
    return {f"layer_{i}": {n: each[i] for n, each in names.items()} for i in (0, 1)}


@pytest.mark.acceptance("gnn-parallelism", 9)
def test_neighbours_of_digits_tell_more_than_pixels():
    """Numpy learns by Adam what the model scores; five draws of the labels."""
    right, plain = [], []
    for seed in range(5):
        found = data.KnnDigitsConfig(draw_seed=seed).load()
        model = models.GnnConfig(hidden=64, dropout=0.0).make((), 10, **found.given)
        rng = np.random.default_rng(seed)
        drawn = [
            rng.normal(0, np.sqrt(2 / sum(shape)), shape).astype("f4")
            for shape in ((64, 64), (64, 10))
        ]
        held, few = found.validation.numbers, found.train.numbers
        labels, x = found.train.labels, np.asarray(found.graph.features)
        assert (len(few), len({*few, *held})) == (180, 1797)
        logits, _ = model.apply(learn(found, *drawn), {}, held, train=False)
        right.append(100 * (logits.argmax(1) == labels[held]).mean())
        pixels = LogisticRegression(max_iter=300).fit(x[few], labels[few])
        plain.append(100 * pixels.score(x[held], labels[held]))
    assert np.mean(right) >= 96
    assert np.mean(right) - np.mean(plain) >= 4


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
    model, x = make(), dataset.train.sample(0, 4, 0, (0, 1))["x"]
    params, state = jax.eval_shape(model.init, jax.random.key(0))

    def score(model, x):
        return jax.eval_shape(
            lambda p, s: model.apply(p, s, x, train=False), params, state
        )

    with pytest.raises(refused, match="call it inside"):
        score(model, x)
    with pytest.raises(refused, match=r"needs them all, and 4 .* parts=2"):
        score(make(1), {"features": x["features"][:2]})
    with pytest.raises(refused, match="sgc propagates without a layer"):
        make(layer="sgc")
    edges = np.ones((len(dataset.graph.senders), 1), "f4")
    seen = dataclasses.replace(dataset.graph, edge_features=edges)
    given = {**dataset.given, "graph": seen, "devices": 2}
    with pytest.raises(refused, match="graph in parts: take gat"):
        models.GnnConfig(layer="gin").make(dataset.inputs, 3, **given)
    for fields in ({"stale": 1}, {"scheme": "allgather"}):
        with pytest.raises(refused, match="dataset=partitioned_vertices"):
            make(owner=None, **fields)
    with pytest.raises(refused, match="depth must be at least 2"):
        models.GnnConfig(stale=1, depth=1)
    with pytest.raises(refused, match="sees edges"):
        models.GnnConfig(stale=1, layer="mlp")
    with pytest.raises(refused, match="scheme=features sends none"):
        models.GnnConfig(stale=1, scheme="features")
    kept = np.arange(41), np.zeros(40, int), np.ones(40, "f4")
    names = "offsets", "columns", "values"
    rows = graphs.SparseRows(**dict(zip(names, kept, strict=True)), width=3)
    given["graph"] = dataclasses.replace(dataset.graph, features=rows)
    with pytest.raises(refused, match="must be dense: got SparseRows"):
        models.GnnConfig(scheme="features").make(dataset.inputs, 3, **given)
    with pytest.raises(refused, match="sgc propagates without a layer"):
        make(layer="sgc", scheme="features")
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
