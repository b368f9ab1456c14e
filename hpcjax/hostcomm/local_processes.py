"""Processes of this machine that work for us: connected, asked by messages.

Importing this module imports no JAX: a process that is pinned is so before it does.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from hpcjax.core import environment, errors
from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost
from hpcjax.hostcomm.channels import PATIENCE, Channel, Message

# By the name of the request, given its options; or one for all, given the request.
Answers = Mapping[str, Callable[[Mapping[str, Any]], Message]]
Answer = Callable[[Message], Message]
# By rank: the name of its error's class, and its words.
_Failed = dict[int, tuple[str, str]]
_LOST = ProcessLost.__name__
_FAILED = "failed"
_LINES = 20
_POLL = 0.05  # seconds between looks: few enough not to disturb
GRACE = 5.0
# One core, one thread: libraries that bring threads along are told so.
_ONE_THREAD_FLAGS = "--xla_cpu_multi_thread_eigen=false"
_ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def free_cores(count: int) -> tuple[int, ...]:
    """Returns the first cores that this process may use.

    Raises:
      ConfigError: there are fewer than `count`, or the system cannot pin processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("processes cannot be pinned to cores on this system")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise ConfigError(
            f"{count} processes need a core each: this one may use {len(cores)} "
            f"({cores}); times of processes that share a core prove nothing"
        )
    return tuple(cores[:count])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """What one of the processes has: its rank and its connections.

    Attributes:
      rank: from 0.
      control: to the process that asks.
      links: to the other ranks.
      listener: its own listening socket, if it was given one.
    """

    rank: int
    control: Channel
    links: Mapping[int, Channel]
    listener: socket.socket | None = None

    def serve(self, answers: Answers | Answer) -> int:
        """Answers requests until the asking process closes the connection.

        Args:
          answers: for each name of a request a function of its options, or one function
            of the request for all.

        Returns:
          The exit status: 0, or that of the error, which the asking process gets.
        """
        while True:
            try:
                request = self.control.receive("a request")
            except ProcessLost:
                return 0
            try:
                reply = (
                    answers(request)
                    if callable(answers)
                    else answers[request.name](request.options)
                )
            except Exception as error:
                known = isinstance(error, HpcjaxError)
                said = str(error) if known else traceback.format_exc()
                kind = type(error).__name__ if known else HpcjaxError.__name__
                self.control.send(Message(_FAILED, {"said": said, "kind": kind}))
                return error.exit_code if isinstance(error, HpcjaxError) else 1
            self.control.send(reply)


def join_processes(argument: str) -> Member:
    """Makes this process the member that its `argument` describes, and pins it.

    One that has no core of its own is not pinned.

    To be called before JAX is imported, with `sys.argv[1]` of a process that
    `LocalProcesses` has started.
    """
    given = json.loads(argument)
    if given["core"] is not None:
        os.sched_setaffinity(0, {given["core"]})
    control = Channel(
        socket.socket(fileno=given["control"]), "the asking process", patience=math.inf
    )
    links = {
        int(rank): Channel(
            socket.socket(fileno=number), f"rank {rank}", patience=given["patience"]
        )
        for rank, number in given["links"].items()
    }
    number = given["listener"]
    listener = None if number is None else socket.socket(fileno=number)
    return Member(rank=given["rank"], control=control, links=links, listener=listener)


