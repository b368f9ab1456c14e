"""The k-th magnitude and selection above it: sorted bits in numpy, and a kernel."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import kernels
from hpcjax.core import ConfigError

launch = importlib.import_module("hpcjax.kernels._top_k.launch")
masks = importlib.import_module("hpcjax.kernels._top_k.masks")
reference = importlib.import_module("hpcjax.kernels._top_k.reference")
SIZES = (1, 7, 64, 1000)


def numbers(kind, size, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "ties":
        return rng.integers(-2, 3, size).astype(np.float32)
    if kind == "zeros":
        return np.where(np.arange(size) % 2, -0.0, 0.0).astype(np.float32)
    made = rng.normal(size=size).astype(np.float32)
    return made * np.float32(1e-42) if kind == "denormal" else made


def by_hand(x, threshold, capacity):
    bits = x.view(np.int32) & 0x7FFFFFFF
    chosen = np.flatnonzero((bits >= threshold) & (bits > 0))
    kept = chosen[:capacity]
    rest = capacity - len(kept)
    indices = np.concatenate([kept, np.full(rest, len(x))])
    return indices, np.concatenate([x[kept], np.zeros(rest, x.dtype)]), len(chosen)


kth = jax.jit(lambda x, k: kernels.kth_magnitude(kernels.magnitudes(x), k))


@pytest.mark.acceptance("oktopk", 5)
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "denormal"])
@pytest.mark.parametrize("size", SIZES)
def test_the_kth_magnitude_is_that_of_a_sort(kind, size):
    x = numbers(kind, size)
    order = np.sort(x.view(np.int32) & 0x7FFFFFFF)[::-1]
    for k in {1, 2, size // 3 + 1, size}:
        expected = order[k - 1] if k <= size else 0
        assert int(kth(jnp.asarray(x), k)) == expected
    assert int(kth(jnp.asarray(x), size + 1)) == 0


@pytest.mark.quick("0.03-0-False", "0.5-0-False", "1.0-0-False")
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_places_and_counts_are_those_of_numpy(monkeypatch, on_cpu, size, share):
    monkeypatch.setattr(masks, "_on_cpu", lambda: on_cpu)
    # Bit 31 of a word is a sign elsewhere.
    mask = np.random.default_rng(size).random(size) < share
    wanted = np.flatnonzero(mask)
    assert int(kernels.count(jnp.asarray(mask))) == len(wanted)
    for capacity in (1, 7, size + 3):
        indices, count = kernels.nonzero(jnp.asarray(mask), capacity)
        assert (indices.dtype, count.dtype) == ("int32", "int32")
        kept = wanted[:capacity]
        rest = np.full(capacity - len(kept), size)
        np.testing.assert_array_equal(indices, np.concatenate([kept, rest]))
        assert int(count) == len(wanted)


def test_places_are_found_in_many_masks_at_once():
    mask = np.random.default_rng(0).random((5, 99)) < 0.2
    find = jax.jit(jax.vmap(functools.partial(kernels.nonzero, capacity=30)))
    for found, count, each in zip(*find(jnp.asarray(mask)), mask, strict=True):
        wanted = np.flatnonzero(each)
        np.testing.assert_array_equal(found[: int(count)], wanted)
    with pytest.raises(ConfigError, match="capacity=0"):
        kernels.nonzero(jnp.asarray(mask[0]), 0)


def test_magnitudes_of_what_is_no_number_stand_above():
    order = kernels.magnitudes(jnp.array([1.0, -jnp.inf, jnp.nan, 3e38]))
    assert jnp.argsort(order).tolist() == [0, 3, 1, 2]
    half = jnp.array([-1.5, 0.25], jnp.bfloat16)
    assert jnp.argsort(kernels.magnitudes(half)).tolist() == [1, 0]


def test_the_kth_magnitude_over_devices_is_that_of_all_numbers():
    x = jnp.asarray(
        numbers("ties", 8 * 33) + numbers("normal", 8 * 33, seed=1).round(1)
    )
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def found(part, k):
        total = functools.partial(jax.lax.psum, axis_name="d")
        return kernels.kth_magnitude(kernels.magnitudes(part), k, total=total)

    joint = jax.jit(
        jax.shard_map(found, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    )
    for k in (1, 5, 200):
        assert int(joint(x, k)) == int(kth(x, k))


CASES = [
    (kind, size, capacity)
    for kind in ("normal", "ties", "zeros", "denormal")
    for size in SIZES
    for capacity in (1, 13)
]


def check_selection(select, kind, size, capacity):
    x = numbers(kind, size)
    threshold = kth(jnp.asarray(x), min(9, size))
    expected = by_hand(x, int(threshold), capacity)
    found = select(jnp.asarray(x), threshold, capacity)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), theirs)


@pytest.mark.acceptance("oktopk", 5)
@pytest.mark.parametrize(("kind", "size", "capacity"), CASES)
def test_selection_is_that_of_a_list(kind, size, capacity):
    select = jax.jit(reference.select_above, static_argnums=2)
    check_selection(select, kind, size, capacity)


@pytest.mark.acceptance("oktopk", 5)
@pytest.mark.parametrize(("kind", "size", "capacity"), CASES)
def test_the_kernel_selects_what_a_list_would(monkeypatch, kind, size, capacity):
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    # Several programs, the last of which is not full.
    monkeypatch.setattr(launch, "BLOCK", 32)
    select = functools.partial(launch.select_above, interpreted=True)
    check_selection(select, kind, size, capacity)


@pytest.mark.slow
def test_the_kernel_selects_from_each_of_several_arrays():
    pytest.importorskip("triton", reason="`make kernels` has not been called")
    several = jnp.stack([jnp.asarray(numbers("normal", 70, seed=s)) for s in range(3)])
    threshold = jnp.stack([kth(each, 5) for each in several])
    select = functools.partial(kernels.select_above, capacity=6)
    found, expected = (
        jax.vmap(functools.partial(select, implementation=name))(several, threshold)
        for name in ("interpreted", "reference")
    )
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_kernel_is_in_a_program_for_cuda(lowering):
    select = functools.partial(
        kernels.select_above, capacity=64, implementation="triton"
    )
    assert lowering.kernels(select, jnp.ones(5000), jnp.int32(1)) == ["select_above"]


def test_the_machine_code_does_not_spill(machine_code):
    select = functools.partial(
        kernels.select_above, capacity=64, implementation="triton"
    )
    (found,) = machine_code(select, jnp.ones(5000), jnp.int32(1))
    assert not found.spilled
    # Every value is read once, by loads of four.
    loads = found.instructions.count("LDG.E.128")
    assert loads == launch.BLOCK // found.threads // 4


def test_bad_input_is_refused():
    x, threshold = jnp.ones(4), jnp.int32(1)
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        kernels.select_above(x, threshold, 2, implementation="tritom")
    with pytest.raises(ConfigError, match="capacity=0"):
        kernels.select_above(x, threshold, 0)
