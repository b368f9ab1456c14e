"""Language models split over eight devices against the same on one."""

import dataclasses
import functools
import logging
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hpcjax import core, metrics, models, sharding
from hpcjax.core import trees
from hpcjax.perf import hlo
from hpcjax.sharding.parameters import logical_axes
from tests.models.registry import REGISTRY

DEPTH, WIDTH, INNER, WORDS, ROWS, TIME = 3, 32, 48, 64, 8, 16
MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 8},
    "tp": {"model": 4},
    "tp+fsdp": {"data": 2, "model": 4},
    "ep": {"model": 4},
}


def experts(factor):
    config = models.ExpertsConfig(count=4, capacity_factor=factor)
    return dataclasses.replace(models.GPT2, experts=config)


FAMILIES = {
    "gpt2": {},
    "llama_kv4": {"options": models.LLAMA, "kv_heads": 4},
    "llama_kv2": {"options": models.LLAMA, "kv_heads": 2},
    "moe": {"options": experts(None)},
    "moe_capacity": {"options": experts(2.0)},
}


def model_of(family, **fields):
    config = models.CausalLmConfig(depth=DEPTH, width=WIDTH, heads=8, mlp_width=INNER)
    config = dataclasses.replace(config, **{**FAMILIES[family], **fields})
    return config.make((TIME,), WORDS)


def loss(model, params, x, y):
    logits, _ = model.apply(params, {}, x, train=True)
    return metrics.cross_entropy(logits, y)


@functools.cache
def single(family):
    """Parameters, a batch, and loss and gradients on one device."""
    model = model_of(family)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    # So large that a layer left out, or counted twice, shows.
    params = jax.tree.map(lambda p: p if p.ndim < 2 else 3 * p, params)
    made = np.random.default_rng(0).integers(0, WORDS, (2, ROWS, TIME))
    x, y = jnp.asarray(made, jnp.int32)
    made = jax.jit(jax.value_and_grad(functools.partial(loss, model)))(params, x, y)
    return params, (x, y), jax.device_get(made)


def placed(family, preset):
    """The model, and its parameters and a batch on the mesh of a preset."""
    mesh = sharding.make_mesh(MESHES[preset])
    model = model_of(family, batch_axis="data" if "fsdp" in preset else None)
    params, batch, _ = single(family)
    shardings = sharding.parameter_shardings(
        params, mesh, preset, decoder=model.decoder
    )
    batch = jax.device_put(batch, sharding.batch_sharding(mesh))
    return mesh, model, jax.device_put(params, shardings), batch


def forward(family, preset):
    """The compiled loss."""
    mesh, model, params, batch = placed(family, preset)
    with jax.set_mesh(mesh):
        lowered = jax.jit(functools.partial(loss, model)).lower(params, *batch)
    return lowered.compile()


@functools.cache
def backward(family, preset):
    """The compiled loss with gradients, placed as the parameters are."""
    mesh, model, params, batch = placed(family, preset)
    outputs = (
        NamedSharding(mesh, PartitionSpec()),
        jax.tree.map(lambda leaf: leaf.sharding, params),
    )
    function = jax.value_and_grad(functools.partial(loss, model))
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, out_shardings=outputs).lower(params, *batch)
    return lowered.compile()


def kinds(compiled, times):
    """Bytes of each execution, by kind, of collectives executed so many times."""
    found = {}
    for each in hlo.collectives(compiled):
        if each.times == times:
            found.setdefault(each.kind, []).append(each.bytes)
    return found


def held_bytes(tree):
    """Bytes of buffers on each device."""
    held = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return held


CASES = [
    *((f, p) for f in ("gpt2", "llama_kv4") for p in ("dp", "fsdp", "tp", "tp+fsdp")),
    *(("llama_kv2", p) for p in ("tp", "tp+fsdp")),
    *(("moe", p) for p in ("tp", "ep")),
    ("moe_capacity", "ep"),
]


@pytest.mark.quick("llama_kv4-fsdp")
@pytest.mark.acceptance("lm-models", 6)
@pytest.mark.parametrize(("family", "preset"), CASES)
def test_loss_and_gradients_are_those_of_one_device(family, preset):
    _, (value, grads) = single(family)[1:]
    _, _, params, batch = placed(family, preset)
    found, split = backward(family, preset)(params, *batch)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for path, expected in trees.flatten(grads).items():
        # Added to every key alike, it changes no softmax.
        assert np.abs(expected).max() > 1e-3 or path.endswith("key/bias"), path
        np.testing.assert_allclose(
            trees.flatten(split)[path], expected, rtol=0, atol=1e-5, err_msg=path
        )
    assert held_bytes(split) == held_bytes(params)


