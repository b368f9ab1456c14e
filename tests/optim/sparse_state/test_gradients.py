"""Gradients that are compressed where they arise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, models, perf
from hpcjax.core import deferred, trees
from hpcjax.models import TransformerOptions
from hpcjax.optim import sparse_state

DEPTH, WIDTH, ROWS, DENSITY = 24, 1024, 64, 0.1


def scan_loss(*, checkpoint):
    """The loss of a scan over equal layers, whose weights each layer realizes."""

    def layer(x, params):
        return jnp.tanh(x @ core.realize(params)["w"]), None

    body = jax.checkpoint(layer, prevent_cse=False) if checkpoint else layer
    return lambda params, x: jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)


def gather_after(params, x):
    """The same gradients, gathered once all dense ones are there."""
    loss = scan_loss(checkpoint=True)
    node = params["w"]
    value, dense = jax.value_and_grad(loss)({"w": node.realize()}, x)
    return value, {"w": node.positions.gather(dense["w"])}


VARIANTS = {
    "checkpointed": sparse_state.value_and_grad(scan_loss(checkpoint=True)),
    "not checkpointed": sparse_state.value_and_grad(scan_loss(checkpoint=False)),
    "gathered after": gather_after,
}


def stack_of(depth, width, density):
    """Shapes of a pruned stack."""
    kept = int(density * width * width)
    places = jax.ShapeDtypeStruct((depth, kept), "int32")
    at = sparse_state.Positions(
        places=places, kept=kept, block=(width, width), grid=(1, 1)
    )
    weights = jax.ShapeDtypeStruct((depth, width, width), "float32")
    return {"w": sparse_state.Pruned(weights=weights, positions=at)}


@pytest.mark.acceptance("samo", 5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tree_of_dense_gradients_is_ever_held(variant):
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    step = jax.jit(VARIANTS[variant])
    compiled = step.lower(stack_of(DEPTH, WIDTH, DENSITY), x).compile()
    share = perf.temporary_memory(compiled) / (DEPTH * WIDTH * WIDTH * 4)
    assert (share < 0.2) == (variant == "checkpointed"), share


@pytest.mark.acceptance("samo", 5)
def test_all_ways_give_the_same_gradients():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(6, 32, 32)).astype(np.float32) / 6
    masks = {"w": rng.random(dense.shape) < 0.2}
    made = sparse_state.compress(
        {"w": jnp.asarray(dense)}, masks, dtype="float32", stacked=("w",)
    )
    x = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)
    found = {
        name: jax.jit(step)(made.params, x)[1]["w"] for name, step in VARIANTS.items()
    }
    expected = found.pop("gathered after")
    for grads in found.values():
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(grads, expected, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.acceptance("samo", 8)
def test_gradients_are_those_of_finite_differences():
    """A weight that is used twice, as a tied table is: x W, then once more by Wᵀ."""
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(5, 4))
    mask = rng.random((5, 4)) < 0.5
    x, table = rng.normal(size=(3, 5)), dense * mask

    def loss(w):
        return np.sum(np.sin(x @ w) @ w.T * np.arange(5.0))

    def jax_loss(params):
        w = core.realize(params)["w"]
        return jnp.sum(jnp.sin(jnp.asarray(x, jnp.float32) @ w) @ w.T * jnp.arange(5.0))

    made = sparse_state.compress(
        {"w": jnp.asarray(dense, jnp.float32)}, {"w": mask}, dtype="float32"
    )
    _, grads = jax.jit(sparse_state.value_and_grad(jax_loss))(made.params)
    differences = []
    for place in np.argwhere(mask):
        shift = np.zeros_like(table)
        shift[tuple(place)] = 1e-6
        differences.append((loss(table + shift) - loss(table - shift)) / 2e-6)
    np.testing.assert_allclose(grads["w"], differences, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def language_model():
    """A small language model with a tied head, masks of its matrices and a batch."""
    options = TransformerOptions(tied_head=True)
    config = models.CausalLmConfig(
        width=16, heads=2, depth=3, remat="full", options=options
    )
    model = config.make((8,), 11, core.Policy())
    params, _ = model.init(jax.random.key(0))
    rng = np.random.default_rng(2)
    masks = {
        path: rng.random(leaf.shape) < 0.3
        if path.endswith(("kernel", "embed/table"))
        else None
        for path, leaf in trees.flatten(params).items()
    }
    tokens = jnp.asarray(rng.integers(0, 11, (2, 8)))
    return model, params, trees.unflatten(params, masks), tokens, config.stacks


@pytest.mark.slow
@pytest.mark.acceptance("samo", 8)
@pytest.mark.parametrize("mode", ["dense", "rematerialize"])
@pytest.mark.parametrize("index", ["int32", "bitmap"])
def test_a_model_that_scans_its_blocks_takes_compressed_parameters(
    language_model, mode, index
):
    model, params, masks, tokens, stacks = language_model

    def loss(params, tokens):
        logits, _ = model.apply(params, {}, tokens, train=True)
        picked = jax.nn.log_softmax(logits)[:, :-1]
        return -jnp.take_along_axis(picked, tokens[:, 1:, None], -1).mean()

    made = sparse_state.compress(
        params, masks, dtype="float32", index=index, mode=mode, stacked=stacks
    )
    value, grads = jax.jit(sparse_state.value_and_grad(loss))(made.params, tokens)
    masked = jax.tree.map(
        lambda p, m: p if m is None else p * m,
        params,
        masks,
        is_leaf=lambda n: n is None,
    )
    expected, dense = jax.jit(jax.value_and_grad(loss))(masked, tokens)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    flat, pruned = trees.flatten(dense), 0
    for path, mask in trees.flatten(masks, lambda m: m is None).items():
        given = trees.flatten(grads)[path]
        if mask is None:
            np.testing.assert_allclose(given, flat[path], rtol=1e-5, atol=1e-7)
            continue
        node = trees.flatten(made.params, deferred.is_deferred)[path]
        np.testing.assert_allclose(
            node.positions.expand(given), flat[path] * mask, rtol=1e-5, atol=1e-7
        )
        pruned += 1
    assert pruned >= 5
    assert np.abs(trees.flatten(grads)["embed/table"]).max() > 0
