"""CHAI's experiments: what is measured, on a tiny model and on SmolLM2."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from experiments.chai import decode, experiment, texts
from hpcjax import core, inference, models
from hpcjax.data import catalog
from hpcjax.inference import TextModel, load_language_model
from hpcjax.runs import directory
from tests.data import writers
from tests.data.test_choices import write_bible

ROOT = directory.data_root(pathlib.Path(__file__).parents[3])
TINY = experiment.Config(
    model="random",
    dense_layers=1,
    clusters=2,
    calibration_texts=9,
    calibration_time=8,
    pruning=experiment.Pruning(hidden=3, steps=2),
    passages=3,
    time=12,
    questions=0,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    writers.write_kjv(root)
    loaded, tokenizer, *_ = load_language_model("random", root)
    # As they are drawn, what heads attend to hardly changes a loss.
    blocks = jax.tree.map(lambda leaf: 4 * leaf, loaded.params["blocks"])
    params = {**loaded.params, "blocks": blocks}
    return TextModel(dataclasses.replace(loaded, params=params), tokenizer), root


def clustered(method="online", **changes):
    return dataclasses.replace(TINY, method=method, **changes)


@pytest.mark.quick("random")
@pytest.mark.parametrize("method", ["online", "static", "random"])
def test_a_cluster_for_each_head_foretells_as_the_dense_model(tiny, method):
    dense = experiment.measure(clustered("dense"), *tiny)
    assert dense["place"].values.tolist() == list(range(6, 12))
    every = experiment.measure(clustered(method, clusters=4), *tiny)
    np.testing.assert_allclose(every["loss"], dense["loss"], atol=1e-5)
    assert every["share"] == dense["share"] == 1
    assert every["bytes"] == dense["bytes"] == dense["dense"] == dense["read"]
    fewer = experiment.measure(clustered(method, clusters=1), *tiny)
    assert not np.allclose(fewer["loss"], dense["loss"], atol=1e-4)
    assert fewer["share"] == 7 / 16
    assert fewer["read"] == fewer["bytes"]


@pytest.mark.quick("oracle")
@pytest.mark.parametrize("method", ["spatten", "dejavu", "oracle"])
def test_a_baseline_that_leaves_nothing_out_foretells_as_the_dense_model(tiny, method):
    dense = experiment.measure(clustered("dense"), *tiny)
    all_ = experiment.Pruning(tokens=1.0, hidden=3, steps=2)
    every = experiment.measure(clustered(method, clusters=4, pruning=all_), *tiny)
    np.testing.assert_allclose(every["loss"], dense["loss"], atol=1e-5)
    assert every["share"] == 1
    assert every["read"] == dense["dense"]
    fewer = experiment.measure(clustered(method, clusters=1, pruning=all_), *tiny)
    assert not np.allclose(fewer["loss"], dense["loss"], atol=1e-4)
    assert fewer["share"] == 7 / 16
    # Nothing is freed, though less is read.
    assert fewer["bytes"] == fewer["formula"] == dense["bytes"]
    assert fewer["read"] == 7 / 16 * dense["dense"]


def test_tokens_fall_evenly_to_the_share_of_the_last_layer(tiny):
    cfg = clustered("spatten", clusters=4, pruning=experiment.Pruning(tokens=0.25))
    np.testing.assert_allclose(cfg.tokens_kept(4), [1, 0.75, 0.5, 0.25])
    found = experiment.measure(cfg, *tiny)
    # 12, 9, 6 and 3 of 12 tokens, 4 heads of 4 float32, keys and values.
    assert found["read"] == 30 * 4 * 4 * 4 * 2
    dense = experiment.measure(clustered("dense"), *tiny)
    assert not np.allclose(found["loss"], dense["loss"], atol=1e-4)
    assert clustered("dejavu").tokens_kept(4) == (1.0,) * 4


def test_questions_are_answered_by_what_is_foretold(tiny, tmp_path):
    write_bible(tmp_path)
    (speaker, tokenizer, *_), _ = tiny
    cfg = clustered("spatten", questions=5, question_time=90)
    found = experiment.measure(cfg, TextModel(speaker, tokenizer), tmp_path)
    assert {found["accuracy"].item(), found["normalized"].item()} <= {
        n / 5 for n in range(6)
    }
    asked = texts.questions(tokenizer, tmp_path, 5, time=90, window=5)
    assert len(asked) == 5
    for context, endings, _ in asked:
        assert 5 < len(context) <= 90 - max(map(len, endings))
    right = [endings[answer] for _, endings, answer in asked]

    def told(rows):
        """Foretells the right endings only, and knows nothing of the window."""
        known = np.array([any(_ends(row, each) for each in right) for row in rows])
        return np.where(known[:, None], 0.5, 1.0) * np.ones((1, rows.shape[1] - 6))

    assert experiment.answers(cfg, told, tokenizer, tmp_path)["normalized"] == 1
    assert experiment.answers(clustered(), told, tokenizer, tmp_path) == {}
    with pytest.raises(core.ConfigError, match="0 questions fit into question_time=9"):
        texts.questions(tokenizer, tmp_path, 5, time=9, window=5)


def _ends(row, ending):
    text = np.trim_zeros(np.asarray(row), "b")
    return text[-len(ending) :].tolist() == ending


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
def test_bytes_are_counted_as_they_lie_in_memory(tiny, share):
    options = inference.Clustering(mode="expand", share_values=share)
    found = experiment.measure(clustered(clustering=options), *tiny)
    # Layers of 4, 2, 2 and 2 clusters, 4 heads of 4 float32, 12 tokens.
    unit = 12 * 4 * 4
    assert found["bytes"] == found["formula"] == unit * (10 + (10 if share else 16))
    assert found["dense"] == unit * 32
    assert found["native"] == unit * 16


def test_documents_of_a_calibration_are_whole_and_drawn(tiny):
    speaking, root = tiny
    of = {"count": 5, "time": 8}
    first = texts.documents(speaking.tokenizer, root, "kjv", **of, seed=0)
    assert first.shape == (5, 8)
    other = texts.documents(speaking.tokenizer, root, "kjv", **of, seed=1)
    assert not np.array_equal(first, other)
    with pytest.raises(core.ConfigError, match="documents of 100000 tokens"):
        texts.documents(speaking.tokenizer, root, "kjv", count=1, time=100_000, seed=0)


def test_more_dense_layers_than_there_are_is_refused(tiny):
    with pytest.raises(core.ConfigError, match="at most the model's 4: got 5"):
        experiment.measure(clustered(dense_layers=5), *tiny)


@pytest.mark.slow
def test_all_that_is_timed_computes_the_same_attention():
    cfg = decode.Config(
        batch=2,
        tokens=16,
        heads=4,
        clusters=4,
        head_dim=8,
        compute="float32",
        implementation="reference",
        dense=("xla",),
        inner=1,
    )
    given = decode.problem(cfg)
    assert decode.error_of(cfg, given) < 1e-5
    assert decode.error_of(cfg, given, (given["assign"] + 1) % cfg.clusters) > 0.01
    expected = by_hand(*(given[name] for name in ("query", "keys", "values")))
    # A cluster for each head is attention of all heads, in whatever order.
    found = decode.clustered(cfg, given, "reference")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for attend in decode.attentions(cfg).values():
        np.testing.assert_allclose(attend(given), expected, atol=1e-5)


def by_hand(query, keys, values):
    scores = np.einsum("bqhd,bthd->bhqt", query, keys) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqt,bthd->bqhd", weights, values)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.acceptance("chai", 6)
def test_clusters_of_smollm2_foretell_better_than_random_ones():
    for name in ("smollm2", "kjv"):
        if not catalog.is_present(name, ROOT):
            pytest.skip(f"{name} is not here: hpcjax data fetch {name}")
    speaking = load_language_model("smollm2", ROOT)
    assert models.decoder_of(speaking.pretrained.model).heads == 9

    def mean(method, clusters, seeds):
        found = [
            experiment.measure(
                experiment.Config(
                    method=method, clusters=clusters, seed=seed, questions=0
                ),
                speaking,
                ROOT,
            )["perplexity"].item()
            for seed in range(seeds)
        ]
        print(method, clusters, np.round(found, 2))
        return float(np.mean(found))

    dense, six = mean("dense", 9, 1), mean("online", 6, 1)
    assert dense < six < 1.35 * dense
    assert six <= mean("random", 6, 5)
    assert mean("online", 4, 3) < 0.9 * mean("random", 4, 5)
