"""Values of configs: shown, read from text, and converted to JSON and back.

Reading text or JSON gives a value of exactly the field's type, or an error that names
its path. Walking the types here takes fewer lines than adapting cattrs and tyro did,
and pydantic answers a wrong member of a union with the errors of all members.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable
from types import NoneType
from typing import Any

import yaml

from hpcjax.core import parts
from hpcjax.core.config import (
    alternatives,
    choice_name,
    choices,
    describe,
    elements,
    fits,
)
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import words

TAG = "type"
_WORDS: dict[Any, dict[str, Any]] = {
    bool: {"true": True, "false": False},
    NoneType: {"none": None},
}


@functools.cache
def members(hint: Any) -> dict[str, type]:
    """Returns `{"sgd": SgdConfig, ...}` for the dataclasses among a hint's members.

    Raises:
      ConfigError: two of them have the same name, or one has a field named `type`.
    """
    configs: dict[str, type] = {}
    for member in filter(dataclasses.is_dataclass, alternatives(hint)):
        if choice_name(member) in configs:
            raise ConfigError(
                f"two members of {hint} are named {choice_name(member)!r}"
            )
        if TAG in fields(member):
            raise ConfigError(f"{member.__name__} may not have a field named {TAG!r}")
        configs[choice_name(member)] = member
    return configs


def fields(cls: Any) -> dict[str, Any]:
    """Returns `{field name: type hint}` of a config dataclass.

    A field that holds a part has the union of all parts of its kind.
    """
    return _fields(cls, parts.version())


@functools.lru_cache(maxsize=1024)
def _fields(cls: Any, _: int) -> dict[str, Any]:
    plain = typing.get_type_hints(cls)
    marked = typing.get_type_hints(cls, include_extras=True)
    return {
        f.name: parts.union_of(marked[f.name]) or plain[f.name]
        for f in dataclasses.fields(cls)
        if f.init
    }


def show(value: Any) -> str:
    """Returns a value as text for users: `[64,10]`, `none`, `true`, `sgd`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(show, value))}]"
    return choice_name(type(value)) if dataclasses.is_dataclass(value) else str(value)


def are_equal(left: Any, right: Any) -> bool:
    """Returns whether two values are equal, where NaN equals NaN, in tuples too."""
    return left == right or repr(left) == repr(right)


def write(value: Any, hint: Any) -> str:
    """Returns the text that `read` turns into `value`.

    Raises:
      ConfigError: no text means this value.

    Examples:
      >>> write((64, 10), tuple[int, ...]), write(("a,b", "c"), tuple[str, ...])
      ('[64,10]', "['a,b', c]")
    """
    quoted = yaml.safe_dump(_texts(value), default_flow_style=True, width=math.inf)
    for text in (show(value), quoted.strip()):
        with contextlib.suppress(ConfigError):
            if are_equal(read(text, hint, ""), value):
                return text
    raise ConfigError(f"no override gives {value!r} for {describe(hint)}")


def _texts(value: Any) -> Any:
    return list(map(_texts, value)) if isinstance(value, tuple) else show(value)


def read(text: Any, hint: Any, path: str) -> Any:
    """Returns the value that `text` means for a field of type `hint`.

    Tuples are written `[64,10]`, no value `none`, truth values `true` and `false`.

    Raises:
      ConfigError: the text is not of the type; names path, type and text.

    Examples:
      >>> read("[64,10]", tuple[int, ...] | None, "model.widths")
      (64, 10)
    """
    options = alternatives(hint)
    (many, *_) = [*(h for h in options if typing.get_origin(h) is tuple), None]
    plain = [h for h in options if h is not many and h not in members(hint).values()]
    items = _split(text, path) if many else text
    if isinstance(items, list):
        pairs = elements(many, items) if many else None
        if pairs is not None:
            return tuple(read(*p, f"{path}[{place}]") for place, p in enumerate(pairs))
    elif plain and isinstance(text, str):
        with contextlib.suppress(LookupError):
            value = _read_word(text, plain)
            _check_range(value, text, path)
            return value
    elif not many and not plain:
        raise ConfigError(f"{path} is a config: it cannot be written in one override")
    form = ", written such as [64,10]" if many else ""
    named = [str(choice) for option in options for choice in choices(option)]
    near = nearest(text, named) if named and isinstance(text, str) else ""
    raise ConfigError(f"{path} must be {describe(hint)}{form}: got {text!r}{near}")


