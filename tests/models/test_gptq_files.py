"""Files of GPTQ's layout: made by hand in numpy, round trips, formats that disagree."""

import dataclasses
import json
import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from hpcjax import compress, kernels
from hpcjax.compress import GptqOptions, GridSpec
from hpcjax.core import (
    ConfigError,
    DataFormatError,
    DataMissing,
    DiskFull,
    UnsupportedOp,
)
from hpcjax.models import pretrained
from hpcjax.models.pretrained import _gptq_config

BITS = [2, 3, 4, 8]


def stream(values, bits):
    """Integers along the first axis as int32 words, by arithmetic on whole numbers."""
    columns = []
    for column in values.T:
        number = sum(int(v) << bits * k for k, v in enumerate(column))
        raw = number.to_bytes(len(column) * bits // 8, "little")
        columns.append(np.frombuffer(raw, "<i4"))
    return np.stack(columns, axis=1)


def write(path, q, zero, scale, group, *, bits, less=0, **config):
    tensors = {
        "a.b.qweight": stream(q, bits),
        "a.b.qzeros": np.ascontiguousarray(stream((zero - less).T % 2**bits, bits).T),
        "a.b.scales": scale.astype(np.float16),
        "a.b.g_idx": group.astype(np.int32),
        "a.b.bias": np.zeros(3, np.float32),
    }
    safetensors.numpy.save_file(tensors, path)
    content = {"bits": bits, "group_size": 32, "desc_act": False, **config}
    path.with_name("quantize_config.json").write_text(json.dumps(content))


def by_hand(path, bits, *, sort=False, middle=False, **how):
    """Writes a file; returns in float64 the weights it stands for."""
    rng = np.random.default_rng(bits)
    q = rng.integers(0, 2**bits, (64, 32))
    zero = rng.integers(0, 2**bits, (2, 32))
    zero[0, :2] = 0, 2**bits - 1
    zero = np.full_like(zero, 2 ** (bits - 1)) if middle else zero
    scale = rng.uniform(0.5, 1, (2, 32)).astype(np.float16)
    group = rng.permutation(64) // 32 if sort else np.arange(64) // 32
    write(path, q, zero, scale, group, bits=bits, **how)
    return scale[group].astype(float) * (q - zero[group])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize(("less", "said"), [(1, "gptq"), (0, "gptq_v2"), (1, None)])
def test_a_file_made_by_hand(tmp_path, bits, sort, less, said):
    path = tmp_path / "model.safetensors"
    config = {} if said is None else {"checkpoint_format": said}
    weights = by_hand(path, bits, sort=sort, less=less, sym=False, **config)
    (name, matrix), *others = pretrained.load_gptq(path).items()
    assert (name, others, matrix.bits, matrix.group_size) == ("a.b", [], bits, 32)
    assert (matrix.order is not None) == sort
    np.testing.assert_allclose(matrix.dequantize(), weights, rtol=1e-6)


def test_known_words(tmp_path):
    # 4 bits, inputs 0 … 7 in a word, all zero points 8: 7 a digit in the first format.
    path = tmp_path / "known.safetensors"
    q, one = np.tile(np.arange(8), 4)[:, None].repeat(8, 1), np.ones((1, 8))
    write(path, q, 8 * one.astype(int), one, np.zeros(32), bits=4, less=1, sym=True)
    read = safetensors.numpy.load_file(path)
    assert read["a.b.qweight"].view(np.uint32).tolist() == [[0x76543210] * 8] * 4
    assert read["a.b.qzeros"].view(np.uint32).tolist() == [[0x77777777]]
    found = pretrained.load_gptq(path)["a.b"].dequantize()
    np.testing.assert_array_equal(found, q - 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
def test_symmetric_grids_say_themselves(tmp_path, caplog, bits, less, said):
    path = tmp_path / "model.safetensors"
    weights = by_hand(
        path, bits, middle=True, less=less, sym=True, checkpoint_format=said
    )
    with caplog.at_level(logging.WARNING):
        found = pretrained.load_gptq(path)["a.b"]
    np.testing.assert_allclose(found.dequantize(), weights, rtol=1e-6)
    assert bool(caplog.records) == (_gptq_config.FORMATS[said] != less)


def test_the_caller_has_the_last_word(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = by_hand(path, 4, middle=True, sym=True)
    found = pretrained.load_gptq(path, checkpoint_format="gptq")["a.b"]
    expected = (np.asarray(found.zero) == 9).all()
    assert expected
    assert not np.allclose(found.dequantize(), weights)
    with pytest.raises(ConfigError, match="did you mean 'gptq_v2'"):
        pretrained.load_gptq(path, checkpoint_format="gptq_v3")


def quantized(bits, *, inputs=64, outputs=32, group=16, act_order=False, seed=0):
    rng = np.random.default_rng(seed)
    kernel = jnp.asarray(rng.standard_normal((inputs, outputs)), jnp.float32)
    x = rng.standard_normal((256, inputs)) * rng.uniform(0.1, 2, inputs)
    spec = GridSpec(bits=bits, group_size=group)
    hessian = jnp.asarray(2 * x.T @ x / len(x), jnp.float32)
    solved = compress.solve(kernel, hessian, spec, GptqOptions(act_order=act_order))
    matrix = kernels.quantized_matrix(
        solved.integers,
        # As a file holds them, so that a round trip can be exact.
        solved.grid.scale.astype(jnp.float16),
        solved.grid.zero,
        bits=bits,
        group=solved.group,
    )
    return matrix, solved.kernel(spec)


@pytest.mark.quick("gptq_v2-False-4", "gptq_v2-False-2", "gptq_v2-False-8")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("written", list(_gptq_config.FORMATS))
def test_a_round_trip_of_solved_layers(tmp_path, bits, act_order, written):
    path = tmp_path / "model.safetensors"
    first, kernel = quantized(bits, act_order=act_order)
    second, _ = quantized(bits, inputs=32, seed=1)
    np.testing.assert_allclose(first.dequantize(), kernel, rtol=1e-3, atol=1e-6)
    layers = {"x.q": first, "x.k": second}
    pretrained.save_gptq(path, layers, checkpoint_format=written)
    found = pretrained.load_gptq(path)
    assert found.keys() == layers.keys()
    for name, matrix in layers.items():
        np.testing.assert_array_equal(found[name].dequantize(), matrix.dequantize())
    config = json.loads((tmp_path / "quantize_config.json").read_text())
    assert config["desc_act"] == act_order
    assert (config["bits"], config["group_size"]) == (bits, 16)
    assert (config["sym"], config["checkpoint_format"]) == (False, written)


def test_layers_with_and_without_groups(tmp_path):
    path = tmp_path / "model.safetensors"
    narrow, _ = quantized(4, inputs=32, group=32)
    wide, _ = quantized(4, group=32)
    whole, _ = quantized(4, group=None)
    for layers, size in [({"n": narrow, "w": wide}, 32), ({"w": whole}, -1)]:
        pretrained.save_gptq(path, layers)
        content = json.loads((tmp_path / "quantize_config.json").read_text())
        assert content["group_size"] == size
        for name, matrix in pretrained.load_gptq(path).items():
            np.testing.assert_array_equal(
                matrix.dequantize(), layers[name].dequantize()
            )


def test_scales_that_are_small_in_a_file_stay_as_they_are(tmp_path):
    path = tmp_path / "model.safetensors"
    matrix, _ = quantized(4)
    tiny = dataclasses.replace(matrix, scale=jnp.full_like(matrix.scale, 1e-7))
    pretrained.save_gptq(path, {"a": tiny})
    found = pretrained.load_gptq(path)["a"]
    np.testing.assert_array_equal(found.dequantize(), tiny.dequantize())
    assert found.dequantize().any()


def test_what_the_layout_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    matrix, _ = quantized(4)
    for value in (1e5, 1e-7, float("nan")):
        scale = jnp.ones(matrix.scale.shape).at[1, 2].set(value)
        other = dataclasses.replace(matrix, scale=scale)
        message = re.escape(f"fit float16: got {value:g}")
        with pytest.raises(ConfigError, match=message):
            pretrained.save_gptq(path, {"a": other})
    above = dataclasses.replace(matrix, zero=jnp.full(matrix.zero.shape, 16.0))
    with pytest.raises(ConfigError, match=r"integers in \[0, 16\): got 16.0"):
        pretrained.save_gptq(path, {"a": above})
    with pytest.raises(ConfigError, match="64 inputs and 33 outputs of 4 bits"):
        pretrained.save_gptq(path, {"a": quantized(4, outputs=33)[0]})
    whole, _ = quantized(4, group=None)
    with pytest.raises(ConfigError, match=r"bits \[4\] and group sizes \[-1, 16\]"):
        pretrained.save_gptq(path, {"a": matrix, "b": whole})
    with pytest.raises(ConfigError, match=r"bits \[\] and group sizes \[\]"):
        pretrained.save_gptq(path, {})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_both_files_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    pretrained.save_gptq(path, {"a": quantized(4)[0]})
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(DiskFull):
        pretrained.save_gptq(path, {"a": quantized(3)[0]})
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_files_that_are_not_in_the_layout(tmp_path):
    path, config = tmp_path / "model.safetensors", tmp_path / "quantize_config.json"
    by_hand(path, 4)
    whole, said = path.read_bytes(), json.loads(config.read_text())

    def refused(match, content=None, error=DataFormatError, **changes):
        path.write_bytes(whole if content is None else content)
        config.write_text(json.dumps({**said, **changes}))
        with pytest.raises(error, match=match):
            pretrained.load_gptq(path)

    refused(f"truncated: expected {len(whole)} bytes", whole[:-7])
    refused("truncated: the head needs more than 0 bytes", b"")
    refused("expected bits from .* found bits=5", bits=5)
    refused("found bits=4, group_size='32'", group_size="32")
    for other in ("marlin", ["x"]):
        found = re.escape(f"'gptq' or 'gptq_v2' is implemented: got {other!r}")
        refused(found, error=UnsupportedOp, checkpoint_format=other)
        refused("is implemented: got", error=UnsupportedOp, format=other)
    refused("quant_method='gptq' is", error=UnsupportedOp, method="qqq")
    refused("true or false as 'sym', found 'false'", sym="false")
    refused("found bits=4.0", bits=4.0)
    refused("group_size=True", group_size=True)
    refused(r"'scales': 'F16\[4, 32\]'.*found .*'scales': 'F16\[2, 32\]'",
            group_size=16)  # fmt: skip
    refused(r"I32\[1, 8\].*for 8 bits.*found .*I32\[2, 4\]", bits=8)

    def changed(**parts):
        tensors = safetensors.numpy.load(whole)
        for part, value in parts.items():
            tensors[f"a.b.{part}"] = value
        return safetensors.numpy.save(tensors)

    refused(r"I32\[8, 32\].*F32\[8, 32\]",
            changed(qweight=np.zeros((8, 32), np.float32)))  # fmt: skip
    refused("found .*'qweight': 'I32.8.'", changed(qweight=np.zeros(8, np.int32)))
    refused("must have group_size=32 inputs: got 2 groups, of .63, 1. inputs",
            changed(g_idx=np.eye(64, dtype=np.int32)[0]))  # fmt: skip
    refused("expected finite scales",
            changed(scales=np.full((2, 32), np.nan, np.float16)))  # fmt: skip
    other = safetensors.numpy.save({"a.b.weight": np.zeros(3, np.float32)})
    refused("expected tensors '<name>.qweight', found none", other)
    path.write_bytes(whole)
    for content in ("[", "[" * 100_000):
        config.write_text(content)
        with pytest.raises(DataFormatError, match="expected JSON"):
            pretrained.load_gptq(path)
    config.unlink()
    with pytest.raises(
        DataMissing, match=r"no quantize_config\.json and no config\.json"
    ):
        pretrained.load_gptq(path)
    path.unlink()
    config.write_text(json.dumps(said))
    with pytest.raises(DataMissing, match="no such file"):
        pretrained.load_gptq(path)


def test_a_model_s_config_and_files_without_g_idx(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = by_hand(path, 4, checkpoint_format="gptq_v2")
    tensors = safetensors.numpy.load_file(path)
    del tensors["a.b.g_idx"]
    safetensors.numpy.save_file(tensors, path)
    said = json.loads((tmp_path / "quantize_config.json").read_text())
    (tmp_path / "quantize_config.json").unlink()
    model = {"model_type": "llama", "quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = pretrained.load_gptq(path)["a.b"]
    np.testing.assert_allclose(found.dequantize(), weights, rtol=1e-6)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataFormatError, match="describes the quantization, found None"):
        pretrained.load_gptq(path)


@pytest.mark.parametrize(
    "said", [{"format": "gptq_v2"}, {"checkpoint_format": "gptq_v2"}]
)
def test_newer_writers_have_other_names(tmp_path, said):
    path = tmp_path / "model.safetensors"
    weights = by_hand(path, 4, less=0, method="gptq", **said)
    found = pretrained.load_gptq(path)["a.b"]
    np.testing.assert_allclose(found.dequantize(), weights, rtol=1e-6)


def test_two_files_that_say_different_things_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    by_hand(path, 4, less=0, checkpoint_format="gptq_v2")
    said = json.loads((tmp_path / "quantize_config.json").read_text())
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"quantization_config": {**said, "sym": False}}))
    assert pretrained.load_gptq(path)
    for key, value in (("checkpoint_format", "gptq"), ("bits", 8), ("desc_act", True)):
        model.write_text(json.dumps({"quantization_config": {**said, key: value}}))
        with pytest.raises(
            DataFormatError, match=rf"config.json differ in \['{key}'\]"
        ):
            pretrained.load_gptq(path)
    model.write_text("{}")
    assert pretrained.load_gptq(path)


def test_inputs_in_another_order_need_their_groups(tmp_path):
    path = tmp_path / "model.safetensors"
    by_hand(path, 4, sort=True, desc_act=True)
    assert pretrained.load_gptq(path)["a.b"].order is not None
    tensors = safetensors.numpy.load_file(path)
    del tensors["a.b.g_idx"]
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(DataFormatError, match=r"expected .*g_idx.* found"):
        pretrained.load_gptq(path)