SPLIT = 3 * WIDTH * INNER + 2 * WIDTH * WIDTH  # up, gate, down, query and output
NORMS = (2 * DEPTH + 1) * WIDTH


@pytest.mark.acceptance("lm-models", 6)
@pytest.mark.parametrize(
    ("family", "preset", "numbers"),
    [
        ("llama_kv4", "dp", 2 * WORDS * WIDTH + DEPTH * (SPLIT + WIDTH**2) + NORMS),
        (
            "llama_kv4",
            "fsdp",
            (2 * WORDS * WIDTH + DEPTH * (SPLIT + WIDTH**2) + NORMS) // 8,
        ),
        (
            "llama_kv4",
            "tp",
            (2 * WORDS * WIDTH + DEPTH * (SPLIT + WIDTH**2)) // 4 + NORMS,
        ),
        # Two key and value heads are not split over four devices.
        (
            "llama_kv2",
            "tp",
            (2 * WORDS * WIDTH + DEPTH * SPLIT) // 4 + DEPTH * WIDTH**2 // 2 + NORMS,
        ),
        (
            "llama_kv4",
            "tp+fsdp",
            (2 * WORDS * WIDTH + DEPTH * (SPLIT + WIDTH**2)) // 8 + NORMS // 2,
        ),
    ],
)
def test_every_device_holds_its_share_of_the_parameters(family, preset, numbers):
    held = held_bytes(placed(family, preset)[2])
    assert len(held) == np.prod(list(MESHES[preset].values()))
    assert set(held.values()) == {4 * numbers}


@pytest.mark.acceptance("lm-models", 6)
@pytest.mark.parametrize("family", ["gpt2", "llama_kv4", "llama_kv2"])
def test_tensor_parallel_layers_have_two_all_reduces_forward(family):
    inside = kinds(forward(family, "tp"), DEPTH)
    assert inside == {"all-reduce": [ROWS * TIME * WIDTH * 4] * 2}
    outside = kinds(forward(family, "tp"), 1)
    # The embeddings, and of each place the largest logit, the sum and the label's.
    assert sum(outside.pop("all-reduce")) == ROWS * TIME * (WIDTH + 3) * 4
    assert not outside


@pytest.mark.acceptance("lm-models", 6)
@pytest.mark.parametrize("family", ["gpt2", "llama_kv4"])
def test_data_parallel_sums_every_gradient_once(family):
    found = hlo.bytes_by_kind(backward(family, "dp"))
    # A table that is also the head has two gradients, which are summed apart.
    twice = WORDS * WIDTH * 4 if family == "gpt2" else 0
    scalar = 4
    assert found == {"all-reduce": trees.num_bytes(single(family)[0]) + twice + scalar}


@pytest.mark.acceptance("lm-models", 6)
@pytest.mark.parametrize("family", ["gpt2", "llama_kv4"])
def test_fully_sharded_layers_gather_their_parameters(family):
    block = trees.num_bytes(single(family)[0]["blocks"]) // DEPTH
    once = kinds(forward(family, "fsdp"), DEPTH)
    # No feature of what goes from block to block is split.
    assert set(once) == {"all-gather"}
    # A bias of split features is whole everywhere.
    whole = 4 * (INNER + 3 * WIDTH) if family == "gpt2" else 0
    assert sum(once["all-gather"]) == (block - whole) // 8
    both = kinds(backward(family, "fsdp"), DEPTH)
    assert set(both) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert sum(both["all-gather"]) <= 2 * (block - whole) // 8
    summed = [*both.get("all-reduce", ()), *both.get("reduce-scatter", ())]
    assert sum(summed) == block


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt_350m", "llama", "moe_gated"])
def test_every_parameter_of_every_family_has_a_meaning(name):
    entry = REGISTRY[name]
    model = entry.config.make(entry.inputs, entry.outputs)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    meanings = logical_axes(params)
    assert list(meanings) == list(trees.flatten(params))
    sizes = {"embed": {8, 4}, "vocab": {11}, "layers": {entry.config.depth}}
    for path, leaf in trees.flatten(params).items():
        for meaning, size in zip(meanings[path], leaf.shape, strict=True):
            assert size in sizes.get(meaning, {size}), path


