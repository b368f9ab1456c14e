"""Cascades and predicted heads in a whole model, against all heads and numpy."""

import fractions
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, inference
from hpcjax.inference.pruned_heads import cascading_cache, predicting_cache
from tests.inference.test_clustered_heads import WINDOW, made, tokens_of
from tests.inference.test_generation import speaker
from tests.inference.test_head_pruning import best
from tests.oracles import transformer

DEPTH, HEADS = 3, 4
KEPT = {"heads": (1.0, 0.75, 0.5), "tokens": (0.9, 0.6, 0.5)}
COUNTS = (3, 2, 1)


@functools.cache
def drawn(kv_heads=None):
    """A model whose heads differ, and attend to few tokens each."""
    found, rng = made(HEADS, kv_heads), np.random.default_rng(7)

    def leaf(path, held):
        noise = rng.normal(size=held.shape).astype(np.float32)
        scales = jax.tree_util.keystr(path).endswith("['scale']")
        return jnp.asarray(1 + 0.1 * noise if scales else 0.4 * noise)

    params = jax.tree_util.tree_map_with_path(leaf, found.params)
    return found._replace(params=params)


def predictors(width=16, hidden=5):
    """Untrained ones, whose biases differ."""

    def one(key):
        params = inference.init_predictor(key, width, hidden, HEADS)
        return params | {"out_bias": jax.random.normal(key, HEADS) / 10}

    return jax.vmap(one)(jax.random.split(jax.random.key(5), DEPTH))


def losses_of(name, found, tokens, window=WINDOW):
    if name == "cascade":
        return inference.cascading_losses(
            speaker(found),
            tokens,
            heads=KEPT["heads"],
            tokens_kept=KEPT["tokens"],
            window=window,
        )
    chosen = predictors() if name == "predicted" else None
    return inference.predicting_losses(
        speaker(found), tokens, heads=COUNTS, predictors=chosen, window=window
    )


class Cascade:
    """SpAtten by sets: importance at a layer is what layers before it have shown."""

    def __init__(self, time):
        self.put_out = np.zeros((DEPTH, HEADS))
        self.paid = np.zeros((DEPTH, time))

    def __call__(self, layer, place, mix, hidden):
        if layer == 0:
            self.heads, self.tokens = set(range(HEADS)), set(range(place + 1))
            self.own, self.own_paid = np.zeros(HEADS), np.zeros(self.paid.shape[1])
        self.put_out[layer] += self.own
        self.paid[layer] += self.own_paid
        if place >= WINDOW:
            share = fractions.Fraction(str(KEPT["tokens"][layer]))
            importance = self.paid[layer].copy()
            importance[place] = np.inf
            self.tokens = best(importance, math.ceil(share * (place + 1)), self.tokens)
            keep = math.ceil(KEPT["heads"][layer] * HEADS)
            self.heads = best(self.put_out[layer], keep, self.heads)
        seen, found = sorted(self.tokens), {}
        for head in self.heads:
            found[head], weights = mix(head, seen)
            self.own[head] += np.abs(found[head]).sum()
            self.own_paid[seen] += weights
        return found


class Predicted:
    """DejaVu: heads by what is in front of the layer before."""

    def __init__(self, time):
        del time
        self.params = jax.tree.map(lambda leaf: np.asarray(leaf, float), predictors())

    def __call__(self, layer, place, mix, hidden):
        before = self.before if layer else np.zeros_like(hidden)
        own = {name: leaf[layer] for name, leaf in self.params.items()}
        inner = np.maximum(before @ own["in"] + own["in_bias"], 0)
        logits = inner @ own["out"] + own["out_bias"]
        keep = COUNTS[layer] if place >= WINDOW else HEADS
        self.before = hidden
        seen = range(place + 1)
        return {h: mix(h, seen)[0] for h in best(logits, keep, range(HEADS))}


class Oracle:
    """DejaVu's labels: the heads of the largest outputs."""

    def __init__(self, time):
        del time

    def __call__(self, layer, place, mix, hidden):
        every = {h: mix(h, range(place + 1))[0] for h in range(HEADS)}
        norms = [np.linalg.norm(every[h]) for h in range(HEADS)]
        keep = COUNTS[layer] if place >= WINDOW else HEADS
        return {h: every[h] for h in best(norms, keep, range(HEADS))}


