"""Taking out layers, heads and features: what did nothing can go without a trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress, models
from hpcjax.core import ConfigError
from tests.models.helpers import noisy

CONFIG = models.CausalLmConfig(
    depth=3, width=12, heads=6, kv_heads=2, mlp_width=10, options=models.LLAMA
)
# With biases, and each head with keys of its own.
PLAIN = models.CausalLmConfig(depth=2, width=12, heads=4, mlp_width=10)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, 7)))


def test_small_angles_are_told_apart():
    turns = np.cumsum([0, 1e-4, 3e-4, 0])
    hidden = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    assert compress.keep_by_angle(jnp.asarray(hidden, jnp.float32), 1) == (1,)


def parameters(config, seed=0):
    params, _ = config.make((8,), 11).init(jax.random.key(seed))
    return jax.tree.map(lambda leaf: leaf.astype("float32"), noisy(params, seed=seed))


def logits(config, params):
    return config.make((8,), 11).apply(params, {}, TOKENS, train=False)[0]


def with_part(params, name, part):
    return {**params, "blocks": {**params["blocks"], name: part}}


def test_layers_that_stay_are_those_of_the_stack():
    stack = {"kernel": np.arange(24.0).reshape(6, 2, 2), "bias": np.arange(6)}
    found = compress.prune_layers(jax.tree.map(jnp.asarray, stack), (0, 1, 5))
    np.testing.assert_array_equal(found["kernel"], stack["kernel"][[0, 1, 5]])
    np.testing.assert_array_equal(found["bias"], [0, 1, 5])


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (0,)), (2, (0, 5)), (3, (0, 1, 5)), (6, range(6))]
)
def test_ends(count, expected):
    assert compress.keep_ends(6, count) == tuple(expected)


@pytest.mark.slow
def test_a_layer_that_adds_nothing_goes_and_nothing_changes():
    params = parameters(CONFIG)
    for path in (("attention", "output"), ("mlp", "down")):
        part = params["blocks"][path[0]][path[1]]
        part["kernel"] = part["kernel"].at[1].set(0)
    small = {**params, "blocks": compress.prune_layers(params["blocks"], (0, 2))}
    np.testing.assert_allclose(
        logits(dataclasses.replace(CONFIG, depth=2), small),
        logits(CONFIG, params),
        rtol=1e-6,
    )


def test_layers_by_angle_equal_numpy():
    rng = np.random.default_rng(0)
    hidden = np.cumsum(
        rng.normal(size=(7, 3, 5, 8))
        * np.array([3, 1, 0.1, 2, 0.3, 1, 0.2]).reshape(-1, 1, 1, 1),
        axis=0,
    )
    angles = []
    for before, after in zip(
        *(part.reshape(6, -1, 8) for part in (hidden[:-1], hidden[1:])), strict=True
    ):
        turned = [
            np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            for a, b in zip(before, after, strict=True)
        ]
        angles.append(np.mean(turned))
    for count in range(1, 7):
        expected = sorted(sorted(range(6), key=lambda n: -angles[n])[:count])
        found = compress.keep_by_angle(jnp.asarray(hidden, jnp.float32), count)
        assert found == tuple(expected)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, PLAIN])
def test_features_without_activation_leave_no_trace(config):
    params = parameters(config)
    silent = np.array([[1, 4], [0, 9], [3, 4]])[: config.depth]
    norms = np.random.default_rng(2).uniform(1, 2, (config.depth, 10))
    mlp = params["blocks"]["mlp"]
    for layer, places in enumerate(silent):
        norms[layer, places] = 0
        mlp["down"]["kernel"] = mlp["down"]["kernel"].at[layer, places].set(0)
    found = compress.prune_features(mlp, jnp.asarray(norms, jnp.float32), 8)
    small = dataclasses.replace(config, mlp_width=8)
    np.testing.assert_allclose(
        logits(small, with_part(params, "mlp", found)),
        logits(config, params),
        rtol=2e-5,
        atol=1e-5,
    )
    # Another choice does change something.
    other = compress.prune_features(mlp, jnp.asarray(-norms, jnp.float32), 8)
    far = logits(small, with_part(params, "mlp", other)) - logits(config, params)
    assert np.abs(far).max() > 1e-3


# Heads that are silent in each layer, heads left, groups left.
CHOICES = [
    (CONFIG, [[0, 5], [1, 3], [2, 4]], 4, None),
    (CONFIG, [[0, 1, 2], [3, 4, 5], [0, 1, 2]], 3, 1),
    (CONFIG, [[0, 1, 2, 4], [0, 3, 4, 5], [0, 1, 2, 5]], 2, 1),
    (PLAIN, [[0, 2], [1, 2]], 2, None),
]


@pytest.mark.quick("config2-silent2-2-1")
@pytest.mark.parametrize(("config", "silent", "count", "kv_count"), CHOICES)
def test_heads_without_activation_leave_no_trace(config, silent, count, kv_count):
    params = parameters(config)
    size = config.width // config.heads
    norms = np.random.default_rng(2).uniform(1, 2, (config.depth, config.width))
    attention = params["blocks"]["attention"]
    for layer, heads in enumerate(silent):
        for head in heads:
            own = slice(head * size, (head + 1) * size)
            norms[layer, own] = 0
            kernel = attention["output"]["kernel"]
            attention["output"]["kernel"] = kernel.at[layer, own].set(0)
    found = compress.prune_heads(
        attention,
        jnp.asarray(norms, jnp.float32),
        heads=config.heads,
        kv_heads=config.kv_heads,
        count=count,
        kv_count=kv_count,
    )
    left = kv_count or (config.kv_heads or count)
    small = dataclasses.replace(config, heads=count, kv_heads=left, head_dim=size)
    np.testing.assert_allclose(
        logits(small, with_part(params, "attention", found)),
        logits(config, params),
        rtol=2e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("config", [CONFIG, PLAIN])
def test_keeping_everything_changes_nothing(config):
    blocks = parameters(config)["blocks"]
    norms = jnp.asarray(np.random.default_rng(3).uniform(size=(config.depth, 12)))
    same = {
        **compress.prune_layers(blocks, range(config.depth)),
        "mlp": compress.prune_features(
            blocks["mlp"], norms[:, :10].astype("float32"), 10
        ),
        "attention": compress.prune_heads(
            blocks["attention"],
            norms.astype("float32"),
            heads=config.heads,
            kv_heads=config.kv_heads,
            count=config.heads,
        ),
    }
    jax.tree.map(np.testing.assert_array_equal, same, blocks)


HEADS = {"query": {"kernel": jnp.ones((2, 3, 8))}}
MLP = {"up": {"kernel": jnp.ones((2, 3, 8))}, "down": {"kernel": jnp.ones((2, 8, 3))}}
NORMS = jnp.ones((2, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compress.prune_layers(MLP, ()), r"0 … 1: got \(\)"),
        (lambda: compress.prune_layers(MLP, (0, 2)), r"got \(0, 2\)"),
        (lambda: compress.prune_layers(MLP, (1, 1)), r"got \(1, 1\)"),
        (lambda: compress.keep_ends(4, 5), r"\[1, 4\]: got count=5"),
        (lambda: compress.keep_ends(4, 0), "count=0"),
        (lambda: compress.keep_by_angle(jnp.ones((3, 4)), 3), r"\[1, 2\]: got count=3"),
        (lambda: compress.prune_features(MLP, NORMS, 9), "features: got count=9"),
        (lambda: compress.prune_features(MLP, NORMS[:1], 4), r"\(2, 8\): got \(1, 8\)"),
        (
            lambda: compress.prune_heads(HEADS, NORMS[:1], heads=4, count=2),
            r"\(2, 8\): got \(1, 8\)",
        ),
        (
            lambda: compress.prune_heads(HEADS, NORMS, heads=4, kv_heads=2, count=3),
            "count=3, kv_count=2",
        ),
        (
            lambda: compress.prune_heads(
                HEADS, NORMS, heads=4, kv_heads=2, count=4, kv_count=1
            ),
            "count=4, kv_count=1",
        ),
        (
            lambda: compress.prune_heads(HEADS, NORMS, heads=4, kv_heads=3, count=3),
            "kv_heads=3",
        ),
    ],
)
def test_what_cannot_be_taken_out_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
