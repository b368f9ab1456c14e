"""Copying a training state to host arrays by path, and back to devices."""

import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hpcjax.core import per_device, trees
from hpcjax.core.errors import ConfigError
from hpcjax.train import manifest as manifests
from hpcjax.train.manifest import Block, Leaf, Manifest

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


class Snapshot(NamedTuple):
    """A state copied to the host.

    Attributes:
      leaves: shape, dtype and kind of every leaf, by path.
      blocks: the parts that this process has to hash, by path: (start, values).
      payload: the arrays that Orbax writes, by encoded path.
    """

    leaves: dict[str, Leaf]
    blocks: dict[str, list[tuple[tuple[int, ...], np.ndarray]]]
    payload: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes that this process will write, without compression."""
        parts = (part for blocks in self.blocks.values() for _, part in blocks)
        return sum(part.nbytes for part in parts)


def take(state: Any) -> Snapshot:
    """Copies a state to the host; nothing in the result shares memory with it.

    Raises:
      ConfigError: a leaf that is not an array or number, or two leaves with one path.
    """
    leaves = trees.flatten(state)
    if len(leaves) != len(jax.tree.leaves(state)):
        raise ConfigError("two leaves have the same path: a name may not hold '/'")
    data = {path: _key_data(leaf) for path, leaf in leaves.items()}
    # Start all transfers before waiting for the first.
    for leaf in data.values():
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    snapshot = Snapshot({}, {}, {})
    for path, leaf in data.items():
        described = describe(path, leaves[path])
        snapshot.leaves[path] = described
        # Orbax cannot store empty arrays; shape and dtype in the manifest are enough.
        if 0 in described.shape:
            continue
        value, blocks = _copy(leaf)
        snapshot.payload[encode(path)] = value
        snapshot.blocks[path] = blocks
    return snapshot


def describe(path: str, leaf: Any) -> Leaf:
    """Returns the shape and dtype with which a leaf is saved, for a key its data's."""
    if _is_key(leaf):
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        data = jax.eval_shape(jax.random.key_data, shape)
        return Leaf(shape=data.shape, dtype=data.dtype.name, key=str(leaf.dtype))
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if np.dtype(leaf.dtype).kind in "OUSMm":
        raise ConfigError(f"leaf {path!r} must be an array or a number: got {leaf!r}")
    return Leaf(shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype).name)


def fit(
    arrays: Mapping[str, np.ndarray],
    manifest: Manifest | None,
    like: Any,
    mesh: Mesh | None = None,
) -> Any:
    """Puts restored arrays into the structure and the shardings of `like`.

    Raises:
      ConfigError: lists the paths, shapes and dtypes that differ.
    """
    expected = {
        path: describe(path, leaf) for path, leaf in trees.flatten(like).items()
    }
    missing = sorted(set(expected) - set(arrays))
    extra = sorted(set(arrays) - set(expected))
    if missing or extra:
        raise ConfigError(
            f"the checkpoint has other paths: it lacks {missing}, and has beyond those "
            f"asked for {extra}"
        )
    mesh = mesh or _mesh_of(like)
    tree = trees.unflatten(like, dict(arrays))
    try:
        resized = tree if mesh is None else per_device.resize(tree, mesh, like)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    saved_arrays = {
        path: np.asarray(leaf) for path, leaf in trees.flatten(resized).items()
    }
    differences = []
    for path, leaf in expected.items():
        key = manifest.leaves.get(path, leaf).key if manifest else leaf.key
        saved = Leaf(
            shape=saved_arrays[path].shape, dtype=saved_arrays[path].dtype.name, key=key
        )
        if saved != leaf:
            differences.append(
                f"{path}: saved {_format_leaf(saved)}, asked for {_format_leaf(leaf)}"
            )
    if differences:
        raise ConfigError("the checkpoint has other leaves: " + "; ".join(differences))
    placed = {path: _place(saved_arrays[path], leaf) for path, leaf in _items(like)}
    return trees.unflatten(like, placed)


def _copy(leaf: Any) -> tuple[Any, list[tuple[tuple[int, ...], np.ndarray]]]:
    """Returns what Orbax has to write, and the blocks that this process has to hash."""
    whole = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if whole or leaf.is_fully_replicated:
        copied = np.array(leaf)
        first = jax.process_index() == 0
        return copied, [((0,) * copied.ndim, copied)] if first else []
    copies, blocks = {}, []
    for shard in leaf.addressable_shards:
        start = _start(shard.index)
        if start not in copies:
            copies[start] = np.array(shard.data)
        if shard.replica_id == 0:
            blocks.append((start, copies[start]))
    # Orbax wants a global array; it is built of the copies, in host memory if the
    # device has such, so that the original may be donated.
    device = leaf.addressable_shards[0].device
    kinds = {memory.kind for memory in device.addressable_memories()}
    sharding = leaf.sharding
    if "pinned_host" in kinds:
        sharding = sharding.with_memory_kind("pinned_host")
    rebuilt = jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: copies[_start(index)]
    )
    return rebuilt, blocks


def hash_blocks(snapshot: Snapshot) -> dict[str, Leaf]:
    """Returns the leaves with the checksums of this process's blocks."""
    leaves = {}
    for path, leaf in snapshot.leaves.items():
        blocks = tuple(
            Block(start=start, shape=part.shape, xxh3_128=manifests.checksum(part))
            for start, part in snapshot.blocks.get(path, ())
        )
        leaves[path] = Leaf(
            shape=leaf.shape, dtype=leaf.dtype, key=leaf.key, blocks=blocks
        )
    return leaves


def _place(array: np.ndarray, like: Any) -> Any:
    """Returns an array as the same kind of leaf as `like`, with its sharding."""
    if isinstance(like, bool | int | float | complex):
        return type(like)(array.item())
    if isinstance(like, np.generic):
        return array[()]
    if isinstance(like, np.ndarray):
        return array
    sharding = like.sharding
    if sharding is None or (isinstance(like, jax.Array) and not like.committed):
        placed = jnp.asarray(array)
    else:
        placed = jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )
    return (
        jax.random.wrap_key_data(placed, impl=_impl(like)) if _is_key(like) else placed
    )


def _start(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """Returns the first index of a shard in each dimension."""
    return tuple(part.start or 0 for part in index or ())


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _impl(like: Any) -> str:
    """Returns the name of a key dtype's implementation."""
    for name in _KEY_IMPLEMENTATIONS:
        if jax.random.key(0, impl=name).dtype == like.dtype:
            return name
    raise ConfigError(
        f"keys must be one of {list(_KEY_IMPLEMENTATIONS)}: got {like.dtype}"
    )


def _mesh_of(like: Any) -> Mesh | None:
    """Returns the mesh of the first leaf that is placed on one."""
    for leaf in jax.tree.leaves(like):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _items(tree: Any) -> list[tuple[str, Any]]:
    return list(trees.flatten(tree).items())


def _format_leaf(leaf: Leaf) -> str:
    return f"{leaf.key or leaf.dtype}{list(leaf.shape)}"


def encode(path: str) -> str:
    """Returns a path as one component of a name; `"%"` for the empty path of a leaf."""
    return urllib.parse.quote(path, safe="") or "%"


def decode(name: str) -> str:
    """Returns the path that `encode` made `name` from."""
    return "" if name == "%" else urllib.parse.unquote(name)
