"""Walking through blocks: which Hessian a matrix is given, and what is fed on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress, core
from hpcjax.compress import GptqOptions, GridSpec, PruneOptions, elimination
from hpcjax.core import ConfigError, trees
from hpcjax.models import LLAMA, CausalLmConfig
from hpcjax.models.parts import causal_lm_parts
from tests.oracles import obq

DEPTH, TIME, WORDS = 2, 8, 11
CONFIG = CausalLmConfig(
    depth=DEPTH, width=16, heads=2, kv_heads=1, mlp_width=32, options=LLAMA
)


@pytest.fixture(scope="module")
def parts():
    return causal_lm_parts(CONFIG, TIME, WORDS)


@pytest.fixture(scope="module")
def params():
    model = CONFIG.make((TIME,), WORDS)
    drawn, _ = model.init(jax.random.key(0))
    # As drawn, a block changes next to nothing, and the next sees next to no change.
    return jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim == 3 else leaf, drawn)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, TIME, 16)) * np.geomspace(0.2, 5, 16)
    return jnp.asarray(x, jnp.float32)


def quantize(parts, params, inputs, spec=None, **options):
    walk = {name: options.pop(name) for name in ("true_sequential", "batch", "report")
            if name in options}  # fmt: skip
    return compress.quantize_blocks(
        parts.block,
        params["blocks"],
        inputs,
        parts.groups,
        spec or GridSpec(bits=3),
        GptqOptions(**options),
        **walk,
    )


def layer_of(stacked, layer):
    return jax.tree.map(lambda leaf: leaf[layer], stacked)


def hessian_at(parts, params, x, path):
    """(2/n) Σ x xᵀ in numpy, of what a tap sees in one pass over all sequences."""
    taps = {path: core.Tap(forward=lambda x, y: x)}
    _, state = parts.block.apply(params, {}, x, train=False, taps=taps)
    seen = np.asarray(state[core.SEEN][path], np.float64)
    rows = seen.reshape(-1, seen.shape[-1])
    return 2 / len(x) * rows.T @ rows


def expected_losses(parts, params, made, x, true_sequential):
    """Walks by hand with the kernels that were made; losses and integers by path."""
    found = {}
    plain = compress.dequantize_params(made.params)
    for layer in range(DEPTH):
        before = own = layer_of(params["blocks"], layer)
        after = trees.flatten(layer_of(plain, layer))
        for group in parts.groups:
            seen = own if true_sequential else before
            for path in group:
                name = f"{path}/kernel"
                hessian = hessian_at(parts, seen, x, path)
                kernel = np.asarray(trees.flatten(before)[name], np.float64)
                off = kernel - np.asarray(after[name], np.float64)
                _, values, _ = obq.obq(kernel, hessian, 3)
                same = np.isclose(values, after[name], rtol=1e-4, atol=1e-6).mean()
                found[layer, path] = np.trace(off.T @ hessian @ off), same
            changed = {f"{path}/kernel": after[f"{path}/kernel"] for path in group}
            own = compress.replace_leaves(own, changed)
        x, _ = parts.block.apply(own, {}, x, train=False)
    return found, x


@pytest.mark.slow
@pytest.mark.parametrize("true_sequential", [True, False])
def test_every_matrix_is_solved_with_what_the_quantized_ones_before_give(
    parts, params, inputs, true_sequential
):
    made = quantize(parts, params, inputs, true_sequential=true_sequential, batch=4)
    expected, outputs = expected_losses(parts, params, made, inputs, true_sequential)
    assert [(r.layer, r.path) for r in made.reports] == list(expected)
    for report in made.reports:
        loss, same = expected[report.layer, report.path]
        np.testing.assert_allclose(report.loss, loss, rtol=2e-3)
        # In float32 a near tie may flip an integer and then the rest of its output.
        assert same > 0.9, report
        assert report.damping == 0.01
    np.testing.assert_allclose(made.outputs, outputs, rtol=1e-4, atol=1e-4)
    other, _ = expected_losses(parts, params, made, inputs, not true_sequential)
    wrong = [
        abs(other[key][0] / loss - 1) > 2e-3 for key, (loss, _) in expected.items()
    ]
    assert any(wrong)


@pytest.mark.slow
def test_rounding_is_worse_and_reported_beside(parts, params, inputs):
    told = []
    made = quantize(parts, params, inputs, report=told.append)
    assert tuple(told) == made.reports
    paths = [path for group in parts.groups for path in group]
    rounded = compress.round_blocks(params["blocks"], paths, GridSpec(bits=3))
    first = made.reports[0]
    kernels = (
        trees.flatten(layer_of(compress.dequantize_params(tree), 0))[
            f"{first.path}/kernel"
        ]
        for tree in (params["blocks"], rounded)
    )
    off = np.subtract(*(np.asarray(kernel, np.float64) for kernel in kernels))
    hessian = hessian_at(parts, layer_of(params["blocks"], 0), inputs, first.path)
    np.testing.assert_allclose(
        first.rounded, np.trace(off.T @ hessian @ off), rtol=1e-3
    )
    assert np.mean([r.rounded > r.loss for r in made.reports]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_packed_parameters_give_the_logits_of_plain_ones(
    parts, params, inputs, group_size, act_order
):
    spec = GridSpec(bits=3, group_size=group_size)
    made = quantize(parts, params, inputs, spec, act_order=act_order)
    query = made.params["attention"]["query"]["kernel"]
    assert (query.order is not None) == (act_order and group_size is not None)
    model = CONFIG.make((TIME,), WORDS)
    tokens = jnp.arange(2 * TIME).reshape(2, TIME) % WORDS
    packed, plain = (
        model.apply({**params, "blocks": blocks}, {}, tokens, train=False)[0]
        for blocks in (made.params, compress.dequantize_params(made.params))
    )
    np.testing.assert_allclose(packed, plain, rtol=1e-4, atol=1e-4)


def test_a_block_whose_order_is_that_of_the_inputs_is_stacked_with_others(
    parts, params, inputs
):
    # Without an up projection, nothing reaches the down projection of block 1.
    kernel = params["blocks"]["mlp"]["up"]["kernel"].at[1].set(0)
    blocks = compress.replace_leaves(params["blocks"], {"mlp/up/kernel": kernel})
    spec, options = GridSpec(bits=3, group_size=8), GptqOptions(act_order=True)
    # Fewer groups: what is not compressed need not be compiled.
    groups = (("mlp/down",),)
    made = compress.quantize_blocks(parts.block, blocks, inputs, groups, spec, options)
    down = made.params["mlp"]["down"]["kernel"]
    assert down.order.shape == (DEPTH, 32)
    np.testing.assert_array_equal(down.order[1], np.arange(32))
    assert (np.sort(down.order[0]) == np.arange(32)).all()
    assert (down.order[0] != np.arange(32)).any()
    assert not down.dequantize()[1].any()


@pytest.mark.slow
def test_groups_of_an_order_are_those_of_the_layer_alone(parts, params, inputs):
    spec, options = GridSpec(bits=3, group_size=8), {"act_order": True}
    made = quantize(parts, params, inputs, spec, **options)
    own = layer_of(params["blocks"], 0)
    for path in parts.groups[0]:
        kernel = trees.flatten(own)[f"{path}/kernel"]
        hessian = jnp.asarray(hessian_at(parts, own, inputs, path), jnp.float32)
        alone = compress.solve(kernel, hessian, spec, GptqOptions(**options))
        found = trees.flatten(layer_of(compress.dequantize_params(made.params), 0))
        same = np.isclose(found[f"{path}/kernel"], alone.kernel(spec), atol=1e-5)
        assert same.mean() > 0.9


def test_pruning_walks_the_same_way(parts, params, inputs, monkeypatch):
    factors = []

    def factored(hessian, *arguments):
        factors.append(elimination.factorize(hessian, *arguments))
        return factors[-1]

    monkeypatch.setattr("hpcjax.compress.blocks.factorize", factored)
    made = compress.prune_blocks(
        parts.block, params["blocks"], inputs, parts.groups, PruneOptions(sparsity=0.5)
    )
    for group in parts.groups:
        for path in group:
            kernel = np.asarray(trees.flatten(made.params)[f"{path}/kernel"])
            assert (kernel == 0).mean() == 0.5, path
    assert all(np.isnan(report.rounded) for report in made.reports)
    # Matrices with one and the same input share a factor.
    assert len(factors) == DEPTH * len(parts.groups)
    assert made.outputs.shape == inputs.shape


def test_blocks_of_one_shape_are_compiled_once(parts, params, inputs, compilations):
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    quantize(parts, params, inputs)
    compilations.clear()
    quantize(parts, doubled, inputs)
    assert not compilations


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((("attention/queries",),), "attention/quer"),
        ((("mlp/up",), ("mlp/up",)), "one group"),
        (((),), "one group"),
    ],
)
def test_paths_that_are_none_are_refused(parts, params, inputs, groups, message):
    with pytest.raises(ValueError, match=message):
        compress.quantize_blocks(
            parts.block, params["blocks"], inputs, groups, GridSpec(bits=3)
        )


def changed(params, path, change):
    kernel = trees.flatten(params["blocks"])[f"{path}/kernel"]
    return compress.replace_leaves(params["blocks"], {f"{path}/kernel": change(kernel)})


def test_what_a_late_matrix_cannot_have_is_found_before_any_work(parts, params, inputs):
    paths = [path for group in parts.groups for path in group]

    def refused(message, spec, blocks=params["blocks"]):
        with pytest.raises(ConfigError, match=message):
            compress.round_blocks(blocks, paths, spec)

        def work(*_):
            raise AssertionError("a Hessian was gathered")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hpcjax.compress.blocks._gather_hessian", work)
            with pytest.raises(ConfigError, match=message):
                compress.quantize_blocks(
                    parts.block, blocks, inputs, parts.groups, spec
                )

    plain = GridSpec(bits=3)
    refused("no ternary grid: got ternary=True", GridSpec(ternary=True))
    narrow = changed(params, "mlp/down", lambda kernel: kernel[:, :24])
    refused("mlp/down: group_size must divide.*16, inputs=24",
            GridSpec(group_size=16), narrow)  # fmt: skip
    broken = changed(params, "mlp/down", lambda kernel: kernel.at[1, 0, 0].set(jnp.nan))
    refused("block 1, mlp/down: the kernel is not finite", plain, broken)
    packed = compress.round_blocks(params["blocks"], ["mlp/up"], plain)
    refused("mlp/up: expected a kernel of floats.*got Quantized", plain, packed)
    whole = changed(params, "mlp/up", lambda kernel: kernel.astype("int8"))
    refused("mlp/up: expected a kernel of floats", plain, whole)
    with pytest.raises(ConfigError, match=r"attention_norm: expected .* got None"):
        compress.round_blocks(params["blocks"], ["attention_norm"], plain)
    with pytest.raises(ConfigError, match="mlp/down: the pattern's m must divide"):
        compress.prune_blocks(
            parts.block, narrow, inputs, parts.groups, PruneOptions(pattern=(8, 16))
        )


def test_no_sequences_are_refused(parts, params, inputs):
    with pytest.raises(ValueError, match="0 sequences, batch=8"):
        quantize(parts, params, inputs[:0])
    with pytest.raises(ValueError, match="6 sequences, batch=0"):
        quantize(parts, params, inputs, batch=0)


@pytest.mark.slow
def test_a_singular_layer_is_named(parts, params, inputs, monkeypatch):
    def indefinite(state, x):
        size = len(state.matrix)
        return compress.Hessian(matrix=-jnp.eye(size), count=state.count + len(x))

    monkeypatch.setattr("hpcjax.compress.blocks.hessian_update", indefinite)
    jax.clear_caches()
    with pytest.raises(np.linalg.LinAlgError, match=r"block 0, attention/query.*more"):
        quantize(parts, params, inputs)
    jax.clear_caches()
