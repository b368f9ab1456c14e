"""One graph over devices, by the ordinary step, against one that is written in numpy."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from hpcjax import core, data, graphs, models, optim, train
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
