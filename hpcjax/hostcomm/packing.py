"""Values that are more than arrays, as a message: nothing is pickled."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.hostcomm.channels import Message, frame, read_message


def pack(name: str, value: Any) -> Message:
    """Returns a message that holds a value.

    Args:
      name: of the message.
      value: None, numbers, text, arrays (whatever numpy takes for one), and lists,
        tuples and mappings of such with texts as keys.

    Raises:
      ConfigError: it holds something else; says what and where.

    Examples:
      >>> message = pack("result", {"loss": 0.5, "grads": (np.ones(2), None)})
      >>> unpack(message)
      {'loss': 0.5, 'grads': (array([1., 1.]), None)}
    """
    arrays: dict[str, np.ndarray] = {}
    return Message(name, {"value": _pack(value, "it", arrays)}, arrays)


def unpack(message: Message) -> Any:
    """Returns the value that `pack` was given, its arrays as numpy's."""
    return _unpack(message.options["value"], message.arrays)


def pack_array(name: str, value: Any) -> np.ndarray:
    """Returns a value as an array of bytes, which a `Transport` sends as one message.

    Args:
      name: says what it is to `unpack_array`.
      value: as for `pack`.

    Returns:
      uint8 `[bytes]`, read-only: a header, and the arrays as they are.

    Examples:
      >>> code = np.ones((2, 3), np.uint8), np.ones(3, np.float16)
      >>> packed = pack_array("8 bits", code)
      >>> packed.size - sum(array.nbytes for array in code)
      117
      >>> unpack_array("8 bits", packed)[0].shape
      (2, 3)
    """
    return np.frombuffer(b"".join(frame(pack(name, value))), np.uint8)


def unpack_array(name: str, packed: np.ndarray) -> Any:
    """Returns the value that `pack_array` was given.

    Raises:
      HpcjaxError: it is of another name, or no such array.
    """
    left = memoryview(np.ascontiguousarray(packed).reshape(-1).view(np.uint8).data)

    def read(room: memoryview) -> int:
        nonlocal left
        part, left = left[: len(room)], left[len(room) :]
        room[: len(part)] = part
        return len(part)

    try:
        message, size = read_message(read, packed.nbytes)
    except Exception as error:  # other bytes may break the reading of them anywhere
        what = f"{name} was waited for: got {packed.dtype}{list(packed.shape)}"
        raise HpcjaxError(f"{what}, which nobody packed") from error
    if message.name != name or size != packed.nbytes:
        raise HpcjaxError(f"{name} was waited for: got {message.name}, {size} bytes")
    return unpack(message)


def _pack(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        parts = [_pack(v, f"{where}[{n}]", arrays) for n, v in enumerate(value)]
        return {kind: parts}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        parts = {k: _pack(v, f"{where}[{k!r}]", arrays) for k, v in value.items()}
        return {"mapping": parts}
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            number = str(len(arrays))
            arrays[number] = array
            return {"scalar" if isinstance(value, np.generic) else "array": number}
    raise ConfigError(
        f"{where} cannot be sent: None, numbers, text, arrays, and lists, tuples and "
        f"mappings of them can: got {type(value).__name__}"
    )


def _unpack(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "mapping":
        return {key: _unpack(value, arrays) for key, value in content.items()}
    if kind in ("list", "tuple"):
        parts = [_unpack(value, arrays) for value in content]
        return parts if kind == "list" else tuple(parts)
    return arrays[content] if kind == "array" else arrays[content][()]
