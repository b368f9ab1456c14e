"""The rows of a table in files, which no step of a run holds as a whole in memory."""

import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from hpcjax import data, metrics
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.core.keys import derive
from hpcjax.core.method import Batch, Totals
from hpcjax.core.model import Model
from hpcjax.train.manifest import Manifest
from hpcjax.train.row_cache import list_row_leaves

FOLDER, MARK = "rows", "rows"


class DiskRows:
    """Files of a table's rows, and of what an optimizer keeps for each of them.

    They lie in the folder "rows" beside a run's checkpoints, which say at which state
    of the files they were saved; without checkpoints they are temporary.

    Args:
      model: whose table it is.
      init: makes parameters and the method's state from parameters.
      shapes: of the arrays, by path, of all rows.
      piece: rows of a partition, which are drawn, read and written at once.
    """

    def __init__(
        self,
        model: Model,
        init: Callable[[Any], tuple[Any, Any]],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        piece: int,
    ) -> None:
        self._model, self._shapes, self._piece = model, shapes, piece
        self.files: dict[str, data.RowFile] = {}
        self._opened = contextlib.ExitStack()
        self._mark: int | None = None

        @jax.jit
        def draw(key: jax.Array, start: jax.Array) -> dict[str, jax.Array]:
            assert model.rows is not None
            params, _ = model.init(key)
            table = model.rows(key, start, piece)
            params, opt_state = init({**params, "table": table})
            leaves = trees.flatten({"params": params, "opt_state": opt_state})
            return {path: leaves[path] for path in shapes}

        self._draw = draw
        self._ask = jax.jit(lambda *given: model.apply(*given, train=False)[0])
        self._count = jax.jit(_count)

    def open(self, folder: pathlib.Path | None) -> None:
        """Says where the files are to be; see `Around.open`."""
        self._opened.close()
        if folder is None:
            folder = pathlib.Path(
                self._opened.enter_context(tempfile.TemporaryDirectory())
            )
        self._folder, self._mark, self.files = folder / FOLDER, None, {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Opens the files at the state that a checkpoint says."""
        self._opened.close()
        try:
            if MARK not in saved:
                raise DataMissing("it was saved with the table, which is not on disk")
            self.files = {
                path: self._enter(data.RowFile(self._path(path), saved[MARK]))
                for path in self._shapes
            }
        except (ConfigError, DataMissing, DataFormatError) as error:
            raise DataFormatError(
                f"rows of the checkpoint are lost: {error}"
            ) from error
        for path, file in self.files.items():
            found, like = (file.shape, file.dtype.name), self._shapes[path]
            if found != (like.shape, np.dtype(like.dtype).name):
                raise DataFormatError(
                    f"{file.path}: expected {like.dtype} {list(like.shape)}: found "
                    f"{found[1]} {list(found[0])}"
                )

    def begin(self, step: int, seed: int) -> Mapping[str, data.RowFile]:
        """Returns the files by path, which are made before the first step.

        Raises:
          DataFormatError: a run goes on without them.
          DiskFull: there is no room.
        """
        if not self.files and step:
            raise DataFormatError(
                "rows of the checkpoint are not known: it has no mark"
            )
        if not self.files:  # rows of no checkpoint, of a process that was killed
            shutil.rmtree(self._folder, ignore_errors=True)
        key = derive(jax.random.key(seed), "init")
        for path, like in self._shapes.items() if not self.files else ():
            starts = range(0, like.shape[0], self._piece)
            drawn = (self._draw(key, np.uint32(start))[path] for start in starts)
            pieces = (
                np.asarray(piece)[: like.shape[0] - start]
                for start, piece in zip(starts, drawn, strict=True)
            )
            form = like.shape, like.dtype, self._piece
            made = data.RowFile.build(self._path(path), pieces, *form)
            self.files[path] = self._enter(made)
        return self.files

    def flush(self) -> None:
        """Makes what was written the state that `mark` says."""
        (self._mark,) = {file.flush() for file in self.files.values()}

    def mark(self) -> dict[str, Any]:
        """Returns the number of the state that was flushed, see `Around.mark`."""
        return {} if self._mark is None else {MARK: self._mark}

    def score_links(
        self, state: Any, batches: Iterable[Batch]
    ) -> Iterator[Totals | None]:
        """Ranks held-out links among all rows, of which a partition is in memory.

        In memory are the links, and the rows of their ends.
        """
        whole, table = list(batches), self.files["params/table"]
        ends = [batch["x"]["triples"][..., ::2] for batch in whole]
        ids = np.unique(np.concatenate([each.ravel() for each in ends]))
        rows, asked = table[ids], []
        for batch, each in zip(whole, ends, strict=True):
            own = np.zeros((each.size, *table.shape[1:]), table.dtype)
            own[:] = rows[np.searchsorted(ids, each.ravel())]
            triples = np.array(batch["x"]["triples"])
            triples[..., ::2] = np.arange(each.size).reshape(each.shape)
            params = {**state.params, "table": own}
            seen = self._ask(params, state.model_state, {"triples": triples})
            asked.append(seen)
            yield None
        own = [np.full(seen.queries.shape[:-1], -np.inf, "f4") for seen in asked]
        for _ in range(2):  # scores of right answers, and then what is above them
            none: Any = (-np.inf, 0.0, 0.0, -np.inf)
            parts = [metrics.RankParts(*none)] * len(whole)
            for start, rows, count in self._slices(table):
                parts = [
                    self._count(*given, rows, start, count)
                    for given in zip(parts, asked, whole, own, strict=True)
                ]
                yield None
            own = [part.own for part in parts]
        yield from map(metrics.rank_totals, parts, whole)

    def _slices(self, table: data.RowFile) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yields where partitions begin, their rows filled up, and how many."""
        for start in range(0, len(table), self._piece):
            found = table[slice(start, start + self._piece)]
            rows = np.zeros((self._piece, *table.shape[1:]), table.dtype)
            rows[: len(found)] = found
            yield start, rows, len(found)

    def _path(self, path: str) -> pathlib.Path:
        return self._folder / _name(path)

    def _enter(self, file: data.RowFile) -> data.RowFile:
        return self._opened.enter_context(file)


def examine_rows(
    directory: pathlib.Path, manifest: Manifest
) -> Iterator[tuple[str, str | Exception]]:
    """Reads the files of rows that belong to a checkpoint, if its table is on disk.

    It changes nothing.

    Args:
      directory: of the checkpoints.
      manifest: of the checkpoint.

    Yields:
      The path of each below the directory, with what it has, or else the error.
    """
    paths = list_row_leaves(manifest.leaves) if MARK in manifest.extra else ()
    for name in (f"{FOLDER}/{_name(path)}" for path in paths):
        state = manifest.extra[MARK]
        try:
            with data.RowFile(directory / name, state, writable=False) as file:
                file.verify()
                yield name, f"{file.dtype} {[*file.shape]}, state {state}"
        except (ConfigError, DataMissing, DataFormatError) as error:
            yield name, error


def _name(path: str) -> str:
    return path.replace("/", ".")


def _count(
    parts: metrics.RankParts,
    seen: Any,
    batch: Batch,
    own: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> metrics.RankParts:
    """Adds a slice of rows to what ranks are made of."""
    outputs = dataclasses.replace(seen, table=rows.astype(seen.table.dtype))
    return parts.add(metrics.rank_slice(outputs, batch, own, start, count))
