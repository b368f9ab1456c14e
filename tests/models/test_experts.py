"""A language model with experts: losses of its layers, training, operations."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, data, inference, metrics, models, sharding, train
from tests.models import helpers

CONTEXT, WORDS = 6, 11


class Texts:
    """Sequences in which each token is followed by the next number."""

    def __len__(self):
        return 16

    def gather(self, indices):
        start = 3 * np.asarray(indices)[:, None] + np.arange(CONTEXT + 1)
        tokens = (start % WORDS).astype(np.int32)
        return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def model_of(**fields):
    experts = models.ExpertsConfig(**{"count": 4, **fields})
    options = dataclasses.replace(models.GPT2, experts=experts, init_scale=0.3)
    config = models.CausalLmConfig(width=8, heads=2, options=options)
    return config.make((CONTEXT,), WORDS)


def task_of(model, optimizer):
    texts = Texts()
    dataset = data.Dataset(
        train=texts,
        validation=texts,
        inputs=(CONTEXT,),
        outputs=WORDS,
        objective=data.TokenTextConfig.objective,
    )
    return train.supervised(model, optimizer, dataset)


def layer_losses(model, params, tokens):
    """Both losses of every layer, unweighted, from what the routers were seen to do."""
    (spec,) = (spec for spec in model.layers if spec.path.endswith("router"))
    taps = {spec.path: core.Tap(forward=lambda x, y: y)}
    _, state = model.apply(params, {}, tokens, train=False, taps=taps)
    logits = np.asarray(state["seen"][spec.path], np.float64)
    logits = logits.reshape(len(logits), -1, logits.shape[-1])
    likely = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    count = logits.shape[-1]
    share = np.stack([np.bincount(a, minlength=count) for a in likely.argmax(-1)])
    balance = count * (share / logits.shape[1] * likely.mean(1)).sum(-1)
    return balance, np.square(np.log(np.exp(logits).sum(-1))).mean(1)


@pytest.mark.quick("2")
@pytest.mark.acceptance("lm-models", 7)
@pytest.mark.parametrize("top_k", [1, 2])
def test_training_returns_the_weighted_losses_of_every_layer(top_k):
    model = model_of(top_k=top_k, balance_weight=0.5, router_z_weight=0.25)
    params, state = model.init(jax.random.key(0))
    tokens = jnp.asarray(Texts().gather(np.arange(4))["x"])
    _, new = model.apply(params, state, tokens, train=True)
    balance, z = layer_losses(model, params, tokens)
    found = new[core.LOSSES]["blocks"]["mlp"]
    np.testing.assert_allclose(found["balance"], 0.5 * balance, rtol=1e-5)
    np.testing.assert_allclose(found["router_z"], 0.25 * z, rtol=1e-5)
    expected = 0.5 * balance.sum() + 0.25 * z.sum()
    assert float(core.added_loss(new)) == pytest.approx(expected, rel=1e-5)
    # Neither are they an input of the next pass, nor does evaluation touch them.
    _, again = model.apply(params, new, tokens, train=True)
    chex.assert_trees_all_equal(again, new)
    _, kept = model.apply(params, new, tokens, train=False)
    chex.assert_trees_all_equal(kept, new)


@pytest.mark.slow
@pytest.mark.acceptance("lm-models", 7)
def test_with_room_for_all_a_capacity_changes_neither_logits_nor_gradients():
    tokens, labels = (jnp.asarray(a) for a in Texts().gather(np.arange(4)).values())
    params = jax.tree.map(
        jnp.float32, helpers.noisy(model_of().init(jax.random.key(0))[0])
    )

    def both(factor):
        model = model_of(capacity_factor=factor)

        def loss(params):
            logits, state = model.apply(params, {}, tokens, train=True)
            loss = metrics.cross_entropy(logits, labels) + core.added_loss(state)
            return loss, logits

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    (grads, logits), exact = both(2.0), both(None)
    chex.assert_trees_all_close((grads, logits), exact, atol=1e-5)
    tight, _ = both(0.5)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(tight, exact[0], atol=1e-3)


def grouped(**fields):
    experts = models.ExpertsConfig(**{"count": 4, "every": 2, "top_k": 1, **fields})
    options = dataclasses.replace(models.GPT2, experts=experts, init_scale=0.3)
    config = models.CausalLmConfig(depth=4, width=8, heads=2, options=options)
    return config.make((CONTEXT,), WORDS)


def test_every_second_block_has_experts():
    """Equal experts, whose gates add up to 1, are one dense feed-forward part."""
    model = grouped(top_k=2)
    params, state = model.init(jax.random.key(0))
    dense = models.CausalLmConfig(depth=4, width=8, heads=2).make((CONTEXT,), WORDS)
    given = helpers.noisy(dense.init(jax.random.key(1))[0])
    blocks = {
        f"block_{place}": jax.tree.map(
            lambda leaf: leaf[place::2],  # noqa: B023
            given["blocks"],
        )
        for place in range(2)
    }
    mlp = blocks["block_1"]["mlp"]
    copies = {
        name + end: jnp.stack([jnp.asarray(mlp[name][leaf])] * 4, axis=1)
        for name in ("up", "down")
        for end, leaf in (("", "kernel"), ("_bias", "bias"))
    }
    router = params["blocks"]["block_1"]["mlp"]["router"]
    blocks["block_1"]["mlp"] = {"experts": copies, "router": router}
    mixed = {**given, "blocks": blocks}
    chex.assert_trees_all_equal_shapes(mixed, params)
    tokens = jnp.asarray(Texts().gather(np.arange(2))["x"])
    y, new = model.apply(mixed, state, tokens, train=True)
    assert new[core.LOSSES]["blocks"]["block_1"]["mlp"]["balance"].shape == (2,)
    wanted, _ = dense.apply(given, {}, tokens, train=True)
    np.testing.assert_allclose(y, wanted, atol=1e-5)


@pytest.mark.acceptance("ted", 10)
def test_random_priority_needs_a_key_and_only_in_training():
    model = grouped(priority="random", capacity_factor=0.5)
    params, state = model.init(jax.random.key(0))
    tokens = jnp.asarray(Texts().gather(np.arange(2))["x"])

    def run(key, train=True):
        return model.apply(params, state, tokens, train=train, key=key)[0]

    with pytest.raises(core.ConfigError, match="draws in training: give the model a"):
        run(None)
    first, second = (run(jax.random.key(seed)) for seed in range(2))
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(first, run(jax.random.key(0)))
    by_position = grouped(capacity_factor=0.5).apply(params, state, tokens, train=True)
    np.testing.assert_allclose(run(None, train=False), by_position[0], atol=1e-6)


def test_groups_of_blocks_are_refused_where_each_block_needs_a_cache():
    model = grouped()
    params, _ = model.init(jax.random.key(0))
    speaker = inference.LanguageModel(model=model, params=params)
    few = inference.Continuation(max_new_tokens=2)
    prompts = inference.pad_prompts([[1, 2]])
    with pytest.raises(core.ConfigError, match="every=2"):
        inference.generate(speaker, prompts, few, key=jax.random.key(0))


@pytest.mark.slow
def test_a_step_descends_on_the_objective_and_what_the_layers_add():
    model = model_of(balance_weight=3.0, router_z_weight=1.0)
    task, mesh = task_of(model, optax.sgd(0.1)), sharding.data_mesh(2)
    state = train.init_state(task, 0, mesh)
    params, batch = jax.tree.map(jnp.copy, state.params), Texts().gather(np.arange(8))
    x, y = map(jnp.asarray, batch.values())
    step = train.train_step(task, mesh, state)
    after, found = step(state, sharding.place_batch(batch, mesh))

    def loss(params, rows, *, weight):
        logits, new = model.apply(params, {}, x[rows], train=True)
        own = metrics.cross_entropy(logits, y[rows])
        return own + weight * core.added_loss(new)

    def mean(params, weight):
        halves = slice(0, 4), slice(4, 8)
        return sum(loss(params, rows, weight=weight) for rows in halves) / 2

    grads = jax.grad(mean)(params, 1.0)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    chex.assert_trees_all_close(jax.device_get(after.params), expected, atol=1e-6)
    without = mean(params, 0.0)
    assert float(found["loss"]) == pytest.approx(float(without), rel=1e-5)
    added = mean(params, 1.0) - without
    assert float(found["added_loss"]) == pytest.approx(float(added), rel=1e-4)
    assert added > 1


@pytest.mark.slow
def test_training_with_the_balance_loss_evens_out_the_experts():
    def trained(weight):
        model = model_of(top_k=1, balance_weight=weight)
        task, mesh = task_of(model, optax.adam(0.01)), sharding.data_mesh(1)
        state = train.init_state(task, 0, mesh)
        step = train.train_step(task, mesh, state)
        batch = Texts().gather(np.arange(16))
        losses = []
        for _ in range(60):
            state, found = step(state, sharding.place_batch(batch, mesh))
            losses.append(float(found["loss"]))
        tokens = jnp.asarray(batch["x"])
        return layer_losses(model, state.params, tokens)[0], losses

    balance, losses = trained(0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert balance.max() < 1.1
    assert trained(0.0)[0].max() > 1.2


def test_operations_count_the_experts_a_token_goes_through():
    def flops(**fields):
        options = dataclasses.replace(
            models.LLAMA, experts=models.ExpertsConfig(**fields)
        )
        config = models.CausalLmConfig(width=16, heads=2, options=options)
        return models.flops_per_token(config, 8, 11)

    mlp, router = 3 * 16 * 64, 16 * 8
    dense = models.CausalLmConfig(width=16, heads=2, options=models.LLAMA)
    base = models.flops_per_token(dense, 8, 11)
    assert flops(count=8, top_k=1) == base + 6 * 2 * router
    assert flops(count=8, top_k=2) == base + 6 * 2 * (router + mlp)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 3}, "top_k=3"),
        ({"count": 1}, "top_k=2, count=1"),
        ({"capacity_factor": 0.0}, r"> 0: got capacity_factor=0\.0"),
        ({"balance_weight": -0.5}, r"balance_weight=-0\.5"),
        ({"router_z_weight": float("nan")}, "router_z_weight=nan"),
        ({"priority": "first"}, "priority"),
        ({"every": 0}, "every=0"),
    ],
)
def test_impossible_experts_are_refused(fields, message):
    with pytest.raises(core.ConfigError, match=message):
        models.ExpertsConfig(**fields)


def test_groups_must_divide_the_depth_and_pieces_have_no_experts():
    experts = models.ExpertsConfig(every=2)
    options = dataclasses.replace(models.GPT2, experts=experts)
    with pytest.raises(core.ConfigError, match="every must divide depth: got depth=3"):
        models.CausalLmConfig(depth=3, options=options)
    with pytest.raises(core.ConfigError, match="not in pieces: got pieces=2"):
        models.CausalLmConfig(pieces=2, options=options)


@pytest.mark.parametrize("fields", [{"every": 2}, {"priority": "random"}])
def test_an_unrolled_model_has_experts_in_each_block(fields):
    options = dataclasses.replace(models.GPT2, experts=models.ExpertsConfig(**fields))
    config = models.CausalLmConfig(width=8, heads=2, options=options)
    with pytest.raises(core.UnsupportedOp, match="experts in each block, and draws"):
        models.unrolled_causal_lm(config, CONTEXT, WORDS)
