"""Whole models in GPTQ's layout: read by hand in numpy, and by `transformers`."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from hpcjax import compress, kernels, models
from hpcjax.compress import GptqOptions, GridSpec
from hpcjax.core import (
    ConfigError,
    DataFormatError,
    DiskFull,
    UnsupportedOp,
    trees,
)
from hpcjax.models import pretrained

VOCABULARY, CONTEXT = 64, 24
FAMILIES = {
    "gpt2": models.GPT2,
    "opt": models.OPT,
    "bloom": models.BLOOM,
    "llama": models.LLAMA,
}
TOKENS = jax.random.randint(jax.random.key(0), (2, 11), 3, VOCABULARY)


def model_of(family):
    """A random model; grouped queries for llama."""
    config = models.CausalLmConfig(
        depth=2,
        width=64,
        heads=4,
        kv_heads=2 if family == "llama" else None,
        mlp_width=None if family == "bloom" else 96,
        options=FAMILIES[family],
    )
    empty = pretrained.Pretrained(
        params=None, config=config, context=CONTEXT, vocabulary=VOCABULARY
    )
    params, _ = empty.model.init(jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 99))
    # No norm and no bias is trivial.
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params
    )
    return dataclasses.replace(empty, params=params)


def is_matrix(leaf):
    return isinstance(leaf, kernels.QuantizedMatrix)


@functools.cache
def packed(family, bits, group, act_order):
    """A model with its blocks' matrices packed, scales as a file has them."""
    model = model_of(family)
    x, _ = model.parts.embed.apply(model.params, {}, TOKENS, train=False)
    made = compress.quantize_blocks(
        model.parts.block,
        model.params["blocks"],
        x,
        model.parts.groups,
        GridSpec(bits=bits, group_size=group),
        GptqOptions(act_order=act_order),
    ).params

    def half(leaf):
        if not is_matrix(leaf):
            return leaf
        return dataclasses.replace(leaf, scale=leaf.scale.astype(jnp.float16))

    made = jax.tree.map(half, made, is_leaf=is_matrix)
    return dataclasses.replace(model, params={**model.params, "blocks": made})


def integers(words, bits):
    """The integers of int32 words along the first axis, by whole numbers."""
    columns = []
    for column in words.T:
        number = int.from_bytes(np.ascontiguousarray(column).tobytes(), "little")
        count = len(column) * 32 // bits
        columns.append([number >> bits * k & 2**bits - 1 for k in range(count)])
    return np.array(columns).T


def weights(folder):
    """Every tensor of a folder, packed ones as the weights they stand for."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits, less = said["bits"], {"gptq": 1, "gptq_v2": 0}[said["checkpoint_format"]]
    layers = [name[:-8] for name in tensors if name.endswith(".qweight")]
    assert layers
    for layer in layers:
        words, zeros, scales, group = (
            tensors.pop(f"{layer}.{part}")
            for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        zero = (integers(zeros.T, bits).T + less) % 2**bits
        q = integers(words, bits)
        tensors[f"{layer}.weight"] = scales.astype(np.float64)[group] * (
            q - zero[group]
        )
    return tensors


CASES = [
    ("llama", 4, 32, True, "gptq_v2"),
    ("llama", 3, None, False, "gptq"),
    ("gpt2", 4, 16, True, "gptq"),
    ("gpt2", 8, None, False, "gptq_v2"),
    ("opt", 2, 32, False, "gptq_v2"),
    ("bloom", 4, 16, True, "gptq"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits", "group", "act_order", "written"), CASES)
def test_a_model_and_its_folder(tmp_path, family, bits, group, act_order, written):
    model = packed(family, bits, group, act_order)
    pretrained.save(tmp_path, model, checkpoint_format=written)
    found = pretrained.load(tmp_path)
    assert found.config == model.config
    ours, theirs = (
        trees.flatten(compress.dequantize_params(each.params))
        for each in (found, model)
    )
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], err_msg=path)
    assert sum(map(is_matrix, trees.flatten(found.params, is_matrix).values())) == (
        7 if family == "llama" else 6
    )
    logits = [
        each.model.apply(each.params, {}, TOKENS, train=False)[0]
        for each in (found, model)
    ]
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits", "group", "act_order", "written"), CASES)
def test_a_folder_means_to_transformers_what_it_means_to_us(
    tmp_path, family, bits, group, act_order, written
):
    torch = pytest.importorskip("torch", reason="the oracle of this test is torch")
    transformers = pytest.importorskip("transformers")
    model = packed(family, bits, group, act_order)
    pretrained.save(tmp_path, model, checkpoint_format=written)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.quantization_config["bits"] == bits
    plain = weights(tmp_path)
    del config.quantization_config
    reference = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    # GPT-2 stores [inputs, outputs], and so is the layout; Linear is the other way.
    turned = family != "gpt2"
    state = reference.state_dict()
    for name, value in plain.items():
        flip = turned and value.dtype == np.float64
        state[name] = torch.from_numpy(np.ascontiguousarray(value.T if flip else value))
    missing = reference.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    reference.tie_weights()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor(TOKENS.tolist())).logits.numpy()
    loaded = pretrained.load(tmp_path)
    found, _ = loaded.model.apply(loaded.params, {}, TOKENS, train=False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama in the layout."""
    place = tmp_path_factory.mktemp("packed")
    rounded = model_of("llama")
    paths = [path for group in rounded.parts.groups for path in group]
    blocks = compress.round_blocks(
        rounded.params["blocks"], paths, GridSpec(bits=4, group_size=32)
    )
    pretrained.save(
        place,
        dataclasses.replace(rounded, params={**rounded.params, "blocks": blocks}),
    )
    return place


