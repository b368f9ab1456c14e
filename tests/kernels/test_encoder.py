"""Fused operations of an encoder layer against plain JAX, float64 and differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hpcjax import ir, kernels, perf
from hpcjax.core.errors import ConfigError, UnsupportedOp

SEED = jnp.uint32(7)
# Odd sizes, one key, one feature.
SHAPES = ((3, 5, 7), (1, 1, 1), (2, 4, 33), (65,), (2, 1, 9), (1, 129))


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def kept_of(x, rate, seed=SEED):
    return np.asarray(kernels.keep_mask(seed, x.shape, rate), np.float64) / (1 - rate)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def layer_norm(x, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


@pytest.mark.quick("shape3")
@pytest.mark.parametrize("shape", SHAPES)
def test_each_operation_is_its_definition_in_float64(shape):
    x, residual = normal(*shape), normal(*shape, seed=1)
    bias, scale, shift = (normal(shape[-1], seed=s) for s in (2, 3, 4))
    wide = [np.asarray(a, np.float64) for a in (x, residual, bias, scale, shift)]
    x64, residual64, bias64, scale64, shift64 = wide
    kept = kept_of(x, 0.3)
    near = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    dropped = kernels.softmax_dropout(x, SEED, rate=0.3, scale=0.5)
    near(dropped, softmax(0.5 * x64) * kept)
    active = kernels.bias_activation_dropout(x, bias, SEED, rate=0.3)
    near(active, np.maximum(x64 + bias64, 0) * kept)
    y = kernels.dropout_residual_norm(x, bias, residual, scale, shift, SEED, rate=0.3)
    total = (x64 + bias64) * kept + residual64
    near(y, layer_norm(total) * scale64 + shift64, atol=1e-4)
    stacked = jnp.stack([x, residual, x])
    biases = jnp.stack([bias, scale, shift]).reshape(3, *(1,) * (x.ndim - 1), -1)
    query, key, value = kernels.attention_biases(stacked, biases)
    near(query, x64 + bias64)
    near(key, residual64 + scale64)
    near(value, x64 + shift64)


@pytest.mark.quick("0.0-stored", "0.0-recomputed")
@pytest.mark.parametrize("masks", ["recomputed", "stored"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_gradients_are_those_of_finite_differences(rate, masks):
    with jax.enable_x64(True):
        x, residual = (normal(2, 3, 5, seed=s, dtype="float64") for s in (0, 1))
        bias, scale, shift = (normal(5, seed=s, dtype="float64") for s in (2, 3, 4))
        options = {"rate": rate, "masks": masks}

        def check(fn, args):  # what is not traced gets arrays of numpy
            check_grads(jax.jit(fn), args, order=1, modes=["rev"], eps=1e-4)

        check(lambda x: kernels.softmax_dropout(x, SEED, scale=0.7, **options), (x,))
        check(
            lambda *args: kernels.dropout_residual_norm(*args, SEED, **options),
            (x, bias, residual, scale, shift),
        )
        for activation in ("relu", "gelu_erf"):
            check(
                lambda *args, f=activation: kernels.bias_activation_dropout(
                    *args, SEED, activation=f, **options
                ),
                (x, bias),
            )


@pytest.mark.acceptance("data-movement", 8)
@pytest.mark.parametrize("masks", ["recomputed", "stored"])
def test_the_gradient_has_the_mask_of_the_forward_pass(masks):
    x, rate = jnp.ones((64, 64)), 0.25
    y, pull = jax.vjp(
        lambda x: kernels.bias_activation_dropout(
            x, jnp.zeros(64), SEED, rate=rate, masks=masks
        ),
        x,
    )
    kept = np.asarray(kernels.keep_mask(SEED, x.shape, rate))
    assert 0 < kept.sum() < kept.size
    np.testing.assert_array_equal(np.asarray(y) > 0, kept)
    np.testing.assert_array_equal(np.asarray(pull(x)[0]) > 0, kept)


@pytest.mark.acceptance("data-movement", 8)
@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_as_many_are_dropped_as_are_asked_for(seed):
    count, rate = 10**6, 0.1
    kept = np.asarray(kernels.keep_mask(jnp.uint32(seed), (1000, 1000), rate))
    sigma = (count * rate * (1 - rate)) ** 0.5
    assert abs((~kept).sum() - count * rate) < 4 * sigma
    # Neighbours, rows and columns are independent: as many pairs, and even sums.
    for one, other in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        both = (~one & ~other).sum()
        assert abs(both - one.size * rate**2) < 5 * (one.size * rate**2) ** 0.5
    for axis in (0, 1):
        rows = (~kept).sum(axis)
        assert rows.var() == pytest.approx(1000 * rate * (1 - rate), rel=0.25)


@pytest.mark.acceptance("data-movement", 8)
def test_masks_follow_from_the_seed_and_not_from_the_layout():
    shape, order = (3, 4, 5), (2, 0, 1)
    kept = kernels.keep_mask(SEED, shape, 0.5)
    np.testing.assert_array_equal(kept, kernels.keep_mask(SEED, shape, 0.5))
    turned = kernels.keep_mask(SEED, shape, 0.5, order)
    np.testing.assert_array_equal(turned, np.transpose(kept, order))
    other = kernels.keep_mask(jnp.uint32(8), shape, 0.5)
    assert (np.asarray(kept) != np.asarray(other)).any()


def test_masks_of_two_seeds_are_no_part_of_one_sequence():
    # The hashes of these seeds differ by 305 times what neighbours' indices do.
    one, other = (
        np.asarray(kernels.keep_mask(jnp.uint32(seed), (10**5,), 0.5))
        for seed in (1921, 3826)
    )
    assert abs((one[305:] == other[:-305]).mean() - 0.5) < 0.01


@pytest.mark.acceptance("data-movement", 7)
@pytest.mark.parametrize("hidden", ["scores", "visible"])
def test_a_query_that_sees_nothing_has_zeros_and_no_gradient(hidden):
    scores = normal(2, 3, 4).at[0, 1].set(-jnp.inf if hidden == "scores" else 1.0)
    visible = jnp.ones((2, 3, 4), bool).at[0, 1].set(False)

    def fn(scores):
        seen = visible if hidden == "visible" else None
        return kernels.softmax_dropout(scores, SEED, rate=0.2, visible=seen)

    y, pull = jax.vjp(fn, scores)
    (grad,) = pull(normal(2, 3, 4, seed=1))
    assert np.isfinite(y).all()
    assert np.isfinite(grad).all()
    assert not np.asarray(y[0, 1]).any()
    assert not np.asarray(grad[0, 1]).any()
    assert np.asarray(y[0, 0]).any()


def norm_gradient(x, scale, g, eps):
    """The gradient of a layer norm by its input, in float64."""
    deviation = np.sqrt(x.var(-1, keepdims=True) + eps)
    n, h = layer_norm(x, eps), g * scale
    return (h - h.mean(-1, keepdims=True) - n * (h * n).mean(-1, keepdims=True)) / (
        deviation
    )


@pytest.mark.acceptance("data-movement", 6)
def test_a_norm_of_a_large_mean_is_near_float64():
    x = 1e4 + normal(16, 512)
    one, zero, g = jnp.ones(512), jnp.zeros(512), normal(16, 512, seed=1)
    y, pull = jax.vjp(
        lambda x: kernels.dropout_residual_norm(x, zero, jnp.zeros_like(x), one, zero),
        x,
    )
    wide = np.asarray(x, np.float64)
    assert abs(np.asarray(y) - layer_norm(wide)).max() < 5e-3
    want = norm_gradient(wide, 1.0, np.asarray(g, np.float64), 1e-5)
    assert abs(np.asarray(pull(g)[0]) - want).max() < 5e-3


@pytest.mark.acceptance("data-movement", 6)
def test_a_norm_of_bfloat16_is_near_float64_before_it_is_rounded():
    from hpcjax.kernels._encoder import reference

    x = (100 + 10 * normal(16, 512)).astype("bfloat16")
    normed, _ = reference.normalise(x, 1e-5)
    assert abs(np.asarray(normed) - layer_norm(np.asarray(x, np.float64))).max() < 1e-5
    one, zero = jnp.ones(512), jnp.zeros(512)
    y = kernels.dropout_residual_norm(x, zero, jnp.zeros_like(x), one, zero)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, normed.astype("bfloat16"))


def test_bad_options_are_told():
    x = jnp.ones((2, 2))
    with pytest.raises(ConfigError, match=r"rate must be in \[0, 1\): got rate=1.0"):
        kernels.softmax_dropout(x, SEED, rate=1.0)
    with pytest.raises(ConfigError, match="dropout needs a seed"):
        kernels.softmax_dropout(x, rate=0.1)
    with pytest.raises(ConfigError, match="did you mean 'stored'"):
        kernels.softmax_dropout(x, SEED, masks="store")
    with pytest.raises(ConfigError, match="did you mean 'relu'"):
        kernels.bias_activation_dropout(x, jnp.ones(2), activation="rel")
    with pytest.raises(ConfigError, match="scale must be finite and > 0: got scale=0"):
        kernels.softmax_dropout(x, scale=0.0, visible=x > 0)
    with pytest.raises(ConfigError, match="eps must be finite and >= 0"):
        kernels.dropout_residual_norm(x, x[0], x, x[0], x[0], eps=-1.0)
    with pytest.raises(ConfigError, match="at least one axis"):
        kernels.softmax_dropout(jnp.float32(1.0))
    with pytest.raises(ConfigError, match=r"each axis once: got order=\(\)"):
        kernels.softmax_dropout(x, order=())


def test_a_mask_that_would_enlarge_the_scores_is_refused():
    scores = jnp.ones((2, 1, 4))
    for shape in ((3, 4), (3,), (1, 2, 1, 4)):
        with pytest.raises(ConfigError, match=r"scores of \[2, 1, 4\]: got shape=\["):
            kernels.softmax_dropout(scores, visible=jnp.ones(shape, bool))
    for shape in ((), (4,), (1, 1), (2, 1, 4)):
        y = kernels.softmax_dropout(scores, visible=jnp.ones(shape, bool))
        np.testing.assert_array_equal(y, np.full((2, 1, 4), 0.25))


def test_a_rate_just_below_one_drops_nearly_all_and_an_order_has_all_axes():
    assert not np.any(kernels.keep_mask(SEED, (1000,), 1 - 1e-12))
    for order in ((0, 0), (0,), (0, 2)):
        with pytest.raises(ConfigError, match="order must have each axis once"):
            kernels.keep_mask(SEED, (2, 3), 0.5, order)


# Interpreted, kernels run a program a row: few rows, and widths that fill no block.
_RNG = np.random.default_rng(73)
DRAWN = [
    tuple(map(int, (*_RNG.integers(1, 5, 1 + n % 3), _RNG.integers(1, 34))))
    for n in range(20)
]
OPERATIONS = ("softmax", "norm", "relu", "gelu_erf", "gelu_tanh")


def call(operation, args, seed, **options):
    """An operation on (x, residual, bias, scale, shift), as far as it takes them."""
    x, residual, bias, scale, shift = args
    if operation == "softmax":
        return kernels.softmax_dropout(x, seed, scale=0.7, **options)
    if operation == "norm":
        return kernels.dropout_residual_norm(
            x, bias, residual, scale, shift, seed, **options
        )
    return kernels.bias_activation_dropout(
        x, bias, seed, activation=operation, **options
    )


def arguments(shape, order=None, dtype="float32"):
    """Arrays for `call`, laid out in an order, and a cotangent."""
    laid = shape if order is None else tuple(shape[axis] for axis in order)
    wholes = [normal(*laid, seed=s).astype(dtype) for s in (0, 1, 5)]
    rows = [normal(shape[-1], seed=s).astype(dtype) for s in (2, 3, 4)]
    return (wholes[0], wholes[1], *rows), wholes[2]


def both_passes(operation, args, g, seed, **options):
    y, pull = jax.vjp(lambda *args: call(operation, args, seed, **options), *args)
    return [y, *pull(g)]


def near(found, wanted, tolerance=4e-6):
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = (np.asarray(each, np.float64) for each in (one, other))
        scale = tolerance * (1 + abs(theirs).max())
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=scale)


@pytest.mark.quick("1", "8", "15", "19")
@pytest.mark.acceptance("data-movement", 3)
@pytest.mark.parametrize("number", range(20))
def test_kernels_are_the_definition_forward_and_backward(number):
    """Odd sizes, orders of axes, one seed and one a row, masks drawn and stored."""
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    shape, operation = DRAWN[number], OPERATIONS[number % 5]
    rng = np.random.default_rng(number)
    order = tuple(map(int, rng.permutation(len(shape)))) if number % 2 else None
    several = number % 4 > 1 and len(shape) > 1
    seed = jnp.arange(shape[0], dtype=jnp.uint32) if several else SEED
    options = {"rate": 0.3 * (number % 7 > 0), "order": order}
    options["masks"] = ("recomputed", "stored")[number % 3 == 0]
    args, g = arguments(shape, order)
    plain, own = (
        both_passes(operation, args, g, seed, implementation=each, **options)
        for each in ("reference", "interpreted")
    )
    near(own, plain)
    # The definition in another order is that of the canonical array, transposed.
    if order is not None:
        back = np.argsort(order)
        turned = (*(jnp.transpose(a, back) for a in args[:2]), *args[2:])
        y = call(operation, turned, seed, **{**options, "order": None})
        np.testing.assert_allclose(plain[0], jnp.transpose(y, order), atol=1e-6)


def bound_orders():
    """How `ir.gemm_layouts` may lay out what the operations take, by their axes."""
    sizes = ir.encoder_sizes(batch=2, length=3, heads=2, width=4)
    found = {}
    for einsum, canonical, at in (
        ("phbk,phbj->hbjk", "hbjk", 2),
        ("phi,phbj->bij", "bji", 2),
        ("bji,ui->bju", "bju", 2),
        ("bju,iu->bji", "bji", 2),
    ):
        orders = found.setdefault(canonical, set())
        for gemm in ir.gemm_layouts(einsum, sizes):
            orders.add(gemm.einsum.replace("->", ",").split(",")[at])
    return [(axes, order) for axes in sorted(found) for order in sorted(found[axes])]


@pytest.mark.slow
@pytest.mark.acceptance("data-movement", 3)
def test_kernels_take_every_layout_that_contractions_bind():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    sizes = {"h": 1, "b": 2, "j": 2, "k": 3, "i": 5, "u": 3}
    layouts = bound_orders()
    assert len({axes for axes, _ in layouts}) == 3
    operations = {"hbjk": "softmax", "bji": "norm", "bju": "relu"}
    for canonical, laid in layouts:
        order = tuple(canonical.index(axis) for axis in laid)
        shape = tuple(sizes[axis] for axis in canonical)
        args, _ = arguments(shape, order)
        own, plain = (
            call(operations[canonical], args, SEED, rate=0.4, order=order, **each)
            for each in ({"implementation": "interpreted"}, {})
        )
        near([own], [plain])


@pytest.mark.acceptance("data-movement", 6)
def test_an_interpreted_norm_of_a_large_mean_is_near_float64():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    x, g = 1e4 + normal(3, 512), normal(3, 512, seed=1)
    one, zero = jnp.ones(512), jnp.zeros(512)
    y, pull = jax.vjp(
        lambda x: kernels.dropout_residual_norm(
            x, zero, jnp.zeros_like(x), one, zero, implementation="interpreted"
        ),
        x,
    )
    wide = np.asarray(x, np.float64)
    assert abs(np.asarray(y) - layer_norm(wide)).max() < 5e-3
    want = norm_gradient(wide, 1.0, np.asarray(g, np.float64), 1e-5)
    assert abs(np.asarray(pull(g)[0]) - want).max() < 5e-3


@pytest.mark.acceptance("data-movement", 7)
def test_an_interpreted_query_that_sees_nothing_has_zeros_and_no_gradient():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    scores = normal(2, 3, 4).at[0, 1].set(-jnp.inf)
    y, pull = jax.vjp(
        lambda x: kernels.softmax_dropout(
            x, SEED, rate=0.2, implementation="interpreted"
        ),
        scores,
    )
    (grad,) = pull(normal(2, 3, 4, seed=1))
    assert np.isfinite(y).all()
    assert np.isfinite(grad).all()
    assert not np.asarray(y[0, 1]).any()
    assert not np.asarray(grad[0, 1]).any()


@pytest.mark.acceptance("data-movement", 8)
def test_the_masks_of_kernels_are_those_of_keep_mask_bit_by_bit():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    for rate in (0.5, 1 - 1e-12):
        for seed in (jnp.uint32(2**32 - 1), jnp.array([1, 2**31], jnp.uint32)):
            x = jnp.ones((2, 3, 61))
            y, pull = jax.vjp(
                lambda x, seed=seed, rate=rate: kernels.bias_activation_dropout(
                    x, jnp.zeros(61), seed, rate=rate, implementation="interpreted"
                ),
                x,
            )
            kept = kernels.keep_mask(seed, x.shape, rate)
            np.testing.assert_array_equal(np.asarray(y) > 0, kept)
            np.testing.assert_array_equal(np.asarray(pull(x)[0]) > 0, kept)


@pytest.mark.slow
def test_bfloat16_kernels_are_within_a_unit_of_the_last_place():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    args, g = arguments((2, 3, 17), dtype="bfloat16")
    for operation in ("softmax", "norm", "gelu_erf"):
        plain, own = (
            both_passes(operation, args, g, SEED, rate=0.3, implementation=each)
            for each in ("reference", "interpreted")
        )
        assert [leaf.dtype for leaf in own] == [leaf.dtype for leaf in plain]
        near(own, plain, 2**-6)


def test_kernels_read_and_write_each_array_once():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    args, g = arguments((5, 33))
    for operation in ("softmax", "norm", "relu"):
        found = perf.count_accesses(
            lambda operation=operation: both_passes(
                operation, args, g, SEED, rate=0.3, implementation="interpreted"
            )
        )
        assert len(found) == 2
        for kernel in found:
            for done in (kernel.loaded, kernel.stored):
                counts = {n: c for n, c in done.items() if kernel.sizes[n] == 5 * 33}
                assert set(counts.values()) <= {0, 5 * 33}, kernel


@pytest.mark.quick("norm")
@pytest.mark.parametrize("operation", ["softmax", "norm", "relu"])
def test_kernels_are_compiled_for_hopper(machine_code, operation):
    args, g = arguments((64, 512), dtype="bfloat16")
    found = machine_code(
        lambda *args: both_passes(
            operation, args, g, SEED, rate=0.1, implementation="triton"
        ),
        *args,
    )
    assert len(found) == 2
    for code in found:
        assert code.spilled == 0
        assert code.registers <= 128


def test_what_kernels_cannot_is_told():
    x, row = jnp.ones((2, 8200)), jnp.ones(8200)
    with pytest.raises(UnsupportedOp, match="rows of at most 8192: got 8200"):
        kernels.softmax_dropout(x, implementation="interpreted")
    assert kernels.softmax_dropout(x).shape == x.shape
    with pytest.raises(UnsupportedOp, match="device is a cpu"):
        kernels.softmax_dropout(x[:, :9], implementation="triton")
    with pytest.raises(ConfigError, match="takes floats: got dtype='int32'"):
        kernels.softmax_dropout(jnp.ones((2, 2), int))
    with pytest.raises(ConfigError, match="bias must have a number for each"):
        kernels.bias_activation_dropout(x, row[:3])
    with pytest.raises(ConfigError, match="beside x must have its shape"):
        kernels.dropout_residual_norm(x, row, x[:1], row, row)
    with pytest.raises(ConfigError, match="order must have each axis once"):
        kernels.softmax_dropout(x, order=(0, 0))
    with pytest.raises(ConfigError, match="one for each element of the first"):
        kernels.softmax_dropout(x, jnp.arange(3, dtype=jnp.uint32), rate=0.1)
