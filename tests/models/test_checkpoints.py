"""What checkpoints may be like: old, sharded, damaged, written by the project."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress, core, models
from hpcjax.models import pretrained
from tests import hostile
from tests.models.checkpoints import copy_of, one
from tests.models.registry import REGISTRY

OLD = {
    "gpt2": lambda name: name.removeprefix("transformer."),
    "opt": lambda name: name.removeprefix("model."),
    "bert": lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    ),
    "bert_pooled": lambda name: f"bert.{name}",
}
BUFFERS = {
    "gpt2": ("h.0.attn.bias", "h.2.attn.masked_bias", "lm_head.weight"),
    "opt": ("decoder.version", "lm_head.weight"),
    "bert": ("bert.embeddings.position_ids", "cls.predictions.decoder.weight"),
    "bert_pooled": ("bert.embeddings.position_ids",),
}


@pytest.mark.slow
@one(*OLD)
def test_names_of_old_files_are_known_and_buffers_are_skipped(case, tmp_path):
    name = case[0]

    def change(tensors):
        renamed = {OLD[name](key): value for key, value in tensors.items()}
        assert set(renamed) != set(tensors)
        return {buffer: np.zeros(3) for buffer in BUFFERS[name]} | renamed

    found = pretrained.load(copy_of(case, tmp_path, change)).params
    jax.tree.map(np.testing.assert_array_equal, found, pretrained.load(case[2]).params)


@pytest.mark.slow
@one("llama")
def test_shards_and_bfloat16(case, tmp_path):
    _, model, folder = case
    model.save_pretrained(tmp_path, max_shard_size="9KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    whole, found = (pretrained.load(each).params for each in (folder, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, whole, found)

    def change(tensors):
        return {name: each.astype(jnp.bfloat16) for name, each in tensors.items()}

    half = copy_of(case, tmp_path / "half", change)
    stored = pretrained.read_safetensors(half)
    assert {each.kind for each in stored.values()} == {"BF16"}
    for policy, rounded in (
        (core.Policy(), lambda leaf: leaf.astype("bfloat16").astype("float32")),
        (core.Policy(param="bfloat16"), lambda leaf: leaf.astype("bfloat16")),
    ):
        found = pretrained.load(half, policy=policy).params
        wanted = jax.tree.map(rounded, whole)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert all(leaf.dtype == policy.param for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@one("gpt2")
@pytest.mark.acceptance("lm-models", 10)
def test_wrong_tensors_are_named(case, tmp_path):
    def change(tensors):
        del tensors["transformer.h.1.ln_2.bias"], tensors["transformer.wpe.weight"]
        return tensors | {"transformer.h.3.ln_1.bias": np.zeros(20, np.float32)}

    with pytest.raises(core.DataFormatError) as caught:
        pretrained.load(copy_of(case, tmp_path, change))
    assert "missing ['h.1.ln_2.bias', 'wpe.weight']" in str(caught.value)
    assert "unexpected ['h.3.ln_1.bias']" in str(caught.value)

    def bend(tensors):
        return tensors | {"transformer.wte.weight": np.zeros((53, 19), np.float32)}

    words = r"'wte.weight' should have shape \(53, 20\).*: got \(53, 19\)"
    with pytest.raises(core.DataFormatError, match=words):
        pretrained.load(copy_of(case, tmp_path, bend))

    def whole(tensors):
        return tensors | {EMBED: tensors[EMBED].astype(np.int8)}

    with pytest.raises(core.UnsupportedOp, match=f"'{EMBED}' is stored as I8"):
        pretrained.load(copy_of(case, tmp_path, whole))
    with pytest.raises(core.DataFormatError, match=r"'wte.weight' is there twice"):
        pretrained.load(copy_of(case, tmp_path, lambda t: t | {"wte.weight": t[EMBED]}))


EMBED = "transformer.wte.weight"


@pytest.mark.slow
@one("gpt2")
@pytest.mark.acceptance("lm-models", 10)
def test_cut_and_absent_files_are_named(case, tmp_path):
    path = copy_of(case, tmp_path, lambda t: t) / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            core.DataFormatError, match=r"model.safetensors: .*truncated"
        ):
            pretrained.load(tmp_path)
    wanted = f"expected {len(whole)} bytes, found {len(whole) - 1}"
    with pytest.raises(core.DataFormatError, match=wanted):
        pretrained.load(tmp_path)
    path.write_bytes(whole[:8] + b"?" + whole[9:])
    with pytest.raises(core.DataFormatError, match="damaged head"):
        pretrained.load(tmp_path)
    deep = b"[" * 100_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(core.DataFormatError, match="damaged head"):
        pretrained.load(tmp_path)
    path.unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(core.DataMissing, match=r"pytorch_model.bin is not read"):
        pretrained.load(tmp_path)
    with pytest.raises(core.DataMissing, match="nowhere"):
        pretrained.load(tmp_path / "nowhere")


@pytest.mark.slow
@one("llama")
def test_wrong_indices_are_refused(case, tmp_path):
    _, model, _ = case
    model.save_pretrained(tmp_path, max_shard_size="9KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    other = {"model.norm.weight": places["model.embed_tokens.weight"]}
    for changed, words in (
        (places | other, r"its shards lack: \['model.norm.weight'\]"),
        (places | {"model.norm.weight": "../x.safetensors"}, "a shard's name"),
        (places | {"model.norm.weight": 3}, "a shard's name"),
        ({}, "'weight_map'"),
    ):
        path.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(core.DataFormatError, match=words):
            pretrained.load(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(core.DataFormatError, match="expected JSON"):
        pretrained.load(tmp_path)
    path.write_text(json.dumps(index))
    (tmp_path / places["model.norm.weight"]).unlink()
    with pytest.raises(core.DataMissing, match=places["model.norm.weight"]):
        pretrained.load(tmp_path)


@pytest.mark.slow
@one("gpt2")
def test_a_folder_that_is_half_written_is_not_loaded(case, tmp_path, monkeypatch):
    loaded = pretrained.load(case[2])
    pretrained.save(tmp_path, loaded)

    def fail(*arguments, **options):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", fail)
        with pytest.raises(RuntimeError, match="killed"):
            pretrained.save(tmp_path, loaded)
    again = pretrained.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)

    replace = pathlib.Path.replace

    def fail_at_the_config(path, target):
        return fail() if target.name == "config.json" else replace(path, target)

    monkeypatch.setattr(pathlib.Path, "replace", fail_at_the_config)
    with pytest.raises(RuntimeError, match="killed"):
        pretrained.save(tmp_path, loaded)
    with pytest.raises(core.DataMissing, match=r"config.json"):
        pretrained.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


CHANGES = [
    ("gpt2", {"model_type": "gpt3"}, core.UnsupportedOp, "did you mean 'gpt2'"),
    ("gpt2", {"model_type": None}, core.UnsupportedOp, "architecture None"),
    ("gpt2", {"model_type": []}, core.UnsupportedOp, r"architecture \[\]"),
    ("gpt2", {"activation_function": "mish"}, core.UnsupportedOp, "'mish'"),
    ("gpt2", {"n_layer": "3"}, core.DataFormatError, "as 'n_layer', found '3'"),
    ("gpt2", {"n_head": None}, core.DataFormatError, "as 'n_head', found None"),
    ("gpt2", {"n_layer": 2**40}, core.DataFormatError, "from 1 to 2147483647"),
    ("gpt2", {"n_layer": 2**30}, core.DataFormatError, "1073741824 layers: got "),
    ("gpt2", {"n_head": 3}, core.ConfigError, "heads must divide width"),
    ("gpt2", {"n_layer": 2}, core.DataFormatError, r"unexpected \['h.2.attn"),
    ("opt", {"enable_bias": False}, core.UnsupportedOp, "enable_bias=True"),
    ("opt", {"do_layer_norm_before": 1}, core.DataFormatError, "true or false"),
    ("llama", {"attention_bias": True}, core.UnsupportedOp, "attention_bias=False"),
    ("llama", {"head_dim": 32}, core.DataFormatError, r"shape \(192, 24\)"),
    ("llama", {"head_dim": "4"}, core.DataFormatError, "as 'head_dim', found '4'"),
    ("llama", {"rms_norm_eps": "x"}, core.DataFormatError, "a number"),
    ("llama", {"rope_parameters": 3}, core.DataFormatError, "an object"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn"}},
        core.UnsupportedOp,
        "rope_parameters: only rope_type='default' or 'llama3'",
    ),
    (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"factor": 2.0}},
        core.UnsupportedOp,
        "rope_scaling: only factor=1.0 or None is implemented: got 2.0",
    ),
    ("bert", {"hidden_act": "relu"}, core.UnsupportedOp, "hidden_act='gelu'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "keys", "error", "words"), CHANGES, indirect=["case"])
def test_what_is_not_implemented_is_refused(case, tmp_path, keys, error, words):
    folder = copy_of(case, tmp_path, lambda tensors: tensors)
    content = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        pretrained.load(folder)


@pytest.mark.slow
@one("gpt2")
def test_a_config_that_is_no_json_is_refused(case, tmp_path):
    folder = copy_of(case, tmp_path, lambda tensors: tensors)
    for content in (b"{", b"\xff", b"[]", b"[" * 100_000):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(core.DataFormatError, match=r"config.json: expected"):
            pretrained.load(folder)


@pytest.mark.slow
@one("llama_tied")
def test_the_keys_of_old_rope_configs_are_read(case, tmp_path):
    wanted = pretrained.load(case[2]).config
    assert wanted.options.rope_scaling == models.RopeScaling(
        factor=4.0, low=1.0, high=3.0, context=24
    )
    folder = copy_of(case, tmp_path, lambda tensors: tensors)
    content = json.loads((folder / "config.json").read_text())
    rope = content.pop("rope_parameters")
    assert content.pop("head_dim") == 8
    content["rope_theta"] = rope.pop("rope_theta")
    for key in ("rope_type", "type"):
        rope[key] = rope.pop("rope_type")
        (folder / "config.json").write_text(
            json.dumps(content | {"rope_scaling": rope})
        )
        assert pretrained.load(folder).config == wanted
        rope["rope_type"] = rope.pop(key)


@pytest.mark.quick("options1", "options3", "options4")
@pytest.mark.parametrize(
    "options",
    [
        models.TransformerOptions(norm_position="post"),
        models.TransformerOptions(mlp="silu_gated"),
        models.TransformerOptions(norm="rms"),
        models.TransformerOptions(embed_width=8),
        models.TransformerOptions(position="offset", norm_eps=1e-3),
        models.TransformerOptions(position="rope"),
        models.TransformerOptions(position="alibi"),
        models.GPT2,
    ],
)
def test_a_model_that_no_family_expresses_is_not_saved(tmp_path, options):
    # GPT-2's config.json has no place for heads of a size of their own.
    head_dim = 6 if options == models.GPT2 else None
    config = models.CausalLmConfig(width=8, heads=2, head_dim=head_dim, options=options)
    params, _ = config.make((5,), 7).init(jax.random.key(0))
    ours = pretrained.Pretrained(params=params, config=config, context=5, vocabulary=7)
    with pytest.raises(core.ConfigError, match=r"no config.json of .* can express"):
        pretrained.save(tmp_path, ours)
    assert not list(tmp_path.iterdir())


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama", "bert"])
def test_what_the_project_trains_is_saved_and_loaded(tmp_path, name):
    config, inputs, vocabulary, *_ = REGISTRY[name]
    params, _ = config.make(inputs, vocabulary).init(jax.random.key(0))
    ours = pretrained.Pretrained(
        params=params, config=config, context=inputs[0], vocabulary=vocabulary
    )
    pretrained.save(tmp_path, ours)
    found = pretrained.load(tmp_path)
    assert found.family == ours.family == name
    assert (found.context, found.vocabulary) == (inputs[0], vocabulary)
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    x = jnp.ones((2, *inputs), jnp.int32)
    pair = (each.model.apply(params, {}, x, train=False)[0] for each in (ours, found))
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.slow
def test_parameters_of_another_model_are_not_saved(tmp_path):
    config, inputs, vocabulary, *_ = REGISTRY["llama"]
    params, _ = config.make(inputs, vocabulary).init(jax.random.key(0))
    ours = pretrained.Pretrained(
        params=params, config=config, context=inputs[0], vocabulary=vocabulary
    )
    pretrained.save(tmp_path, ours)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    packed = compress.round_blocks(
        params["blocks"], ["mlp/up"], compress.GridSpec(bits=4)
    )
    table = params["embed"]["table"]
    shape = re.escape(str(table.shape))
    for changed, words in (
        ({}, r"blocks/attention/key/kernel should have shape .*: got None"),
        (params | {"embed": {"table": table[:5]}}, f"embed/table .* {shape}: got .5, "),
        (params | {"more": table}, f"more should have shape None: got {shape}"),
        (
            params | {"blocks": packed},
            r"mlp.up_proj: .*12 outputs .*compress.dequantize_params",
        ),
    ):
        with pytest.raises(core.ConfigError, match=words):
            pretrained.save(tmp_path, dataclasses.replace(ours, params=changed))
    assert kept == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    whole = compress.dequantize_params(params | {"blocks": packed})
    pretrained.save(tmp_path, dataclasses.replace(ours, params=whole))


@pytest.mark.faults(21)
def test_hostile_weights_are_refused_and_run_nothing(tmp_path):
    config, inputs, vocabulary, *_ = REGISTRY["llama"]
    params, _ = config.make(inputs, vocabulary).init(jax.random.key(0))
    ours = pretrained.Pretrained(
        params=params, config=config, context=inputs[0], vocabulary=vocabulary
    )
    (folder := tmp_path / "weights").mkdir()
    pretrained.save(folder, ours)
    for kind, content in hostile.files(tmp_path / "run").items():
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(core.DataFormatError, match=r"model\.safetensors"):
            pretrained.load(folder)
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(core.DataFormatError, match=r"model\.gguf"):
            pretrained.load(tmp_path / "model.gguf")
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(core.DataMissing, match=r"pytorch_model\.bin is not read"):
            pretrained.load(folder)
        assert not (tmp_path / "run").exists(), kind
