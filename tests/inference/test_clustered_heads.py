"""Clustered heads in a whole model, against all heads and against numpy."""

import contextlib
import functools
import math
import operator

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from hpcjax import core, cost, inference, models, perf
from hpcjax.inference import clustered_heads as module
from hpcjax.inference import generation
from tests.inference.test_generation import GREEDY, speaker
from tests.models.helpers import Instance, noisy
from tests.oracles import transformer

VOCABULARY, WINDOW = 11, 3


@functools.cache
def made(heads=4, kv_heads=None, depth=3, seed=0):
    config = models.CausalLmConfig(
        depth=depth, width=16, heads=heads, kv_heads=kv_heads, options=models.LLAMA
    )
    model = config.make((64,), VOCABULARY)
    params, _ = model.init(jax.random.key(seed))
    return Instance(model, noisy(params, seed=seed), {}, None, config)


def tokens_of(shape, seed=0):
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, shape)
    return jnp.asarray(drawn, jnp.int32)


def clustering(mode=None, **more):
    return inference.Clustering(window=WINDOW, mode=mode, **more)


def shuffled(batch, heads, seed):
    """A membership of one head a cluster, in any order."""
    order = np.random.default_rng(seed).permuted(
        np.tile(np.arange(heads), (batch, 1)), axis=1
    )
    rep = np.argsort(order, axis=1)
    return inference.Membership(
        jnp.asarray(order, jnp.int32), jnp.asarray(rep, jnp.int32)
    )


@pytest.mark.slow
@pytest.mark.acceptance("chai", 1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "mode"),
    [(4, None, None), (4, 2, "within_group"), (4, 2, "cross_group"), (4, 2, "expand")],
)
@pytest.mark.parametrize("share", [False, True])
def test_a_cluster_for_each_head_changes_nothing(heads, kv_heads, mode, share):
    found = made(heads, kv_heads)
    tokens = tokens_of((3, 12))
    plan = inference.ChaiPlan((heads,) * 3)
    memberships = [shuffled(3, heads, seed) for seed in range(3)]
    losses = inference.clustered_losses(
        speaker(found),
        tokens,
        plan,
        clustering(mode, share_values=share),
        key=jax.random.key(0),
        memberships=memberships,
    )
    dense = inference.token_losses(speaker(found), tokens)
    np.testing.assert_allclose(losses, dense[:, WINDOW:], atol=1e-5, rtol=1e-5)


