"""Smaller language models of a large one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import inference


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return inference.load_language_model("random", root).pretrained


TOKENS = np.arange(32).reshape(2, 16) % 7


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["ends", "angle"])
def test_with_all_that_it_has_a_child_says_what_its_parent_says(parent, choice):
    depth = parent.config.depth
    child = inference.prune_language_model(parent, TOKENS, layers=depth, choice=choice)
    said, wanted = (
        each.model.apply(each.params, {}, jnp.asarray(TOKENS), train=False)[0]
        for each in (child, parent)
    )
    np.testing.assert_allclose(said, wanted, rtol=1e-5, atol=1e-5)


def test_a_child_has_what_it_was_left(parent):
    config = parent.config
    child = inference.prune_language_model(parent, TOKENS, layers=1, mlp_width=8)
    assert (child.config.depth, child.config.mlp_width) == (1, 8)
    assert child.config.heads == config.heads
    shapes = jax.tree.map(np.shape, child.params)
    wanted, _ = jax.eval_shape(child.model.init, jax.random.key(0))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, wanted)
