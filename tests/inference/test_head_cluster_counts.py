"""How many clusters a layer needs: errors by brute force, rules, plans in files."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import inference
from hpcjax.core import ConfigError, DataFormatError


def least_errors(rows):
    """The least error of any partition into k = 1, 2, … clusters."""
    heads = len(rows)
    least = np.full(heads, np.inf)
    for labels in itertools.product(range(heads), repeat=heads):
        used = sorted(set(labels))
        if used != list(range(len(used))):
            continue
        members = [rows[np.array(labels) == c] for c in used]
        error = sum(((m - m.mean(0)) ** 2).sum() for m in members)
        least[len(used) - 1] = min(least[len(used) - 1], error)
    return least


def clustered(texts, layers, near):
    """Five heads in two tight pairs and one alone."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(texts, layers, 3, 4))
    rows = centres[:, :, [0, 1, 0, 2, 1]]
    return rows + near * rng.normal(size=rows.shape)


def test_errors_are_the_least_ones_of_clear_clusters():
    rows = clustered(3, 2, 0.01)
    found = np.asarray(
        inference.clustering_errors(
            jnp.asarray(rows, jnp.float32), key=jax.random.key(0)
        )
    )
    for layer in range(2):
        least = sum(least_errors(rows[text, layer]) for text in range(3))
        # Two clusters of three may be a local minimum.
        assert (found[layer] >= least * (1 - 1e-4)).all()
        np.testing.assert_allclose(found[layer][[0, 2]], least[[0, 2]], rtol=1e-4)
        assert found[layer, -1] == 0
    assert inference.choose_clusters(found).clusters == (3, 3)


def test_errors_of_more_texts_than_are_clustered_at_once():
    rows = jnp.asarray(clustered(11, 1, 0.5), jnp.float32)
    key = jax.random.key(0)
    whole = inference.clustering_errors(rows, key=key)
    assert whole.shape == (1, 5)
    total = sum(
        np.sum((x - x.mean(0)) ** 2) for x in np.asarray(rows[:, 0], np.float64)
    )
    assert float(whole[0, 0]) == pytest.approx(total, rel=1e-5)


def test_errors_within_groups():
    rows = jnp.asarray(clustered(2, 1, 0.1), jnp.float32)
    doubled = jnp.concatenate([rows, rows[:, :, ::-1]], axis=2)
    found = inference.clustering_errors(doubled, key=jax.random.key(0), groups=2)
    assert found.shape == (1, 5)
    alone = inference.clustering_errors(rows, key=jax.random.key(0))
    np.testing.assert_allclose(found[0, 0], 2 * alone[0, 0], rtol=1e-5)
    assert inference.choose_clusters(found, groups=2).clusters == (6,)
    with pytest.raises(ConfigError, match="groups=3, heads=10"):
        inference.clustering_errors(doubled, key=jax.random.key(0), groups=3)


def test_rules():
    errors = np.array(
        [
            [10.0, 6.0, 1.0, 0.4, 0.0],
            [10.0, 0.2, 0.1, 0.05, 0.0],
            # Equally far apart: nothing to merge. All equal: one is enough.
            [8.0, 6.0, 4.0, 2.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
        ]
    )

    def chosen(**options):
        return inference.choose_clusters(errors, **options).clusters

    assert chosen() == (4, 2, 5, 1)
    assert chosen(tau=0.1) == (3, 2, 5, 1)
    assert chosen(tau=0.0) == (5, 5, 5, 1)
    assert chosen(rule="knee") == (3, 2, 5, 1)


def test_the_knee_is_farthest_from_the_chord():
    errors = np.sort(np.random.default_rng(0).random((20, 9)) ** 3)[:, ::-1]
    found = inference.choose_clusters(errors.copy(), rule="knee").clusters
    for row, chosen in zip(errors, found, strict=True):
        start, end = np.array([1, row[0]]), np.array([9, row[-1]])
        along = (end - start) / np.linalg.norm(end - start)
        across = np.array([-along[1], along[0]])
        # Positive above the chord.
        sides = [-(np.array([k + 1, e]) - start) @ across for k, e in enumerate(row)]
        assert chosen == int(np.argmax(sides)) + 1


@pytest.mark.parametrize(
    ("errors", "options", "message"),
    [
        ([[1.0, 0.0]], {"rule": "elbow"}, "no rule 'elbow'"),
        ([[1.0, 0.0]], {"tau": 1.0}, "tau=1.0"),
        ([[1.0, np.nan]], {}, "finite"),
        ([[1.0, 0.0], [1.0, 0.5]], {}, "layer 1: no error falls to 0.05"),
    ],
)
def test_what_chooses_nothing_is_refused(errors, options, message):
    with pytest.raises(ConfigError, match=message):
        inference.choose_clusters(np.array(errors), **options)


def test_plans_are_read_as_they_are_written(tmp_path):
    errors = np.array([[4.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    plan = inference.choose_clusters(errors, rule="threshold")
    path = tmp_path / "plan.json"
    plan.save(path)
    found = inference.ChaiPlan.load(path, depth=2, heads=3)
    assert found == plan
    np.testing.assert_array_equal(found.errors, errors)
    assert json.loads(path.read_text())["layer_params"] == list(plan.clusters)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_the_published_form_is_read(tmp_path):
    path = tmp_path / "params7b.json"
    path.write_text(json.dumps({"layer_params": [32] * 18 + [4] * 14}))
    plan = inference.ChaiPlan.load(path, depth=32, heads=32)
    assert sum(plan.clusters) == 632
    assert plan.errors is None


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        ([4, 5, 2], r"layer 1: clusters must be in \[1, 4\]: got 5"),
        ([4, 4, 0], "layer 2: .*got 0"),
        ([4, 4], "each of 3 layers: got 2"),
    ],
)
def test_a_plan_of_another_model_is_refused(tmp_path, clusters, message):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layer_params": clusters}))
    with pytest.raises(ValueError, match=message):
        inference.ChaiPlan.load(path, depth=3, heads=4)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1, 2]",
        '{"layers": [1]}',
        '{"layer_params": 4}',
        '{"layer_params": [4.0]}',
        '{"layer_params": [true]}',
        '{"layer_params": [1], "errors": [[1, 2], [3]]}',
        '{"layer_params": [1], "errors": [[1], [2]]}',
    ],
)
def test_what_is_not_a_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(DataFormatError, match=r"plan\.json"):
        inference.ChaiPlan.load(path, depth=1, heads=4)