def by_hand(found, tokens, memberships, row, share):
    """Losses of one text in numpy: heads of a cluster mix by one map."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found.params)
    config, options = found.labels, found.labels.options
    x = params["embed"]["table"][np.asarray(tokens)]
    time, size = len(tokens), config.width // config.heads
    groups = config.heads // (config.kv_heads or config.heads)
    past = np.tril(np.ones((time, time), bool))
    for layer, membership in enumerate(memberships):
        own = jax.tree.map(operator.itemgetter(layer), params["blocks"])
        normed = transformer.norm(x, own["attention_norm"], options.norm_eps)
        query, key, value = (
            transformer.dense(normed, own["attention"][name])
            for name in ("query", "key", "value")
        )
        parts = []
        for head in range(config.heads):
            speaks = int(membership.rep[row][membership.assign[row][head]])
            mixes = []
            for q_head, v_head in (
                (head, head),
                (speaks, speaks if share else head),
            ):
                q = query[:, q_head * size : (q_head + 1) * size]
                k, v = (
                    rows[:, h // groups * size : (h // groups + 1) * size]
                    for rows, h in ((key, q_head), (value, v_head))
                )
                q, k = (transformer.rotate(a, options.rope_theta) for a in (q, k))
                scores = np.where(past, q @ k.T / math.sqrt(size), -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixes.append(weights / weights.sum(-1, keepdims=True) @ v)
            # The window was read with all heads.
            parts.append(np.concatenate([mixes[0][:WINDOW], mixes[1][WINDOW:]]))
        mixed = np.concatenate(parts, -1)
        x = x + transformer.dense(mixed, own["attention"]["output"])
        normed = transformer.norm(x, own["mlp_norm"], options.norm_eps)
        x = x + transformer.feed_forward(normed, own["mlp"], options.mlp)
    x = transformer.norm(x, params["final_norm"], options.norm_eps)
    logits = transformer.dense(x, params["head"])
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -logits[np.arange(time - 1), tokens[1:]][WINDOW:]


@pytest.mark.quick("False-2-expand-clusters3")
@pytest.mark.parametrize(
    ("kv_heads", "mode", "clusters"),
    [
        (None, None, (3, 1, 1)),
        (2, "within_group", (2, 4, 2)),
        (2, "cross_group", (1, 3, 2)),
        (2, "expand", (3, 1, 1)),
    ],
)
@pytest.mark.parametrize("share", [False, True])
def test_losses_are_those_of_heads_mixed_by_their_representatives(
    kv_heads, mode, clusters, share
):
    found = made(4, kv_heads)
    tokens = tokens_of((2, 9), seed=1)
    plan, options = inference.ChaiPlan(clusters), clustering(mode, share_values=share)
    key = jax.random.key(3)
    losses = inference.clustered_losses(speaker(found), tokens, plan, options, key=key)
    made_ = inference.generate_clustered(
        speaker(found),
        inference.Prompts(tokens, jnp.array([9, 9])),
        plan,
        inference.Continuation(max_new_tokens=1),
        options,
        key=key,
    )
    for row in range(2):
        expected = by_hand(
            found, np.asarray(tokens[row]), made_.memberships, row, share
        )
        np.testing.assert_allclose(losses[row], expected, atol=2e-5, rtol=2e-5)


def test_maps_are_the_softmaxed_scores_of_each_head():
    found = made(4, 2)
    tokens = tokens_of((2, 5))
    maps, cache = inference.probe(speaker(found), tokens, maps_only=False)
    assert maps.shape == (3, 2, 4, 5, 5)
    assert cache.length.tolist() == [5, 5]
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-6)
    assert not np.any(np.triu(maps, 1))
    taps = {
        f"blocks/attention/{name}": core.Tap(forward=lambda x, y: y)
        for name in ("query", "key")
    }
    _, state = found.model.apply(found.params, {}, tokens, train=False, taps=taps)
    query, key = (np.asarray(state["seen"][path]) for path in taps)
    for head in range(4):
        q = transformer.rotate(query[1, 0, :, head * 4 : head * 4 + 4], 1e4)
        k = transformer.rotate(key[1, 0, :, head // 2 * 4 : head // 2 * 4 + 4], 1e4)
        scores = np.where(np.tril(np.ones((5, 5))), q @ k.T / 2, -np.inf)
        weights = np.exp(scores)
        expected = weights / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(maps[1, 0, head], expected, atol=1e-5)


def read(found, tokens, cache):
    x = models.Decoding(tokens=tokens, cache=cache, attend=inference.attend_clustered)
    return speaker(found).decode(x)


@pytest.mark.slow
@pytest.mark.acceptance("chai", 5)
@pytest.mark.parametrize(
    ("kv_heads", "mode", "share", "clusters"),
    [
        (None, None, False, (3, 1, 2)),
        (None, None, True, (3, 1, 2)),
        (2, "within_group", False, (2, 4, 2)),
        (2, "cross_group", False, (1, 3, 2)),
        (2, "expand", True, (3, 1, 1)),
    ],
)
def test_one_token_at_a_time_gives_what_one_pass_gives(kv_heads, mode, share, clusters):
    found, tokens = made(4, kv_heads), tokens_of((2, 9), seed=2)
    chosen, decoder = clustering(mode, share_values=share), found.model.decoder
    maps, cache = inference.probe(speaker(found), tokens[:, :WINDOW], maps_only=False)
    memberships = inference.cluster_layers(
        maps,
        inference.ChaiPlan(clusters),
        chosen,
        kv_heads=decoder.kv_heads,
        key=jax.random.key(1),
    )
    cache = inference.compact(cache, memberships, decoder, chosen, 9)
    decode = jax.jit(functools.partial(read, found))
    whole, _ = decode(tokens[:, WINDOW:], cache)
    for place in range(WINDOW, 9):
        logits, cache = decode(tokens[:, place : place + 1], cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, place - WINDOW], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "mode"), [(None, None), (2, "cross_group")])
def test_texts_are_those_of_the_clusters_logits(kv_heads, mode, monkeypatch):
    probed, probe = [], module.probe
    monkeypatch.setattr(
        module, "probe", lambda *a, **k: probed.append(probe(*a, **k)) or probed[-1]
    )
    found, lengths = made(4, kv_heads), np.array([8, 5, 4])
    prompts = inference.Prompts(tokens_of((3, 8), seed=2), jnp.asarray(lengths))
    result = inference.generate_clustered(
        speaker(found),
        prompts,
        inference.ChaiPlan((2, 2, 1)),
        inference.Continuation(max_new_tokens=6, sampler=GREEDY),
        clustering(mode),
        key=jax.random.key(1),
    )
    ((_, first),) = probed
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.runs))
    text = np.zeros((3, 14), np.int32)
    text[:, :8] = np.where(np.arange(8) < lengths[:, None], prompts.tokens, 0)
    told = lengths[:, None] + np.arange(6)
    np.put_along_axis(text, told, np.asarray(result.generated.tokens), axis=1)
    _, cache = probe(speaker(found), jnp.asarray(text[:, :WINDOW]), maps_only=False)
    cache = inference.compact(
        cache, result.memberships, found.model.decoder, clustering(mode), 14
    )
    logits, _ = read(found, jnp.asarray(text[:, WINDOW:]), cache)
    likeliest = np.argmax(logits, axis=-1)
    expected = np.take_along_axis(likeliest, told - WINDOW - 1, axis=1)
    np.testing.assert_array_equal(result.generated.tokens, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2}, r"the plan's \(2, 1, 2\) clusters: got clusters=\[2, 1\]"),
        ({"batch": 2}, "layer 0: a membership must be of 1 or 3 requests, 4 heads"),
        ({"move": 4}, "layer 0: rep must be in 0 … 3"),
    ],
)
def test_memberships_that_do_not_fit_are_refused(change, message):
    found, batch = made(4), change.get("batch", 1)
    memberships = [
        inference.random_membership(jax.random.key(layer), batch, 4, clusters)
        for layer, clusters in enumerate((2, 1, 2)[: change.get("layers", 3)])
    ]
    moved = memberships[0].rep + change.get("move", 0)
    memberships[0] = memberships[0]._replace(rep=moved)
    with pytest.raises(core.ConfigError, match=message):
        inference.generate_clustered(
            speaker(found),
            inference.pad_prompts([[1] * 6] * 3, least=8),
            inference.ChaiPlan((2, 1, 2)),
            None,
            clustering(),
            key=jax.random.key(0),
            memberships=memberships,
        )


@pytest.mark.quick("32-runs0-632")
@pytest.mark.acceptance("chai", 4)
@pytest.mark.parametrize(
    ("heads", "runs", "kept"),
    [
        (32, ((18, 32), (14, 4)), 632),
        (52, ((18, 48), (8, 36), (6, 24), (2, 8), (26, 6)), 1468),
        (32, ((3, 28), (12, 18), (2, 8), (15, 4)), 376),
    ],
)
def test_bytes_in_memory_are_those_of_the_formula(heads, runs, kept):
    clusters = tuple(k for layers, k in runs for _ in range(layers))
    assert sum(clusters) == kept
    depth = len(clusters)
    decoder = core.Decoder(depth, heads, heads, 2, 3, None, "float32")
    every = jnp.zeros((depth, 2, WINDOW, heads, 2))
    cache = models.Cache(
        runs=(models.KeysValues(keys=every, values=every),),
        length=jnp.full(2, WINDOW),
    )
    memberships = [
        inference.Membership(
            jnp.arange(heads, dtype=jnp.int32)[None] % k,
            jnp.arange(k, dtype=jnp.int32)[None],
        )
        for k in clusters
    ]
    compacted = inference.compact(cache, memberships, decoder, clustering(), 16)
    found = inference.cache_bytes(compacted)
    formula = cost.ClusteredHeads(clusters=clusters, heads=heads, head_dim=2)
    assert found == formula.kv_cache_bytes(2, 16, 4)
    saved = 1 - found / formula.dense_cache_bytes(2, 16, 4)
    assert saved == pytest.approx((1 - kept / (depth * heads)) / 2)


@pytest.mark.slow
@pytest.mark.acceptance("chai", 4)
@pytest.mark.parametrize("mode", ["within_group", "cross_group", "expand"])
def test_bytes_of_grouped_heads(mode):
    found = made(4, 2)
    clusters = (4, 2, 2)
    result = inference.generate_clustered(
        speaker(found),
        inference.pad_prompts([[1] * 7], least=8),
        inference.ChaiPlan(clusters),
        inference.Continuation(max_new_tokens=8),
        clustering(mode),
        key=jax.random.key(0),
    )
    formula = cost.ClusteredHeads(
        clusters=clusters, heads=4, head_dim=4, kv_heads=2, mode=mode
    )
    assert result.cache_bytes == formula.kv_cache_bytes(1, 16, 4)


@pytest.mark.acceptance("chai", 9)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clusters": (4, 5, 1)}, r"layer 1: clusters must be in \[1, 4\]: got 5"),
        ({"clusters": (4, 0, 1)}, r"layer 1: clusters must be in \[1, 4\]: got 0"),
        ({"clusters": (4, 4)}, "each of 3 layers: got 2"),
        ({"length": WINDOW}, "at least 4 tokens, one more than the window: got 3"),
        ({"kv_heads": 2}, "mode=None, heads=4, kv_heads=2; take 'within_group'"),
        ({"mode": "expand"}, "mode='expand', heads=4, kv_heads=4"),
        ({"kv_heads": 2, "mode": "within_group", "clusters": (3, 2, 2)}, "divide"),
    ],
)
def test_what_cannot_be_clustered_is_refused(change, message):
    found = made(4, change.get("kv_heads"))
    prompt = [1] * change.get("length", 6)
    with pytest.raises(core.ConfigError, match=message):
        inference.generate_clustered(
            speaker(found),
            inference.pad_prompts([prompt, [1] * 6], least=8),
            inference.ChaiPlan(change.get("clusters", (4, 2, 1))),
            None,
            clustering(change.get("mode")),
            key=jax.random.key(0),
        )


@contextlib.contextmanager
def jaxtyping_off():
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.slow
def test_clusters_need_less_memory_than_all_heads():
    """4 clusters of 16 heads keep 20 of 32 arrays of keys and values: 0.625."""
    config = models.CausalLmConfig(depth=4, width=64, heads=16, options=models.LLAMA)
    model = config.make((2048,), VOCABULARY)
    params, _ = model.init(jax.random.key(0))
    shapes = inference.LanguageModel(model=model, params=params)
    prompts = inference.Prompts(tokens_of((4, 16)), jnp.full(4, 16, jnp.int32))
    key, options = jax.random.key(0), inference.Continuation(max_new_tokens=2000)
    dense = generation._generate.lower(shapes, prompts, key, options=options).compile()
    memberships = [
        inference.random_membership(jax.random.key(layer), 4, 16, 4)
        for layer in range(4)
    ]
    cache = inference.compact(
        models.empty_cache(model, 4, WINDOW),
        memberships,
        models.decoder_of(model),
        clustering(),
        2016,
    )
    # The types of clusters demand arrays, where JAX says what is donated.
    with jaxtyping_off():
        lowered = module._continue.lower(
            shapes, cache, prompts, key, window=WINDOW, options=options
        )
    clustered = lowered.compile()
    assert perf.peak_memory(clustered) <= 0.8 * perf.peak_memory(dense)
