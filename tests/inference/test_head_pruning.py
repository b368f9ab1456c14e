"""Cascades and predictors of heads, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import inference
from hpcjax.core import ConfigError


def best(values, keep, among):
    """The `keep` largest of the places `among`, the first of equals."""
    return set(sorted(among, key=lambda place: (-values[place], place))[:keep])


@pytest.mark.parametrize("keep", [0, 1, 4, 9])
def test_top_heads(keep):
    # Few values: many are equal.
    importance = np.random.default_rng(0).integers(0, 4, (3, 5, 9)).astype(float)
    mask = inference.top_heads(jnp.asarray(importance, jnp.float32), keep)
    for row in np.ndindex(3, 5):
        found = set(np.flatnonzero(mask[row]).tolist())
        assert found == best(importance[row], keep, range(9))


def test_a_number_for_each_row():
    importance = jnp.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    mask = inference.top_heads(importance, jnp.array([1, 2]))
    assert mask.tolist() == [[False, False, True], [True, True, False]]
    with pytest.raises(ConfigError, match="keep=4"):
        inference.top_heads(importance, 4)


def test_schedules_only_fall():
    assert inference.kept_counts(10, [1.0, 0.7, 0.7, 0.01]) == (10, 7, 7, 1)
    with pytest.raises(ConfigError, match=r"layer 2: .*\(0, 0.5\].*got 0.6"):
        inference.kept_counts(10, [1.0, 0.5, 0.6])
    with pytest.raises(ConfigError, match="layer 0"):
        inference.kept_counts(10, [0.0])


def test_a_cascade_is_the_loop():
    rng = np.random.default_rng(0)
    batch, time, heads, size = 3, 4, 6, 9
    places = np.array([3, 5, 0])[:, None] + np.arange(time)
    positions = jnp.asarray(places, jnp.int32)
    keep_heads = inference.kept_counts(heads, [1.0, 0.6, 0.3])
    keep_tokens = [0.9, 0.8, 0.4]
    cascade = inference.start_cascade(positions, heads, size)
    left = {
        row: (set(range(heads)), set(range(places[row] + 1)))
        for row in np.ndindex(batch, time)
    }
    shown = np.zeros((batch, time, heads)), np.zeros((batch, time, size))
    for layer in range(3):
        outputs = rng.normal(size=(batch, time, heads, 4))
        maps = rng.dirichlet(np.ones(size), (batch, heads, time))
        # By queries of earlier calls.
        before = rng.random((batch, heads)), rng.random((batch, size))
        earlier = inference.Importance(*(jnp.asarray(x, jnp.float32) for x in before))
        known = inference.gather_importance(earlier, cascade.shown)
        counts = [
            [inference.kept_counts(place + 1, keep_tokens)[layer] for place in row]
            for row in places.tolist()
        ]
        cascade = inference.prune_heads_and_tokens(
            cascade,
            known,
            positions,
            keep_heads=keep_heads[layer],
            keep_tokens=jnp.array(counts),
        )
        for b, t in left:
            by_heads, by_tokens = (
                first[b] + own[b, : t + 1].sum(axis=0)
                for first, own in zip(before, shown, strict=True)
            )
            by_tokens[places[b, t]] = np.inf
            left[b, t] = (
                best(by_heads, keep_heads[layer], left[b, t][0]),
                best(by_tokens, counts[b][t], left[b, t][1]),
            )
            assert set(np.flatnonzero(cascade.heads[b, t])) == left[b, t][0]
            assert set(np.flatnonzero(cascade.tokens[b, t])) == left[b, t][1]
            assert places[b, t] in left[b, t][1]
        cascade = inference.observe_layer(
            cascade, jnp.asarray(outputs, jnp.float32), jnp.asarray(maps, jnp.float32)
        )
        for b, t in left:
            for h in left[b, t][0]:
                shown[0][b, t, h] += np.abs(outputs[b, t, h]).sum()
                for s in left[b, t][1]:
                    shown[1][b, t, s] += maps[b, h, t, s]
    assert {len(heads) for heads, _ in left.values()} == {2}
    np.testing.assert_allclose(cascade.shown.heads, shown[0], rtol=1e-5)
    np.testing.assert_allclose(cascade.shown.tokens, shown[1], rtol=1e-5)


def test_what_is_pruned_stays_pruned():
    positions = jnp.array([[3]])
    cascade = inference.start_cascade(positions, 3, 4)

    def cut(cascade, heads, tokens, keep):
        known = inference.Importance(jnp.array([[heads]]), jnp.array([[tokens]]))
        return inference.prune_heads_and_tokens(
            cascade, known, positions, keep_heads=keep, keep_tokens=keep
        )

    pruned = cut(cascade, [1.0, 2.0, 3.0], [0.4, 0.3, 0.2, 0.1], 2)
    # Later the others would be the most important by far.
    again = cut(pruned, [1000.0, 0.0, 0.0], [0.0, 100.0, 100.0, 0.0], 2)
    assert again.heads.tolist() == [[[False, True, True]]]
    # And the query's own token stays, however little was paid to it.
    assert again.tokens.tolist() == [[[True, False, False, True]]]
    # There are no more to keep than are left.
    more = cut(again, [1000.0, 0.0, 0.0], [0.0, 100.0, 100.0, 0.0], 3)
    assert more.heads.tolist() == again.heads.tolist()
    assert more.tokens.tolist() == again.tokens.tolist()


def test_labels_are_the_largest_norms():
    outputs = np.random.default_rng(0).normal(size=(5, 9, 4))
    mask = inference.output_labels(jnp.asarray(outputs, jnp.float32), 3)
    for row, values in zip(mask, np.linalg.norm(outputs, axis=-1), strict=True):
        assert set(np.flatnonzero(row).tolist()) == best(values, 3, range(9))


def test_a_predictor_by_hand():
    params = inference.init_predictor(jax.random.key(0), 6, 5, 3)
    biases = {"in_bias": jnp.arange(5) - 2.0, "out_bias": jnp.arange(3.0)}
    params |= biases
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    values = {name: np.asarray(value, float) for name, value in params.items()}
    hidden = np.maximum(x @ values["in"] + values["in_bias"], 0)
    expected = hidden @ values["out"] + values["out_bias"]
    found = inference.predict_heads(params, jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_predictor_learns_what_can_be_told():
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(3000, 16)), jnp.float32)
    mixing = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    labels = inference.top_heads(jnp.abs(states @ mixing), 4)
    params = inference.init_predictor(jax.random.key(0), 16, 64, 8)
    fit = jax.jit(
        lambda params, states, labels: inference.fit_predictor(
            params, states, labels, key=jax.random.key(1), steps=600, lr=1e-2
        )
    )
    fitted = fit(params, states[:2000], labels[:2000])
    assert fitted.losses.shape == (600,)
    assert float(fitted.losses[0]) == pytest.approx(0.9, abs=0.3)

    def right(params):
        chosen = inference.top_heads(inference.predict_heads(params, states[2000:]), 4)
        return float(jnp.mean(chosen == labels[2000:]))

    assert right(params) < 0.65
    assert right(fitted.params) > 0.8
    shuffled = fit(params, states[:2000], labels[:2000][::-1])
    assert right(shuffled.params) < 0.65
    with pytest.raises(ConfigError, match="steps=0"):
        inference.fit_predictor(params, states, labels, key=jax.random.key(1), steps=0)
