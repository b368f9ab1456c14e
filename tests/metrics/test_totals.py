"""Objectives of masked language models and of segmentation."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, data, metrics, models, optim, sharding, train
from tests.data import writers
from tests.train import tiny

RNG = np.random.default_rng(0)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def masked_batch(rows=6, time=5, vocabulary=7):
    batch = {
        "y": RNG.integers(0, vocabulary, (rows, time)).astype(np.int32),
        "scored": (RNG.random((rows, time)) < 0.4).astype(np.float32),
        "order": RNG.integers(0, 2, rows).astype(np.int32),
    }
    batch["scored"][:, 1] = 1
    batch = jax.tree.map(jnp.asarray, batch)
    outputs = models.BertOutputs(
        jnp.asarray(RNG.normal(size=(rows, time, vocabulary)), "float32"),
        jnp.asarray(RNG.normal(size=(rows, 2)), "float32"),
    )
    return outputs, batch


def masked_by_hand(outputs, batch, weight):
    sums = dict.fromkeys(
        ("token_loss", "token_error", "order_loss", "order_error"), 0.0
    )
    count, batch = 0, jax.tree.map(np.asarray, batch)
    tokens, order = log_softmax(outputs.tokens), log_softmax(outputs.order)
    for row, place in np.argwhere(batch["scored"]):
        if weight[row] == 0:
            continue
        count += 1
        word, kind = batch["y"][row, place], batch["order"][row]
        sums["token_loss"] -= tokens[row, place, word]
        sums["token_error"] += tokens[row, place].argmax() != word
        sums["order_loss"] -= order[row, kind]
        sums["order_error"] += order[row].argmax() != kind
    return sums | {"loss": sums["token_loss"] + sums["order_loss"]}, count


@pytest.mark.quick("weight1")
@pytest.mark.parametrize("weight", [None, [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
def test_masked_totals_count_scored_tokens(weight):
    outputs, batch = masked_batch()
    extra = {} if weight is None else {"weight": jnp.asarray(weight)}
    found = metrics.masked_language_totals(outputs, batch | extra)
    sums, count = masked_by_hand(outputs, batch, weight or [1.0] * 6)
    assert float(found.count) == count
    assert set(found.sums) == set(sums)
    for name, value in sums.items():
        assert float(found.sums[name]) == pytest.approx(value, rel=1e-5)


def parts_add_up(objective, outputs, batch):
    objective = jax.jit(objective)
    whole = objective(outputs, batch)
    halves = [
        jax.tree.map(lambda a, at=at: a[at], (outputs, batch))
        for at in (slice(0, 2), slice(2, None))
    ]
    added = jax.tree.map(jnp.add, *(objective(*half) for half in halves))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), added, whole)


def test_totals_of_parts_add_up():
    parts_add_up(metrics.masked_language_totals, *masked_batch())
    parts_add_up(metrics.segmentation_totals, *segments())
    x, y, outputs = jnp.float32(RNG.normal(size=(3, 5, 4, 4, 1)))
    parts_add_up(metrics.field_totals, outputs, {"x": x, "y": y})


def segments(rows=5, classes=3):
    labels = RNG.integers(0, classes, (rows, 4, 6)).astype(np.int32)
    labels[0] = 0
    logits = jnp.asarray(2 * RNG.normal(size=(rows, 4, 6, classes)), "float32")
    return logits.at[0, ..., 0].add(99), {"y": jnp.asarray(labels)}


@pytest.mark.parametrize("weight", [None, [1.0, 0.0, 1.0, 1.0, 0.0]])
@pytest.mark.parametrize("dice_weight", [0.0, 0.7])
def test_segmentation_totals_count_images(weight, dice_weight):
    logits, batch = segments()
    extra = {} if weight is None else {"weight": jnp.asarray(weight)}
    found = metrics.segmentation_totals(logits, batch | extra, dice_weight=dice_weight)
    sums = dict.fromkeys(("loss", "error", "overlap", "area"), 0.0)
    logs = log_softmax(logits)
    kept = [row for row in range(5) if weight is None or weight[row]]
    for row in kept:
        truth = np.eye(3)[batch["y"][row]]
        guess = np.eye(3)[logs[row].argmax(-1)]
        p = np.exp(logs[row])
        soft = [
            (2 * (p * truth)[..., c].sum() + 1) / ((p + truth)[..., c].sum() + 1)
            for c in (1, 2)
        ]
        sums["loss"] += -(truth * logs[row]).sum() / 24
        sums["loss"] += dice_weight * (1 - np.mean(soft))
        sums["error"] += (guess != truth).any(-1).mean()
        sums["overlap"] += 2 * (guess * truth)[..., 1:].sum() / 24
        sums["area"] += (guess + truth)[..., 1:].sum() / 24
    assert float(found.count) == len(kept)
    for name, value in sums.items():
        assert float(found.sums[name]) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("weight", [None, [1.0, 0.0, 1.0]])
def test_field_totals_compare_with_persistence(weight):
    x, y, noise = RNG.normal(size=(3, 3, 4, 5, 2))
    outputs = y + 0.02 * noise * np.abs(y)
    extra = {} if weight is None else {"weight": np.array(weight)}
    arrays = jax.tree.map(jnp.float32, (outputs, {"x": x, "y": y, **extra}))
    found = metrics.field_totals(*arrays)
    rows = np.array(weight or [1.0] * 3)
    close = np.abs(outputs - y) <= 0.01 * np.abs(y)
    sums = {
        "loss": (outputs - y) ** 2,
        "close": 100 * close,
        "persistence": (x - y) ** 2,
    }
    assert float(found.count) == rows.sum()
    for name, values in sums.items():
        expected = (rows * values.mean((1, 2, 3))).sum()
        assert float(found.sums[name]) == pytest.approx(expected, rel=1e-4)


def fitted(model, optimizer, dataset, objective, steps):
    """The records of a run on two devices."""
    task = train.supervised(model, optimizer, dataset, objective=objective)
    config = train.TrainConfig(steps=steps, batch_size=16, eval_every=steps)
    records = tiny.Records()
    train.fit(task, config, seed=0, mesh=sharding.data_mesh(2), recorder=records)
    return records.values()


@pytest.mark.slow
def test_bert_learns_masked_words_in_the_loop(tmp_path):
    writers.write_documents(tmp_path, 200)
    dataset = data.MaskedTextConfig(
        corpus="documents.txt", context=32, vocabulary=60, validation=0.2
    ).load(tmp_path)
    model = models.BertConfig(width=16, depth=1).make(dataset.inputs, dataset.outputs)
    optimizer = optim.lamb(0.02, stacked=("^blocks/",), clip_norm=1.0)
    records = fitted(model, optimizer, dataset, metrics.masked_language_totals, 40)
    losses = [r["loss"] for r in records if "loss" in r]
    assert np.mean(losses[-5:]) < losses[0] - 0.5
    last = next(r for r in records if "val_loss" in r)
    assert last["val_loss"] == pytest.approx(
        last["val_token_loss"] + last["val_order_loss"], rel=1e-6
    )
    assert last["val_token_loss"] < np.log(dataset.outputs) - 0.5


@pytest.mark.slow
def test_a_unet_learns_masks_in_the_loop():
    phantoms = data.PhantomsConfig(patients=12, slices=4, size=16, noise=5.0)
    dataset = phantoms.load(pathlib.Path())
    model = models.UNetConfig(depth=1, width=4).make(dataset.inputs, dataset.outputs)
    objective = functools.partial(metrics.segmentation_totals, dice_weight=0.5)
    records = fitted(model, optim.adamw(2e-2), dataset, objective, 30)
    losses = [r["loss"] for r in records if "loss" in r]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    last = next(r for r in records if "val_area" in r)
    assert last["val_loss"] < 0.6 * losses[0]
    assert 0 <= last["val_overlap"] <= last["val_area"]


@pytest.mark.quick("5")
@pytest.mark.parametrize("chunk", [2, 5])
def test_chunked_logits_give_the_same_totals(chunk):
    config = models.CausalLmConfig(depth=1, width=8, heads=2)
    whole = config.make((6,), 11)
    chunked = dataclasses.replace(config, loss_chunk=chunk).make((6,), 11)
    params, _ = whole.init(jax.random.key(0))
    batch = {
        "x": jnp.asarray(RNG.integers(0, 11, (3, 6))),
        "y": jnp.asarray(RNG.integers(0, 11, (3, 6))),
        "weight": jnp.array([1.0, 0.0, 1.0]),
    }
    totals = [
        metrics.label_totals(model.apply(params, {}, batch["x"], train=False)[0], batch)
        for model in (whole, chunked)
    ]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), totals[0], totals[1]
    )


def test_a_score_sums_what_its_objective_names():
    objective = dataclasses.replace(tiny.OBJECTIVE, metrics={"loss": "low"})
    batch = tiny.dataset().train.gather(np.arange(4))
    with pytest.raises(
        core.ConfigError, match=r"points must sum \['loss'\]: got \['er"
    ):
        objective(batch["x"][:, :3], batch)
    held = dataclasses.replace(objective, held_out={"error": "high"})
    assert set(held(batch["x"][:, :3], batch).sums) == {"loss", "error"}
    with pytest.raises(core.ConfigError, match="further metrics: got loss in both"):
        dataclasses.replace(objective, held_out={"loss": "high"})
    with pytest.raises(core.ConfigError, match="of which high is; allowed"):
        held.require_low("val_error")
    other = dataclasses.replace(objective, held_out={"mrr": "high"})
    with pytest.raises(core.ConfigError, match=r"and of held-out ones \['mrr'\]: got"):
        other(batch["x"][:, :3], batch)


def test_what_is_minimised_must_be_better_low():
    asked = data.PhantomsConfig.objective
    for name in ("loss", "val_error", "of another", "val_loss"):
        asked.require_low(name)
    with pytest.raises(core.ConfigError, match=r"of which high is; allowed .* loss, e"):
        asked.require_low("val_overlap")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"error": "low"}, "must hold 'loss'"),
        ({"loss": "low", "step": "low"}, "none of step"),
        ({"loss": "low", "a/b": "low"}, "be words"),
        ({"loss": "low", "eval_seconds": "low"}, "ends in seconds"),
        ({"loss": "lowest"}, "better low or high or neither: got .'lowest'"),
    ],
)
def test_metrics_that_no_record_could_hold_are_refused(metrics, told):
    with pytest.raises(core.ConfigError, match=told):
        dataclasses.replace(tiny.OBJECTIVE, metrics=metrics)


def test_metrics_are_not_named_as_scalars_of_the_optimizer():
    def score(outputs, batch):
        sums, count = metrics.label_totals(outputs, batch)
        return core.Totals({**sums, "learning_rate": sums["loss"]}, count)

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    task = train.supervised(tiny.linear(), optimizer, tiny.dataset(), score)
    with pytest.raises(core.ConfigError, match="of the optimizer: got learning_rate"):
        train.fit(
            task,
            train.TrainConfig(steps=1, batch_size=8),
            seed=0,
            mesh=sharding.data_mesh(1),
            recorder=tiny.Records(),
        )