def _split(text: Any, path: str) -> Any:
    if not (isinstance(text, str) and text.startswith("[") and text.endswith("]")):
        return text
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - makes only text
    except RecursionError as error:
        raise ConfigError(f"{path}: lists too deep: got {text[:60]!r}") from error
    except yaml.YAMLError as error:
        why = getattr(error, "problem", "characters that YAML does not allow")
        raise ConfigError(f"{path} is not a list: got {text!r} ({why})") from error


def _read_word(text: str, options: list[Any]) -> Any:
    """Returns the value of a word for the first of some types that accepts it."""
    # bool and None before str, so that `true` and `none` are not read as strings.
    for option in sorted(options, key=lambda each: each not in _WORDS):
        known = _WORDS.get(option) or {str(each): each for each in choices(option)}
        word = text.lower() if option in _WORDS else text
        if word in known:
            return known[word]
        if option in (int, float, str):
            with contextlib.suppress(ValueError):
                return option(text)
    raise LookupError(text)


def _check_range(value: Any, text: str, path: str) -> None:
    """Raises ConfigError for a number that over- or underflowed in reading it."""
    too_large = value in (math.inf, -math.inf) and "inf" not in text.lower()
    too_small = value == 0 and re.search("[1-9]", re.split("[eE]", text)[0])
    if isinstance(value, float) and (too_large or too_small):
        raise ConfigError(f"{path} must be a number that a float can hold: got {text}")


def encode(value: Any, hint: Any, path: str = "") -> Any:
    """Returns `value` as JSON: tagged unions, tuples as lists, infinities as words.

    Raises:
      ConfigError: the value is not of type `hint`; names the path.
    """
    allowed = members(hint)
    if type(value) not in allowed.values():
        return words.plain(_convert(value, hint, path, encode))
    tag = {TAG: choice_name(type(value))} if len(allowed) > 1 else {}
    return tag | {
        name: encode(getattr(value, name), inner, _join(path, name))
        for name, inner in fields(type(value)).items()
    }


def decode(value: Any, hint: Any, path: str = "") -> Any:
    """Returns the value that `encode`, or a person, wrote.

    Missing keys get the class's defaults.

    Raises:
      ConfigError: unknown or missing key, unknown member, or a value of another type;
        names the path.
    """
    allowed = members(hint)
    if not (allowed and isinstance(value, dict)):
        items = tuple(value) if isinstance(value, list) else value
        converted = _convert(items, hint, path, decode)
        return tuple(converted) if isinstance(items, tuple) else converted
    tag, tree = next(iter(allowed)), value
    if len(allowed) > 1:
        tag, tree = value.get(TAG), {k: value[k] for k in value if k != TAG}
    # A list, because the tag may be any JSON value, which need not be hashable.
    if tag not in list(allowed):
        raise _misfit(f"{TAG!r}: {tag!r}{nearest(str(tag), allowed)}", hint, path)
    return _build(allowed[tag], tree, path)


def _build(cls: Any, tree: dict[str, Any], path: str) -> Any:
    """Returns the config of class `cls` whose fields are given as JSON."""
    hints = fields(cls)
    if unknown := set(tree) - set(hints):
        key = min(unknown)
        raise ConfigError(f"unknown key {_join(path, key)!r}{nearest(key, hints)}")
    for field in dataclasses.fields(cls):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if field.init and needed and field.name not in tree:
            raise ConfigError(f"{_join(path, field.name)} has no default: give it")
    arguments = {key: decode(tree[key], hints[key], _join(path, key)) for key in tree}
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _convert(value: Any, hint: Any, path: str, each: Callable[..., Any]) -> Any:
    """Returns a value that is not a config; a tuple as a list."""
    for option in alternatives(hint):
        candidate = words.number(value) if option is float else value
        if dataclasses.is_dataclass(option) or not fits(candidate, option):
            continue
        if typing.get_origin(option) is tuple:
            pairs = elements(option, candidate) or ()
            return [each(*pair, f"{path}[{n}]") for n, pair in enumerate(pairs)]
        try:
            return float(candidate) if option is float else candidate
        except OverflowError as error:
            raise ConfigError(f"{path}: {error}") from error
    raise _misfit(_show_json(value), hint, path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _misfit(got: str, hint: Any, path: str) -> ConfigError:
    return ConfigError(f"{path or 'the config'} must be {describe(hint)}: got {got}")


def _show_json(value: Any) -> str:
    try:
        return json.dumps(value, default=repr)
    except RecursionError:
        return "lists or objects nested too deeply"
