"""Checkpoints that are complete or absent, verified, and written in the background.

A checkpoint is a directory `<step>/` with arrays in Orbax's format, saved flat by path,
and `MANIFEST.json` (see `manifest`). It is written as `.saving-<step>` and renamed when
the manifest is in it. A step that is saved again replaces the old one by two renames.
What a killed process has left is removed, or renamed back, by the next one.

Several processes write to one shared file system. Each copies the shards of which it
holds the first replica to the host, and Orbax writes them from all processes; arrays
that every process holds completely are written by process 0. Each process hashes its
own blocks. Process 0 collects the hashes, writes the manifest, renames, and deletes old
steps. All processes must make the same calls of `save`, `wait` and `restore`. In
`restore` every process reads and verifies the whole checkpoint and keeps its shards.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from hpcjax.core import files
from hpcjax.core.errors import CheckpointCorrupt, ConfigError, DataFormatError
from hpcjax.train import checkpoint_files as stored
from hpcjax.train import manifest as manifests
from hpcjax.train import snapshot as snapshots
from hpcjax.train.manifest import Leaf, Manifest

log = logging.getLogger(__name__)

_SAVING, _REPLACED, _PARTS = ".saving-", ".replaced-", ".parts-"
_BARRIER_MS = 600_000
# How TensorStore says that there is no room for a file.
_NO_ROOM = {
    "No space left": errno.ENOSPC,
    "quota exceeded": errno.EDQUOT,
    "File too large": errno.EFBIG,
}


class Restored(NamedTuple):
    """A restored state, with what was saved beside it.

    Attributes:
      state: a tree of the requested structure and placement.
      step: the step at which it was saved.
      extra: the JSON values saved with it; empty for a checkpoint without a manifest.
    """

    state: Any
    step: int
    extra: dict[str, Any]


@final
class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: contains a directory for each step; created if it does not exist. Only
        one `Checkpoints` may write to it at a time.
      keep: number of the newest complete checkpoints to keep. An older one is deleted
        only after a newer one has been read back and verified.
      trust: default of `trust` in `restore`.

    Raises:
      ConfigError: `keep` is below 1.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
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
        self._orbax = ocp.AsyncCheckpointer(stored.make_handler())
        with files.disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._clean()

    @property
    def directory(self) -> pathlib.Path:
        """The folder of a directory for each step."""
        return self._directory

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Copies `state` to the host, and writes it in the background.

        The copy is complete on return, so that the arrays may be donated. If the
        previous save is still running, it is waited for first.

        Args:
          step: non-negative; an existing checkpoint of that step is replaced.
          state: any tree of arrays, typed keys and numbers.
          extra: JSON values to keep beside it, such as counters of the host.

        Raises:
          ConfigError: a value that cannot be saved.
          DiskFull: no space, for this save or the previous one; older checkpoints are
            intact.
          Exception: whatever else made the previous save fail; this one has then not
            begun, and can be tried again.
        """
        self.wait()
        if step < 0:
            raise ConfigError(f"step must not be negative: got {step}")
        try:
            values = json.loads(json.dumps(dict(extra)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra must hold JSON values only: {error}") from error
        snapshot = snapshots.take(state)
        # Uncompressed; of TensorStore's many writers each would print that it failed.
        files.check_room(self._path(step), snapshot.nbytes)
        aside = self._directory / f"{_SAVING}{step}"
        self._saves += 1
        with self._writing(step):
            if snapshot.payload:
                save_args = ocp.args.PyTreeSave(snapshot.payload)
                self._orbax.save(aside, args=save_args, force=True)
        self._pending = self._worker.submit(
            self._finish, step, self._saves, snapshot, values
        )

    def wait(self) -> None:
        """Waits until the last save is complete on disk; raises its error, once."""
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

    def forget_after(self, step: int) -> None:
        """Deletes later checkpoints, but not those that were found to be damaged."""
        self.wait()
        for later in self.steps():
            if later > step and later not in self._bad:
                shutil.rmtree(self._path(later))

    def empty(self) -> bool:
        """Returns whether there is no checkpoint, not even an incomplete one."""
        return not self._numbers()

    def verify(self, step: int) -> Manifest:
        """Reads a whole checkpoint and compares it with its manifest.

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
        check: Callable[[Mapping[str, Any]], None] = lambda _: None,
        complete: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
    ) -> Restored:
        """Returns a verified state, with the structure and placement of `like`.

        Without `step` it is the newest checkpoint that can be verified; a warning says
        why newer ones cannot, and from where on steps are taken again. With `step` it
        is that one.

        Args:
          like: a tree of arrays or `ShapeDtypeStruct`s, to whose shardings the leaves
            are restored, whatever devices saved them.
          step: the step of the checkpoint.
          mesh: the mesh for which per-device state is resized, by
            `core.per_device.resize`; by default that of the first leaf of `like` that
            has one.
          trust: whether to accept a checkpoint without a manifest, such as any tree
            with the paths of `like` that another program saved by Orbax. It is not
            verified.
          check: raises DataFormatError if what belongs to a checkpoint elsewhere, such
            as records, is lost; it gets what was saved beside the state. A checkpoint
            without a manifest does not know of such things, so that none is taken in
            place of one that has lost them.
          complete: returns the verified arrays, by path, with what was not saved.

        Raises:
          CheckpointCorrupt: no checkpoint, or not the requested one, can be verified.
          DataFormatError: some can, and none of these passes `check`.
          ConfigError: there is no checkpoint, or its paths, shapes or dtypes are not
            those of `like`; the message lists them.
        """
        self.wait()
        trust = self._trust if trust is None else trust
        candidates = self._candidates(step, trust)
        problems: list[str] = []
        lost = False
        for number in candidates:
            try:
                arrays, manifest = self._read(number, trust and not lost, check)
            except (CheckpointCorrupt, DataFormatError) as error:
                self._bad.add(number)
                problems.append(str(error))
                lost = lost or isinstance(error, DataFormatError)
                continue
            if problems:
                log.warning(
                    "fell back to step %d, steps %d to %d are taken again: %s",
                    number,
                    number + 1,
                    candidates[0],
                    _join(problems),
                )
            extra = dict(manifest.extra) if manifest else {}
            state = snapshots.fit(complete(arrays), manifest, like, mesh)
            return Restored(state, number, extra)
        if lost:
            raise DataFormatError(
                f"{_join(problems)}. Put back what is lost, or start a new run: one "
                "that went on would have a gap"
            )
        raise CheckpointCorrupt(_join(problems))

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
        self, step: int, trust: bool, check: Callable[[Mapping[str, Any]], None]
    ) -> tuple[dict[str, np.ndarray], Manifest | None]:
        """Reads a checkpoint; either all processes succeed or all fail.

        Each tells the others in an all-gather how it fared, so that all raise the same
        error and fall back to the same older checkpoint.
        """
        outcome, problem = None, None
        try:
            if trust and not self._complete(step):
                outcome = stored.load_arrays(self._path(step), step), None
            else:
                outcome = self._read_verified(step)
                check(outcome[1].extra)
        except (CheckpointCorrupt, DataFormatError) as error:
            problem = error
        failed = [problem is not None, isinstance(problem, DataFormatError)]
        if jax.process_count() > 1:
            everywhere = multihost_utils.process_allgather(np.array(failed, np.int32))
            failed = np.any(everywhere, axis=0).tolist()
        if outcome is None or any(failed):
            kind = DataFormatError if failed[1] else CheckpointCorrupt
            other = f"checkpoint of step {step}: another process cannot go on from it"
            raise kind(str(problem or other))
        return outcome

    def _read_verified(self, step: int) -> tuple[dict[str, np.ndarray], Manifest]:
        return stored.read_verified(self._path(step), step)

    def _finish(
        self, step: int, save: int, snapshot: snapshots.Snapshot, extra: dict[str, Any]
    ) -> None:
        """Completes a save in the background: waits for Orbax, then commits."""
        aside = self._directory / f"{_SAVING}{step}"
        with self._writing(step):
            self._orbax.wait_until_finished()
            aside.mkdir(exist_ok=True)
            leaves = self._collect(step, save, snapshots.hash_blocks(snapshot))
            if jax.process_index() == 0:
                self._commit(step, leaves, extra)
            self._barrier(step, save, "end")

    def _collect(
        self, step: int, save: int, own: dict[str, Leaf]
    ) -> Mapping[str, Leaf]:
        """Returns the leaves of all processes on process 0, on others their own.

        They are exchanged through files beside the checkpoint.
        """
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
        """Writes the manifest, renames the directory, and deletes old checkpoints."""
        aside, final = self._directory / f"{_SAVING}{step}", self._path(step)
        replaced = self._directory / f"{_REPLACED}{step}"
        manifest = Manifest(
            step=step, leaves=leaves, files=manifests.scan(aside), extra=extra
        )
        manifests.write(aside, manifest)
        # Between the two renames a crash leaves `.replaced-<step>`, which `_clean` puts
        # back.
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        self._bad.discard(step)
        self._retain(step)

    def _retain(self, saved: int) -> None:
        """Deletes old checkpoints, after reading back the one just saved."""
        good = [step for step in self.steps() if step not in self._bad]
        kept = set(good[-self._keep :]) | {saved}
        # A checkpoint that is known to be damaged is kept for inspection until it is
        # older than all that are kept.
        old = {step for step in self.steps() if step < min(kept)}
        expired = (set(good) | old) - kept
        if expired:
            try:
                self._read_verified(saved)
            except CheckpointCorrupt:
                self._bad.add(saved)
                raise
        for step in sorted(expired):
            shutil.rmtree(self._path(step))

    def _clean(self) -> None:
        """Removes what a killed process left; renames back a step it was replacing."""
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
        """Waits for all processes; keys are unique, as the service takes each once."""
        if jax.process_count() > 1:
            sync = ocp.multihost.get_barrier_sync_fn()
            key = f"hpcjax/{self._directory.name}/{step}/{save}/{what}"
            sync(key=key, timeout_ms=_BARRIER_MS)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Removes the files of a failed save; raises DiskFull if there is no room.

        The operating system raises OSError for that, TensorStore ValueError.
        """
        try:
            with files.disk_errors(self._path(step)):
                try:
                    yield
                except ValueError as error:
                    for text, number in _NO_ROOM.items():
                        if text in str(error):
                            raise OSError(number, text) from error
                    raise
        except BaseException:
            # Orbax may still be writing into the directory that is removed here.
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
            for path in self._directory.glob(f"{_SAVING}{step}*"):
                if path.name.removeprefix(_SAVING).split(".")[0] == str(step):
                    shutil.rmtree(path, ignore_errors=True)
            raise

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / str(step)

    def _complete(self, step: int) -> bool:
        return stored.is_complete(self._path(step))

    def _numbers(self) -> list[int]:
        return stored.list_steps(self._directory)


def _join(problems: list[str]) -> str:
    """Returns problems in one line, each once."""
    return "; ".join(dict.fromkeys(problems))
