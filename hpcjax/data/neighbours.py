"""Records out of the memory of other processes: asked for by number, sent as bytes."""

import contextlib
import itertools
import logging
import threading
from collections.abc import Mapping

import numpy as np

from hpcjax.core.errors import HpcjaxError
from hpcjax.hostcomm.mailbox import Arrived, Tag
from hpcjax.hostcomm.transport import Transport

log = logging.getLogger(__name__)
# Seconds for an answer. The storage is there for who does not get one.
PATIENCE = 10.0
_GOODBYE = -1


class Neighbours:
    """Asks others for records, and answers them with those that this process keeps.

    Who does not answer is asked no more, which is told once; likewise who has said
    goodbye, since it has got all of its own batches, which is not told.
    """

    def __init__(
        self,
        transport: Transport,
        kept: Mapping[int, bytes],
        *,
        patience: float = PATIENCE,
    ) -> None:
        """Joins the others; all must do so in the same order.

        Args:
          transport: to them.
          kept: what may be asked for; other threads add to it.
          patience: seconds for an answer.
        """
        self._transport, self._kept, self._patience = transport, kept, patience
        self._asking = transport.new_kind("ask")
        self._answering = transport.new_kind("record")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._gone: set[int] = set()
        self._asked: dict[int, int] = {}  # whom, by the number of the question

    def ask(self, worker: int, index: int) -> bytes | None:
        """Returns a record that another one keeps; None if it has none, or has left."""
        with self._lock:
            if worker in self._gone:
                return None
            number = next(self._numbers)
            self._asked[number] = worker
        try:
            self._send(worker, self._asking, number, np.array([index], np.int64))
            answer = self._transport.receive(
                worker, Tag(self._answering, number), timeout=self._patience
            )
        except (HpcjaxError, TimeoutError) as error:
            self._lose(worker, error)
            return None
        finally:
            with self._lock:
                del self._asked[number]
        return answer.tobytes() or None

    def serve(self) -> None:
        """Answers until `stop`, or until the connections have ended."""
        own = self._transport.rank
        while True:
            try:
                source, tag, asked = self._transport.receive_any(self._asking)
                if asked[0] != _GOODBYE:
                    record = self._kept.get(int(asked[0]), b"")
                    content = np.frombuffer(record, np.uint8)
                    self._send(source, self._answering, tag.round, content)
                elif source == own:
                    return
                else:
                    self._part_from(source)
            except HpcjaxError as error:
                if self._over():
                    self._lose(own, error)
                    return

    def stop(self) -> None:
        """Says goodbye to all, which ends `serve`; nobody is asked any more."""
        for worker in range(self._transport.size):
            self._part_from(worker)  # its goodbye may not be read any more
            with contextlib.suppress(HpcjaxError):  # who is lost need not be told
                self._send(worker, self._asking, 0, np.array([_GOODBYE], np.int64))

    def _send(self, worker: int, kind: str, number: int, array: np.ndarray) -> None:
        self._transport.send(worker, Tag(kind, number), array)

    def _part_from(self, worker: int) -> None:
        """Answers in place of one that will not: with nothing."""
        with self._lock:
            self._gone.add(worker)
            open_questions = [n for n, who in self._asked.items() if who == worker]
        nothing = np.zeros(0, np.uint8)
        for number in open_questions:
            letter = Arrived(worker, Tag(self._answering, number), nothing)
            self._transport.mailbox.deliver(letter, local=True)

    def _over(self) -> bool:
        try:
            self._transport.mailbox.check()
        except HpcjaxError:
            return True
        return False

    def _lose(self, worker: int, error: Exception) -> None:
        """Asks one no more, or nobody if that has ended all connections."""
        over = self._over()
        lost = set(range(self._transport.size)) if over else {worker}
        with self._lock:
            new = lost - self._gone
            self._gone |= lost
        if new and (over or isinstance(error, TimeoutError)):
            who = "all others" if over else f"rank {worker}"
            log.warning("input: %s; records of %s come from the storage", error, who)
