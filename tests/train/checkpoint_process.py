"""Processes that test_checkpoint starts: one to be killed, one of a pair."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hpcjax.core.errors import DataFormatError
from hpcjax.train.checkpoint import Checkpoints


def kill(directory):
    """Saves a constant array again and again; the value is the step."""
    checkpoints = Checkpoints(pathlib.Path(directory))
    state = {"a": jnp.zeros(1 << 22)}
    checkpoints.save(0, state, {})
    checkpoints.wait()
    print("saving", flush=True)
    for step in range(1, 10_000):
        checkpoints.save(step, {"a": state["a"] + step}, {})


def pair(directory, port, index):
    """Saves two steps from two processes of two devices, restores the newer."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    grid = np.arange(16.0, dtype=np.float32).reshape(8, 2)

    def put(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    make_key = jax.jit(
        lambda: jax.random.key(5), out_shardings=NamedSharding(mesh, whole)
    )
    state = {
        "sharded": put(grid, rows),
        "replicated": put(np.arange(3.0, dtype=np.float32), whole),
        "local": np.ones(2),
        "key": make_key(),
    }
    checkpoints = Checkpoints(pathlib.Path(directory), keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"step": step})

    def check(extra):
        if extra["step"] == 3 and index == "0":  # who alone has records
            raise DataFormatError("records are missing")

    restored = checkpoints.restore(state, check=check)
    assert restored.extra == {"step": restored.step}
    for shard in restored.state["sharded"].addressable_shards:
        np.testing.assert_array_equal(shard.data, grid[shard.index])
    assert restored.state["sharded"].sharding == state["sharded"].sharding
    print("restored", restored.step, flush=True)
    assert checkpoints.steps() == [2, 3]
    checkpoints.close()


if __name__ == "__main__":
    {"kill": kill, "pair": pair}[sys.argv[1]](*sys.argv[2:])
