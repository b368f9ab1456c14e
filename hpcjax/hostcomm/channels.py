"""Messages between processes of one machine: JSON and arrays over a socket.

Nothing is pickled. Every channel has a thread that takes in what arrives, so that a
sender need not wait until the receiver has ended what it computes.
"""

import contextlib
import json
import math
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core.errors import ProcessLost
from hpcjax.hostcomm.link import PIECE, Egress

PATIENCE = 60.0
_LENGTH = 8
_LONGEST = 2**30  # bytes of a header: what claims more is no message
_OPTIONS: Mapping[str, Any] = {}
_ARRAYS: Mapping[str, np.ndarray] = {}


class Message(NamedTuple):
    """What is sent at once.

    Attributes:
      name: what it is about.
      options: anything that JSON can hold.
      arrays: by name.
    """

    name: str
    options: Mapping[str, Any] = _OPTIONS
    arrays: Mapping[str, np.ndarray] = _ARRAYS


def frame(message: Message) -> list[memoryview]:
    """Returns what is sent of a message: the length of its header, it, the arrays.

    Raises:
      ValueError: an array of objects or of records.

    Examples:
      >>> sum(map(len, frame(Message("some", arrays={"x": np.ones(2)}))))
      57
    """
    arrays = {name: np.asarray(each) for name, each in message.arrays.items()}
    forms = [
        [name, dtype_name(name, each.dtype), each.shape]
        for name, each in arrays.items()
    ]
    header = json.dumps([message.name, dict(message.options), forms]).encode()
    contents = [
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for array in arrays.values()
    ]
    first = memoryview(len(header).to_bytes(_LENGTH, "big") + header)
    if len(first) + sum(map(len, contents)) <= PIECE:  # sent at once
        return [memoryview(b"".join([first, *contents]))]
    return [first, *(each for each in contents if each)]


def read_message(
    receive_into: Callable[[memoryview], int], most: float = math.inf
) -> tuple[Message, int]:
    """Reads what `frame` has made.

    Args:
      receive_into: like that of a socket: fills some of it, returns how much.
      most: bytes of a message; a longer one is refused before it is read.

    Returns:
      The message and its bytes.

    Raises:
      EOFError: there is no more.
      Exception: of any kind, if it is no message.
    """
    length = int.from_bytes(_exactly(_LENGTH, receive_into).tobytes(), "big")
    if length > min(_LONGEST, most):
        raise ValueError(f"a header of {length} bytes")
    name, options, forms = json.loads(_exactly(length, receive_into).tobytes())
    arrays, total = {}, _LENGTH + length
    for key, dtype, shape in forms:
        form = _dtype(dtype)
        count = math.prod(shape) * form.itemsize
        if _LENGTH + length + count > most:
            raise ValueError(f"an array of {count} bytes")
        arrays[key] = _exactly(count, receive_into).view(form).reshape(shape)
        total += count
    return Message(name, options, arrays), total


