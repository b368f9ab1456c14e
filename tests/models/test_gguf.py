"""The GGUF reader against formats decoded by hand, and files cut or changed."""

import contextlib
import dataclasses
import math
import pathlib
import struct
import types

import gguf
import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies

from hpcjax import data, models
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    DataMissing,
    HpcjaxError,
    UnsupportedOp,
)
from hpcjax.data import catalog
from hpcjax.models import pretrained
from hpcjax.runs import directory

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def decode(raw, kind):
    """Blocks of 32 by their definition: halves d and m, numbers q of 8 or 4 bits."""
    if kind in ("F32", "F16"):
        return raw.view({"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)
    if kind == "BF16":
        return raw.view(ml_dtypes.bfloat16).astype(np.float32)
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    blocks = np.ascontiguousarray(raw).reshape(-1, size)
    d, m = (
        np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
        for at in (0, 2)
    )
    if kind == "Q8_0":
        found = d * blocks[:, 2:].view(np.int8).astype(np.float32)
    else:
        packed = blocks[:, size - 16 :]
        q = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
        found = d * (q - 8) if kind == "Q4_0" else d * q + m
    return found.reshape(*raw.shape[:-1], -1)


def write(path, tensors, keys=lambda writer: None, **options):
    """Writes a file with the package; `tensors` are name -> (raw array, its type)."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    keys(writer)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_of(values, kind):
    kind = gguf.GGMLQuantizationType[kind]
    return gguf.quants.quantize(values, kind), kind


@pytest.fixture
def example(tmp_path):
    """A small file with every format, some keys, and the values written."""
    rng = np.random.default_rng(0)
    values = {
        kind: rng.normal(size=(3, 2, 64)).astype(np.float32) * 10 for kind in KINDS
    }

    def keys(writer):
        writer.add_uint32("a.count", 7)
        writer.add_float64("a.rate", 0.1)
        writer.add_bool("a.flag", True)
        writer.add_int64("a.low", -(2**40))
        writer.add_string("a.words", "größe")
        writer.add_array("a.names", ["x", "", "yz"])
        writer.add_array("a.numbers", [3, -1, 2])

    path = tmp_path / "example.gguf"
    write(path, {k: raw_of(v, k) for k, v in values.items()}, keys)
    return path, values


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_read_bit_by_bit(example, kind):
    path, values = example
    ours = pretrained.read_gguf(path).tensors[kind]
    assert ours.kind == kind
    assert ours.shape == (3, 2, 64)
    expected = decode(np.asarray(raw_of(values[kind], kind)[0]).view(np.uint8), kind)
    np.testing.assert_array_equal(
        ours.read().view(np.uint32), expected.reshape(3, 2, 64).view(np.uint32)
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_random_blocks_are_those_of_the_definition(tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    raw = np.random.default_rng(1).integers(0, 256, (50, 3 * size)).astype(np.uint8)
    for place in (1, 3):  # the upper bytes of scales: no infinity, no NaN
        raw[:, place::size] &= 0xBB
    write(tmp_path / "random.gguf", {"w": (raw, number)})
    ours = pretrained.read_gguf(tmp_path / "random.gguf").tensors["w"].read()
    expected = decode(raw, kind)
    assert ours.shape == (50, 96)
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


def test_metadata_are_read(example):
    metadata = pretrained.read_gguf(example[0]).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.count"] == 7
    assert metadata["a.rate"] == 0.1
    assert metadata["a.flag"] is True
    assert metadata["a.low"] == -(2**40)
    assert metadata["a.words"] == "größe"
    assert metadata["a.names"] == ["x", "", "yz"]
    assert metadata["a.numbers"] == [3, -1, 2]


def test_the_second_version_and_another_alignment(tmp_path):
    values = np.arange(6, dtype="<f4")
    key = b"general.alignment"
    content = b"GGUF" + struct.pack("<IQQ", 2, 1, 1)
    content += struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 128)
    content += struct.pack("<Q1sIQQIQ", 1, b"w", 2, 3, 2, 0, 0)
    content += bytes(-len(content) % 128) + values.tobytes()
    path = tmp_path / "old.gguf"
    path.write_bytes(content)
    found = pretrained.read_gguf(path).tensors["w"].read()
    np.testing.assert_array_equal(found, values.reshape(2, 3))


def test_bfloat16_is_read_exactly(tmp_path):
    """Every pattern of 16 bits, NaN, infinities and subnormal numbers among them."""
    values = np.arange(2**16, dtype="<u2").view(ml_dtypes.bfloat16)
    head = of_tensor((256, 256), 30)[:-99]
    path = tmp_path / "half.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + values.tobytes())
    stored = pretrained.read_gguf(path).tensors["w"]
    assert stored.kind == "BF16"
    found = stored.read()
    assert found.dtype == np.float32
    # As bits, for no NaN equals itself.
    expected = values.astype(np.float32).reshape(256, 256)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("kind", "size"), [("Q5_0", 22), ("Q4_K", 144), ("Q6_K", 210)])
def test_further_formats_are_read(tmp_path, kind, size):
    number = gguf.GGMLQuantizationType[kind]
    raw = np.zeros((2, size), np.uint8)
    write(tmp_path / "k.gguf", {"blk.0.w": (raw, number)})
    stored = pretrained.read_gguf(tmp_path / "k.gguf").tensors["blk.0.w"]
    width = gguf.GGML_QUANT_SIZES[number][0]
    assert stored.shape == (2, width)
    np.testing.assert_array_equal(stored.read(), np.zeros((2, width)))


def test_an_axis_longer_than_any_file_is_refused(tmp_path):
    path = tmp_path / "long.gguf"
    path.write_bytes(of_tensor((2**62, 0), 0))
    with pytest.raises(DataFormatError, match="expected at most 2147483648 along"):
        pretrained.read_gguf(path)


def test_another_format_is_named(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_1
    raw = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    write(tmp_path / "k.gguf", {"blk.0.w": (raw, kind)})
    stored = pretrained.read_gguf(tmp_path / "k.gguf").tensors["blk.0.w"]
    with pytest.raises(UnsupportedOp, match=r"'blk.0.w' is stored as Q8_1, which the"):
        stored.read()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"GG", "expected b'GGUF'"),
        (b"nope" * 9, "expected b'GGUF'"),
        (b"GGUF\x03", "truncated: expected 4 bytes of the version, found 1"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "found 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        # Counts and lengths that no memory could hold.
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 1), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\xff" * 8 + bytes(9), "truncated"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path, content, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=words) as caught:
        pretrained.read_gguf(path)
    assert str(path) in str(caught.value)


def of_key(kind, value):
    head = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    return b"GGUF" + head + struct.pack("<I", kind) + value + bytes(64)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (of_key(99, b""), "expected a type of value for 'k', found 99"),
        (of_key(9, struct.pack("<IQ", 9, 1)), "expected numbers or strings in 'k'"),
        (of_key(9, struct.pack("<IQ", 4, 2**61)), "of 'k', found"),
        (of_key(9, struct.pack("<IQ", 8, 2**60)), "of 'k', found"),
        (of_key(8, struct.pack("<Q2s", 2, b"\xff\xfe")), "in UTF-8"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, content, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=words):
        pretrained.read_gguf(path)


def of_tensor(shape, kind, offset=0, keys=b"", count=0):
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, count) + keys
    content += struct.pack("<Q1sI", 1, b"w", len(shape))
    return content + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset) + bytes(99)


ZERO = struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (of_tensor((4, 2**61), 0), r"truncated: tensor 'w' \(F32, shape"),
        (of_tensor((4,), 0, 2**63), "truncated: tensor 'w'"),
        (of_tensor((33,), 8), "multiple of 32 values for Q8_0"),
        (of_tensor((1,) * 5, 0), "expected 1 to 4 axes of 'w', found 5"),
        (of_tensor((4,), 0, keys=ZERO, count=1), "alignment of at least 1, found 0"),
    ],
)
def test_tensors_that_cannot_be_are_refused(tmp_path, content, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=words):
        pretrained.read_gguf(path)


@pytest.mark.parametrize(("keys", "tensors", "least"), [(3, 0, 39), (0, 2, 64)])
def test_more_keys_and_tensors_than_there_is_room_for_are_refused(
    tmp_path, keys, tensors, least
):
    """A key takes 13 bytes at least, a tensor's description 32."""
    path, count = tmp_path / "bad.gguf", "descriptions of .* tensors"
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)
    path.write_bytes(head + bytes(least - 1))
    with pytest.raises(DataFormatError, match=count):
        pretrained.read_gguf(path)
    path.write_bytes(head + bytes(least))
    if keys:
        assert not pretrained.read_gguf(path).tensors  # empty keys are keys
        return
    with pytest.raises(DataFormatError, match="1 to 4 axes of '', found 0"):
        pretrained.read_gguf(path)


@pytest.mark.faults(9)
@pytest.mark.acceptance("lm-models", 10)
def test_a_file_cut_anywhere_is_refused(example, tmp_path):
    whole = example[0].read_bytes()
    path = tmp_path / "cut.gguf"
    # The last tensor ends before the file does: what follows is padding.
    reader = gguf.GGUFReader(example[0])
    end = max(t.data_offset + t.n_bytes for t in reader.tensors)
    for size in [*range(0, end, 97), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataFormatError):
            pretrained.read_gguf(path)
    path.write_bytes(whole[: end - 1])
    with pytest.raises(DataFormatError, match=r"cut.gguf: truncated: tensor 'Q4_1'"):
        pretrained.read_gguf(path)


@hypothesis.given(place=strategies.integers(0, 10**6), byte=strategies.integers(0, 255))
@hypothesis.settings(
    max_examples=200,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_a_changed_byte_never_crashes(example, tmp_path, place, byte):
    content = bytearray(example[0].read_bytes())
    content[place % 750] = byte  # in the head, which is 750 bytes long
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    with contextlib.suppress(DataFormatError, UnsupportedOp):
        for stored in pretrained.read_gguf(path).tensors.values():
            stored.read()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataMissing, match=r"nothing.gguf"):
        pretrained.read_gguf(tmp_path / "nothing.gguf")


def described(config, context, **changes):
    """Adds the keys of llama's architecture."""

    def keys(writer):
        writer.add_block_count(config.num_hidden_layers)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_context_length(context)
        for key, value in changes.items():
            writer.add_string(key.replace("__", "."), value)

    return keys


def interleaved(weight, heads):
    """Rows of each head as llama.cpp's converter puts them: 0, half, 1, half + 1."""
    rows = weight.reshape(heads, -1, weight.shape[1])
    half = rows.shape[1] // 2
    order = np.stack([np.arange(half), half + np.arange(half)], axis=1).ravel()
    return rows[:, order].reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def twin(request):
    """A random LLaMA of `transformers` and its tensors by GGUF's names."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=48,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=19,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=request.param == "tied",
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for full, parameter in model.named_parameters():
        values, name = parameter.detach().numpy(), full
        for theirs, heads in (("q_proj", 6), ("k_proj", 2)):
            values = interleaved(values, heads) if theirs in full else values
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = (values, gguf.GGMLQuantizationType.F32)
    return model, config, tensors


@pytest.mark.slow
def test_logits_equal_transformers(twin, tmp_path):
    import torch

    model, config, tensors = twin
    path = tmp_path / "twin.gguf"
    write(path, tensors, described(config, 19))
    loaded = pretrained.load(path)
    assert (loaded.context, loaded.vocabulary, loaded.family) == (19, 53, "llama")
    assert loaded.metadata["llama.block_count"] == 2
    tokens = np.random.default_rng(0).integers(0, 53, (2, 11)).astype(np.int32)
    found, _ = loaded.model.apply(loaded.params, {}, jnp.asarray(tokens), train=False)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def divisors(head_dim, base, factor, low, high, context):
    """What llama.cpp's converter writes of LLaMA 3's scaling, in plain Python."""
    found = np.ones(head_dim // 2, np.float32)
    for place in range(head_dim // 2):
        turns = context / (2 * math.pi * base ** (2 * place / head_dim))
        if turns < low:
            found[place] = factor
        elif turns <= high:
            smooth = (turns - low) / (high - low)
            found[place] = 1 / ((1 - smooth) / factor + smooth)
    return found


def rotating(path, divisors):
    """Writes a tiny random LLaMA with heads of 16 and divisors of frequencies."""
    names = [
        f"blk.0.{name}" for name in NAMES.values() if name.startswith(("attn", "ffn"))
    ]
    rng, single = np.random.default_rng(0), gguf.GGMLQuantizationType.F32
    sizes = {name: (32,) if "norm" in name else (32, 32) for name in names}
    sizes |= {"token_embd": (5, 32), "output_norm": (32,)}
    tensors = {name: rng.normal(size=shape) for name, shape in sizes.items()}
    tensors["rope_freqs"] = divisors
    stored = {f"{name}.weight": (np.float32(x), single) for name, x in tensors.items()}
    counts = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    widths = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    rope = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500.0}}
    write(path, stored, described(types.SimpleNamespace(**counts | widths | rope), 64))
    return path


def test_frequencies_are_divided_as_the_file_says(tmp_path):
    scaling = models.RopeScaling(factor=4.0, low=1.0, high=4.0, context=64)
    written = divisors(16, 500.0, **dataclasses.asdict(scaling))
    assert 2 < len({*written}) < 8  # some kept, some divided, some between
    loaded = pretrained.load(rotating(tmp_path / "divided.gguf", written))

    def speak(**changes):
        options = dataclasses.replace(loaded.config.options, **changes)
        model = dataclasses.replace(loaded.config, options=options).make((64,), 5)
        tokens = jnp.arange(40)[None] % 5
        return model.apply(loaded.params, {}, tokens, train=False)[0]

    wanted = speak(rope_divisors=(), rope_scaling=scaling)
    np.testing.assert_allclose(speak(), wanted, rtol=0, atol=1e-3)
    assert np.abs(speak(rope_divisors=()) - wanted).max() > 1
    with pytest.raises(ConfigError, match=r"no config\.json of 'llama'"):
        pretrained.save(tmp_path, loaded)
    for wrong in (written[:3], -written):
        with pytest.raises(DataFormatError, match="8 positive numbers in rope_freqs"):
            pretrained.load(rotating(tmp_path / "wrong.gguf", wrong))


@pytest.mark.slow
def test_other_architectures_and_wrong_tensors_are_refused(twin, tmp_path):
    _, config, tensors = twin
    path = tmp_path / "twin.gguf"
    write(path, tensors, described(config, 19, llama__rope__scaling__type="yarn"))
    with pytest.raises(UnsupportedOp, match="'yarn'"):
        pretrained.load(path)
    for key in ("scaling.factor", "scale_linear", "scaling.attn_factor"):

        def scaled(writer, key=f"llama.rope.{key}"):
            described(config, 19)(writer)
            writer.add_float32(key, 2.0)

        write(path, tensors, scaled)
        with pytest.raises(UnsupportedOp, match=rf"rope.{key}=1.0 or .*: got 2.0"):
            pretrained.load(path)
    more = {**tensors, "rope_freqs.weight": tensors["output_norm.weight"]}
    write(path, more, described(config, 19))
    with pytest.raises(DataFormatError, match="expected 4 positive numbers in rope_fr"):
        pretrained.load(path)
    write(
        path, {**tensors, "other": tensors["output_norm.weight"]}, described(config, 19)
    )
    with pytest.raises(DataFormatError, match=r"unexpected \['other'\]"):
        pretrained.load(path)
    write(path, tensors)
    with pytest.raises(DataFormatError, match=r"'llama.embedding_length', found None"):
        pretrained.load(path)
    fewer = {k: v for k, v in tensors.items() if k != "token_embd.weight"}
    write(path, fewer, described(config, 19))
    with pytest.raises(DataFormatError, match=r"no tensor 'token_embd.weight'"):
        pretrained.load(path)


@pytest.mark.slow
@hypothesis.given(place=strategies.integers(0, 10**6), byte=strategies.integers(0, 255))
@hypothesis.settings(
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_a_changed_byte_gives_a_model_or_an_error(twin, tmp_path, place, byte):
    _, config, tensors = twin
    path = tmp_path / "changed.gguf"
    write(path, tensors, described(config, 19))
    content = bytearray(path.read_bytes())
    content[place % 1900] = byte  # the keys, and the tensors' names and shapes
    path.write_bytes(content)
    with contextlib.suppress(HpcjaxError):
        pretrained.load(path)


@pytest.mark.slow
@pytest.mark.acceptance("lm-models", 3)
def test_smollm2_equals_the_package_bit_by_bit():
    root = directory.data_root(pathlib.Path(__file__).parents[2])
    path = data.fetch("smollm2", root) / catalog.SMOLLM2
    found = pretrained.read_gguf(path).tensors
    theirs = gguf.GGUFReader(path).tensors
    assert len(theirs) == len(found) == 272
    for tensor in theirs:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = found[tensor.name].read()
        np.testing.assert_array_equal(
            ours.view(np.uint32), expected.astype(np.float32).view(np.uint32)
        )
    loaded = pretrained.load(path)
    assert models.num_params(loaded.model) == 134_515_008
    preset = models.preset("smollm2-135m")
    assert (loaded.config, loaded.context, loaded.vocabulary) == preset
