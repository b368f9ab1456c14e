"""Programs as examples: files of LLVM-IR, their graphs and labels, and unions."""

import collections
import dataclasses
import functools
import hashlib
import logging
import pathlib
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcjax import graphs
from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data.source import Batch, subset
from hpcjax.graphs import Graph
from hpcjax.ir import programs
from hpcjax.ir.programs import ProgramGraph
from hpcjax.ir.programs.analyses import NotConverged

if TYPE_CHECKING:
    from hpcjax.data.programs import ProgramsConfig

log = logging.getLogger(__name__)
FOLDER = "programs"
MOST_POSITIONS = 1024
_POJ104 = pathlib.Path(__file__).parent / "files" / "poj104_ir.tar.bz2"
# With it the digest of a record's code follows the archive.
_SHA256 = "5a42fd261f7714400168dddecd2a49de106bb93f9784c52276911db5669d4e09"
_DEALING = 2**32  # files have lower numbers
# Of an archive of arrays.
_DAMAGE = (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error)
_ENDS = ("flow", "position", "source", "target")
# Of the folder that a module's source was in.
_CLASS = re.compile(rb"ModuleID = '(?:.*/)?([^/'\n]+)/[^/'\n]+'")
_LEFT_OUT = {"no_control": programs.CONTROL, "no_data": programs.DATA}


def read_texts(source: str) -> dict[str, bytes]:
    """Returns files of LLVM-IR by name.

    Args:
      source: "poj104", or a folder.

    Raises:
      DataMissing: there is no such folder, or no `.ll` in it.
      DataFormatError: the archive is damaged.
    """
    if source == "poj104":
        return {**_read_archive(_POJ104)}
    found = {path.name: path for path in sorted(pathlib.Path(source).glob("*.ll"))}
    if not found:
        raise DataMissing(f"there is no folder with files .ll at {source}")
    return {name: path.read_bytes() for name, path in found.items()}


@functools.lru_cache(maxsize=1)  # seconds to unpack, for 12 MB
def _read_archive(path: pathlib.Path) -> dict[str, bytes]:
    if hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256:
        raise DataFormatError(f"{path}: expected the archive with SHA-256 {_SHA256}")
    try:
        with tarfile.open(path, "r:bz2") as archive:
            found = ((each.name, archive.extractfile(each)) for each in archive)
            return {name: file.read() for name, file in found if file}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataFormatError(f"{path}: expected a tar.bz2 archive: {error}") from error


def read_classes(source: str, names: Iterable[str]) -> list[str]:
    """Returns the class of each file: the folder of its source, as its ModuleID says.

    Raises:
      DataFormatError: a file says none.
    """
    texts, found = read_texts(source), []
    for name in names:
        match = _CLASS.search(texts[name])
        if match is None:
            first = texts[name].split(b"\n", 1)[0].decode(errors="replace")
            rule = "a class is the folder in ModuleID = '.../CLASS/FILE'"
            raise DataFormatError(f"{name} has no class: {rule}: got {first[:80]!r}")
        found.append(match[1].decode(errors="replace"))
    return found


def read_graphs(
    source: str, variables: Any, limit: int | None, root: pathlib.Path | None
) -> dict[str, ProgramGraph]:
    """Returns the graphs of files by name, in the order of these.

    Those that LLVM cannot read are left out, which is told. Graphs are kept in
    `<root>/programs/<digest>.npz`, with the digest of the files, of the code that makes
    graphs and of llvmlite's version.

    Args:
      source: see `read_texts`.
      variables: see `ir.programs.from_llvm_ir`.
      limit: how many files; None for all.
      root: of data; None to keep nothing.

    Raises:
      DataFormatError: LLVM reads no file, or what is kept is damaged.
    """
    every = sorted(read_texts(source).items())
    texts = dict(every[index] for index in np.sort(subset(len(every), limit)))
    if root is None:
        return _make_graphs(texts, variables)
    path = files.inside(root, FOLDER, f"{_digest(texts, variables)}.npz")
    if not path.exists():
        _save(path, _make_graphs(texts, variables))
    return _open(path)


