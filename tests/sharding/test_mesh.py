import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from hpcjax import core, sharding
from hpcjax.core import ConfigError, PerDevice


def test_axes_are_auto_and_named():
    mesh = sharding.make_mesh({"data": 4, "model": 2})
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("shape", [{}, {"data": 0}, {"data": -1}, {"data": 16}])
def test_impossible_meshes_are_refused_with_the_number_of_devices(shape):
    with pytest.raises(ConfigError, match="8 devices"):
        sharding.make_mesh(shape)


def test_a_batch_is_split_over_the_data_axis():
    mesh = sharding.data_mesh(8)
    placed = sharding.place_batch({"x": np.arange(16.0).reshape(16, 1)}, mesh)
    shards = placed["x"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 1)] * 8
    np.testing.assert_array_equal(shards[3].data, [[6.0], [7.0]])


@pytest.mark.parametrize(
    ("processes", "stages", "shared"), [(2, 2, False), (2, 4, True), (4, 2, True)]
)
def test_processes_that_would_share_rows_are_refused(processes, stages, shared):
    # Of four devices, as those of several processes lie in a mesh.
    owners = [
        types.SimpleNamespace(process_index=at * processes // 4) for at in range(4)
    ]
    shape = {"data": 4 // stages, "stage": stages}
    mesh = mock.NonCallableMock(
        devices=np.array(owners).reshape(tuple(shape.values())),
        axis_names=tuple(shape),
        shape=shape,
    )
    if not shared:
        assert sharding.data_axes(mesh) == ("data",)
        return
    message = f"got {processes} processes, data = {4 // stages}, of a mesh"
    with pytest.raises(ConfigError, match=message):
        sharding.data_axes(mesh)


def test_state_shardings_split_only_per_device_parts():
    mesh = sharding.data_mesh(8)
    state = {
        "mean": jnp.zeros(3),
        "own": PerDevice(value=jnp.zeros((8, 3)), axis="data"),
    }
    shardings = sharding.state_shardings(state, mesh)
    assert shardings["mean"].spec == PartitionSpec()
    assert shardings["own"].value.spec == PartitionSpec("data")


def loss(weights, x):
    return jnp.mean((x @ weights) ** 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_local_gradients_stay_on_their_device(check_vma):
    mesh = sharding.data_mesh(8)
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    weights = jnp.asarray([1.0, -2.0, 0.5])

    def body(weights, x):
        value, grads = sharding.local_value_and_grad(loss, "data")(weights, x)
        return value[None], grads[None]

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        check_vma=check_vma,
    )
    values, grads = jax.jit(mapped)(weights, x)
    w = np.asarray(weights, np.float64)
    for device in range(8):
        part = x[2 * device : 2 * device + 2].astype(np.float64)
        np.testing.assert_allclose(values[device], np.mean((part @ w) ** 2), rtol=1e-5)
        np.testing.assert_allclose(grads[device], part.T @ (part @ w), rtol=1e-5)


def test_vary_marks_once_and_leaves_values():
    mesh = sharding.data_mesh(8)

    def body(x):
        twice = core.vary(core.vary(x, "data"), "data")
        assert core.varying_axes(twice) == {"data"}
        return jax.lax.psum(twice, "data")

    total = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    np.testing.assert_array_equal(jax.jit(total)(jnp.ones(2)), [8.0, 8.0])