def test_an_optimizers_state_lies_as_its_parameters_do():
    model = model_of("llama_kv4")
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    mesh = sharding.make_mesh({"data": 2, "model": 4})
    place = functools.partial(
        sharding.parameter_shardings, mesh=mesh, preset="tp+fsdp", decoder=model.decoder
    )
    state = place(jax.eval_shape(optax.adam(0.1).init, params))
    assert state[0].mu == state[0].nu == place(params)
    assert state[0].count.spec == PartitionSpec()
    kernel = place(params)["blocks"]["mlp"]["down"]["kernel"]
    assert kernel.spec == PartitionSpec(None, "model", "data")


def test_layers_are_split_over_stages():
    model = model_of("gpt2", depth=8)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    mesh = sharding.make_mesh({"stage": 4})
    found = trees.flatten(sharding.parameter_shardings(params, mesh, "pp"))
    for path, leaf in trees.flatten(params).items():
        shape = found[path].shard_shape(leaf.shape)
        first = 2 if path.startswith("blocks/") else leaf.shape[0]
        assert shape == (first, *leaf.shape[1:]), path


def test_what_must_not_be_split_is_whole_and_said_once(caplog):
    decoder = model_of("gpt2").decoder._replace(kv_heads=3, heads=12)
    params = {"embed": {"table": jax.ShapeDtypeStruct((50257, 24), "float32")}}
    heads = {"key": {"kernel": jax.ShapeDtypeStruct((24, 4), "float32")}}
    params["attention"] = heads
    mesh = sharding.make_mesh({"model": 4})
    with caplog.at_level(logging.INFO, "hpcjax.sharding.parameters"):
        for _ in range(2):
            found = sharding.parameter_shardings(params, mesh, "tp", decoder=decoder)
    assert {leaf.spec for leaf in jax.tree.leaves(found)} == {PartitionSpec(None, None)}
    assert sorted(record.getMessage() for record in caplog.records) == [
        "key and value heads: 3 on each of 4 devices of 'model'",
        "vocab: 50257 on each of 4 devices of 'model'",
    ]


def test_only_data_axes_split_a_batch():
    spec = sharding.batch_sharding(sharding.make_mesh({"data": 2, "model": 4})).spec
    assert spec == PartitionSpec(("data",))
    for axis in ("model", "stage"):
        found = sharding.batch_sharding(sharding.make_mesh({axis: 2}))
        assert found.spec == PartitionSpec()
    with pytest.raises(ValueError, match="one of the data axes"):
        sharding.batch_sharding(sharding.make_mesh({"rows": 2}))


@pytest.mark.acceptance("lm-models", 10)
@pytest.mark.parametrize(
    ("fields", "mesh", "preset", "message"),
    [
        ({"heads": 6, "width": 24}, {"model": 4}, "tp", "heads=6, model=4"),
        ({"mlp_width": 30}, {"model": 4}, "tp", r"ff=30, model=4 \(blocks/mlp/down/k"),
        ({"width": 24}, {"data": 5}, "fsdp", "embed=24, data=5"),
        ({}, {"stage": 2}, "pp", "layers=3, stage=2"),
        ({}, {"data": 8}, "tp", r"mesh axis 'model': got a mesh with \('data',\)"),
        ({}, {"data": 8}, "fdsp", "preset='fdsp'; did you mean 'fsdp'"),
        ({}, {"data": 8}, {"embde": "data"}, "'embde'; did you mean 'embed'"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(fields, mesh, preset, message):
    model = model_of("gpt2", **fields)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(core.ConfigError, match=message):
        sharding.parameter_shardings(
            params, sharding.make_mesh(mesh), preset, decoder=model.decoder
        )


@pytest.mark.slow
def test_parameters_of_other_models_are_listed():
    entry = REGISTRY["mlp"]
    model = entry.config.make(entry.inputs, entry.outputs)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    mesh = sharding.data_mesh(8)
    with pytest.raises(core.ConfigError, match=r"matched by no rule: \['dense_0/bias'"):
        sharding.parameter_shardings(params, mesh, "dp")
    params, _ = jax.eval_shape(model_of("gpt2").init, jax.random.key(0))
    mesh = sharding.make_mesh({"model": 4})
    with pytest.raises(core.ConfigError, match="only split with decoder="):
        sharding.parameter_shardings(params, mesh, "tp")
    flat = {"head": {"kernel": jax.ShapeDtypeStruct((3,), "float32")}}
    with pytest.raises(core.ConfigError, match=r"head/kernel must have axes .*\(3,\)"):
        logical_axes(flat)
