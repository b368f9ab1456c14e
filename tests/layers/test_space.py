"""Convolutions and pools of blocks against XLA's own of the whole."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hpcjax import layers, perf, sharding
from hpcjax.collectives import halo

RNG = np.random.default_rng(0)
D, H, W = sharding.SPACE_AXES


class Case(NamedTuple):
    """A window over an array; `padding` is on both sides."""

    space: tuple
    sizes: tuple
    kernel: tuple
    strides: tuple
    padding: tuple
    dilation: tuple
    boundary: str = "zero"
    kind: str = "conv"


ONE, TWO = (1, 1), (2, 2)
GRID, LINE = {D: 2, H: 2, W: 2}, {H: 4, W: 2}
# Corners and periodic ends; then uneven blocks, even kernels, halos of two blocks, a
# maximum of negative numbers, fewer outputs than devices.
CASES = {
    "corners": (
        GRID,
        Case((D, H, W), (4, 4, 4), (5, 5, 5), (1, 1, 1), (2, 2, 2), (1, 1, 1)),
        Case((None, W), (6, 8), (3, 5), ONE, (1, 2), ONE, "periodic"),
    ),
    "uneven": (
        LINE,
        Case((H, W), (30, 6), (3, 4), (2, 1), (1, 2), (1, 2)),
        Case((H,), (9,), (7,), (1,), (3,), (1,)),
        Case((H, W), (30, 6), (3, 3), TWO, ONE, ONE, "zero", "max"),
        Case((H,), (9,), (3,), (3,), (1,), (1,), "zero", "mean"),
    ),
}


def draw_case(number):
    """One of 60 cases: how many devices, and a window."""
    rng = np.random.default_rng(number)
    dims = 1 + number % 3
    blocks = [[(8,), (3,)], [(4, 2), (1, 5)], [(2, 2, 2), (3, 1, 2)]][dims - 1]
    mesh = dict(zip((D, H, W), blocks[rng.integers(2)], strict=False))
    kernel = rng.integers(1, 8 if dims < 3 else 5, dims)
    strides, dilation = rng.integers(1, 4, dims), rng.integers(1, 3, dims)
    sizes = np.maximum(rng.integers(4, 14, dims), (kernel - 1) * dilation + 1)
    window = sizes, kernel, strides, rng.integers(0, kernel + 1), dilation
    return mesh, Case(tuple(mesh), *(tuple(each.tolist()) for each in window))


def serial(case, x, w):
    pads = [(p, p) for p in case.padding]
    if case.boundary == "periodic":
        x = jnp.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap")
        pads = [(0, 0)] * len(pads)
    if case.kind == "conv":
        s = "DHW"[-len(pads) :]
        axes = f"N{s}C", f"{s}IO", f"N{s}C"
        return lax.conv_general_dilated(
            x, w, case.strides, pads, rhs_dilation=case.dilation, dimension_numbers=axes
        )
    start, step = {"max": (-np.inf, lax.max), "mean": (0.0, lax.add)}[case.kind]
    around = (1, *case.kernel, 1), (1, *case.strides, 1), [(0, 0), *pads, (0, 0)]
    found = lax.reduce_window(x, start, step, *around)
    return found / np.prod(case.kernel) if case.kind == "mean" else found


def cut(case, x, w):
    options = {
        "strides": case.strides,
        "padding": [(p, p) for p in case.padding],
        "space": case.space,
        "boundary": case.boundary,
        "sizes": case.sizes,
    }
    if case.kind == "conv":
        return layers.conv(x, w, dilation=case.dilation, **options)
    return layers.pool(x, case.kernel, case.kind, **options)


def fill_up(x, sizes, value):
    ends = [(0, size - own) for size, own in zip(sizes, x.shape[1:-1], strict=True)]
    return np.pad(x, [(0, 0), *ends, (0, 0)], constant_values=value)


def check(mesh_shape, *cases):
    """Compares outputs and both gradients, those of all cases in one program."""
    mesh = sharding.make_mesh(mesh_shape)
    specs = [P(None, *case.space) for case in cases]
    wholes, blocks, slopes = [], [], []
    for case in cases:
        x = RNG.normal(size=(1, *case.sizes, 2)).astype("f4") - 3
        w = RNG.normal(size=(*case.kernel, 2, 3)).astype("f4")
        y = jax.eval_shape(lambda x, w, c=case: serial(c, x, w), x, w)
        counts = [mesh_shape.get(axis, 1) for axis in case.space]
        slope = RNG.normal(size=y.shape).astype("f4")
        wholes.append((x, w, slope))
        # What lies past the end must not matter.
        far = [
            (-(-s // b) * b for s, b in zip(own.shape[1:-1], counts, strict=True))
            for own in (x, y)
        ]
        blocks.append((fill_up(x, far[0], 7), w))
        slopes.append(fill_up(slope, far[1], 5))

    def alone(given):
        found = []
        for case, (x, w, slope) in zip(cases, given, strict=True):
            y, pull = jax.vjp(lambda x, w, c=case: serial(c, x, w), x, w)
            found.append((y, *pull(slope)))
        return found

    def run(given):
        return [cut(case, *each) for case, each in zip(cases, given, strict=True)]

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=([(spec, P()) for spec in specs],), out_specs=specs
    )

    def together(given):
        found, pull = jax.vjp(mapped, given)
        return found, pull(slopes)[0]

    found, grads = jax.jit(together)(blocks)
    for y, (dx, dw), theirs in zip(found, grads, jax.jit(alone)(wholes), strict=True):
        for ours, whole in zip((y, dx, dw), theirs, strict=True):
            ends = [(0, a - b) for a, b in zip(ours.shape, whole.shape, strict=True)]
            apart = np.abs(ours - np.pad(whole, ends)).max(initial=0)
            assert apart <= 1e-5 * max(np.abs(whole).max(initial=0), 1e-3)


@pytest.mark.acceptance("spatial-conv", 2)
@pytest.mark.parametrize("name", CASES)
def test_blocks_give_what_the_whole_gives(name):
    check(*CASES[name])


@pytest.mark.slow
@pytest.mark.acceptance("hybrid3dcnn", 1)
def test_sixty_cases():
    kinds = {"stride": 0, "even": 0, "negative": 0, "hops": 0}
    for number in range(60):
        mesh, case = draw_case(number)
        check(mesh, case)
        window = zip(*case[1:6], case.space, strict=True)
        widths = []
        for size, kernel, stride, pad, apart, axis in window:
            each = halo.halo_widths(size, mesh[axis], kernel, stride, (pad, pad), apart)
            widths.append(
                (min(map(min, each)), max(map(max, each)) - -(-size // mesh[axis]))
            )
        kinds["stride"] += max(case.strides) > 1
        kinds["even"] += any(k % 2 == 0 for k in case.kernel)
        kinds["negative"] += min(low for low, _ in widths) < 0
        kinds["hops"] += max(over for _, over in widths) > 0
    assert min(kinds.values()) >= 10, kinds


@pytest.mark.acceptance("hybrid3dcnn", 3)
def test_statistics_do_not_depend_on_how_samples_are_cut():
    x = RNG.normal(size=(4, 4, 4, 2)).astype("f4") + 5
    slopes, ones = RNG.normal(size=x.shape).astype("f4"), jnp.ones(2)
    running = layers.RunningStatistics(0 * ones, ones)

    def both(x, axes):
        y, new = layers.batch_norm(
            x, ones, ones, running, train=True, axis_name=axes and ("data", *axes)
        )
        grouped = layers.group_norm(x, ones, ones, groups=1, axis_name=axes)
        return y + grouped, new

    def run(x, slopes, axes=()):
        y, pull, new = jax.vjp(lambda x: both(x, axes), x, has_aux=True)
        return y, pull(slopes)[0], new

    wanted = jax.jit(run)(x, slopes)
    for shape in ({"data": 1, H: 4, W: 2}, {"data": 4, H: 1, W: 2}):
        spec = P("data", H, W)
        mapped = jax.shard_map(
            lambda x, slopes: run(x, slopes, (H, W)),
            mesh=sharding.make_mesh(shape),
            in_specs=(spec, spec),
            out_specs=(spec, spec, P()),
        )
        found = jax.jit(mapped)(x, slopes)
        for ours, theirs in zip(
            jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.acceptance("spatial-conv", 1)
@pytest.mark.parametrize(
    ("rows", "height", "width"),
    [
        (1, 4, 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, 2, 2), (2, 2, 2), (4, 1, 2), (1, 1, 8), (1, 8, 1))
        ),
    ],
)
def test_what_is_past_the_end_counts_for_nothing(rows, height, width):
    """A convolution of 30 rows, the batch's statistics, and a mean square."""
    x = RNG.normal(size=(4, 30, 16, 2)).astype("f4")
    w, ones = RNG.normal(size=(3, 3, 2, 2)).astype("f4"), jnp.ones(2)
    running = layers.RunningStatistics(0 * ones, ones)

    def loss(x, w, space=(), axes=()):
        y = layers.conv(x, w, space=space, sizes=(30, 16) if space else None)
        inside = jnp.ones((1, y.shape[1], 1, 1), bool)
        inside = halo.mask_past_end(inside, 30, space[0], 1, False) if space else inside
        options = {"train": True, "axis_name": axes or None, "where": inside}
        y, _ = layers.batch_norm(jnp.tanh(y), ones, ones, running, **options)
        total = jnp.sum(jnp.where(inside, jnp.sin(y) ** 2, 0))
        return (lax.psum(total, axes) if axes else total) / (4 * 30 * 16)

    axes, space = ("data", H, W), (H, W)
    mapped = jax.shard_map(
        lambda x, w: loss(x, w, space, axes),
        mesh=sharding.make_mesh({"data": rows, H: height, W: width}),
        in_specs=(P(*axes), P()),
        out_specs=P(),
    )
    far = fill_up(x, (-(-30 // height) * height, 16), 99)
    ours = jax.jit(jax.value_and_grad(mapped, (0, 1)))(far, w)
    theirs = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-5)
    for found, wanted in zip(ours[1], theirs[1], strict=True):
        ends = [(0, a - b) for a, b in zip(found.shape, wanted.shape, strict=True)]
        apart = np.abs(found - np.pad(wanted, ends)).max()
        assert apart <= 1e-5 * np.abs(wanted).max()


def compile_conv(mesh_shape, space, kernel, stride):
    """The program of a convolution, and the bytes of a block's halos by the rule."""
    mesh, half, dims = sharding.make_mesh(mesh_shape), kernel // 2, len(space)

    def run(x, w):
        pads = [(half, half)] * dims
        y = layers.conv(x, w, strides=(stride,) * dims, padding=pads, space=space)
        return jax.lax.psum(jnp.sum(y), space)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P(None, *space), P()), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((2, *[16] * dims, 3), "f4")
    w = jax.ShapeDtypeStruct((*[kernel] * dims, 3, 5), "f4")
    block = [16 // mesh_shape[axis] for axis in space]
    wanted = 0
    for at, axis in enumerate(space):
        low, high = halo.halo_widths(
            16, mesh_shape[axis], kernel, stride, (half, half)
        )[0]
        others = np.prod(block) // block[at]
        wanted += 4 * 2 * 3 * others * (low + high)
        block[at] += low + high
    return jax.jit(mapped).lower(x, w).compile(), wanted


@pytest.mark.acceptance("hybrid3dcnn", 6)
@pytest.mark.acceptance("spatial-conv", 3)
@pytest.mark.parametrize(
    ("space", "kernel", "stride", "permutes"),
    [((H,), 3, 1, 2), ((H,), 3, 2, 1), ((H, W), 1, 1, 0), ((H, W), 5, 2, 4)],
)
def test_halos_are_all_that_is_sent(space, kernel, stride, permutes):
    program, wanted = compile_conv(dict.fromkeys(space, 2), space, kernel, stride)
    kinds = perf.bytes_by_kind(program)
    counts = [each.kind for each in perf.collectives(program)]
    assert counts.count("collective-permute") == permutes
    assert kinds["collective-permute"] == wanted
    assert set(kinds) <= {"collective-permute", "all-reduce"}
