"""Ranks that send each other arrays: what every kind of transport can do."""

import abc
import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import HpcjaxError, ProcessLost
from hpcjax.hostcomm.channels import dtype_name
from hpcjax.hostcomm.mailbox import Arrived, Mailbox, Request, Tag

LINGER = 5.0


class Traffic(NamedTuple):
    """What has gone one way.

    Attributes:
      messages: how many.
      payload: bytes of their arrays.
      wire: bytes of all that was sent for them.
    """

    messages: int = 0
    payload: int = 0
    wire: int = 0

    def plus(self, other: "Traffic", sign: int = 1) -> "Traffic":
        """Returns the sum, or with `sign` -1 the difference."""
        return Traffic(*(a + sign * b for a, b in zip(self, other, strict=True)))


class Counters(NamedTuple):
    """What a rank has exchanged with each other one; nothing with itself.

    Attributes:
      sent: to each rank.
      received: from each rank.

    Examples:
      >>> before = Counters((Traffic(), Traffic(1, 8, 60)), (Traffic(), Traffic()))
      >>> now = Counters((Traffic(), Traffic(3, 24, 180)), (Traffic(), Traffic()))
      >>> now.since(before).total_sent()
      Traffic(messages=2, payload=16, wire=120)
    """

    sent: tuple[Traffic, ...]
    received: tuple[Traffic, ...]

    def since(self, before: "Counters") -> "Counters":
        """Returns what was added since an earlier reading."""
        sent = zip(self.sent, before.sent, strict=True)
        received = zip(self.received, before.received, strict=True)
        return Counters(
            tuple(now.plus(then, -1) for now, then in sent),
            tuple(now.plus(then, -1) for now, then in received),
        )

    def total_sent(self) -> Traffic:
        """Returns the sum over all ranks."""
        return _sum(self.sent)

    def total_received(self) -> Traffic:
        """Returns the sum over all ranks."""
        return _sum(self.received)


