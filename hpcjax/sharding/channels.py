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
        # Messages, then why there are no more.
        self._inbox: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._take_in, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          ProcessLost: the other process has ended, or takes nothing in.
          ValueError: an array of objects or of records.
        """
        arrays = {name: np.asarray(each) for name, each in message.arrays.items()}
        forms = [
            [name, _dtype_name(name, each.dtype), each.shape]
            for name, each in arrays.items()
        ]
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

    def close(self) -> None:
        """Ends the connection; the other process sees that."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _take_in(self) -> None:
        why = "has ended"
        try:
            while True:
                self._inbox.put(self._read())
        except (EOFError, OSError):
            pass
        except Exception as error:  # other bytes may break the reading of them anywhere
            why = f"has sent what is no message ({type(error).__name__}: {error})"
        self._inbox.put(why)

    def _read(self) -> Message:
        length = int.from_bytes(self._exactly(_LENGTH).tobytes(), "big")
        if length > _LONGEST:
            raise ValueError(f"a header of {length} bytes")
        name, options, forms = json.loads(self._exactly(length).tobytes())
        arrays = {}
        for key, dtype, shape in forms:
            form = _dtype(dtype)
            count = math.prod(shape) * form.itemsize
            arrays[key] = self._exactly(count).view(form).reshape(shape)
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


def _dtype_name(array: str, dtype: np.dtype) -> str:
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
