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
    batch, time, heads = 3, 7, 6
    lengths = [7, 5, 4]
    there = np.arange(time) < np.array(lengths)[:, None]
    cascade = inference.start_cascade(jnp.asarray(there), heads)
    left = [(set(range(heads)), set(range(n))) for n in lengths]
    shown, paid = np.zeros((batch, heads)), np.zeros((batch, time))
    keep_heads = inference.kept_counts(heads, [1.0, 0.6, 0.3])
    keep_tokens = [inference.kept_counts(n, [0.9, 0.8, 0.4]) for n in lengths]
    for layer in range(3):
        outputs = rng.normal(size=(batch, time, heads, 4))
        maps = rng.dirichlet(np.ones(time), (batch, heads, time))
        cascade = inference.observe_layer(
            cascade, jnp.asarray(outputs, jnp.float32), jnp.asarray(maps, jnp.float32)
        )
        tokens = jnp.array([each[layer] for each in keep_tokens])
        cascade = inference.prune(cascade, keep_heads[layer], tokens)
        for b in range(batch):
            for h in left[b][0]:
                shown[b, h] += np.abs(outputs[b, :, h]).sum()
                for t in left[b][1]:
                    paid[b, t] += maps[b, h, :, t].sum()
            left[b] = (
                best(shown[b], keep_heads[layer], left[b][0]),
                best(paid[b], keep_tokens[b][layer], left[b][1]),
            )
            found = (
                set(np.flatnonzero(cascade.heads[b]).tolist()),
                set(np.flatnonzero(cascade.tokens[b]).tolist()),
            )
            assert found == left[b]
    assert {len(heads) for heads, _ in left} == {2}
    np.testing.assert_allclose(cascade.head_importance, shown, rtol=1e-5)
    np.testing.assert_allclose(cascade.token_importance, paid, rtol=1e-5)


def test_what_is_pruned_stays_pruned():
    cascade = inference.start_cascade(jnp.ones((1, 4), bool), 3)
    outputs = jnp.array([1.0, 2.0, 3.0])[None, None, :, None]
    maps = jnp.broadcast_to(jnp.array([0.4, 0.3, 0.2, 0.1]), (1, 3, 1, 4))
    pruned = inference.prune(inference.observe_layer(cascade, outputs, maps), 2, 2)
    # Later the others would be the most important by far.
    loud = jnp.array([1000.0, 0.0, 0.0])[None, None, :, None]
    turned = 1000 * maps[..., ::-1]
    again = inference.prune(inference.observe_layer(pruned, loud, turned), 2, 2)
    assert again.heads.tolist() == [[False, True, True]]
    assert again.tokens.tolist() == [[True, True, False, False]]
    # And there are no more to keep than are left.
    assert inference.prune(again, 3, 4).heads.tolist() == again.heads.tolist()


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
