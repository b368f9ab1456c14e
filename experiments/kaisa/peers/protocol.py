"""Messages between our process and that of a peer: JSON and arrays over a pipe.

Both sides import this file, so it needs nothing but the standard library and numpy.
"""

import io
import json
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np

_HEADER = "header"
_ARRAY = "array:"
_LENGTH = 8


class Message(NamedTuple):
    """A request, or its answer.

    Attributes:
      name: what is asked for; of an answer `"done"` or `"failed"`.
      options: anything that JSON can hold.
      arrays: by name.
    """

    name: str
    options: Mapping[str, Any] = {}
    arrays: Mapping[str, np.ndarray] = {}


def send(stream: IO[bytes], message: Message) -> None:
    """Writes one message: its length, then an archive of numpy."""
    header = json.dumps({"name": message.name, "options": dict(message.options)})
    arrays = {_ARRAY + name: array for name, array in message.arrays.items()}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{_HEADER: np.array(header)}, **arrays)
    content = buffer.getvalue()
    stream.write(len(content).to_bytes(_LENGTH, "big") + content)
    stream.flush()


def receive(stream: IO[bytes]) -> Message:
    """Reads one message.

    Raises:
      EOFError: the other side has ended, perhaps within a message.
    """
    length = int.from_bytes(_exactly(stream, _LENGTH), "big")
    with np.load(io.BytesIO(_exactly(stream, length)), allow_pickle=False) as archive:
        header = json.loads(archive[_HEADER].item())
        arrays = {
            name.removeprefix(_ARRAY): archive[name]
            for name in archive.files
            if name != _HEADER
        }
    return Message(header["name"], header["options"], arrays)


def _exactly(stream: IO[bytes], count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise EOFError(f"got {len(content)} of {count} bytes")
    return content
