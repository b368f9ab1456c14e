"""What holds for every model."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, models
from hpcjax.core import parts, trees
from hpcjax.models import modules
from tests.models import helpers
from tests.models.registry import REGISTRY

NAMES = sorted(REGISTRY)
FACTORIES = {
    "mlp": models.MlpConfig,
    "gnn": models.GnnConfig,
    "ggnn": models.GgnnConfig,
    "dlrm": models.DlrmConfig,
    "kge": models.KgeConfig,
    "resnet": models.ResNetConfig,
    "causal_lm": models.CausalLmConfig,
    "bert": models.BertConfig,
    "unet": models.UNetConfig,
    "cosmoflow": models.CosmoFlowConfig,
    "volume_unet": models.VolumeUNetConfig,
    "vgg": models.VggConfig,
    "raw_ensemble": models.RawConfig,
    "emos": models.EmosConfig,
    "point_mlp": models.PointMlpConfig,
    "field_cnn": models.FieldCnnConfig,
    "field_unet": models.FieldUNetConfig,
    "member_attention": models.MemberAttentionConfig,
    "unet3d": models.UNet3dConfig,
    "conv_lstm": models.ConvLstmConfig,
    "bias_unet": models.BiasUNetConfig,
    "spread_net": models.SpreadNetConfig,
    "mean_and_spread": models.MeanAndSpreadConfig,
    "cnn": models.CnnConfig,
    "locally_connected": models.LocallyConnectedConfig,
    "smoe": models.SmoeConfig,
}
GIVEN = ("axes", "channels", "folds", "joint")  # by the data set
# The raw ensemble has no parameters to stack or to round.
TRAINED = [name for name in REGISTRY if name != "raw"]


def test_every_factory_is_in_the_registry():
    made = {type(entry.config) for entry in REGISTRY.values()}
    assert made == set(FACTORIES.values()) == {*parts.classes("model").values()}
    returns_model = {
        name
        for name in models.__all__
        if inspect.isfunction(getattr(models, name))
        and inspect.signature(getattr(models, name)).return_annotation is core.Model
    }
    # The second builds what `causal_lm` does, from the same config; the third is a
    # network of points, which compresses a field and is part of no training config.
    others = {"from_nnx", "unrolled_causal_lm", "coord_net"}
    assert returns_model - others == set(FACTORIES)


# These take the fields of their configs as they are.
@pytest.mark.parametrize(
    "name", sorted(set(FACTORIES) - {"causal_lm", "gnn", "ggnn", "dlrm", "kge"})
)
def test_config_fields_equal_the_factory(name):
    signature = inspect.signature(getattr(models, name)).parameters
    arguments = {
        key: value.default
        for key, value in signature.items()
        if key not in ("inputs", "outputs", "policy", *GIVEN)
    }
    fields = {
        field.name: field.default for field in dataclasses.fields(FACTORIES[name])
    }
    assert fields == arguments


@pytest.mark.quick("linear", "mlp")
@pytest.mark.parametrize("name", NAMES)
def test_apply_is_pure_and_evaluation_keeps_the_state(name):
    model, params, state, x, _ = helpers.instance(name)
    entry = REGISTRY[name]
    apply = jax.jit(model.apply, static_argnames="train")
    y, same = apply(params, state, x, train=False)
    assert jax.tree.map(jnp.shape, y) == helpers.output_shapes(entry, 4)
    for leaf in jax.tree.leaves(y):
        assert leaf.dtype == jnp.float32
        assert jnp.isfinite(leaf).all()
    jax.tree.map(np.testing.assert_array_equal, same, state)
    shapes = jax.eval_shape(
        lambda p, s: model.apply(p, s, x, train=False), params, state
    )
    assert jax.tree.map(jnp.shape, shapes[0]) == jax.tree.map(jnp.shape, y)
    _, trained = apply(params, state, x, train=True)
    assert jax.tree.structure(trained) == jax.tree.structure(state)
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), t) for t in (trained, state)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.quick("linear", "mlp", "resnet8")
@pytest.mark.parametrize("name", NAMES)
def test_init_is_plain_abstract_and_repeatable(name):
    model = helpers.make(REGISTRY[name])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    init = jax.jit(model.init)
    first, again, other = (
        jax.tree.map(np.asarray, init(jax.random.key(seed))) for seed in (0, 0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda s: (s.shape, s.dtype), first
    )
    for path, leaf in trees.flatten(first).items():
        assert leaf.dtype == jnp.float32
        assert np.isfinite(leaf).all()
        constant = (leaf == leaf.ravel()[0]).all()
        if not constant:
            assert (leaf != trees.flatten(other)[path]).any(), path


@pytest.mark.quick("linear", "mlp")
@pytest.mark.parametrize("name", [n for n in TRAINED if n != "resnet50"])
def test_vmap_over_stacked_parameters_and_scan_over_batches(name):
    model, params, state, x, _ = helpers.instance(name)
    shifted = jax.tree.map(lambda p: p * 1.25, params)
    stacked = jax.tree.map(lambda *p: jnp.stack(p), params, shifted)

    def apply(p):
        return model.apply(p, state, x, train=False)[0]

    def body(carry, p):
        y, carry = model.apply(p, carry, x, train=False)
        return carry, y

    @jax.jit
    def both(stacked):
        return jax.vmap(apply)(stacked), jax.lax.scan(body, state, stacked)[1]

    together, in_turn = both(stacked)
    for a, b in zip(*map(jax.tree.leaves, (together, in_turn)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


@pytest.mark.quick("linear", "mlp")
@pytest.mark.parametrize("name", TRAINED)
def test_low_precision_keeps_float32_parameters_and_gradients(name):
    model, params, state, x, labels = helpers.instance(name, "bfloat16")
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}

    def loss(params):
        return helpers.loss(model, params, state, x, labels)

    def both(params):
        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, new, grads

    shapes = jax.eval_shape(both, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    if name != "resnet50":  # compiles for 20 s and has no layer that others lack
        for leaf in jax.tree.leaves(jax.jit(both)(params)):
            assert np.isfinite(leaf).all()


@pytest.mark.quick("linear", "mlp", "resnet8", "gpt2_remat")
# A graph's layers map all vertices at once, which is nothing that a tap could observe.
@pytest.mark.parametrize("name", [n for n in NAMES if "graph" not in REGISTRY[n].given])
def test_layers_list_every_kernel(name):
    model, params, *_ = helpers.instance(name)
    flat = trees.flatten(params)
    kernels = {path.removesuffix("/kernel") for path in flat if "kernel" in path}
    assert {spec.path for spec in model.layers} == kernels
    for spec in model.layers:
        shape, options = flat[f"{spec.path}/kernel"].shape, spec.options
        depth = () if options["depth"] is None else (options["depth"],)
        size = options["kernel_size"] if spec.kind == "conv" else ()
        assert shape == (*depth, *size, options["inputs"], options["outputs"])
        assert (f"{spec.path}/bias" in flat) == options["use_bias"]


@pytest.mark.quick("linear", "mlp")
@pytest.mark.parametrize("name", NAMES)
def test_without_taps_the_jaxpr_is_that_of_a_model_without_tap_code(name, monkeypatch):
    model, params, state, x, labels = helpers.instance(name)

    def text():
        grad = jax.grad(
            lambda p: helpers.loss(model, p, state, x, labels), has_aux=True
        )
        return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(grad)(params)))

    with_code = text()
    monkeypatch.setattr(modules.Observable, "apply_tap", lambda self, x, y: y)
    monkeypatch.setattr("hpcjax.models._from_nnx.set_taps", None)
    jax.clear_caches()
    assert text() == with_code


@pytest.mark.quick("linear", "mlp", "resnet8", "gpt2_remat")
@pytest.mark.parametrize("name", NAMES)
def test_describe_counts_what_init_makes(name):
    model, params, _, x, _ = helpers.instance(name)
    found = models.describe(model, x)
    assert found.num_params == sum(p.size for p in jax.tree.leaves(params))
    assert [row.path for row in found.parameters] == list(trees.flatten(params))
    outputs = jax.tree.map(lambda leaf: leaf.shape, found.outputs)
    rows = len(jax.tree.leaves(x)[0])
    assert outputs == helpers.output_shapes(REGISTRY[name], rows)
    assert str(found).splitlines()[-1].split() == ["total", f"{found.num_params:,}"]