class Transport(abc.ABC):
    """The connections of one rank with all others.

    Any number of threads may use it. Used in a `with` statement it is closed at the
    end, and after an error aborted, so that nobody waits for this rank.

    Attributes:
      rank: from 0.
      size: how many there are.
      patience: seconds to wait for a rank of which nothing is heard.
    """

    def __init__(
        self, rank: int, size: int, *, patience: float, latency: float = 0.0
    ) -> None:
        """For those who make one of a kind."""
        self.rank, self.size, self.patience = rank, size, patience
        self.mailbox = Mailbox(
            patience=patience, latency=latency, heard=self._heard, remind=self._remind
        )
        self._closed = False
        self._kinds = itertools.count()
        self._sent, self._received = [Traffic()] * size, [Traffic()] * size
        self._outboxes = {
            peer: _Outbox(self, peer) for peer in range(size) if peer != rank
        }

    def send(self, to: int, tag: Tag, array: np.ndarray) -> None:
        """Sends an array; returns once it may be changed, not once it has arrived.

        Ranks that send to each other at once do not block each other. What a rank sends
        to itself is copied and not counted.

        Args:
          to: the rank.
          tag: what it is about.
          array: of any shape and dtype but objects and records.

        Raises:
          ConfigError: there is no such rank.
          ProcessLost: a process has ended, or that one takes nothing in.
        """
        if to in self._outboxes:
            self.mailbox.check(to)
            self._outboxes[to].send(tag, array)
        else:
            self.isend(to, tag, array)

    def isend(self, to: int, tag: Tag, array: np.ndarray) -> Request:
        """Begins to send an array, which must not be changed until the request is done.

        Raises:
          ConfigError: there is no such rank.
          ProcessLost: a process has ended.
          ValueError: an array of objects or of records.
        """
        self._check_rank("to", to)
        self.mailbox.check(to)
        array = np.asarray(array)
        dtype_name(tag.kind, array.dtype)  # told here, not to who waits at the end
        request = Request(self.mailbox, to, None)
        if to == self.rank:
            self.mailbox.deliver(Arrived(to, tag, np.array(array)), local=True)
            self.mailbox.done(request)
        else:
            self._outboxes[to].post(request, tag, array)
        return request

    def receive(
        self, source: int, tag: Tag, *, timeout: float | None = None
    ) -> np.ndarray:
        """Waits for the next array from a rank with a tag.

        Args:
          source: the rank.
          tag: what it is about.
          timeout: seconds; None: as long as something is heard of the rank.

        Raises:
          ConfigError: there is no such rank.
          ProcessLost: a process has ended, or that one was silent for longer than the
            patience.
          TimeoutError: the timeout is over; what comes later can be received.
        """
        return self._wait_for(self.irecv(source, tag), timeout).array

    def receive_any(self, *tags: Tag | str, timeout: float | None = None) -> Arrived:
        """Waits for the next array from whatever rank, itself included.

        Args:
          tags: that it may have; a text stands for all of that kind, none for any.
          timeout: seconds; None: nobody is waited for in particular, so that silence is
            no error.

        Raises:
          ProcessLost: a process has ended.
          TimeoutError: the timeout is over.
        """
        self.mailbox.check()
        return self._wait_for(self.mailbox.ask(None, tags), timeout)

    def irecv(self, source: int, tag: Tag | str) -> Request:
        """Asks for the next array from a rank with a tag; who asks first gets it first.

        A text stands for all tags of that kind; the request's `arrived` has the tag.

        Raises:
          ConfigError: there is no such rank.
          ProcessLost: a process has ended.
        """
        self._check_rank("source", source)
        self.mailbox.check()
        return self.mailbox.ask(source, (tag,))

    def wait_any(
        self, requests: Sequence[Request], *, timeout: float | None = None
    ) -> int:
        """Waits until one of the requests is done and returns its place among them.

        Raises:
          ConfigError: there are none.
          ProcessLost: a process has ended, or all that are waited for were silent.
          TimeoutError: the timeout, in seconds, is over.
        """
        checks.require(len(requests) > 0, "something must be waited for", requests=0)
        return self.mailbox.wait(requests, timeout)

    def new_kind(self, name: str) -> str:
        """Returns a kind of messages that nobody has used before.

        Ranks that ask for kinds in the same order get the same ones.
        """
        return f"{name} {next(self._kinds)}"

    def counters(self) -> Counters:
        """Returns what was sent and has arrived until now."""
        with self.mailbox.changed:
            return Counters(tuple(self._sent), tuple(self._received))

    def close(self, linger: float = LINGER) -> None:
        """Sends what is still to be sent, says goodbye and ends; again, only waits.

        Args:
          linger: seconds to wait until the others have closed too: a process that ends
            earlier may take with it what they have not yet read.
        """
        if not self._closed:
            self._closed = True
            for outbox in self._outboxes.values():
                outbox.close()
            self._say_goodbye()
            self.mailbox.lose(HpcjaxError("this transport is closed"))
        self._leave(linger)

    def abort(self, error: BaseException | None = None) -> None:
        """Ends without a goodbye: the others' calls raise ProcessLost.

        Args:
          error: why; if that is a ProcessLost the others learn whom this rank has lost,
            as far as they can be told at once.
        """
        lost = isinstance(error, ProcessLost)
        self._closed = True
        self.mailbox.lose(HpcjaxError("this transport is closed"))
        self._cut(str(error) if lost else f"rank {self.rank} has ended")
        for outbox in self._outboxes.values():
            outbox.end()  # what is still in there can no longer be sent

    def __enter__(self) -> "Transport":  # noqa: PYI034  # beartype knows no Self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort(error)

    @abc.abstractmethod
    def _write(self, to: int, tag: Tag, array: np.ndarray) -> int:
        """Sends to another rank; returns the bytes; raises ProcessLost."""

    @abc.abstractmethod
    def _heard(self, source: int) -> float:
        """Returns when something has last come from a rank, `time.monotonic()`."""

    @abc.abstractmethod
    def _say_goodbye(self) -> None:
        """Tells the others that nothing more comes."""

    @abc.abstractmethod
    def _leave(self, linger: float) -> None:
        """Waits for the others' end for so many seconds, and frees what is held."""

    @abc.abstractmethod
    def _cut(self, why: str) -> None:
        """Ends all connections at once, telling the others why if that can be done."""

    @abc.abstractmethod
    def _remind(self) -> None:
        """Lets the others hear that we are here, if that can be done at once."""

    def _wrote(self, to: int, tag: Tag, array: np.ndarray) -> None:
        """Writes and counts."""
        array = np.asarray(array)
        wire = self._write(to, tag, array)
        with self.mailbox.changed:
            added = Traffic(1, array.nbytes, wire)
            self._sent[to] = self._sent[to].plus(added)

    def _took(self, letter: Arrived, wire: int) -> None:
        """Delivers and counts what has arrived."""
        with self.mailbox.changed:
            added = Traffic(1, letter.array.nbytes, wire)
            self._received[letter.source] = self._received[letter.source].plus(added)
        self.mailbox.deliver(letter)

    def _wait_for(self, request: Request, timeout: float | None) -> Arrived:
        try:
            request.wait(timeout)
        except BaseException:
            self.mailbox.withdraw(request)
            raise
        if request.arrived is None:
            raise AssertionError("a request without an error has an array")
        return request.arrived

    def _check_rank(self, name: str, rank: int) -> None:
        good = 0 <= rank < self.size
        checks.require(good, f"{name} must be one of {self.size} ranks", **{name: rank})


class _Outbox:
    """What goes to one rank, in order: at once, or by a thread of its own."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self._writing = threading.Lock()
        self._posted: queue.SimpleQueue[tuple[Request, Tag, np.ndarray] | None]
        self._posted = queue.SimpleQueue()
        self._unwritten = 0
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, tag: Tag, array: np.ndarray) -> None:
        if self._unwritten:  # behind what was posted before
            request = Request(self._transport.mailbox, self._peer, None)
            self.post(request, tag, array)
            request.wait()
            return
        with self._writing:
            self._transport._wrote(self._peer, tag, array)

    def post(self, request: Request, tag: Tag, array: np.ndarray) -> None:
        with self._changing:
            self._unwritten += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, daemon=True)
                self._thread.start()
        self._posted.put((request, tag, array))

    @contextlib.contextmanager
    def idle(self) -> Iterator[bool]:
        """Says whether nothing is being written, and keeps it so."""
        free = self._writing.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._writing.release()

    def end(self) -> None:
        self._posted.put(None)

    def close(self) -> None:
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _write_all(self) -> None:
        while (posted := self._posted.get()) is not None:
            request, tag, array = posted
            error = None
            try:
                with self._writing:
                    self._transport._wrote(self._peer, tag, array)
            except Exception as caught:  # raised by who waits for the request
                error = caught
            with self._changing:
                self._unwritten -= 1
            self._transport.mailbox.done(request, error)


def _sum(traffic: Sequence[Traffic]) -> Traffic:
    total = Traffic()
    for each in traffic:
        total = total.plus(each)
    return total
