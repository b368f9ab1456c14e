"""Time lost to input, by how real files are read from a slow storage; nothing computes.

Processes wait as long as training would take, and for each other after each batch.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    from hpcjax import cost, data, hostcomm
    from hpcjax.data.placement import Placement

DIGESTS = ("digest", "digest_reversed")
Reading = Literal["naive", "read_ahead", "clairvoyant", "own_memory"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Files, the storage they are on, and processes that read them.

    Attributes:
      reading: one record after the other when a batch is wanted; ahead by threads;
        clairvoyant; or that without asking for the memory of other processes.
      files: number of records, each a file.
      bytes: of a file.
      processes: that share a batch.
      batch_size: of all.
      epochs: in which each file is read once.
      rate: bytes per second of the storage, for all processes together.
      latency: seconds that each request takes besides.
      consume_rate: bytes per second that a process trains on.
      memory: share of all files that a process can keep.
      staging: files that a process reads ahead.
      threads: that read, of each process.
      placement: who keeps what, see `data.plan`; "auto": by the simulator.
      link: bytes per second that leave a process; none: as fast as it can.
      seed: of contents and order.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "files": "24",
        "bytes": "1000",
        "processes": "2",
        "batch_size": "8",
        "epochs": "2",
        "latency": "0.001",
        "consume_rate": "1e6",
        "staging": "16",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": ": of the run",
        "lost": ": of these, to input",
        "first_epoch": ": its seconds",
        "storage_reads": ": of the storage over all reads",
        "missed": ": reads that a neighbour was asked for in vain",
        "plan_seconds": ": of planning",
        "predicted predicted_reads": ": what the simulator says of both",
        "processor": ": share of the machine's processor time",
        " ".join(DIGESTS): ": of all batches, as they came, and rows reversed",
        "epoch_seconds": "epoch: of each",
        "keeps": "placement: 1 for that by which is kept",
    }

    reading: Reading = "clairvoyant"
    files: config.Size = 2000
    bytes: config.Size = 100_000
    processes: config.Size = 4
    batch_size: config.Size = 40
    epochs: config.Size = 10
    rate: config.Positive = 40e6
    latency: config.NotNegative = 5e-3
    consume_rate: config.Positive = 20e6
    memory: config.Share = 0.2
    staging: config.Size = 64
    threads: config.Size = 4
    placement: Literal["frequency", "dedup", "hybrid", "first_touch", "auto"] = (
        "frequency"
    )
    link: config.Positive | None = None
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "batch_size must divide by the processes, and the files of all epochs"
        good = self.batch_size % self.processes == 0
        good &= self.files * self.epochs % self.batch_size == 0
        given = {"batch_size": self.batch_size, "processes": self.processes}
        checks.require(good, rule, **given)
        rule = "files must be no fewer than those of a batch, and memory hold one"
        good = self.files >= self.batch_size and int(self.memory * self.files) > 0
        checks.require(good, rule, files=self.files, memory=self.memory)

    @property
    def steps(self) -> int:
        """Batches of the run."""
        return self.files * self.epochs // self.batch_size

    @property
    def rows(self) -> int:
        """Files of a batch that a process reads."""
        return self.batch_size // self.processes

    def labels(self) -> "runs.Labels":
        """Returns the numbers of the epochs, and the placements."""
        from hpcjax.data.placement import PLACEMENTS

        return {"epoch": range(1, self.epochs + 1), "placement": PLACEMENTS}


@runs.measured
def run(cfg: Config) -> "runs.Figures":
    """Writes the files, and reads them in several processes."""
    from hpcjax import hostcomm
    from hpcjax.data.placement import PLACEMENTS

    if cfg.placement == "auto":
        cfg = dataclasses.replace(cfg, placement=choose(cfg))
    link = None if cfg.link is None else hostcomm.Link(rate=cfg.link)
    with tempfile.TemporaryDirectory() as folder:
        write(cfg, pathlib.Path(folder))
        found = runs.in_processes(work, cfg, cfg.processes, given=[folder], link=link)
    keeps = cfg.reading in ("clairvoyant", "own_memory")
    seconds = max(each["seconds"] for each in found)
    cores = len(os.sched_getaffinity(0))
    digests = {name: "".join(each[name] for each in found).encode() for name in DIGESTS}
    served = found[0]["served"]
    foreseen = predict(cfg)
    # Times are of process 0, which leaves the barrier of a batch with all others.
    epochs = np.diff(found[0]["ends"], prepend=0.0)
    return {
        "seconds": seconds,
        "lost": seconds - cfg.steps * cfg.rows * cfg.bytes / cfg.consume_rate,
        "first_epoch": epochs[0],
        "storage_reads": served / cfg.bytes / (cfg.epochs * cfg.files),
        "missed": float(sum(each["missed"] for each in found)),
        "plan_seconds": max(each["plan_seconds"] for each in found),
        "predicted": foreseen["seconds"],
        "predicted_reads": foreseen["storage_reads"],
        "processor": sum(each["processor"] for each in found) / seconds / cores,
        **{name: _number(each) for name, each in digests.items()},
        "epoch_seconds": epochs,
        "keeps": [float(keeps and p == cfg.placement) for p in PLACEMENTS],
    }


def _number(digests: bytes) -> float:
    """Returns a digest of 48 bits, which a float64 holds exactly."""
    return float(int(hashlib.sha256(digests).hexdigest()[:12], 16))


def write(cfg: Config, folder: pathlib.Path) -> None:
    """Writes files of random bytes, named by their numbers."""
    for number in range(cfg.files):
        rng = np.random.Generator(np.random.Philox(key=[cfg.seed, number]))
        (folder / str(number)).write_bytes(rng.bytes(cfg.bytes))


class SlowFiles:
    """Files of one folder as records, behind a storage that all processes share."""

    def __init__(self, cfg: Config, folder: pathlib.Path, rate: "data.SharedRate"):
        self.sizes = np.full(cfg.files, cfg.bytes)
        self._folder, self._rate = folder, rate

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, index: int) -> bytes:
        """Returns a file's content, no sooner than the storage has sent it."""
        from hpcjax import data

        content = data.read_uncached(self._folder / str(index))
        self._rate.take(len(content))
        return content

    def decode(self, records: list[bytes], indices: np.ndarray) -> "data.Batch":
        """Returns the bytes as they are, [rows, bytes]."""
        del indices
        return {"x": np.stack([np.frombuffer(each, np.uint8) for each in records])}

    def gather(self, indices: np.ndarray) -> "data.Batch":
        """Returns what `decode` makes of some files."""
        return self.decode([self.read(int(i)) for i in indices], indices)


