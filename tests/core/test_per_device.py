"""State that differs between devices, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from hpcjax.core import per_device
from hpcjax.core.per_device import PerDevice


def mesh(devices, names=("data",), shape=None):
    return jax.make_mesh(
        shape or (devices,),
        names,
        devices=jax.devices()[:devices],
        axis_types=(AxisType.Auto,) * len(names),
    )


def test_a_step_over_devices_equals_one_per_device():
    devices = mesh(8)
    state = {"r": PerDevice(value=jnp.zeros((3,)), axis="data"), "n": jnp.int32(0)}
    state = per_device.expand(state, devices)
    assert state["r"].value.shape == (8, 3)
    specs = per_device.specs(state)
    assert specs["r"].value == PartitionSpec("data")
    assert specs["n"] == PartitionSpec()

    def body(state, x):
        state = per_device.enter(state)
        added = jax.tree.map(lambda r: r + x[0], state["r"])
        return per_device.leave({"r": added, "n": state["n"] + 1})

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=devices,
            in_specs=(specs, PartitionSpec("data")),
            out_specs=specs,
        )
    )
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    for _ in range(2):
        state = step(state, x)
    np.testing.assert_array_equal(state["r"].value, x + x)
    assert int(state["n"]) == 2


def test_without_an_axis_nothing_is_wrapped():
    made = per_device.wrap({"r": 1.0}, ("data", "model"), "reset")
    assert made == PerDevice(value={"r": 1.0}, axis=("data", "model"), resize="reset")
    assert per_device.unwrap(made) == {"r": 1.0}
    assert per_device.wrap(2.0, None) == per_device.unwrap(2.0) == 2.0


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_resizing_keeps_the_mean(old, new):
    value = np.random.default_rng(old).standard_normal((old, 2, 3)).astype(np.float32)
    state = {"r": PerDevice(value=value, axis="data"), "other": np.ones(old)}
    fitted = per_device.resize(state, mesh(new))
    assert fitted["r"].value.shape == (new, 2, 3)
    np.testing.assert_allclose(
        np.mean(fitted["r"].value, 0), value.astype(np.float64).mean(0), atol=1e-6
    )
    assert fitted["other"].shape == (old,)


def test_resizing_resets_or_refuses_as_told():
    def fit(value, devices, **settings):
        return per_device.resize(
            PerDevice(value=value, axis="data", **settings), devices
        )

    value = np.ones((8, 2), np.float32)
    assert not np.any(fit(value, mesh(4), resize="reset").value)
    assert fit(value, mesh(8), resize="refuse").value is value
    for bad in ({"resize": "refuse"}, {}):
        with pytest.raises(ValueError, match="saved on 8 devices cannot continue on"):
            fit(value, mesh(4) if bad else mesh(3), **bad)


def fitted(value, devices):
    state = {"a": {"r": PerDevice(value={"n": value}, axis="data")}}
    return per_device.resize(state, mesh(devices))["a"]["r"].value["n"]


# From one number for each of four devices.
NO_MEAN = {
    "int": np.array,
    "bool": lambda numbers: np.array(numbers) > 0,
    "key data": lambda numbers: np.array([[7, n] for n in numbers], np.uint32),
    "key": lambda numbers: jax.random.wrap_key_data(
        jnp.array([[7, n] for n in numbers], jnp.uint32)
    ),
}


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("kind", NO_MEAN)
def test_what_has_no_mean_is_refused_unless_all_devices_agree(kind, devices):
    make = NO_MEAN[kind]
    with pytest.raises(ValueError, match=r"'a/r/value/n' \(.*\) has no mean"):
        fitted(make([0, 0, 0, 1]), devices)
    same, expected = make([1] * 4), make([1] * devices)
    found = fitted(same, devices)
    assert found.dtype == same.dtype
    assert found.shape == expected.shape
    assert bool((found == expected).all())
    differing = make([0, 0, 0, 1])
    assert fitted(differing, 4) is differing


def test_large_integers_that_agree_are_kept_exactly():
    # A mean in float64 would round it.
    large = 2**53 + 1
    assert fitted(np.full(4, large), 1).tolist() == [large]


def test_the_mean_of_half_precisions_is_taken_in_full():
    # 256 + 1 = 256 in bfloat16.
    value = np.array([256, 1, 1, 1, 1, 1, 1, 1]).astype(jnp.bfloat16)
    assert float(fitted(value, 1)[0]) == 33  # 263 / 8 = 32.875, to 8 bits


def test_several_axes_multiply():
    grid = mesh(8, ("r", "c"), (2, 4))
    assert per_device.axis_size(grid, "c") == 4
    assert per_device.axis_size(grid, ("r", "c")) == 8
    with pytest.raises(ValueError, match="'data'"):
        per_device.axis_size(grid, "data")
