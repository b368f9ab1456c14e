"""Configs as JSON with type tags: writing, checked reading, comparing, hashing."""

import dataclasses
import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import overrides, values

CLASS, VALUES = "class", "values"
_PACKAGES = ("configs", "experiments", "hpcjax")


class _Absent:
    """Stands for a key that one of two configs does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def to_json(config: Any) -> dict[str, Any]:
    """Returns a config as JSON values.

    Args:
      config: a frozen dataclass of a module.

    Returns:
      `{"class": "module:Class", "values": {...}}`; members of unions carry their name
      under `"type"`, tuples are lists, and infinities and NaN are words.

    Raises:
      ConfigError: a value is not of its field's type; names the path.
    """
    cls = type(config)
    return {
        CLASS: f"{cls.__module__}:{cls.__qualname__}",
        VALUES: values.encode(config, cls),
    }


def from_json(data: Any, cls: type | None = None) -> Any:
    """Returns the config that `to_json`, or a person, wrote as JSON.

    Missing keys get their defaults. Other keys of `data` than these two are ignored.

    Args:
      data: `{"class": ..., "values": ...}`.
      cls: the class it must be of; default the class it names, which must lie in
        `experiments` or `configs` or be imported already.

    Raises:
      ConfigError: no such class, unknown key, or a value of another type.
    """
    if not isinstance(data, Mapping) or not {CLASS, VALUES} <= set(data):
        raise ConfigError(f'a config must be {{"{CLASS}": ..., "{VALUES}": {{...}}}}')
    named = data[CLASS]
    if cls is None:
        cls = _find_class(str(named))
    elif named != f"{cls.__module__}:{cls.__qualname__}":
        raise ConfigError(f"config of {named} given, {cls.__qualname__} expected")
    if not isinstance(data[VALUES], dict):
        raise ConfigError(f"{VALUES} must be an object: got {data[VALUES]!r}")
    return values.decode(data[VALUES], cls)


def _find_class(name: str) -> type:
    module_name, colon, class_name = name.partition(":")
    if (
        module_name.partition(".")[0] not in _PACKAGES
        and module_name not in sys.modules
    ):
        raise ConfigError(
            f"a config's class must lie in {' or '.join(_PACKAGES)}: got {name!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"no module for the config's class {name!r}") from error
    cls = getattr(module, class_name, None) if colon else None
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        configs = filter(dataclasses.is_dataclass, vars(module).values())
        near = nearest(class_name, {type_.__qualname__ for type_ in configs})
        raise ConfigError(f"{module_name} has no config class {class_name!r}{near}")
    return cls


def flatten(config: Any) -> dict[str, Any]:
    """Returns `{path: value}` of every key; a chosen config is its member's name.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Config:
      ...   steps: int = 3
      >>> flatten(Config())
      {'steps': 3}
    """
    return {
        path: key.value for path, key in overrides.keys(config).items() if key.settable
    }


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Returns `{path: (old value, new value)}` where two configs differ.

    A key that only one of them has has the value `ABSENT` in the other.
    """
    before, after = flatten(old), flatten(new)
    pairs = {
        path: (before.get(path, ABSENT), after.get(path, ABSENT))
        for path in dict.fromkeys([*before, *after])
    }
    return {path: pair for path, pair in pairs.items() if not values.are_equal(*pair)}


def changes(base: Any, config: Any) -> dict[str, str]:
    """Returns the overrides, as on the command line, that turn `base` into `config`.

    Raises:
      ConfigError: a value cannot be written as text.
    """
    changed: dict[str, str] = {}
    held = flatten(base)
    target = overrides.keys(config).values()
    # Outer keys first, since choosing a member resets all keys below it.
    for key in sorted(target, key=lambda key: key.path.count(".")):
        old = held.get(key.path, ABSENT)
        if key.settable and not values.are_equal(old, key.value):
            text = key.value if key.group else values.write(key.value, key.hint)
            changed[key.path] = text
            # What a member has before the keys below it need not be valid.
            if key.group:
                keys = overrides.keys(base, changed)
                held = {path: key.value for path, key in keys.items()}
    return changed


def digest(config: Any) -> str:
    """Returns a fingerprint of 16 hex digits, which only equal configs share."""
    return digest_json(to_json(config))


def digest_json(data: Mapping[str, Any]) -> str:
    """Returns the `digest` of a config in JSON, without importing its class."""
    content = {name: data.get(name) for name in (CLASS, VALUES)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_seed(seed: int) -> None:
    """Checks a seed of parameters, data order and draws.

    Raises:
      ConfigError: it is not an unsigned 32-bit number.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be at least 0 and less than 2**32: got {seed}")


def check_resumable(old: Any, new: Any) -> None:
    """Checks that a run of config `old` may be resumed with config `new`.

    The attribute `resumable` of the config's class lists the keys that may change, with
    all below them.
    """
    if type(old) is not type(new):
        raise ConfigError(
            f"the run is of {type(old).__qualname__}, not {type(new).__qualname__}"
        )
    allowed = getattr(type(new), "resumable", ())
    changed = {
        key: pair
        for key, pair in diff(old, new).items()
        if not any(f"{key}.".startswith(f"{name}.") for name in allowed)
    }
    if changed:
        lines = (
            f"{key}: {values.show(left)} -> {values.show(right)}"
            for key, (left, right) in changed.items()
        )
        may = f"; resuming may change {', '.join(allowed)}" if allowed else ""
        raise ConfigError(
            f"cannot resume with another config ({'; '.join(lines)}){may}; "
            "`--fork` starts a child run that may differ"
        )
