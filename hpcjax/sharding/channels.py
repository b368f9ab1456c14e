"""Messages between processes of one machine: JSON and arrays over a socket.

Nothing is pickled. Every channel has a thread that takes in what arrives, so that a
sender need not wait until the receiver has ended what it computes.
"""

import contextlib
import json
import math
import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core.errors import ProcessLost

PATIENCE = 60.0
_LENGTH = 8
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


class Channel:
    """One end of a connection to another process.

    Examples:
      >>> ours, theirs = socket.socketpair()
      >>> a, b = Channel(ours, "rank 1"), Channel(theirs, "rank 0")
      >>> a.send(Message("double", arrays={"x": np.ones(2)}))
      >>> b.receive("a request").arrays["x"].tolist()
      [1.0, 1.0]
      >>> a.close()
    """

    def __init__(
        self, connection: socket.socket, other: str, *, patience: float = PATIENCE
    ) -> None:
        """Takes over a connected stream socket.

        Args:
          connection: the socket, which is closed with the channel.
          other: who is at the other end, for errors.
          patience: seconds to wait for anything from there, or for room to send; may be
            infinite.
        """
        self.other, self._patience = other, patience
        self._limit = None if math.isinf(patience) else patience
        connection.settimeout(self._limit)
        self._connection = connection
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._take_in, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          ProcessLost: the other process has ended, or takes nothing in.
          ValueError: an array of objects.
        """
        arrays = {name: np.asarray(each) for name, each in message.arrays.items()}
        if any(array.dtype.hasobject for array in arrays.values()):
            raise ValueError(f"arrays of objects cannot be sent: {sorted(arrays)}")
        forms = [[name, each.dtype.str, each.shape] for name, each in arrays.items()]
        header = json.dumps([message.name, dict(message.options), forms]).encode()
        try:
            self._connection.sendall(len(header).to_bytes(_LENGTH, "big") + header)
            for array in arrays.values():
                content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                self._connection.sendall(content.data)
        except TimeoutError:
            raise ProcessLost(
                f"{self.other} has taken nothing for {self._patience:g} s: "
                f"{message.name!r} could not be sent"
            ) from None
        except OSError as error:
            raise ProcessLost(
                f"{self.other} has ended: {message.name!r} could not be sent"
            ) from error

    def arrived(self) -> bool:
        """Says whether `receive` would return, or raise, at once."""
        return not self._inbox.empty()

    def receive(self, what: str) -> Message:
        """Returns the next message.

        Args:
          what: is waited for, for errors.

        Raises:
          ProcessLost: the other process has ended, or has sent nothing for too long.
        """
        try:
            message = self._inbox.get(timeout=self._limit)
        except queue.Empty:
            raise ProcessLost(
                f"{self.other} has sent nothing for {self._patience:g} s, waited for "
                f"{what}"
            ) from None
        if message is None:
            self._inbox.put(None)  # it stays ended
            raise ProcessLost(f"{self.other} has ended, waited for {what}")
        return message

    def close(self) -> None:
        """Ends the connection; the other process sees that."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _take_in(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._inbox.put(self._read())
        finally:
            self._inbox.put(None)

    def _read(self) -> Message:
        length = int.from_bytes(self._exactly(_LENGTH).tobytes(), "big")
        name, options, forms = json.loads(self._exactly(length).tobytes())
        arrays = {}
        for key, dtype, shape in forms:
            count = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[key] = self._exactly(count).view(dtype).reshape(shape)
        return Message(name, options, arrays)

    def _exactly(self, count: int) -> np.ndarray:
        content = np.empty(count, np.uint8)
        left = memoryview(content.data)
        while left:
            try:
                got = self._connection.recv_into(left)
            except TimeoutError:
                continue  # the limit is for those who wait for something
            if not got:
                raise EOFError(f"the connection ended {len(left)} bytes too early")
            left = left[got:]
        return content
