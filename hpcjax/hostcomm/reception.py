"""Taking in connections and what they say first, whoever calls, until a deadline."""

import collections
import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

from hpcjax.core.errors import ProcessLost
from hpcjax.hostcomm.channels import Message, frame, read_message

HELLO = "hello"
FIRST_WORDS = 5.0  # seconds for who has called to say who it is
_MOST_STRANGERS = 256  # who have called and not spoken yet
_POLL = 0.1
_FEW = 2**16  # bytes of what is said before anybody is trusted


class Caller(NamedTuple):
    """A connection, and what is known of who is at its other end."""

    connection: socket.socket
    hello: Mapping[str, Any]


# Talks with a caller until a time of `time.monotonic()`; returns its hello, or raises
# what it likes if it is not to be let in.
Greeting = Callable[[socket.socket, float], Mapping[str, Any]]


class Reception:
    """Listens to all callers at once: a silent one holds up nobody else.

    A thread accepts, and another one for each caller greets it, for seconds at most,
    however it spreads its bytes. Who is not let in is hung up on, and so is the oldest
    who has not been, if there are too many. A context manager: at its end the listener
    is closed, and with it who has not been taken.
    """

    def __init__(self, listener: socket.socket, end: float, greet: Greeting) -> None:
        """Takes over a listener.

        Args:
          listener: which is closed at the end.
          end: when to give up, `time.monotonic()`.
          greet: called by a thread of each caller.
        """
        self._listener, self._end, self._greet = listener, end, greet
        self._came: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        self._greeted: collections.deque[socket.socket] = collections.deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        # Wakes who accepts, on systems where closing does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        while not self._came.empty():
            self._came.get().connection.close()

    def take(self, missing: Collection[int]) -> Caller:
        """Returns the next caller that was let in.

        Raises:
          ProcessLost: none came until the deadline; names the ranks that are missing.
        """
        try:
            return self._came.get(timeout=left(self._end))
        except queue.Empty:
            raise ProcessLost(f"ranks {sorted(missing)} have not come") from None

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._listener.settimeout(_POLL)
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it was closed
                return
            self._greeted.append(connection)
            if len(self._greeted) > _MOST_STRANGERS:
                # Its thread finds that nothing can be read any more.
                with contextlib.suppress(OSError, IndexError):
                    self._greeted.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        hello = None
        # A stranger's bytes may break the reading anywhere.
        with contextlib.suppress(Exception):
            end = min(self._end, time.monotonic() + FIRST_WORDS)
            hello = self._greet(connection, end)
        with contextlib.suppress(ValueError):
            self._greeted.remove(connection)
        if hello is None or self._closed.is_set():
            connection.close()
        else:
            self._came.put(Caller(connection, hello))


def left(end: float) -> float | None:
    """Returns the seconds until a time of `time.monotonic()`; None is for ever."""
    return None if math.isinf(end) else max(end - time.monotonic(), 1e-3)


def say(connection: socket.socket, message: Message) -> None:
    """Sends a message."""
    for block in frame(message):
        connection.sendall(block)


def hear(connection: socket.socket, end: float) -> Message:
    """Returns the next message, all of which must come until `end`.

    Raises:
      TimeoutError: it has not.
      Exception: of any kind, if what comes is no message.
    """

    def receive_into(view: memoryview) -> int:
        if time.monotonic() >= end:
            raise TimeoutError("the message has not come in time")
        connection.settimeout(left(end))
        return connection.recv_into(view)

    return read_message(receive_into, most=_FEW)[0]
