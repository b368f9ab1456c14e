"""A model cut into parts, against the whole."""

import operator

import jax
import numpy as np
import pytest

from hpcjax import core, models
from tests.models.helpers import instance
from tests.models.registry import REGISTRY


@pytest.mark.quick("opt", "opt_350m")
@pytest.mark.parametrize("family", ["gpt2", "opt", "opt_350m", "llama", "post_norm"])
def test_the_parts_together_are_the_model(family):
    found, entry = instance(family), REGISTRY[family]
    parts = models.causal_lm_parts(entry.config, entry.inputs[0], entry.outputs)
    y, _ = parts.embed.apply(found.params, {}, found.x, train=False)
    listed = {spec.path for spec in parts.block.layers}
    assert {path for group in parts.groups for path in group} == listed
    for layer in range(entry.config.depth):
        own = jax.tree.map(operator.itemgetter(layer), found.params["blocks"])
        given = {}
        for group in parts.groups:
            taps = {path: core.Tap(forward=lambda x, y: x) for path in group}
            _, state = parts.block.apply(own, {}, y, train=False, taps=taps)
            given = state["seen"]
            for path in group:
                np.testing.assert_array_equal(given[path], given[group[0]])
        y, _ = parts.block.apply(own, {}, y, train=False)
    logits, _ = parts.head.apply(found.params, {}, y, train=False)
    expected, _ = found.model.apply(found.params, {}, found.x, train=False)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


def test_experts_cannot_be_cut():
    config = REGISTRY["moe"].config
    with pytest.raises(core.UnsupportedOp, match="experts"):
        models.causal_lm_parts(config, 8, 11)
