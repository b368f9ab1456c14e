"""Checkpoints that are complete or absent, verified before use, written in background.

One checkpoint is one directory `<step>/`: arrays in Orbax's format, saved flat by path,
plus `MANIFEST.json` (see `manifest`). It is written aside as `.saving-<step>` and
renamed when the manifest is in it; a step that is saved again is swapped in the same
way. Whatever a killed process leaves behind is removed, or put back, by the next one.

Who writes what, with several processes on one shared file system: every process copies
the shards it holds as first replica and hands them to Orbax, which writes them from all
processes; arrays that every process holds wholly are written by process 0. Each
process hashes its own blocks; process 0 collects these, writes the manifest, renames,
and deletes old steps. `save`, `wait` and `restore` must be called by all processes
alike. In `restore` every process reads and verifies the whole checkpoint and keeps its
shards.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from hpcjax.core import files, trees
from hpcjax.core.errors import CheckpointCorrupt, ConfigError, DiskFull
from hpcjax.train import manifest as manifests
from hpcjax.train import snapshot as snapshots
from hpcjax.train.manifest import Leaf, Manifest

log = logging.getLogger(__name__)

_SAVING, _REPLACED, _PARTS = ".saving-", ".replaced-", ".parts-"
_BARRIER_MS = 600_000


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns.

    Attributes:
      state: a tree like the one asked for, placed as it asks.
      step: the step it was saved at.
      extra: the JSON values saved along; empty for a trusted foreign checkpoint.
    """

    state: Any
    step: int
    extra: dict[str, Any]


