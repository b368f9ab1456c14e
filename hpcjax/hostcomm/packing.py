"""Values that are more than arrays, as a message: nothing is pickled."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm.channels import Message


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
