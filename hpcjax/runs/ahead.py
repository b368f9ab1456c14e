"""Making runs in several processes at a time, ahead of who reads them."""

import collections
import concurrent.futures
import contextlib
import itertools
import math
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import process
from multiprocessing import queues, reduction, synchronize
from typing import NamedTuple

from hpcjax.core import provenance
from hpcjax.core.errors import ConfigError, HpcjaxError, Preempted
from hpcjax.runs.progress import Progress
from hpcjax.runs.signals import StopSignals

_LOOK = 0.5  # seconds between looks at signals, and for a parent that has gone
_stop: synchronize.Event | None = None  # of this process, if it makes runs
_LAST_WORDS = 60.0  # seconds for a run to save when the parent has gone


class Wanted(NamedTuple):
    """A run that somebody will read: a config's name and overrides."""

    config: str
    overrides: Mapping[str, str]


class WorkerLost(HpcjaxError):
    """A process that made runs died, for example for lack of memory."""

    exit_code = 7


def make_runs(
    wanted: Sequence[Wanted],
    parallel: int,
    *,
    root: pathlib.Path,
    devices: int,
    fresh: bool = False,
    cores: int | None = None,
    quiet: bool = True,
) -> None:
    """Makes runs that are missing, `parallel` at a time; see `execute.ensure`.

    Each process keeps to its share of the cores, so that they do not wait for one
    another. A signal to stop is passed on to the runs that are being made, and no other
    is begun.
    """
    if not wanted:
        return
    context = multiprocessing.get_context("spawn")
    shares, stop = context.Queue(), context.Event()
    for share in share_cores(parallel):
        shares.put(share[:cores])
    with (
        concurrent.futures.ProcessPoolExecutor(
            parallel,
            context,
            initializer=_begin,
            initargs=(shares, stop, os.getpid()),
        ) as pool,
        StopSignals() as signals,
        signals.defer(),
        Progress(
            f"{len(wanted)} runs, {parallel} at a time",
            len(wanted),
            quiet=quiet,
            unit="run",
        ) as line,
    ):
        pieces = _by_program(wanted, parallel)
        made = {
            pool.submit(_make, piece, root, devices, fresh): len(piece)
            for piece in pieces
        }
        ended = 0
        try:
            for one in _ended([*made], signals, stop):
                one.result()
                ended += made[one]
                line.write({"step": ended})
        except process.BrokenProcessPool as error:
            raise WorkerLost(f"a process that made runs died: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _by_program(wanted: Sequence[Wanted], parallel: int) -> list[list[Wanted]]:
    """Returns the runs in pieces; those of a piece differ by the seed alone.

    A process that makes them one after another compiles one program for all. Pieces are
    small enough for each process to get four, so that none waits long for the last; and
    those that come first are of different programs, which nobody compiles twice.
    """
    by_program = collections.defaultdict(list)
    for each in wanted:
        program = {**each.overrides, "seed": ""}
        by_program[each.config, *sorted(program.items())].append(each)
    most = math.ceil(len(wanted) / (4 * parallel))
    cut = (
        [runs[start : start + most] for start in range(0, len(runs), most)]
        for runs in by_program.values()
    )
    return list(filter(None, itertools.chain(*itertools.zip_longest(*cut))))


def _ended(
    made: Sequence["concurrent.futures.Future[None]"],
    signals: StopSignals,
    stop: "synchronize.Event",
) -> Iterator["concurrent.futures.Future[None]"]:
    """Yields runs as they end; after a signal waits for those that are being made."""
    waiting = set(made)
    while waiting:
        done, waiting = concurrent.futures.wait(
            waiting, _LOOK, concurrent.futures.FIRST_COMPLETED
        )
        if signals.received:
            # What is on its way to a process cannot be cancelled any more.
            stop.set()
            for one in waiting:
                one.cancel()
            for child in multiprocessing.active_children():
                child.terminate()
            concurrent.futures.wait(one for one in waiting if not one.cancelled())
            signals.check()
        yield from done


def share_cores(parallel: int) -> list[list[int]]:
    """Returns the cores of each process; none where the system does not tell them."""
    cores = provenance.usable_cores()
    return [cores[index::parallel] or cores for index in range(parallel)]


def check_parallel(parallel: int, benchmark: bool, name: str) -> None:
    """Raises ConfigError unless a table's runs can be made so many at a time."""
    if parallel < 1:
        raise ConfigError(f"parallel must be at least 1: got {parallel}")
    if parallel > 1 and benchmark:
        raise ConfigError(
            f"{name} measures time, which runs beside one another would change: leave "
            f"out --parallel {parallel}"
        )


def _begin(
    shares: "queues.Queue[list[int]]", stop: "synchronize.Event", parent: int
) -> None:
    """Keeps this process to its share of the cores, and ends it with its parent."""
    global _stop  # noqa: PLW0603 - how an initializer hands something to calls
    _stop = stop
    if cores := shares.get():  # some systems have no such call
        os.sched_setaffinity(0, cores)

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        # A run that is being made saves and ends; nobody wants the next one.
        stop.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_WORDS)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _make(
    piece: Sequence[Wanted], root: pathlib.Path, devices: int, fresh: bool
) -> None:
    """Makes runs one after another, in one of the processes."""
    for each in piece:
        _ensure(each.config, dict(each.overrides), root, devices, fresh)


def _ensure(
    name: str,
    overrides: Mapping[str, str],
    root: pathlib.Path,
    devices: int,
    fresh: bool,
) -> None:
    from hpcjax.runs import execute

    if _stop is not None and _stop.is_set():
        raise Preempted("stopped")
    try:
        execute.ensure(
            name, overrides, root=root, devices=devices, fresh=fresh, quiet=True
        )
    except Exception as error:
        whole = False
        with contextlib.suppress(Exception):
            # As the error is about to be sent.
            pickler = reduction.ForkingPickler
            copy = pickler.loads(pickler.dumps(error))
            whole = type(copy) is type(error)
        if whole:
            raise
        # It cannot be handed to the other process.
        raise WorkerLost(traceback.format_exc()) from None