QUERY = "model.layers.1.self_attn.q_proj"


def changed(folder, place, change, **said):
    """A copy with other tensors, and with other words on its quantization."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(change(tensors), place / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] |= said
    (place / "config.json").write_text(json.dumps(content))
    return place


@pytest.mark.slow
def test_biases_of_zeros_are_nothing_and_others_are_unexpected(folder, tmp_path):
    def add(value):
        return lambda found: found | {f"{QUERY}.bias": np.full(64, value, np.float16)}

    found = pretrained.load(changed(folder, tmp_path, add(0)))
    wanted = pretrained.load(folder)
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    with pytest.raises(DataFormatError, match=r"unexpected .*q_proj.bias"):
        pretrained.load(changed(folder, tmp_path, add(1)))


@pytest.mark.slow
def test_shards_are_read(folder, tmp_path):
    whole = safetensors.numpy.load_file(folder / "model.safetensors")
    # Parts of one matrix are in both files.
    halves = dict(list(whole.items())[::2]), dict(list(whole.items())[1::2])
    places = {}
    for number, tensors in enumerate(halves):
        name = f"model-{number}.safetensors"
        safetensors.numpy.save_file(tensors, tmp_path / name)
        places |= dict.fromkeys(tensors, name)
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = pretrained.load(tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, found.params, pretrained.load(folder).params
    )


def test_what_cannot_be_read_is_refused_by_name(folder, tmp_path):
    def plain(found):
        parts = [found.pop(f"{QUERY}.{part}") for part in pretrained.PARTS]
        assert len(parts) == 4
        return found | {f"{QUERY}.weight": np.zeros((64, 64), np.float32)}

    with pytest.raises(UnsupportedOp, match=r"q_proj.weight' must be packed in all"):
        pretrained.load(changed(folder, tmp_path, plain))
    with pytest.raises(UnsupportedOp, match=r"quant_method='gptq' .* got 'awq'"):
        pretrained.load(changed(folder, tmp_path, dict, quant_method="awq"))
    short = {f"{QUERY}.scales": np.ones((1, 64), np.float16)}
    with pytest.raises(DataFormatError, match=r"q_proj: expected .*found .*F16\[1, 64"):
        pretrained.load(changed(folder, tmp_path, lambda found: found | short))

    def lost(found):
        del found[f"{QUERY}.qzeros"]
        return found

    with pytest.raises(DataFormatError, match=r"q_proj: expected .*qzeros.* found"):
        pretrained.load(changed(folder, tmp_path, lost))

    def narrow(found):
        wide = "model.layers.0.mlp.down_proj"
        for part in pretrained.PARTS:
            found[f"{wide}.{part}"] = found[f"{QUERY}.{part}"]
        return found

    words = r"'layers.0.mlp.down_proj.weight' should have shape \(96, 64\)"
    with pytest.raises(DataFormatError, match=words):
        pretrained.load(changed(folder, tmp_path, narrow))

    def table(found):
        del found["model.embed_tokens.weight"]
        for part in pretrained.PARTS:
            found[f"model.embed_tokens.{part}"] = found[f"{QUERY}.{part}"]
        return found

    with pytest.raises(UnsupportedOp, match=r"only kernels .* 'embed_tokens.weight'"):
        pretrained.load(changed(folder, tmp_path, table))

    def both(found):
        return found | {f"{QUERY}.weight": np.zeros((64, 64), np.float32)}

    with pytest.raises(DataFormatError, match=r"packed and plain: .*q_proj.weight"):
        pretrained.load(changed(folder, tmp_path, both))
    stray = {"model.layers.1.self_attn.more_proj.scales": np.ones((1, 64), np.float16)}
    with pytest.raises(DataFormatError, match=r"unexpected .*more_proj.scales"):
        pretrained.load(changed(folder, tmp_path, lambda found: found | stray))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama"} | SIZES_WITHOUT_A_WORD)
    )
    with pytest.raises(DataFormatError, match="describes the quantization, found None"):
        pretrained.load(tmp_path)


def test_a_packed_head_is_no_copy_of_the_table(folder, tmp_path):
    def head(found):
        del found["lm_head.weight"]
        for part in pretrained.PARTS:
            found[f"lm_head.{part}"] = found[f"{QUERY}.{part}"]
        return found

    loaded = pretrained.load(changed(folder, tmp_path, head))
    query = pretrained.load(folder).params["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(
        loaded.params["head"]["kernel"].dequantize(), query.dequantize()[1]
    )
    content = json.loads((tmp_path / "config.json").read_text())
    content["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(DataFormatError, match=r"unexpected \['lm_head.weight'\]"):
        pretrained.load(tmp_path)


def test_the_format_can_be_said(folder, tmp_path):
    wrong = changed(folder, tmp_path, dict, checkpoint_format="gptq")
    assert not np.allclose(
        logits(pretrained.load(wrong)), logits(pretrained.load(folder))
    )
    right = pretrained.load(wrong, checkpoint_format="gptq_v2")
    np.testing.assert_array_equal(logits(right), logits(pretrained.load(folder)))
    with pytest.raises(ConfigError, match="did you mean 'gptq_v2'"):
        pretrained.load(wrong, checkpoint_format="gptq_v3")


def logits(loaded):
    return loaded.model.apply(loaded.params, {}, TOKENS, train=False)[0]


def test_a_full_disk_leaves_a_folder_as_it_was(folder, tmp_path, monkeypatch):
    loaded = pretrained.load(folder)
    pretrained.save(tmp_path, loaded)
    (tmp_path / "quantize_config.json").write_text("{}")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(DiskFull):
        pretrained.save(tmp_path, loaded)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


SIZES_WITHOUT_A_WORD = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}


def test_other_methods_are_refused_whatever_their_tensors(folder, tmp_path):
    def plain(found):
        return {name: each for name, each in found.items() if "proj" not in name}

    with pytest.raises(
        UnsupportedOp, match="'gptq' is implemented: got 'bitsandbytes'"
    ):
        pretrained.load(changed(folder, tmp_path, plain, quant_method="bitsandbytes"))


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused_before_anything_is_removed(tmp_path):
    model = packed("gpt2", 4, 16, True)
    pretrained.save(tmp_path, model)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    attention = model.params["blocks"]["attention"]

    def with_query(query):
        blocks = model.params["blocks"]
        changed = {**blocks, "attention": {**attention, "query": query}}
        return dataclasses.replace(model, params={**model.params, "blocks": changed})

    query = attention["query"]
    plain = {**query, "kernel": query["kernel"].dequantize()}
    with pytest.raises(ConfigError, match=r"h.0.attn.c_attn.weight' must be packed"):
        pretrained.save(tmp_path, with_query(plain))
    order = query["kernel"].order[:, ::-1]
    turned = {**query, "kernel": dataclasses.replace(query["kernel"], order=order)}
    with pytest.raises(ConfigError, match=r"c_attn.weight'.* rows in one order"):
        pretrained.save(tmp_path, with_query(turned))
    with pytest.raises(ConfigError, match="did you mean 'gptq'"):
        pretrained.save(tmp_path, model, checkpoint_format="gtpq")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_model_saved_anew_is_not_read_by_an_older_config(folder, tmp_path):
    model = pretrained.load(folder)
    (tmp_path / "quantize_config.json").write_text('{"bits": 3}')
    pretrained.save(tmp_path, model)
    again = pretrained.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    plain = dataclasses.replace(model, params=compress.dequantize_params(model.params))
    pretrained.save(tmp_path, plain)
    assert "quantization_config" not in json.loads(
        (tmp_path / "config.json").read_text()
    )
    again = pretrained.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, plain.params)
