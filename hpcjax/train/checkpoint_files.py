"""Reading the directory of a checkpoint, and verifying it against its manifest."""

import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from hpcjax.core import trees
from hpcjax.core.errors import CheckpointCorrupt
from hpcjax.train import manifest as manifests
from hpcjax.train import snapshot as snapshots
from hpcjax.train.manifest import Manifest


def examine_checkpoints(
    directory: pathlib.Path,
) -> Iterator[tuple[int, Manifest | CheckpointCorrupt | None]]:
    """Reads and verifies every checkpoint of a run, as `Checkpoints.verify` does.

    It changes nothing, and may be used while another process writes there. A checkpoint
    that is deleted meanwhile is left out.

    Args:
      directory: holds one directory per step.

    Yields:
      Each step in ascending order, with the manifest if the checkpoint agrees with it,
      the error if it does not, and None if it has no manifest.
    """
    for step in list_steps(directory):
        path = directory.absolute() / str(step)
        result = None
        try:
            if is_complete(path):
                result = read_verified(path, step)[1]
        except FileNotFoundError:
            continue
        except CheckpointCorrupt as error:
            result = error
        if path.exists():
            yield step, result


def is_complete(path: pathlib.Path) -> bool:
    """Returns whether a checkpoint has a manifest, which is written last."""
    return (path / manifests.NAME).is_file()


def list_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps that have a directory, complete or not, ascending."""
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def read_verified(
    path: pathlib.Path, step: int
) -> tuple[dict[str, np.ndarray], Manifest]:
    """Returns all arrays of a checkpoint by path, verified, and its manifest.

    Raises:
      CheckpointCorrupt: a file or a leaf differs from the manifest.
    """
    manifest = manifests.read(path, step)
    manifests.check_files(path, manifest)
    # Orbax cannot store empty arrays; the manifest has all there is to know of them.
    arrays = {
        name: np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
        for name, leaf in manifest.leaves.items()
        if 0 in leaf.shape
    }
    if len(arrays) < len(manifest.leaves):
        arrays |= load_arrays(path, step)
    manifests.check_leaves(arrays, manifest)
    return arrays, manifest


def load_arrays(path: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by path, as Orbax reads them, not verified."""
    # Programs other than this one may nest the arrays in a folder.
    below = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
    root = next((p for p in below if (p / "_METADATA").exists()), path)
    # For damaged bytes TensorStore raises errors of no particular type.
    try:
        handler = make_handler()
        names = handler.metadata(epath.Path(root)).tree
        arguments = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names
        )
        restored = handler.restore(
            epath.Path(root),
            args=ocp.args.PyTreeRestore(restore_args=arguments),
        )
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointCorrupt(
            f"checkpoint of step {step}: arrays cannot be read: {first[:300]}"
        ) from error
    leaves = trees.flatten(restored)
    return {snapshots.decode(name): np.asarray(leaf) for name, leaf in leaves.items()}


def make_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns Orbax's handler, set to write arrays without sharding files or copies."""
    types = ocp.type_handlers
    arrays = types.ArrayHandler(
        enable_write_sharding_file=False, array_metadata_store=None
    )
    registry = types.create_type_handler_registry(
        (jax.Array, arrays),
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