@final
class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: holds one directory per step; made if it does not exist. Only one
        `Checkpoints` may write to it at a time.
      keep: how many of the newest complete checkpoints to keep. An older one is deleted
        only after a newer one was read back and verified.
      trust: what `restore` does by default with a checkpoint without a manifest.

    Raises:
      ConfigError: `keep` is below 1.

    Examples:
      >>> import tempfile
      >>> directory = pathlib.Path(tempfile.mkdtemp())
      >>> state = {"kernel": jnp.arange(3.0)}
      >>> with Checkpoints(directory, keep=2) as checkpoints:
      ...     checkpoints.save(10, state, {"seconds": 1.5})
      ...     restored = checkpoints.restore(state)
      >>> restored.step, restored.extra, restored.state["kernel"].tolist()
      (10, {'seconds': 1.5}, [0.0, 1.0, 2.0])
    """

    def __init__(
        self, directory: pathlib.Path, keep: int = 3, *, trust: bool = False
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1: got {keep}")
        self._directory = directory.absolute()
        self._keep, self._trust = keep, trust
        self._bad: set[int] = set()
        self._saves = 0
        self._pending: concurrent.futures.Future[None] | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._orbax = ocp.AsyncCheckpointer(_handler())
        with files.disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._clean()

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Copies `state` to the host, and writes it while the caller goes on.

        The copy is complete on return: the arrays may be donated at once. Waits for the
        save before, if that still runs.

        Args:
          step: non-negative; a checkpoint of that step is replaced.
          state: any tree of arrays, typed keys and numbers.
          extra: JSON values to keep beside it, such as counters of the host.

        Raises:
          ConfigError: a value that cannot be saved.
          DiskFull: no room, now or in the save before; older checkpoints are intact.
          Exception: whatever else made the save before fail; the present one is then
            not begun, and can be tried again.
        """
        self.wait()
        if step < 0:
            raise ConfigError(f"step must not be negative: got {step}")
        try:
            values = json.loads(json.dumps(dict(extra)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra must hold JSON values only: {error}") from error
        snapshot = snapshots.take(state)
        self._check_room(step, snapshot)
        aside = self._directory / f"{_SAVING}{step}"
        self._saves += 1
        with self._writing(step):
            if snapshot.payload:
                save_args = ocp.args.PyTreeSave(snapshot.payload)
                self._orbax.save(aside, args=save_args, force=True)
        self._pending = self._worker.submit(
            self._finish, step, self._saves, snapshot, values
        )

    def _check_room(self, step: int, snapshot: snapshots.Snapshot) -> None:
        """Refuses a save that cannot fit, uncompressed: Orbax fails untidily."""
        free = shutil.disk_usage(self._directory).free
        if free < snapshot.nbytes:
            raise DiskFull(
                f"no space left to write {self._path(step)}: {free} bytes free, "
                f"{snapshot.nbytes} needed"
            )

    def wait(self) -> None:
        """Returns when the last save is complete on disk; raises its error, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the last save, as `wait` does, and frees threads."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoint is complete, ascending; reads no data."""
        return [step for step in self._numbers() if self._complete(step)]

    def empty(self) -> bool:
        """Says whether there is no checkpoint at all, not even an incomplete one."""
        return not self._numbers()

    def verify(self, step: int) -> Manifest:
        """Reads everything a checkpoint holds and compares it with its manifest.

        Raises:
          CheckpointCorrupt: names the step and the leaf or file that differs.
          ConfigError: there is no complete checkpoint of that step.
        """
        if not self._complete(step):
            raise ConfigError(
                f"no complete checkpoint of step {step} in {self._directory.name}: "
                f"there are {self.steps()}"
            )
        return self._read_verified(step)[1]

    def restore(
        self,
        like: Any,
        step: int | None = None,
        *,
        mesh: Mesh | None = None,
        trust: bool | None = None,
    ) -> Restored:
        """Returns a verified state, with the structure and placement of `like`.

        Without `step`, takes the newest checkpoint that verifies; those passed over are
        named in one warning. With `step`, exactly that one.

        Args:
          like: a tree of arrays or `ShapeDtypeStruct`s; their shardings say where to
            put the leaves, whatever devices saved them.
          step: which checkpoint.
          mesh: what per-device state is resized to, by `core.per_device.resize`; by
            default the mesh of the first leaf of `like` that has one.
          trust: also take a checkpoint without a manifest, made by other programs: any
            tree saved by Orbax whose paths are those of `like`. Nothing of it is
            verified.

        Raises:
          CheckpointCorrupt: no checkpoint is good, or the one asked for is not.
          ConfigError: there is none, or its paths, shapes or dtypes are not those of
            `like`; the message lists them.
        """
        self.wait()
        trust = self._trust if trust is None else trust
        candidates = self._candidates(step, trust)
        problems = []
        for number in candidates:
            try:
                arrays, manifest = self._read(number, trust)
            except CheckpointCorrupt as error:
                self._bad.add(number)
                problems.append(str(error))
                continue
            if problems:
                log.warning("fell back to step %d: %s", number, "; ".join(problems))
            extra = dict(manifest.extra) if manifest else {}
            return Restored(snapshots.fit(arrays, manifest, like, mesh), number, extra)
        raise CheckpointCorrupt("; ".join(problems))

    def _candidates(self, step: int | None, trust: bool) -> list[int]:
        """Returns the steps to try, best first."""
        present, complete = self._numbers(), self.steps()
        usable = present if trust else complete
        incomplete = sorted(set(present) - set(complete))
        if not trust and incomplete and step is None:
            log.warning(
                "skipped checkpoints without %s: %s", manifests.NAME, incomplete
            )
        wanted = [step] if step is not None else usable[::-1]
        if wanted and set(wanted) <= set(usable):
            return wanted
        hint = f"; without a manifest: {incomplete}, see trust" if incomplete else ""
        message = (
            f"no checkpoint{'' if step is None else f' of step {step}'} in "
            f"{self._directory.name}: complete are {complete}{hint}"
        )
        raise CheckpointCorrupt(message) if incomplete else ConfigError(message)

    def _read(
        self, step: int, trust: bool
    ) -> tuple[dict[str, np.ndarray], Manifest | None]:
        """Reads one checkpoint; all processes succeed together or fail together."""
        try:
            if trust and not self._complete(step):
                outcome = _load(self._path(step), step), None
            else:
                outcome = self._read_verified(step)
            problem = None
        except CheckpointCorrupt as error:
            outcome, problem = None, error
        if jax.process_count() > 1 and problem is None:
            good = multihost_utils.process_allgather(np.int32(1))
            if not np.all(good):
                problem = CheckpointCorrupt(
                    f"checkpoint of step {step}: another process cannot read it"
                )
        elif jax.process_count() > 1:
            multihost_utils.process_allgather(np.int32(0))
        if outcome is None or problem is not None:
            raise problem or CheckpointCorrupt(f"checkpoint of step {step}")
        return outcome

    def _read_verified(self, step: int) -> tuple[dict[str, np.ndarray], Manifest]:
        return _read_verified(self._path(step), step)

    def _finish(
        self, step: int, save: int, snapshot: snapshots.Snapshot, extra: dict[str, Any]
    ) -> None:
        """The background part: waits for Orbax, writes the manifest, renames."""
        aside = self._directory / f"{_SAVING}{step}"
        with self._writing(step):
            self._orbax.wait_until_finished()
            aside.mkdir(exist_ok=True)
            leaves = self._collect(step, save, snapshots.hashed(snapshot))
            if jax.process_index() == 0:
                self._commit(step, leaves, extra)
            self._barrier(step, save, "end")

    def _collect(
        self, step: int, save: int, own: dict[str, Leaf]
    ) -> Mapping[str, Leaf]:
        """Returns all processes' leaves on process 0, own ones elsewhere."""
        count, index = jax.process_count(), jax.process_index()
        if count == 1:
            return own
        parts = self._directory / f"{_PARTS}{step}"
        content = {path: manifests.leaf_to_json(leaf) for path, leaf in own.items()}
        files.write_json(parts / f"{index}.json", content)
        self._barrier(step, save, "parts")
        if index:
            return own
        read = [files.read_json(parts / f"{number}.json") for number in range(count)]
        shutil.rmtree(parts)
        return manifests.merge(
            {path: manifests.leaf_from_json(leaf) for path, leaf in part.items()}
            for part in read
        )

    def _commit(
        self, step: int, leaves: Mapping[str, Leaf], extra: dict[str, Any]
    ) -> None:
        aside, final = self._directory / f"{_SAVING}{step}", self._path(step)
        replaced = self._directory / f"{_REPLACED}{step}"
        manifest = Manifest(
            step=step, leaves=leaves, files=manifests.scan(aside), extra=extra
        )
        manifests.write(aside, manifest)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        self._bad.discard(step)
        self._retain(step)

    def _retain(self, saved: int) -> None:
        """Deletes old checkpoints, once the one just saved has been read back."""
        good = [step for step in self.steps() if step not in self._bad]
        kept = set(good[-self._keep :]) | {saved}
        # A step known to be bad stays for inspection until newer good ones pass it.
        old = {step for step in self.steps() if step < min(kept)}
        doomed = (set(good) | old) - kept
        if doomed:
            try:
                self._read_verified(saved)
            except CheckpointCorrupt:
                self._bad.add(saved)
                raise
        for step in sorted(doomed):
            shutil.rmtree(self._path(step))

    def _clean(self) -> None:
        """Removes what a killed process left, and puts back a step half replaced."""
        for path in sorted(self._directory.glob(f"{_REPLACED}*")):
            final = self._directory / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path)
            else:
                path.rename(final)
        for prefix in (_SAVING, _PARTS):
            for path in self._directory.glob(f"{prefix}*"):
                shutil.rmtree(path)

    def _barrier(self, step: int, save: int, what: str) -> None:
        if jax.process_count() > 1:
            sync = ocp.multihost.get_barrier_sync_fn()
            key = f"hpcjax/{self._directory.name}/{step}/{save}/{what}"
            sync(key=key, timeout_ms=_BARRIER_MS)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Frees the room a failed save took; a full disk becomes DiskFull.

        The system says "no space" as OSError, TensorStore as ValueError.
        """
        try:
            with files.disk_errors(self._path(step)):
                try:
                    yield
                except ValueError as error:
                    text = str(error)
                    if "No space left" in text or "quota exceeded" in text:
                        raise OSError(errno.ENOSPC, "no space left") from error
                    raise
        except BaseException:
            # Orbax may still be writing in the background into what is removed here.
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
            for path in self._directory.glob(f"{_SAVING}{step}*"):
                if path.name.removeprefix(_SAVING).split(".")[0] == str(step):
                    shutil.rmtree(path, ignore_errors=True)
            raise

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / str(step)

    def _complete(self, step: int) -> bool:
        return _is_complete(self._path(step))

    def _numbers(self) -> list[int]:
        return _numbers(self._directory)


def examine_checkpoints(
    directory: pathlib.Path,
) -> Iterator[tuple[int, Manifest | CheckpointCorrupt | None]]:
    """Reads and verifies every checkpoint of a run as `Checkpoints.verify` does.

    Changes nothing, so that it may be used beside a process that writes there; one that
    is deleted meanwhile is left out.

    Args:
      directory: holds one directory per step.

    Yields:
      Each step, ascending, with the manifest that its checkpoint agrees with, or with
      how it does not; None for one that has no manifest.
    """
    for step in _numbers(directory):
        path = directory.absolute() / str(step)
        found = None
        try:
            if _is_complete(path):
                found = _read_verified(path, step)[1]
        except FileNotFoundError:
            continue
        except CheckpointCorrupt as error:
            found = error
        if path.exists():
            yield step, found


def _is_complete(path: pathlib.Path) -> bool:
    return (path / manifests.NAME).is_file()


def _numbers(directory: pathlib.Path) -> list[int]:
    """Returns the steps that have a directory, complete or not, ascending."""
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _read_verified(
    path: pathlib.Path, step: int
) -> tuple[dict[str, np.ndarray], Manifest]:
    manifest = manifests.read(path, step)
    manifests.check_files(path, manifest)
    arrays = {
        name: np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
        for name, leaf in manifest.leaves.items()
        if 0 in leaf.shape
    }
    if len(arrays) < len(manifest.leaves):
        arrays |= _load(path, step)
    manifests.check_leaves(arrays, manifest)
    return arrays, manifest


def _load(path: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Reads whole arrays through Orbax, by path; checks nothing."""
    below = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
    root = next((p for p in below if (p / "_METADATA").exists()), path)
    # Whatever TensorStore makes of damaged bytes comes as a bare Exception.
    try:
        handler = _handler()
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


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler that writes arrays only: no sharding files, no second copy."""
    types = ocp.type_handlers
    arrays = types.ArrayHandler(
        enable_write_sharding_file=False, array_metadata_store=None
    )
    registry = types.create_type_handler_registry(
        (jax.Array, arrays),
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