def _digest(texts: dict[str, bytes], variables: str) -> str:
    from hpcjax.ir.programs import graph, llvm

    digest = hashlib.sha256(f"{variables} {llvm.version()}".encode())
    for module in (graph, llvm):
        digest.update(pathlib.Path(module.__file__).read_bytes())
    for name, text in texts.items():
        digest.update(f"\n{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:32]


def _make_graphs(texts: dict[str, bytes], variables: Any) -> dict[str, ProgramGraph]:
    found, refused = {}, []
    for name, text in texts.items():
        try:
            decoded = text.decode(errors="replace")
            found[name] = programs.from_llvm_ir(decoded, variables, name=name)
        except DataFormatError as error:
            refused.append(str(error))
    if not found:
        raise DataFormatError(f"LLVM can read none of {len(texts)} files: {refused[0]}")
    if refused:
        told = f"{len(refused)} of {len(texts)} files are left out"
        log.warning("%s, the first being %s", told, refused[0])
    return found


def _save(path: pathlib.Path, found: dict[str, ProgramGraph]) -> None:
    made = [*found.values()]
    words = programs.vocabulary(made)
    arrays = {
        "names": np.array([*found]),
        "words": np.array(words),
        "vertices": np.array([len(graph.texts) for graph in made]),
        "edges": np.array([len(graph.flow) for graph in made]),
        "texts": np.concatenate([graph.numbers(words) for graph in made]),
    }
    for name in ("kinds", "functions", *_ENDS):
        arrays[name] = np.concatenate([getattr(graph, name) for graph in made])
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _open(path: pathlib.Path) -> dict[str, ProgramGraph]:
    try:
        with np.load(path) as kept:
            arrays = {name: kept[name] for name in kept.files}
        cuts = {size: np.cumsum(arrays[size])[:-1] for size in ("vertices", "edges")}
        words = arrays["words"][arrays["texts"]].astype(object)
        texts = np.split(words, cuts["vertices"])
        columns: dict[str, list[Any]] = {"texts": [tuple(each) for each in texts]}
        for name in ("kinds", "functions", *_ENDS):
            size = "edges" if name in _ENDS else "vertices"
            columns[name] = np.split(arrays[name], cuts[size])
        rows = zip(*columns.values(), strict=True)
        made = (ProgramGraph(**dict(zip(columns, row, strict=True))) for row in rows)
        return dict(zip(arrays["names"].tolist(), made, strict=True))
    except (*_DAMAGE, KeyError, IndexError) as error:
        raise DataFormatError(
            f"{path}: damaged: {error}; delete it, and it is made again"
        ) from error


class Examples(NamedTuple):
    """Examples; the numbers of each part's; and words, and classes, that are known."""

    graphs: list[Graph]
    parts: list[np.ndarray]
    words: tuple[str, ...]
    classes: tuple[str, ...]


def make_examples(
    config: "ProgramsConfig",
    made: Sequence[ProgramGraph],
    classes: Sequence[str] | None = None,
) -> Examples:
    """Returns examples, whose words are those of the first part.

    An example is a graph whose vertices have three features, all integers: the number
    of its text, whether it is the root, and its label.

    Args:
      config: of the data set.
      made: graphs of files.
      classes: of files, which are learnt in the place of an analysis.

    Raises:
      ConfigError: no file of a class is in the first part.
    """
    files_of = split_files(made, config.split_seed, classes)
    words = programs.vocabulary(made[file] for file in files_of[0])
    known, labels = _number_classes(config, classes or [""] * len(made), files_of)
    examples: list[Graph] = []
    parts, clamped = [], 0
    for part in files_of:
        first = len(examples)
        for file in part:
            rng = np.random.Generator(np.random.Philox(key=[config.split_seed, file]))
            own = made[file], labels[file]
            clamped += _add_examples(config, *own, words, rng, examples)
        parts.append(np.arange(first, len(examples)))
    if clamped:
        rule = f"are above {MOST_POSITIONS - 1}, which they are taken for"
        log.warning("positions of %d edges %s", clamped, rule)
    return Examples(examples, parts, words, known)


def _number_classes(
    config: "ProgramsConfig", classes: Sequence[str], parts: list[list[int]]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the classes, and the number of each file's; dealt anew if asked for."""
    train = parts[0]
    known = tuple(sorted({classes[file] for file in train}))
    if missing := sorted({*classes} - {*known}):
        rule = "each class must have a file to train on, unlike any other class's"
        raise ConfigError(f"{rule}: got none of {', '.join(missing)}")
    labels = np.array([known.index(each) for each in classes])
    if config.shuffled:
        rng = np.random.Generator(np.random.Philox(key=[config.split_seed, _DEALING]))
        labels[train] = rng.permutation(labels[train])
    return known, labels


def split_files(
    made: Sequence[ProgramGraph], seed: int, classes: Sequence[str] | None = None
) -> list[list[int]]:
    """Returns the numbers of graphs by part, 3 : 1 : 1; equal ones are in one part.

    Args:
      made: the graphs.
      seed: of the draw.
      classes: of graphs, each of which is split so.
    """
    equal = collections.defaultdict(list)
    for number, graph in enumerate(made):
        digest = hashlib.sha256(repr(graph.texts).encode())
        for name in ("kinds", "functions", *_ENDS):
            digest.update(getattr(graph, name).tobytes())
        equal[digest.digest()].append(number)
    strata = collections.defaultdict(list)
    for group in equal.values():
        strata[classes[group[0]] if classes else ""].append(group)
    rng = np.random.Generator(np.random.Philox(seed))
    parts: list[list[int]] = [[], [], []]
    for _, groups in sorted(strata.items()):
        order = rng.permutation(len(groups))
        # A class's one file is to train on.
        cuts = [round(0.6 * len(groups)), round(0.8 * len(groups))]
        for part, places in zip(parts, np.split(order, cuts), strict=True):
            part += [number for place in places for number in groups[place]]
    return [sorted(part) for part in parts]


def _add_examples(
    config: "ProgramsConfig",
    graph: ProgramGraph,
    label: int,
    words: tuple[str, ...],
    rng: np.random.Generator,
    examples: list[Graph],
) -> int:
    """Adds the examples of a graph; returns how many positions are too high."""
    seen, kept = graph, np.arange(len(graph.texts))
    if config.edges == "cdfg":
        seen, kept = programs.cdfg(graph)
    own = seen.flow != _LEFT_OUT.get(config.edges, -1)
    numbers, over = seen.numbers(words), 0
    for root, labels in _label(config, graph, label, rng):
        features = np.stack([numbers, kept == root, labels[kept]], axis=1)
        positions = np.minimum(seen.position[own], MOST_POSITIONS - 1)
        over = int(np.sum(seen.position[own] >= MOST_POSITIONS))
        made = graphs.make_graph(
            seen.source[own],
            seen.target[own],
            len(kept),
            features=features,
            edge_type=seen.flow[own],
            edge_features=positions[:, None],
        )
        examples.append(made)
    return over


def _label(
    config: "ProgramsConfig", graph: ProgramGraph, label: int, rng: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields root, -1 for none, and labels of vertices, of each example of a graph."""
    if config.task == "algorithm":
        yield -1, np.full(len(graph.texts), label)
        return
    for root in programs.draw_roots(graph, config.task, rng):
        try:
            labels = programs.ANALYSES[config.task](graph, root)
        except NotConverged:
            continue
        if labels.steps <= config.steps:
            yield root, labels.values


class UnionMaker:
    """Makes batches of disjoint unions, each padded by vertices that stand alone.

    Args:
      block: graphs of a union; the last one of an epoch may have fewer.
      whole: whether graphs have labels, and not vertices.
    """

    def __init__(self, block: int, *, whole: bool = False) -> None:
        self.block, self.whole = block, whole

    @staticmethod
    def joining(examples: Sequence[Graph]) -> Callable[[np.ndarray, Any], Graph]:
        """Returns the function of examples' numbers, and a draw, that joins them."""

        def join(numbers: np.ndarray, draw: Any) -> Graph:
            del draw  # nothing of it is drawn
            joined, own = graphs.join_graphs(examples[number] for number in numbers)
            features: Any = joined.features
            features = np.concatenate([features, own[:, None]], axis=1)
            return dataclasses.replace(joined, features=features)

        return join

    def sizes(self, union: Graph) -> np.ndarray:
        """Returns what a ladder holds: vertices, one of which pads, and edges."""
        return np.array([union.vertices + 1, len(union.senders)])

    def batch(self, unions: Sequence[Graph], sizes: np.ndarray) -> Batch:
        """Returns "x", "y" and "scored", whose leading axis is that of unions.

        Of "x" `texts` and `selected` are int32 [batch, vertices], the number of a text
        and 1 at roots; `senders`, `receivers`, `flows` and `positions` int32 [batch,
        edges]. "y" int32 and "scored" float32 are of vertices; 0 where these pad. If
        graphs have labels they are of these, [batch, block], and `graphs` int32 [batch,
        vertices] is the number of each vertex's graph, or `block`.

        Args:
          unions: of the batch.
          sizes: that all are padded to, see `sizes`.
        """
        padded = [graphs.pad_graph(each, *sizes.tolist()) for each in unions]
        vertices: Any = np.stack([each.features for each in padded]).astype(np.int32)
        x = {"texts": vertices[..., 0], "selected": vertices[..., 1]}
        for name in ("senders", "receivers"):
            x[name] = np.stack([getattr(each, name) for each in padded])
        x["flows"] = np.stack([each.edge_type for each in padded])
        positions: Any = np.stack([each.edge_features for each in padded])
        x["positions"] = positions[..., 0].astype(np.int32)
        counts = np.array([each.vertices for each in unions])
        scored = np.arange(sizes[0]) < counts[:, None]
        y = vertices[..., 2]
        if self.whole:
            x["graphs"] = np.where(scored, vertices[..., 3], self.block).astype(
                np.int32
            )
            places = np.nonzero(scored)[0], x["graphs"][scored]
            labels, y = y[scored], np.zeros((len(unions), self.block), np.int32)
            y[places] = labels
            scored = np.zeros(y.shape, bool)
            scored[places] = True
        return {"x": x, "y": y, "scored": scored.astype(np.float32)}