def work(transport: "hostcomm.Transport", cfg: Config, folder: str) -> dict[str, Any]:
    """Reads all epochs in one of the processes; returns its figures."""
    from hpcjax import data, hostcomm

    path = pathlib.Path(folder)
    rate = data.SharedRate(path / "storage", cfg.rate, cfg.latency)
    source = SlowFiles(cfg, path, rate)
    shard = (transport.rank, transport.size)
    batches = data.batches(source, cfg.batch_size, cfg.seed, shard=shard)
    began = time.perf_counter()
    start = open_reader(cfg, batches, transport)
    plan_seconds = time.perf_counter() - began
    hostcomm.barrier(transport)
    began, used = time.perf_counter(), time.process_time()
    ends, missed, digests = train(cfg, start, transport)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "ends": np.array(ends) - began,
        "processor": time.process_time() - used,
        **digests,
        "plan_seconds": plan_seconds,
        "served": rate.served().bytes,
        "missed": missed,
    }


def open_reader(
    cfg: Config, batches: "data.Batches", transport: "hostcomm.Transport"
) -> Callable[[], Any]:
    """Returns what begins to read."""
    from hpcjax import data

    if cfg.reading == "naive":
        return lambda: _one_by_one(batches)
    if cfg.reading == "read_ahead":
        ahead = data.ReadAheadConfig(
            threads=cfg.threads, ahead=max(1, cfg.staging // cfg.rows)
        )
        return ahead.make(batches, cfg.steps, contextlib.nullcontext).iterate
    reader = data.ClairvoyantConfig(
        memory=int(cfg.memory * cfg.files) * cfg.bytes,
        staging=cfg.staging,
        threads=cfg.threads,
        placement=cfg.placement,
        neighbours=cfg.reading == "clairvoyant",
    ).make(batches, cfg.steps, lambda: contextlib.nullcontext(transport))
    reader.foresee()
    return reader.iterate


def train(
    cfg: Config, start: Callable[[], Any], transport: "hostcomm.Transport"
) -> tuple[list[float], int, dict[str, str]]:
    """Waits as training would; returns ends of epochs, wrong guesses, digests."""
    from hpcjax import hostcomm

    digest, reverse = hashlib.sha256(), hashlib.sha256()
    ends: list[float] = []
    iterator = start()
    with contextlib.closing(iterator):
        for number in range(1, cfg.steps + 1):
            batch = next(iterator)
            due = time.perf_counter() + cfg.rows * cfg.bytes / cfg.consume_rate
            digest.update(batch["x"])
            reverse.update(batch["x"][::-1].tobytes())
            time.sleep(max(0.0, due - time.perf_counter()))
            hostcomm.barrier(transport)
            if number * cfg.batch_size // cfg.files > len(ends):
                ends.append(time.perf_counter())
        counts = getattr(iterator, "counts", None)
        hostcomm.barrier(transport)
    shown = zip(DIGESTS, (digest.hexdigest(), reverse.hexdigest()), strict=True)
    return ends, 0 if counts is None else counts.missed, dict(shown)


def _one_by_one(batches: "data.Batches") -> Iterator[Any]:
    number = 0
    while True:
        yield batches[number]
        number += 1


def choose(cfg: Config) -> "Placement":
    """Returns by which placement the simulator says that such a run is the fastest."""
    from hpcjax import cost

    return cost.choose_placement(
        *describe(cfg), neighbours=cfg.reading == "clairvoyant"
    )


def predict(cfg: Config) -> dict[str, float]:
    """Returns what the simulator says of such a run."""
    from hpcjax import cost

    own, placement = cfg.reading == "own_memory", cfg.placement
    if placement == "auto":
        placement = choose(cfg)
    times = cost.simulate_input(
        "clairvoyant" if cfg.reading == "own_memory" else cfg.reading,
        *describe(cfg),
        placement=placement,
        neighbours=not own,
    )
    reads = times.bytes["storage"] / cfg.bytes / (cfg.epochs * cfg.files)
    return {"seconds": times.total, "storage_reads": float(reads)}


def describe(cfg: Config) -> "tuple[data.AccessStream, np.ndarray, cost.InputSystem]":
    """Returns what is read, the sizes, and what it goes through."""
    from hpcjax import cost, data

    source: Any = np.empty(cfg.files)  # only its length is looked at
    batches = data.batches(source, cfg.batch_size, cfg.seed)
    stream = data.access_stream(batches, cfg.steps, cfg.processes)
    room = int(cfg.memory * cfg.files) * cfg.bytes
    system = cost.InputSystem(
        storage_rate=cfg.rate,
        latency=cfg.latency,
        consume_rate=cfg.consume_rate,
        send_rate=cfg.link or np.inf,
        classes=(data.StorageClass("memory", room, np.inf),),
        threads=cfg.threads,
        staging=cfg.staging,
    )
    return stream, np.full(cfg.files, cfg.bytes), system