class Channel:
    """One end of a connection to another process.

    Attributes:
      other: who is at the other end.
      heard: when bytes have last come from there, `time.monotonic()`.

    Examples:
      >>> ours, theirs = socket.socketpair()
      >>> a, b = Channel(ours, "rank 1"), Channel(theirs, "rank 0")
      >>> _ = a.send(Message("double", arrays={"x": np.ones(2)}))
      >>> b.receive("a request").arrays["x"].tolist()
      [1.0, 1.0]
      >>> a.close()
      >>> b.close()
    """

    def __init__(
        self,
        connection: socket.socket,
        other: str,
        *,
        patience: float = PATIENCE,
        egress: Egress | None = None,
        deliver: Callable[[Message | str, int], None] | None = None,
    ) -> None:
        """Takes over a connected stream socket.

        Args:
          connection: the socket, which is closed with the channel.
          other: who is at the other end, for errors.
          patience: seconds to wait for anything from there, or for room to send; may be
            infinite.
          egress: through which what is sent leaves; None: at once.
          deliver: called by the channel's thread with each message and its bytes, at
            last with the reason why there are no more; None: `receive` returns them.
        """
        self.other, self._patience = other, patience
        self._limit = None if math.isinf(patience) else patience
        connection.settimeout(self._limit)
        self._connection, self._egress = connection, egress
        # Messages, then why there are no more.
        self._inbox: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._deliver = deliver or (lambda message, _: self._inbox.put(message))
        self._leaving = False
        self.heard = time.monotonic()
        self._thread = threading.Thread(target=self._take_in, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> int:
        """Sends a message; not to be called by two threads at once.

        Returns:
          The bytes that were sent.

        Raises:
          ProcessLost: the other process has ended, or takes nothing in.
          ValueError: an array of objects or of records.
        """
        blocks = frame(message)
        try:
            ready = self._egress.begin() if self._egress else 0.0
            for block in blocks:
                ready = self._write(block, ready)
        except TimeoutError:
            raise ProcessLost(
                f"{self.other} has taken nothing for {self._patience:g} s: "
                f"{message.name!r} could not be sent"
            ) from None
        except OSError as error:
            raise ProcessLost(
                f"{self.other} has ended: {message.name!r} could not be sent"
            ) from error
        return sum(map(len, blocks))

    def send_at_once(self, message: Message) -> None:
        """Sends a small message if there is room for it; otherwise, or lost, never."""
        (block,) = frame(message)
        room = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is closed
            room.register(self._connection, select.POLLOUT)
            if room.poll(0):
                self._connection.send(block)

    def arrived(self) -> bool:
        """Says whether `receive` would return, or raise, at once."""
        return not self._inbox.empty()

    def receive(self, what: str) -> Message:
        """Returns the next message.

        Args:
          what: is waited for, for errors.

        Raises:
          ProcessLost: the other process has ended, has sent nothing for too long, or
            what is no message.
        """
        try:
            message = self._inbox.get(timeout=self._limit)
        except queue.Empty:
            raise ProcessLost(
                f"{self.other} has sent nothing for {self._patience:g} s, waited for "
                f"{what}"
            ) from None
        if isinstance(message, str):
            self._inbox.put(message)  # it stays so
            raise ProcessLost(f"{self.other} {message}, waited for {what}")
        return message

    def end_sending(self) -> None:
        """Says that nothing more will be sent; what comes is still taken in."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_WR)

    def leave(self, seconds: float) -> None:
        """Closes once the other end has: here within `seconds`, else by the thread.

        To close a socket while something arrives may destroy what it has sent.
        """
        self._leaving = True
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._connection.close()

    def close(self) -> None:
        """Ends the connection; the other process sees that."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _write(self, block: memoryview, ready: float) -> float:
        for start in range(0, len(block), PIECE) if self._egress else (0,):
            left = block
            if self._egress:
                left = block[start : start + PIECE]
                ready = self._egress.let_out(len(left), ready)
            while left:  # by parts, so that the limit is for each
                left = left[self._connection.send(left) :]
        return ready

    def _take_in(self) -> None:
        why = "has ended"
        try:
            while True:
                self._deliver(*read_message(self._receive_into))
        except (EOFError, OSError):
            pass
        except Exception as error:  # other bytes may break the reading of them anywhere
            why = f"has sent what is no message ({type(error).__name__}: {error})"
        self._deliver(why, 0)
        if self._leaving:
            self._connection.close()

    def _receive_into(self, room: memoryview) -> int:
        while True:
            try:
                got = self._connection.recv_into(room)
            except TimeoutError:
                continue  # the limit is for those who wait for something
            self.heard = time.monotonic()
            return got


def _exactly(count: int, receive_into: Callable[[memoryview], int]) -> np.ndarray:
    content = np.empty(count, np.uint8)
    left = memoryview(content.data)
    while left:
        got = receive_into(left)
        if not got:
            raise EOFError(f"the connection ended {len(left)} bytes too early")
        left = left[got:]
    return content


def dtype_name(array: str, dtype: np.dtype) -> str:
    """Returns what a dtype is called in a header; `array` is for the error."""
    added = dtype.isbuiltin == 2  # bfloat16 and its like: numpy's code says their size
    if dtype.hasobject or (dtype.kind == "V" and not added):
        raise ValueError(
            f"arrays of objects or records cannot be sent: got {array!r} of {dtype}"
        )
    return dtype.name if added else dtype.str


def _dtype(name: str) -> np.dtype:
    if name.isidentifier():
        import ml_dtypes  # noqa: F401  # makes its names known to numpy
    return np.dtype(name)