@jax.jit
def read(speaks, x):
    return speaks.decode(x)


RULES = {"cascade": Cascade, "predicted": Predicted, "oracle": Oracle}


def by_hand(found, tokens, rule):
    """Losses of one text in numpy, one token after another and head by head."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found.params)
    config, options = found.labels, found.labels.options
    size, groups = config.width // HEADS, HEADS // (config.kv_heads or HEADS)
    rows, losses = [[] for _ in range(DEPTH)], []

    for place, token in enumerate(tokens[:-1]):
        x = params["embed"]["table"][token]
        for layer in range(DEPTH):
            own = jax.tree.map(operator.itemgetter(layer), params["blocks"])
            rows[layer].append(transformer.norm(x, own["attention_norm"], 1e-5))
            query, key, value = (
                transformer.dense(np.array(rows[layer]), own["attention"][name])
                for name in ("query", "key", "value")
            )

            def mix(head, seen, query=query, key=key, value=value):
                q, k, v = (
                    all_[:, h * size : (h + 1) * size]
                    for all_, h in (
                        (query, head),
                        (key, head // groups),
                        (value, head // groups),
                    )
                )
                q, k = (transformer.rotate(a, options.rope_theta) for a in (q, k))
                weights = np.exp(k[list(seen)] @ q[-1] / math.sqrt(size))
                weights /= weights.sum()
                return weights @ v[list(seen)], weights

            outputs = np.zeros((HEADS, size))
            for head, output in rule(layer, place, mix, x).items():
                outputs[head] = output
            x = x + transformer.dense(outputs.ravel(), own["attention"]["output"])
            normed = transformer.norm(x, own["mlp_norm"], options.norm_eps)
            x = x + transformer.feed_forward(normed, own["mlp"], options.mlp)
        x = transformer.norm(x, params["final_norm"], options.norm_eps)
        logits = transformer.dense(x, params["head"])
        losses.append(np.log(np.exp(logits).sum()) - logits[tokens[place + 1]])
    return losses[WINDOW:]


@pytest.mark.quick("oracle-None")
@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("name", RULES)
def test_losses_are_those_of_the_loop(name, kv_heads):
    found = drawn(kv_heads)
    tokens = tokens_of((3, 11), seed=1)
    losses = losses_of(name, found, tokens)
    for row in range(3):
        expected = by_hand(found, np.asarray(tokens[row]), RULES[name](11))
        np.testing.assert_allclose(losses[row], expected, atol=2e-5, rtol=2e-5)
    dense = inference.token_losses(speaker(found), tokens)[:, WINDOW:]
    assert np.min(np.max(np.abs(losses - dense), axis=1)) > 1e-3


@pytest.mark.quick("oracle-parts0")
@pytest.mark.parametrize("parts", [(1,) * 10, (4, 1, 5)])
@pytest.mark.parametrize("name", RULES)
def test_tokens_in_parts_give_what_one_pass_gives(name, parts):
    found = drawn(2)
    speaks, tokens = speaker(found), tokens_of((2, 11), seed=2)
    if name == "cascade":
        cache = cascading_cache(speaks, 2, 11, **KEPT, window=WINDOW)
    else:
        chosen = predictors() if name == "predicted" else None
        cache = predicting_cache(
            speaks, 2, 11, heads=COUNTS, predictors=chosen, window=WINDOW
        )
    logits = []
    for part in np.split(tokens[:, :10], np.cumsum(parts)[:-1], axis=1):
        x = (
            inference.cascading_decoding(speaks, jnp.asarray(part), cache)
            if name == "cascade"
            else inference.predicting_decoding(jnp.asarray(part), cache)
        )
        told, cache = read(speaks, x)
        logits.append(told)
    logs = jax.nn.log_softmax(jnp.concatenate(logits, axis=1))
    losses = -jnp.take_along_axis(logs, tokens[:, 1:, None], axis=2)[..., 0]
    expected = losses_of(name, found, tokens)
    np.testing.assert_allclose(losses[:, WINDOW:], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.quick("oracle")
@pytest.mark.parametrize("name", RULES)
def test_what_comes_later_changes_nothing(name):
    found, tokens = drawn(), tokens_of((1, 12), seed=3)
    losses = losses_of(name, found, tokens)
    for place in range(WINDOW + 2, 12):
        other = tokens.at[:, place:].set((tokens[:, place:] + 3) % 11)
        again = losses_of(name, found, other)
        before = place - WINDOW - 1
        np.testing.assert_allclose(again[:, :before], losses[:, :before], atol=1e-6)
        assert abs(float(again[0, before] - losses[0, before])) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_leaving_out_nothing_is_the_dense_model(kv_heads):
    found, tokens = drawn(kv_heads), tokens_of((3, 9))
    speaks = speaker(found)
    dense = inference.token_losses(speaks, tokens)[:, 2:]
    all_ = (HEADS,) * DEPTH
    for losses in (
        inference.cascading_losses(
            speaks, tokens, heads=(1.0,) * 3, tokens_kept=(1.0,) * 3, window=2
        ),
        inference.predicting_losses(speaks, tokens, heads=all_, window=2),
        inference.predicting_losses(
            speaks, tokens, heads=all_, predictors=predictors(), window=2
        ),
    ):
        np.testing.assert_allclose(losses, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_predictors_learn_the_heads_of_the_largest_outputs():
    found, tokens = drawn(), tokens_of((24, 15), seed=4)
    observed = inference.observe_heads(speaker(found), tokens, COUNTS)
    assert observed.states.shape == (DEPTH, 24, 15, 16)
    assert observed.labels.sum(-1).tolist() == [[[n] * 15] * 24 for n in COUNTS]
    assert not observed.states[0].any()
    words = found.params["embed"]["table"][tokens]
    np.testing.assert_allclose(observed.states[1], words, atol=1e-6)

    def right(params):
        logits = jax.vmap(inference.predict_heads)(params, observed.states)
        keep = jnp.array(COUNTS)[:, None, None]
        chosen = inference.top_heads(logits, jnp.broadcast_to(keep, logits.shape[:3]))
        return np.mean(chosen == observed.labels, axis=(1, 2, 3))

    key = jax.random.key(0)
    trained = inference.fit_predictors(observed, key=key, hidden=32, steps=300)
    assert trained["in"].shape == (DEPTH, 16, 32)
    first = inference.fit_predictors(observed, key=key, hidden=32, steps=1)
    assert np.all(right(trained) >= right(first))
    assert np.all(right(trained)[1:] > right(first)[1:] + 0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (1.0, 0.5)}, "heads must have a value for each of 3 layers: got 2"),
        ({"tokens_kept": (0.5,) * 4}, "tokens must have a value .* got 4"),
        ({"tokens_kept": (0.5, 0.6, 0.5)}, r"layer 1: a kept ratio must be in \(0, 0"),
        ({"heads": (1.0, 0.5, 0.0)}, "layer 2: a kept ratio"),
        ({"window": 5}, "at least 7 tokens, two more than the window: got 6"),
    ],
)
def test_cascades_that_cannot_be_are_refused(change, message):
    whole = {"heads": (1.0,) * 3, "tokens_kept": (1.0,) * 3, "window": WINDOW}
    with pytest.raises(core.ConfigError, match=message):
        inference.cascading_losses(
            speaker(drawn()), tokens_of((1, 6)), **(whole | change)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (4, 4)}, "heads must have a value for each of 3 layers: got 2"),
        ({"heads": (4, 5, 4)}, r"layer 1: heads must be in \[1, 4\]: got 5"),
        ({"heads": (4, 4, 0)}, r"layer 2: heads must be in \[1, 4\]: got 0"),
        ({"window": 5}, "at least 7 tokens, two more than the window: got 6"),
    ],
)
def test_heads_that_cannot_be_kept_are_refused(change, message):
    whole = {"heads": (HEADS,) * 3, "window": WINDOW}
    with pytest.raises(core.ConfigError, match=message):
        inference.predicting_losses(
            speaker(drawn()), tokens_of((1, 6)), **(whole | change)
        )
