"""Ranks connected by MPI, for clusters that have it."""

import atexit
import contextlib
import math
import threading
import time
from typing import Any

import numpy as np

from hpcjax.core.errors import ConfigError, ProcessLost
from hpcjax.hostcomm.channels import PATIENCE, Message, frame, read_message
from hpcjax.hostcomm.link import PIECE, Clock, Egress, Link
from hpcjax.hostcomm.mailbox import Arrived, Tag
from hpcjax.hostcomm.transport import Transport

_POLL = 1e-4  # MPI itself would wait at full load
_GOODBYE, _LOST = Message("goodbye"), "lost"


class MpiTransport(Transport):
    """A transport over MPI: the same calls for the processes of `mpirun`.

    A thread looks every 100 µs whether something has come, since MPI waits at full
    load; with more processes than cores also pass `--mca mpi_yield_when_idle 1` to Open
    MPI's `mpirun`. A rank that raises an error tells the others; a killed one ends the
    job, as MPI does. Patience counts whole messages.
    """

    def __init__(
        self,
        communicator: Any = None,
        *,
        link: Link | None = None,
        patience: float = PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        """Joins the ranks of a communicator; all of them call it.

        Args:
          communicator: mpi4py's; None: that of all processes.
          link: which holds back what is sent and delays what comes; None: no more than
            MPI does.
          patience: seconds to wait for a rank of which nothing is heard, or inf.
          clock: by which the link measures.

        Raises:
          ConfigError: mpi4py or MPI is missing, or MPI allows no threads.
        """
        self._mpi = _load()
        self._world = (communicator or self._mpi.COMM_WORLD).Dup()
        size, link = self._world.Get_size(), link or Link()
        self._heard_at = [time.monotonic()] * size
        super().__init__(
            self._world.Get_rank(), size, patience=patience, latency=link.latency
        )
        self._egress = None if math.isinf(link.rate) else Egress(link.rate, clock)
        self._left: set[int] = {self.rank}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._take_in, daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # before MPI ends

    def _write(self, to: int, tag: Tag, array: np.ndarray) -> int:
        message = Message(tag.kind, {"at": [tag.round, tag.phase]}, {"": array})
        return self._put(to, message, self.patience)

    def _put(self, to: int, message: Message, patience: float) -> int:
        content = np.frombuffer(b"".join(frame(message)), np.uint8)
        if self._egress is not None:
            ready = self._egress.begin()
            for start in range(0, len(content), PIECE):
                piece = min(PIECE, len(content) - start)
                ready = self._egress.let_out(piece, ready)
        request = self._world.Isend([content, self._mpi.BYTE], to)
        end = time.monotonic() + patience
        while not request.Test():
            if time.monotonic() > end:
                error = ProcessLost(f"rank {to} has taken nothing for {patience:g} s")
                self.mailbox.lose(error)
                raise error
            time.sleep(_POLL)
        return len(content)

    def _heard(self, source: int) -> float:
        return math.inf if source == self.rank else self._heard_at[source]

    def _say_goodbye(self) -> None:
        self._tell(_GOODBYE)

    def _leave(self, linger: float) -> None:
        end = time.monotonic() + linger
        while len(self._left) < self.size and time.monotonic() < end:
            time.sleep(_POLL)
        if len(self._left) == self.size:
            self._stop()

    def _cut(self, why: str) -> None:
        self._tell(Message(_LOST, {"why": why}))
        self._stop()

    def _remind(self) -> None:
        """Does nothing: a message to one that takes none in could not be given up."""

    def _tell(self, message: Message) -> None:
        for peer in set(range(self.size)) - {self.rank}:
            with contextlib.suppress(ProcessLost):
                self._put(peer, message, min(self.patience, 1.0))

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        atexit.unregister(self._stop)

    def _take_in(self) -> None:
        try:
            self._take_in_all()
        except Exception as error:  # raised by who waits
            words = f"MPI has failed ({type(error).__name__}: {error})"
            self.mailbox.lose(ProcessLost(words))

    def _take_in_all(self) -> None:
        status = self._mpi.Status()
        while not self._stopping.is_set():
            found = self._world.Improbe(status=status)
            if found is None:
                time.sleep(_POLL)
                continue
            content = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            request = found.Irecv([content, self._mpi.BYTE])
            while not request.Test():
                time.sleep(_POLL)
            self._read(status.Get_source(), content)

    def _read(self, source: int, content: np.ndarray) -> None:
        self._heard_at[source] = time.monotonic()
        left = content.data

        def receive_into(room: memoryview) -> int:
            nonlocal left
            count = min(len(room), len(left))
            room[:count], left = left[:count], left[count:]
            return count

        message, wire = read_message(receive_into)
        if message == _GOODBYE:
            self.mailbox.leave(source)
            self._left.add(source)
        elif message.name == _LOST and "why" in message.options:
            self.mailbox.lose(ProcessLost(message.options["why"]))
            self._left.add(source)
        else:
            tag = Tag(message.name, *message.options["at"])
            self._took(Arrived(source, tag, message.arrays[""]), wire)


def _load() -> Any:
    try:
        from mpi4py import MPI  # pyrefly: ignore[missing-import]
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "MpiTransport needs an MPI and mpi4py: install the extra hpcjax[mpi] and, "
            f"where the system has no MPI, the package openmpi or mpich ({error})"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError("MpiTransport needs an MPI with MPI_THREAD_MULTIPLE")
    return MPI
