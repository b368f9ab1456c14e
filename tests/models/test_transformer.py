import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import models
from hpcjax.core import trees
from hpcjax.perf import hlo
from tests.models import helpers
from tests.models.registry import REGISTRY
from tests.oracles import transformer as oracle

FAMILIES = [
    *("gpt2", "gpt2_remat", "opt", "opt_350m", "bloom", "llama", "llama_heads"),
    *("moe", "moe_gated", "post_norm"),
]


def forward(params, tokens, config, mask=None):
    """Logits of one sequence, in numpy float64; a causal mask if none is given."""
    mask = np.tri(len(tokens), dtype=bool) if mask is None else mask
    options = config.options
    x = params["embed"]["table"][tokens]
    if options.embed_width:
        x = x @ params["project_in"]["kernel"]
    if options.embed_norm:
        x = oracle.norm(x, params["embed_norm"], options.norm_eps)
    if options.position in ("learned", "offset"):
        offset = 2 if options.position == "offset" else 0
        x = x + params["position"]["table"][offset : offset + len(tokens)]
    for layer in range(config.depth):
        p = jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"])
        x = oracle.layer(x, p, config, options, mask)
    if options.final_norm:
        x = oracle.norm(x, params["final_norm"], options.norm_eps)
    if options.embed_width:
        x = x @ params["project_out"]["kernel"]
    tied = options.tied_head
    return x @ (params["embed"]["table"].T if tied else params["head"]["kernel"])


@pytest.mark.quick("opt", "post_norm", "llama_heads")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_numpy(name):
    config = REGISTRY[name].config
    model, params, state, x, _ = helpers.instance(name)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    expected = np.stack([forward(wide, row, config) for row in np.asarray(x)])
    found, _ = model.apply(params, state, x, train=False)
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=1e-5 * (1 + np.abs(expected).max())
    )


# `ragged_dot` refuses a `vmap` over the output gradient alone, as in a Jacobian; that
# "moe" sees no later tokens is in test_decoding.py.
@pytest.mark.quick("gpt2_remat")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "moe"])
def test_logits_do_not_depend_on_later_tokens(name):
    entry = REGISTRY[name]
    options = dataclasses.replace(entry.config.options, tied_head=False)
    config = dataclasses.replace(entry.config, options=options)
    model = config.make(entry.inputs, entry.outputs)
    params, state = model.init(jax.random.key(0))
    params = jax.tree.map(jnp.asarray, helpers.noisy(params))
    tokens = jnp.arange(6)[None]  # distinct, so row j of the table is position j

    def outputs(table):
        changed = params | {"embed": {"table": table.astype(jnp.float32)}}
        y, _ = model.apply(changed, state, tokens, train=True)
        return y[0, :, 1]

    jacobian = jnp.abs(jax.jacrev(outputs)(params["embed"]["table"])).sum(-1)[:, :6]
    assert (jacobian[np.triu_indices(6, 1)] == 0).all()
    assert (jacobian[np.tril_indices(6)] > 0).all()


def test_residual_matrices_start_smaller_with_depth():
    model = models.causal_lm((4,), 7, depth=8, width=64)
    flat = trees.flatten(model.init(jax.random.key(0))[0])
    deviation = {path: float(leaf.std()) for path, leaf in flat.items()}
    for path in ("attention/output", "mlp/down"):
        assert deviation[f"blocks/{path}/kernel"] == pytest.approx(0.02 / 4, rel=0.05)
    for path in ("attention/query", "mlp/up"):
        assert deviation[f"blocks/{path}/kernel"] == pytest.approx(0.02, rel=0.05)


def test_a_sequence_longer_than_the_table_is_refused():
    model, params, state, *_ = helpers.instance("gpt2")
    with pytest.raises(ValueError, match="7 tokens, context=6"):
        model.apply(params, state, jnp.zeros((1, 7), jnp.int32), train=False)


@pytest.mark.quick("llama")
@pytest.mark.acceptance("lm-models", 8)
@pytest.mark.parametrize("name", ["gpt2", "llama", "moe"])
def test_depth_does_not_lengthen_the_compiled_step(name):
    entry, counts = REGISTRY[name], []
    for depth in (4, 48):
        config = dataclasses.replace(entry.config, depth=depth)
        model = config.make(entry.inputs, entry.outputs)
        params, state = jax.eval_shape(model.init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((2, 6), "int32")

        def loss(params, state, tokens, model=model):
            return helpers.loss(model, params, state, tokens, tokens)[0]

        lowered = jax.jit(jax.grad(loss)).lower(params, state, tokens)
        program = hlo.parse(lowered.compile().as_text())
        counts.append(sum(map(len, program.computations.values())))
    assert counts[1] <= 1.1 * counts[0]


def test_depth_does_not_lengthen_the_program():
    lines = []
    for depth in (2, 12):
        model = models.causal_lm((6,), 11, depth=depth, width=8, heads=2)
        params, state = jax.eval_shape(model.init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((2, 6), "int32")
        jaxpr = jax.make_jaxpr(lambda p, s, x, m=model: m.apply(p, s, x, train=True))
        lines.append(len(str(jaxpr(params, state, tokens)).splitlines()))
    assert lines[0] == lines[1]


def test_offloaded_inputs_of_blocks_wait_in_the_hosts_memory():
    config = models.CausalLmConfig(depth=3, width=8, heads=2, remat="offload")
    model = config.make((6,), 11)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, 6), "int32")

    def total(params, x):
        return model.apply(params, {}, x, train=True)[0].sum()

    made = str(jax.make_jaxpr(jax.grad(total))(params, x))
    # Of three blocks, a batch of two, six places, eight features; nothing else does.
    assert set(re.findall(r"f32<host>\[(3,[\d,]+)\]", made)) == {"3,2,6,8"}
