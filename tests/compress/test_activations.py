"""Codecs of activations, beside numpy's: codes, slopes, bytes, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress
from hpcjax.compress import Autoencoder, Identity, Quantizer, RandomK, TopK
from hpcjax.core import ConfigError, trees
from hpcjax.core.varying import vary
from hpcjax.models import (
    CausalLmConfig,
    ExpertsConfig,
    MlpConfig,
    TransformerOptions,
)

SHAPE = 3, 5, 8
LIKE = jax.ShapeDtypeStruct(SHAPE, "float32")
CASES = 100


def draw(number):
    """Numbers of many sizes; some channels are zero, tiny, or too large for float16."""
    rng = np.random.default_rng(number)
    sizes = rng.choice([0, 1e-6, 1e-3, 1, 40, 3e4, 2e5], SHAPE[-1])
    return (rng.normal(size=SHAPE) * sizes).astype(np.float32)


def quantize(y, bits):
    """Returns codes and scales as the paper has them, by numpy."""
    half = np.float32(2 ** (bits - 1))
    scale = np.minimum(np.abs(y).max((0, 1)), np.float32(65504)).astype(np.float16)
    by = y / (scale.astype(np.float32) + np.float32(1e-6)) * half
    q = (np.clip(np.round(by), -half, half - 1) + half).astype(np.uint8)
    wide, packed = np.unpackbits(q[..., None], -1), []
    chunks = np.split(wide[..., 8 - bits :], 8 // bits, axis=-2)
    packed = np.packbits(np.concatenate(chunks, -1), -1)[..., 0]
    return packed, scale, (q - half) / half * scale.astype(np.float32)


@pytest.mark.acceptance("mpcompress", 3)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_quantizer_is_the_papers_to_the_bit(bits):
    codec = Quantizer(bits=bits)
    encode = jax.jit(lambda y: codec.encode(y, {}))
    decode = jax.jit(lambda code: codec.decode(code, LIKE, {}))
    for number in range(CASES):
        y = draw(number)
        packed, scale, wanted = quantize(y, bits)
        code = encode(y)
        assert code[0].dtype == jnp.uint8
        np.testing.assert_array_equal(code[1], scale)
        np.testing.assert_array_equal(code[0], packed)
        found = np.asarray(decode(code))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
        most = np.abs(y).max((0, 1))
        fits = most <= 65504
        bound = most * (2.0 ** (1 - bits) + 2.0**-11) + 1.1e-6
        assert (np.abs(found - y) <= bound)[..., fits].all()
        assert codec.count(code)["clamped_scales"] == (~fits).sum()
    size = sum(np.asarray(each).nbytes for each in code)
    assert codec.wire_bytes(SHAPE, "float32", where="pipeline") == size


def test_the_largest_number_has_the_top_code_and_others_stay_what_they_are():
    y = np.zeros((2, 4), np.float32)
    y[0] = [1, 0, np.nan, np.inf]
    codec = Quantizer(bits=8)
    codes, scale = codec.encode(jnp.array(y), {})
    assert (codes[0, 0], codes[0, 1]) == (255, 128)
    found = codec.decode((codes, scale), jax.ShapeDtypeStruct(y.shape, y.dtype), {})
    assert np.isfinite(found[:, :2]).all()
    assert not np.isfinite(found[0, 2:]).any()
    assert not found[:, 1].any()


@pytest.mark.acceptance("mpcompress", 4)
def test_top_k_sends_the_k_largest_of_the_whole_array():
    codec = TopK(k=7)
    encode = jax.jit(lambda y: codec.encode(y, {}))
    for number in range(CASES):
        y = np.round(draw(number), 1)  # with ties and zeros
        values, indices = map(np.asarray, encode(y))
        flat = y.ravel()
        order = np.argsort(-np.abs(flat), kind="stable")[:7]
        np.testing.assert_array_equal(indices, np.sort(order))
        np.testing.assert_array_equal(values, flat[np.sort(order)])
    found = np.asarray(codec.decode((values, indices), LIKE, {}))
    wanted = np.zeros_like(flat)
    wanted[order] = flat[order]
    np.testing.assert_array_equal(found, wanted.reshape(SHAPE))
    assert indices.dtype == np.int32
    flat[3] = np.nan
    assert np.isnan(np.asarray(encode(flat.reshape(SHAPE))[0])).any()


def alone(codec, y, given):
    """Returns the sum over one device, inside `shard_map`."""
    mesh = jax.make_mesh((1,), ("col",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        lambda y: codec.sum(vary(y, "col"), ("col",), given),
        mesh=mesh,
        in_specs=spec(),
        out_specs=spec(),
    )
    return run(y)


@pytest.mark.acceptance("mpcompress", 4)
@pytest.mark.parametrize("grad", ["masked", "through"])
def test_slopes_of_entries_are_of_what_was_sent_or_of_all(grad):
    codec, rng = TopK(k=9, grad=grad), np.random.default_rng(0)
    y = np.float32(rng.permutation(np.arange(1.0, 25)) * rng.choice([-1, 1], 24))
    y = y.reshape(2, 3, 4)

    def loss(z):
        return (z**3).sum() / 100

    total = jax.jit(lambda y: alone(codec, y, {}))

    def whole(y):
        return float(loss(np.asarray(total(y), np.float64)))

    slope = jax.jit(jax.grad(lambda y: loss(alone(codec, y, {}))))
    found = np.asarray(slope(y))
    if grad == "through":
        sent = np.asarray(total(y))
        np.testing.assert_allclose(found, 3 * sent**2 / 100, rtol=1e-6)
        return
    # Steps of 0.25 change no selection, for magnitudes are one apart.
    steps = 0.25 * np.eye(24, dtype=np.float32).reshape(24, *y.shape)
    apart = [whole(y + step) - whole(y - step) for step in steps]
    cubic = 0.25**2 / 100 * (found.ravel() != 0)  # of the central difference
    np.testing.assert_allclose(np.array(apart) / 0.5, found.ravel() + cubic, rtol=1e-3)
    assert np.count_nonzero(found) == 9


def test_random_entries_are_drawn_by_the_key_without_replacement():
    codec, y = RandomK(k=20), draw(4) + 1
    encode = jax.jit(lambda key: codec.encode(y, {"key": key})[1])
    first, again, other = (np.asarray(encode(jax.random.key(n))) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert len(set(first)) == 20
    assert set(first) != set(other)
    many = np.concatenate([encode(jax.random.key(n)) for n in range(200)])
    counts = np.bincount(many, minlength=y.size)
    expected = 200 * 20 / y.size
    assert abs(counts - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.acceptance("mpcompress", 2)
def test_the_code_of_a_sum_is_the_sum_of_codes():
    codec = Autoencoder(d=3)
    given = codec.init(jax.random.key(0), SHAPE[-1])
    assert {name: leaf.shape for name, leaf in given.items()} == {
        "encoder": (3, 8),
        "decoder": (8, 3),
    }
    parts = np.random.default_rng(0).normal(size=(4, *SHAPE)).astype(np.float32)
    codes = sum(codec.encode(part, given) for part in parts)
    found = codec.decode(codes, LIKE, given)
    whole = codec.decode(codec.encode(parts.sum(0), given), LIKE, given)
    np.testing.assert_allclose(found, whole, atol=1e-5)
    exact = parts.sum(0, dtype=np.float64) @ np.float64(given["encoder"]).T
    exact = exact @ np.float64(given["decoder"]).T
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_bytes_are_those_of_the_worked_example():
    shape, half = (32, 512, 1024), "float16"
    sent = functools.partial(dict, shape=shape, dtype=half, where="pipeline")()
    assert Identity().wire_bytes(**sent) == 33_554_432
    assert Autoencoder(d=50).wire_bytes(**sent) == 1_638_400
    assert Autoencoder(d=100).wire_bytes(**sent) == 3_276_800
    for bits, size in ((8, 16_777_216), (4, 8_388_608), (2, 4_194_304)):
        assert Quantizer(bits=bits).wire_bytes(**sent) == size + 2048
    assert TopK(k=819_200).wire_bytes(**sent) == 4_915_200
    # By gathers of four devices 8 bits are as much as the sum of float16, but scales.
    eight = Quantizer(bits=8).wire_bytes(shape, half, 4)
    assert eight - 3 * 2048 == Identity().wire_bytes(shape, half, 4) == 1.5 * 33_554_432
    one = Autoencoder(d=50)
    for where, devices in (("pipeline", 2), ("tensor", 4), ("tensor", 8)):
        at = {"shape": shape, "dtype": half, "devices": devices, "where": where}
        equal = compress.equal_bytes(RandomK(), one, **at)
        more = dataclasses.replace(equal, k=equal.k + 1)
        assert equal.wire_bytes(**at) <= one.wire_bytes(**at) < more.wire_bytes(**at)


@pytest.mark.acceptance("mpcompress", 10)
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Quantizer(bits=3), "bits must be 2 | 4 | 8: got bits=3"),
        (lambda: Quantizer(bits=2).apply_to(lm(width=6, heads=2)), "got width=6"),
        (lambda: Quantizer(bits=4).wire_bytes((2, 7), "float32"), "got width=7"),
        (lambda: TopK(k=121).encode(jnp.zeros(SHAPE), {}), "got k=121, entries=120"),
        (lambda: RandomK(k=121).code_bytes(SHAPE, "int8"), "got k=121, entries=120"),
        (lambda: Identity(start=2).apply_to(lm()), "got 2, 2 layers"),
        (lambda: Identity().apply_to(MlpConfig().make((4,), 2)), "a model without"),
        (lambda: compress.equal_ratio(TopK(), Autoencoder(d=9), SHAPE), "are k=135"),
        (
            lambda: compress.equal_bytes(
                TopK(), Identity(), SHAPE, "float32", devices=1
            ),
            "at least two devices",
        ),
        (
            lambda: Identity().wire_bytes(SHAPE, "float32", where="node"),
            "where must be 'tensor' or 'pipeline'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(act, message):
    with pytest.raises(ConfigError) as error:
        act()
    assert message in str(error.value)


def lm(**sizes):
    return CausalLmConfig(**{"depth": 2, "width": 16, "heads": 4, **sizes}).make(
        (4,), 9
    )


def test_layers_of_groups_are_counted_as_layers():
    grouped = ExpertsConfig(count=2, every=2)
    model = lm(depth=4, options=TransformerOptions(experts=grouped))
    learnt = jax.eval_shape(Autoencoder(d=3).apply_to(model).init, jax.random.key(0))
    shapes = trees.flatten(learnt[0]["codecs"])
    assert shapes["blocks/block_1/attention/output/encoder"].shape == (1, 3, 16)
    assert Identity(start=2).apply_to(model)
    for start in (1, 4):
        message = rf"first of 2 that are stacked: got {start}, 4 layers"
        with pytest.raises(ConfigError, match=message):
            Identity(start=start).apply_to(model)


def test_nothing_is_a_code_too():
    y = jnp.zeros((0, 8))
    codec = Quantizer(bits=4)
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    assert codec.decode(codec.encode(y, {}), like, {}).shape == y.shape


def test_an_autoencoder_as_wide_as_the_activations_warns(caplog):
    Autoencoder(d=16).apply_to(lm())
    assert "codec.d=16 of width 16 compresses nothing" in caplog.text


def test_what_is_learnt_lies_beside_the_layers_from_start_on():
    model = lm()
    coded = Autoencoder(d=3).apply_to(model)
    plain, _ = jax.jit(model.init)(jax.random.key(0))
    params, _ = jax.jit(coded.init)(jax.random.key(0))
    learnt = params.pop("codecs")
    jax.tree.map(np.testing.assert_array_equal, plain, params)
    assert jax.tree.map(jnp.shape, learnt)["blocks"] == {
        "attention": {"output": {"encoder": (1, 3, 16), "decoder": (1, 16, 3)}},
        "mlp": {"down": {"encoder": (1, 3, 16), "decoder": (1, 16, 3)}},
    }
    # Where kernels are whole there is no sum.
    tokens = jnp.ones((1, 4), jnp.int32)
    ours, wanted = (
        each.lower(given, {}, tokens).as_text()
        for each, given in (
            (jax.jit(functools.partial(coded.apply, train=True)), params),
            (jax.jit(functools.partial(model.apply, train=True)), plain),
        )
    )
    assert ours == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "codec",
    [
        *(Identity(), Autoencoder(d=3), Quantizer(bits=4)),
        *(TopK(k=7), RandomK(k=7)),
    ],
)
def test_codes_have_the_bytes_that_are_told_in_every_dtype(codec, dtype):
    def code(key):
        y = jnp.zeros(SHAPE, dtype)
        return codec.encode(y, codec.init(key, SHAPE[-1]) | {"key": key})

    found = jax.tree.leaves(jax.eval_shape(code, jax.random.key(0)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in found)
    assert size == codec.wire_bytes(SHAPE, dtype, where="pipeline")