class LocalProcesses:
    """Processes of one module, each connected with all others or able to be."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen],
        controls: Sequence[Channel],
        words: TextIO,
        patience: float,
        grace: float,
    ) -> None:
        """Use `start_processes`."""
        self.processes, self._controls = tuple(processes), tuple(controls)
        self._words, self._patience, self._grace = words, patience, grace

    def ask(self, name: str, options: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Asks all at once and returns their answers, by rank.

        Args:
          name: of the request.
          options: for each rank.

        Raises:
          ProcessLost: one has ended, hangs, or has lost another one; says which.
          HpcjaxError: one has failed; with its traceback.
        """
        return self.request([Message(name, given) for given in options])

    def request(self, messages: Sequence[Message]) -> list[Message]:
        """Like `ask`, with a whole message for each rank, of one name."""
        name = messages[0].name
        failed: _Failed = {}
        for rank, message in enumerate(messages):
            with _noting(rank, failed):
                self._controls[rank].send(message)
        replies = self._replies(name, failed)
        for rank, (kind, said) in failed.items():
            if kind != _LOST:
                error = getattr(errors, kind, HpcjaxError)
                raise error(f"rank {rank} failed at {name!r}:\n{said}")
        if failed:
            words = "; ".join(f"rank {rank}: {s}" for rank, (_, s) in failed.items())
            raise ProcessLost(f"{words}{self._killed()}{self._last()}")
        return [replies[rank] for rank in range(len(messages))]

    def _replies(self, name: str, failed: _Failed) -> dict[int, Message]:
        """Returns what comes; once one has failed the others are not waited for long.

        Who lives notices by itself when another rank is lost, and fails too.
        """
        replies: dict[int, Message] = {}
        waiting = set(range(len(self._controls))) - failed.keys()
        limit = time.monotonic() + self._patience
        while waiting:
            late = time.monotonic() > limit
            for rank in sorted(waiting):
                control = self._controls[rank]
                if control.arrived():
                    with _noting(rank, failed):
                        reply = replies[rank] = control.receive(f"answer to {name!r}")
                        if reply.name == _FAILED:
                            failed[rank] = reply.options["kind"], reply.options["said"]
                elif late:
                    failed[rank] = _LOST, f"no answer to {name!r}: it is dead or hangs"
            waiting -= replies.keys() | failed.keys()
            if failed:
                limit = min(limit, time.monotonic() + self._grace)
            time.sleep(_POLL if waiting else 0)
        return replies

    def _killed(self) -> str:
        words = [
            f"; rank {rank} was killed by {signal.Signals(-status).name}"
            for rank, process in enumerate(self.processes)
            if (status := process.poll()) is not None and status < 0
        ]
        return "".join(words)

    def _last(self) -> str:
        self._words.seek(0)
        last = "".join(self._words.readlines()[-_LINES:])
        return f"\nthey printed last:\n{last}" if last else ""


@contextlib.contextmanager
def _noting(rank: int, failed: _Failed) -> Iterator[None]:
    try:
        yield
    except ProcessLost as error:
        failed[rank] = _LOST, str(error)


@contextlib.contextmanager
def start_processes(
    module: str,
    cores: Sequence[int | None],
    *,
    folder: pathlib.Path | None = None,
    patience: float = PATIENCE,
    answer_patience: float = 10 * PATIENCE,
    grace: float = GRACE,
    listeners: Sequence[socket.socket] | None = None,
    devices: int = 1,
) -> Iterator[LocalProcesses]:
    """Starts `python -m module` once for each rank, and ends all of them afterwards.

    Args:
      module: whose `main` calls `join_processes` and `serve`.
      cores: that of each rank, to which it pins itself; None: any.
      folder: from which the module can be imported; None: this process's.
      patience: seconds that a rank waits for another one.
      answer_patience: seconds that we wait for an answer.
      grace: seconds that we wait for the others' once one has failed.
      listeners: a listening socket for each rank, which is closed here, in place of
        connections between all.
      devices: simulated devices of each rank, as JAX sees its CPU.

    Yields:
      Them, to be asked.
    """
    ranks = range(len(cores))
    flags = environment.simulated(devices, _ONE_THREAD_FLAGS)["XLA_FLAGS"]
    ends: list[dict[int, socket.socket]] = [{} for _ in ranks]
    for a, b in itertools.combinations(ranks, 2) if listeners is None else ():
        ends[a][b], ends[b][a] = socket.socketpair()
    with contextlib.ExitStack() as stack:
        processes, controls = [], []
        words = stack.enter_context(tempfile.TemporaryFile("w+"))
        for rank, core in enumerate(cores):
            ours, theirs = socket.socketpair()
            listener = None if listeners is None else listeners[rank]
            handed = [theirs, *ends[rank].values(), *([listener] if listener else [])]
            given = {
                "rank": rank,
                "core": core,
                "control": theirs.fileno(),
                "links": {other: end.fileno() for other, end in ends[rank].items()},
                "listener": None if listener is None else listener.fileno(),
                "patience": patience,
            }
            process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(given)],
                env=environment.child(**_ONE_THREAD, XLA_FLAGS=flags),
                cwd=folder,
                pass_fds=[end.fileno() for end in handed],
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)
            for end in handed:
                end.close()
            controls.append(Channel(ours, f"rank {rank}", patience=answer_patience))
            stack.callback(controls[-1].close)
        yield LocalProcesses(processes, controls, words, answer_patience, grace)
