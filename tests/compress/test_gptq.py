"""GPTQ against OBQ written in numpy, its own loss, and rounding to the nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress, sharding
from hpcjax.compress import GptqOptions, GridSpec
from hpcjax.core import ConfigError
from tests.oracles import obq


def problem(inputs=24, outputs=6, seed=0, samples=None):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples or 4 * inputs, inputs)) @ rng.standard_normal(
        (inputs, inputs)
    )
    return rng.standard_normal((inputs, outputs)), 2 * x.T @ x / len(x)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def solve(kernel, hessian, spec=None, **options):
    return compress.solve(
        jnp.asarray(kernel),
        jnp.asarray(hessian),
        spec or GridSpec(bits=3),
        GptqOptions(**options),
    )


@pytest.mark.acceptance("gptq", 2)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_integers_are_those_of_obq_in_order(bits, seed):
    kernel, hessian = problem(seed=seed)
    found = solve(kernel, hessian, GridSpec(bits=bits), block=8)
    expected, values, _ = obq.obq(kernel, hessian, bits)
    np.testing.assert_array_equal(found.integers, expected)
    np.testing.assert_allclose(found.kernel(GridSpec(bits=bits)), values, rtol=1e-12)


@pytest.mark.acceptance("gptq", 1, 5)
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("damping", [0.01, 0.3])
def test_the_loss_is_that_of_the_damped_hessian(group, act_order, static, damping):
    kernel, hessian = problem(seed=3)
    spec = GridSpec(bits=3, group_size=group)
    found = solve(
        kernel, hessian, spec,
        act_order=act_order, static_groups=static, damping=damping,
    )  # fmt: skip
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else None
    expected, values, damped = obq.obq(
        kernel, hessian, 3, group=group, order=order, static=static, damping=damping
    )
    np.testing.assert_array_equal(found.integers, expected)
    made = np.asarray(found.kernel(spec))
    np.testing.assert_allclose(made, values, rtol=1e-12, atol=1e-14)
    off = kernel - made
    loss = np.trace(off.T @ damped @ off) / 2
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)


@pytest.mark.quick("True-False-None", "True-False-24")
@pytest.mark.acceptance("gptq", 3)
@pytest.mark.parametrize("group", [None, 16, 24])
@pytest.mark.parametrize(
    ("act_order", "static"), [(False, False), (True, False), (True, True)]
)
def test_blocks_change_nothing(group, act_order, static):
    kernel, hessian = problem(96, 5, seed=1)
    spec = GridSpec(bits=3, group_size=group)
    made = [
        solve(kernel, hessian, spec, block=block, act_order=act_order,
              static_groups=static)
        for block in (1, 16, 128, 1000)
    ]  # fmt: skip
    for other in made[1:]:
        np.testing.assert_array_equal(other.integers, made[0].integers)
        np.testing.assert_allclose(other.loss, made[0].loss, rtol=1e-10)


@pytest.mark.acceptance("gptq", 3)
def test_in_float32_blocks_change_few_rows():
    kernel, hessian = problem(256, 128, seed=2)
    kernel, hessian = kernel.astype(np.float32), hessian.astype(np.float32)
    small, large = (solve(kernel, hessian, block=block) for block in (1, 128))
    assert small.loss.dtype == jnp.float32
    np.testing.assert_allclose(small.loss, large.loss, rtol=1e-4)
    differing = np.any(np.asarray(small.integers != large.integers), axis=0)
    assert differing.mean() <= 0.02


@pytest.mark.quick("True-True-None", "True-True-8", "True-False-8")
@pytest.mark.acceptance("gptq", 4)
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ternary", [False, True])
def test_with_an_identity_it_rounds_to_the_nearest(group, symmetric, ternary):
    if symmetric and ternary:
        return
    kernel, _ = problem()
    spec = GridSpec(
        bits=2, group_size=group, symmetric=symmetric, mse=symmetric, ternary=ternary
    )
    found = solve(kernel, np.eye(24), spec)
    integers, grid = compress.round_to_nearest(jnp.asarray(kernel), spec)
    np.testing.assert_array_equal(found.integers, integers)
    np.testing.assert_array_equal(found.grid.scale, grid.scale)


@pytest.mark.acceptance("gptq", 5)
def test_act_order_solves_the_permuted_problem():
    kernel, hessian = problem(seed=4)
    order = np.argsort(-np.diag(hessian), kind="stable")
    found = solve(kernel, hessian, act_order=True)
    by_hand = solve(kernel[order], hessian[order][:, order])
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.integers[order], by_hand.integers)
    np.testing.assert_allclose(found.loss, by_hand.loss, rtol=1e-10)


@pytest.mark.acceptance("gptq", 5)
def test_groups_of_an_order_and_static_groups():
    kernel, hessian = problem(seed=5)
    spec = GridSpec(bits=4, group_size=8)
    dynamic = solve(kernel, hessian, spec, act_order=True)
    assert [int(dynamic.group[i]) for i in dynamic.order] == [i // 8 for i in range(24)]
    static = solve(kernel, hessian, spec, act_order=True, static_groups=True)
    np.testing.assert_array_equal(static.group, np.arange(24) // 8)
    first = compress.fit_grid(jnp.asarray(kernel), spec)
    np.testing.assert_array_equal(static.grid.scale, first.scale)


GRIDS = [
    {},
    {"symmetric": True},
    {"symmetric": True, "reference": True},
    {"mse": True},
    {"mse": True, "symmetric": True},
    {"ternary": True},
]


@pytest.mark.parametrize("grid", GRIDS, ids="-".join)
@pytest.mark.parametrize("group", [None, 8])
def test_rounding_takes_the_nearest_of_the_values_that_numpy_fits(grid, group):
    kernel, _ = problem(seed=11)
    kernel[:, 0], kernel[:, 1] = np.abs(kernel[:, 0]), 0
    spec = GridSpec(bits=3, group_size=group, **grid)
    integers, found = compress.round_to_nearest(jnp.asarray(kernel), spec)
    made = compress.dequantize(integers, *found.by_input(24), spec)
    parts = np.split(kernel, 24 // (group or 24))
    expected = [obq.nearest(part, obq.fit(part, 3, **grid))[1] for part in parts]
    # The largest weight lies half-way between two values of a symmetric grid.
    far, least = np.abs(made - kernel), np.abs(np.concatenate(expected) - kernel)
    np.testing.assert_allclose(far, least, atol=1e-12)


@pytest.mark.acceptance("gptq", 6)
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (None, {}),
        (None, {"act_order": True}),
        (8, {}),
        (8, {"act_order": True, "static_groups": True}),
    ],
)
def test_dead_inputs_are_dropped_as_the_oracle_does(group, options):
    kernel, hessian = problem(seed=6)
    dead = [3, 17]
    # The largest weights: a grid that is fitted without them is another one.
    kernel[dead] *= 5
    hessian[dead], hessian[:, dead] = 0, 0
    # In the mean of the diagonal, the ones in place of zeros count.
    hessian *= 1e-2
    found = solve(
        kernel, hessian, GridSpec(bits=3, group_size=group), damping=0.3, **options
    )
    diagonal = np.where(np.diag(hessian) == 0, 1, np.diag(hessian))
    order = np.argsort(-diagonal, kind="stable") if options else None
    static = "static_groups" in options
    expected, values, damped = obq.obq(
        kernel, hessian, 3, group=group, order=order, static=static, damping=0.3
    )
    np.testing.assert_array_equal(found.integers, expected)
    kernel[dead] = 0
    off = kernel - values
    np.testing.assert_allclose(found.loss, np.trace(off.T @ damped @ off) / 2)


@pytest.mark.acceptance("gptq", 6)
def test_dead_inputs_and_constant_outputs():
    kernel, hessian = problem(seed=6)
    hessian[3], hessian[:, 3] = 0, 0
    kernel[:, 1], kernel[:, 2] = 0, 0.5
    found = solve(kernel, hessian)
    assert np.isfinite(found.loss)
    np.testing.assert_array_equal(found.integers[3], found.grid.zero[0])
    made = np.asarray(found.kernel(GridSpec(bits=3)))
    assert np.isfinite(made).all()
    assert not made[3].any()
    assert not made[:, 1].any()
    np.testing.assert_allclose(np.delete(made[:, 2], 3), 0.5)


@pytest.mark.acceptance("gptq", 9)
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float64", 1e-12)])
def test_the_running_hessian_is_that_of_all_sequences(dtype, rtol):
    x = np.random.default_rng(0).standard_normal((7, 5, 4)).astype(dtype)
    whole = 2 / 7 * np.einsum("nti,ntj->ij", x, x)
    for parts, step in [([7], 1), ([1, 2, 4], 1), ([1, 2, 4], -1), ([0, 7, 0], 1)]:
        state = compress.hessian_init(4, dtype)
        for part in np.split(x, np.cumsum(parts)[:-1])[::step]:
            state = compress.hessian_update(state, jnp.asarray(part))
        assert int(state.count) == 7
        far = np.linalg.norm(state.matrix - whole) / np.linalg.norm(whole)
        assert far < rtol


@pytest.mark.acceptance("gptq", 11)
def test_outputs_shared_by_eight_devices_give_the_same_integers():
    kernel, hessian = problem(32, 24, seed=7)
    mesh = sharding.data_mesh(8)
    spec = GridSpec(bits=3, group_size=16)
    for dtype in ("float64", "float32"):
        arguments = (
            jnp.asarray(kernel.astype(dtype)), jnp.asarray(hessian.astype(dtype)), spec
        )  # fmt: skip
        one = compress.solve(*arguments)
        eight = compress.solve(*arguments, mesh=mesh)
        differing = np.any(np.asarray(one.integers != eight.integers), axis=0).mean()
        assert differing == 0 if dtype == "float64" else differing <= 0.02
        np.testing.assert_allclose(one.loss, eight.loss, rtol=1e-4)


def test_kernels_of_one_shape_are_compiled_once(compilations):
    solve(*problem(26, 7, seed=8))
    compilations.clear()
    solve(*problem(26, 7, seed=9))
    assert not compilations


@pytest.mark.acceptance("gptq", 12)
def test_a_singular_hessian_is_damped_further():
    kernel, hessian = problem(samples=2)
    found = solve(kernel, hessian)
    assert np.isfinite(found.loss)
    assert found.damping == 0.01
    again = solve(kernel, hessian, damping=0.0)
    assert again.damping in (1e-4, 1e-3, 1e-2)
    assert np.isfinite(again.loss)


def test_an_indefinite_hessian_is_refused_with_the_layer():
    kernel, hessian = problem()
    hessian = hessian - 2 * np.trace(hessian) * np.eye(24)
    with pytest.raises(np.linalg.LinAlgError, match=r"mlp/up.*more varied calibration"):
        compress.solve(
            jnp.asarray(kernel), jnp.asarray(hessian), GridSpec(), name="mlp/up"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h[:3], "must be"),
        (lambda h: h + np.triu(h), "not symmetric"),
        (lambda h: h * np.nan, "not finite"),
    ],
)
def test_other_hessians_are_refused(change, message):
    kernel, hessian = problem()
    with pytest.raises(ValueError, match=message):
        solve(kernel, change(hessian))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, h: (w * np.nan, h), "mlp/up: the kernel is not finite"),
        (lambda w, h: (w / 0, h), "mlp/up: the kernel is not finite"),
        (lambda w, h: (w.astype("float16"), h), "got float16.* and float64"),
        (lambda w, h: (w, h.astype("float32")), "got float64.* and float32"),
        (lambda w, h: (w[:, :0], h), r"got float64\[24, 0\]"),
    ],
)
def test_other_kernels_are_refused(change, message):
    with np.errstate(divide="ignore"):
        given = [jnp.asarray(each) for each in change(*problem())]
    with pytest.raises(ValueError, match=message):
        compress.solve(*given, GridSpec(), name="mlp/up")
    with pytest.raises(ValueError, match=message):
        compress.prune(*given, name="mlp/up")


def test_an_axis_that_the_mesh_lacks_is_named():
    given = [jnp.asarray(each) for each in problem()]
    with pytest.raises(ConfigError, match=r"axis must be one of .*'data'.*'dta'"):
        compress.solve(*given, GridSpec(), mesh=sharding.data_mesh(2), axis="dta")


def test_groups_must_divide_the_inputs():
    kernel, hessian = problem()
    with pytest.raises(ConfigError, match="group_size=7, inputs=24"):
        solve(kernel, hessian, GridSpec(group_size=7))
    for wrong in ({"bits": 5}, {"group_size": 0}, {"ternary": True, "mse": True}):
        with pytest.raises(ConfigError):
            GridSpec(**wrong)
    for wrong in ({"block": 0}, {"damping": -1.0}, {"damping": float("nan")}):
        with pytest.raises(ConfigError):
            GptqOptions(**wrong)
