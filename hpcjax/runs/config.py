"""Configs as JSON, with type tags; read back checked, compared, fingerprinted."""

import dataclasses
import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import overrides, values
from hpcjax.train.config import TrainConfig

CLASS, VALUES = "class", "values"
_PACKAGES = ("configs", "experiments")


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
    """Returns the config that `to_json` wrote, or that was written by hand.

    Missing keys take their defaults; other keys of `data` are left to the caller.

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
    found = getattr(module, class_name, None) if colon else None
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        configs = filter(dataclasses.is_dataclass, vars(module).values())
        near = nearest(class_name, {type_.__qualname__ for type_ in configs})
        raise ConfigError(f"{module_name} has no config class {class_name!r}{near}")
    return found


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

    A key that only one of them has is `ABSENT` in the other.
    """
    before, after = flatten(old), flatten(new)
    pairs = {
        path: (before.get(path, ABSENT), after.get(path, ABSENT))
        for path in dict.fromkeys([*before, *after])
    }
    return {path: pair for path, pair in pairs.items() if not values.same(*pair)}


def changes(base: Any, config: Any) -> dict[str, str]:
    """Returns overrides, as on the command line, that make `config` of `base`.

    Raises:
      ConfigError: there are none: a chosen config has a field without a default, or a
        value that differs cannot be written as text.
    """
    found: dict[str, str] = {}
    wanted = overrides.keys(config).values()
    # Outer keys first: choosing a member sets every key below it.
    for key in sorted(wanted, key=lambda key: key.path.count(".")):
        held = flatten(base).get(key.path, ABSENT)
        if key.settable and not values.same(held, key.value):
            text = key.value if key.group else values.write(key.value, key.hint)
            base = overrides.parse(base, {key.path: text})
            found[key.path] = text
    return found


def digest(config: Any) -> str:
    """Returns 16 hex digits that equal configs, and only they, share."""
    return digest_json(to_json(config))


def digest_json(data: Mapping[str, Any]) -> str:
    """Returns `digest` of a config already written as JSON; imports nothing."""
    content = {name: data.get(name) for name in (CLASS, VALUES)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_seed(seed: int) -> None:
    """Checks that parameters, data order and draws can be made from a seed.

    Raises:
      ConfigError: it is not an unsigned number of 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be at least 0 and less than 2**32: got {seed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A training run; an experiment's config adds data set, model and optimizer.

    Attributes:
      train: length, batch and intervals.
      seed: of parameters, data order and draws.
    """

    resumable: ClassVar[tuple[str, ...]] = (
        "train.steps",
        "train.checkpoint_every",
        "train.keep",
    )

    train: TrainConfig = TrainConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


def check_resumable(old: Any, new: Any) -> None:
    """Checks that a run of config `old` may go on with config `new`.

    The experiment's config class lists in `resumable` which keys may change.

    Raises:
      ConfigError: any other key differs; lists old and new values.
    """
    if type(old) is not type(new):
        raise ConfigError(
            f"the run is of {type(old).__qualname__}, not {type(new).__qualname__}"
        )
    allowed = getattr(type(new), "resumable", ())
    changed = {key: pair for key, pair in diff(old, new).items() if key not in allowed}
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
