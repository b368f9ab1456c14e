"""Training under a limit of memory, by processes of their own."""

import dataclasses
import multiprocessing
import pathlib
import resource
import tempfile
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from hpcjax import data, runs, train
from hpcjax.core import checks, config
from hpcjax.runs import training

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

task = training.task
MOMENTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run under a limit of memory; see `TrainingConfig`.

    The process warms up on a small graph. What it may take from then on, by
    `RLIMIT_DATA`, is a share of the bytes of the graph's features and edges.

    Attributes:
      share: of these bytes.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"share": "20000.0", "train.batch_size": "1"},
    }
    figures: ClassVar[Mapping[str, str]] = {  # pyrefly: ignore[bad-override]
        "ended refused": ": whether it came to its end; or to a MemoryError",
        "graph_bytes limit peak": (
            ": of features and edges; the limit, and the most of RssAnon, above what "
            "the process had when it was set"
        ),
        "resident": ": features and edges in memory at a time, over all",
        "counted told": ": bytes read for training, by our count, and by the system's",
        "edge_bytes": ": of those counted, of edges",
        "seconds waited": ": of the steps, and of these for blocks",
        "anon": "moment: RssAnon above what it was, over the limit",
    }

    share: config.Positive = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        source = getattr(self.dataset, "source", None)
        rule = "dataset must be partitioned_graph or sampled_graph of community_graph"
        good = isinstance(source, data.CommunityGraphConfig)
        checks.require(good, rule, dataset=type(self.dataset).__name__)

    def labels(self) -> "runs.Labels":
        """Returns the moments, in per cent of the time up to the end."""
        return {"moment": np.linspace(0, 100, MOMENTS).round(2).tolist()}

    @property
    def graph_bytes(self) -> int:
        """Bytes of the features and edges of a drawn graph."""
        from hpcjax.data.graph_store import EDGE_BYTES

        graph = self.dataset.source
        edges = 2 * round(graph.vertices * graph.degree / 2)
        return 4 * graph.vertices * (graph.width or graph.classes) + EDGE_BYTES * edges


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Trains once, in a process that is limited."""
    dataset, limit = cfg.dataset, round(cfg.share * cfg.graph_bytes)
    partitions = getattr(dataset, "partitions", 0)
    if partitions:
        dataset.load(ctx.data_root)  # its files are made without a limit
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_limited, args=(cfg, ctx.data_root, limit, theirs))
    child.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = {}
    child.join()
    if (child.exitcode or 0) > 0:  # else it may have been ended by the system
        raise RuntimeError("the process that trains has failed")
    resident = dataset.capacity / partitions if partitions else 1.0
    nothing = dict.fromkeys(("ended", "refused", "counted", "told", "edge_bytes"), 0.0)
    nothing |= dict.fromkeys(("peak", "seconds", "waited"), np.nan)
    graph = {"graph_bytes": cfg.graph_bytes, "limit": limit, "resident": resident}
    return {**nothing, **graph, "anon": np.full(MOMENTS, np.nan), **found}


def _limited(cfg: Config, root: pathlib.Path, limit: int, told: "Connection") -> None:
    """Trains under a limit, and tells what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        source = dataclasses.replace(
            cfg.dataset.source,
            **{"vertices": 16 * cfg.dataset.block, "labelled": 2 * cfg.dataset.block},
            held=cfg.dataset.block,
        )
        dataset = dataclasses.replace(cfg.dataset, source=source)
        length = dataclasses.replace(cfg.train, steps=2)
        _fit(dataclasses.replace(cfg, dataset=dataset, train=length), folder)
    most = _status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with Watch() as watch:
        try:
            found = {"ended": 1.0, **_fit(cfg, root)}
        except MemoryError:
            found = {"refused": 1.0}
    above = np.array(watch.seen) - watch.seen[0]
    places = np.linspace(0, len(above) - 1, MOMENTS)
    anon = np.interp(places, np.arange(len(above)), above) / limit
    told.send({**found, "peak": above.max(), "anon": anon})


def _fit(cfg: Config, root: Any) -> dict[str, float]:
    """Trains; returns what was read, and how long it took."""
    began = _read_bytes()
    cfg.dataset.load(pathlib.Path(root))
    opened = _read_bytes() - began  # of what is kept of each vertex
    made, records = task(cfg, pathlib.Path(root), 1), Records(cfg.train.steps)
    made = made.replace(read=Bounded)
    records.sampler = made.dataset.train
    train.fit(made, cfg.train, seed=cfg.seed, mesh=made.mesh(1), recorder=records)
    figures = records.figures()
    if "resident_bytes" in figures:
        records.last["resident"] = figures["resident_bytes"] / figures["graph_bytes"]
    return {**records.last, "told": records.last["told"] - began - 2 * opened}


class Bounded:
    """Batches ahead of the steps, but none of the epoch after them."""

    def __init__(self, batches: data.Batches, steps: int) -> None:
        self._batches, self._last = batches, steps - 1

    def __getitem__(self, number: int) -> Any:
        return self._batches[min(number, self._last)]

    def iterate(self, start: int = 0) -> Any:
        """Returns an iterator from a batch on."""
        return data.BatchIterator(self, start)


class Records:
    """Keeps what was read up to the end of the last step, before its validation."""

    def __init__(self, steps: int) -> None:
        self._steps, self.last = steps, {"waited": 0.0}
        self.sampler: Any = None

    def figures(self) -> dict[str, float]:
        """Returns what the sampler tells."""
        return getattr(self.sampler, "figures", dict)()

    def rewind(self, step: int) -> float:
        """Begins at the first step."""
        del step
        return 0.0

    def write(self, record: Mapping[str, float]) -> None:
        """Takes a record."""
        self.last["waited"] += record.get("spent_data_seconds", 0.0)
        if record["step"] == self._steps and "loss" in record:
            read, told = self.figures(), _read_bytes()
            self.last |= {"counted": read.get("read_bytes", 0.0), "told": told}
            self.last["edge_bytes"] = read.get("edge_bytes", 0.0)
            self.last["seconds"] = record["seconds"]


class Watch:
    """Sees RssAnon ten times a second."""

    def __init__(self) -> None:
        self.seen = [_status("RssAnon")]
        self._over, self._thread = threading.Event(), threading.Thread(target=self._see)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _see(self) -> None:
        while not self._over.wait(0.1):
            self.seen.append(_status("RssAnon"))


def _status(name: str) -> int:
    """Returns a figure of this process's memory, in bytes."""
    return 1024 * _number(pathlib.Path("/proc/self/status"), name)


def _read_bytes() -> int:
    """Returns the bytes that this process has read, from files or their cache."""
    return _number(pathlib.Path("/proc/self/io"), "rchar")


def _number(path: pathlib.Path, name: str) -> int:
    line = next(x for x in path.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1])
