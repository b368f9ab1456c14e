"""One value of a config: in words, read from text, to JSON and back checked.

tyro reads scalars, YAML splits `[64,10]`, cattrs codes JSON; what is here adds the
path to their errors, and makes cattrs refuse a value of another JSON type.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

import cattrs
import tyro
import yaml
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import words

TAG = "type"
_JSON_TYPES = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    types.NoneType: (),
}
_CONVERTER = make_converter(
    forbid_extra_keys=True, unstruct_collection_overrides={tuple: list}
)
_CONVERTER.register_unstructure_hook(float, words.plain)


class _Misfit(Exception):
    """The value, its argument, is not of the type asked for."""


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union in order; any other hint is its only member."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


@functools.cache
def members(hint: Any) -> dict[str, type]:
    """Returns `{"sgd": SgdConfig, ...}` for the dataclasses among a hint's members.

    Raises:
      ConfigError: two of them have the same name, or one has a field named `type`.
    """
    found: dict[str, type] = {}
    for member in filter(dataclasses.is_dataclass, alternatives(hint)):
        if name(member) in found:
            raise ConfigError(f"two members of {hint} are named {name(member)!r}")
        if TAG in fields(member):
            raise ConfigError(f"{member.__name__} may not have a field named {TAG!r}")
        found[name(member)] = member
    return found


def name(cls: type) -> str:
    """Returns the name by which a config class is chosen, `sgd` for SgdConfig."""
    return cls.__name__.removesuffix("Config").lower()


@functools.cache
def fields(cls: Any) -> dict[str, Any]:
    """Returns `{field name: type hint}` of a config dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def describe(hint: Any) -> str:
    """Returns a type in words, such as `float | 'dynamic' | none` or `[int, ...]`."""
    args = typing.get_args(hint)
    if len(alternatives(hint)) > 1:
        return " | ".join(map(describe, args))
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(repr, args))
    if typing.get_origin(hint) is tuple:
        inner = ("..." if arg is Ellipsis else describe(arg) for arg in args)
        return f"[{', '.join(inner)}]"
    if hint is types.NoneType:
        return "none"
    return name(hint) if dataclasses.is_dataclass(hint) else str(hint.__name__)


def show(value: Any) -> str:
    """Returns a value for a person to read: `[64,10]`, `none`, `true`, `sgd`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(show, value))}]"
    return name(type(value)) if dataclasses.is_dataclass(value) else str(value)


def same(left: Any, right: Any) -> bool:
    """Says whether two values are equal; NaN equals NaN, in tuples too."""
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
            if same(read(text, hint, ""), value):
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
    parts = alternatives(hint)
    (many, *_) = [*(h for h in parts if typing.get_origin(h) is tuple), None]
    plain = [h for h in parts if h is not many and h not in members(hint).values()]
    items = _split(text, path) if many else text
    if isinstance(items, list):
        pairs = _elements(many, items) if many else None
        if pairs is not None:
            return tuple(read(*p, f"{path}[{place}]") for place, p in enumerate(pairs))
    elif plain and isinstance(text, str):
        with contextlib.suppress(SystemExit):
            value = _read_scalar(text, plain)
            _check_range(value, text, path)
            return value
    elif not many and not plain:
        raise ConfigError(f"{path} is a config: it cannot be written in one override")
    form = ", written such as [64,10]" if many else ""
    raise ConfigError(f"{path} must be {describe(hint)}{form}: got {text!r}")


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


def _elements(hint: Any, items: Any) -> list[tuple[Any, Any]] | None:
    """Pairs a tuple's elements with their hints; None if their number is wrong."""
    args = typing.get_args(hint)
    hints = args[:1] * len(items) if args[-1] is Ellipsis else args
    if len(hints) != len(items):
        return None
    return list(zip(items, hints, strict=True))


def _union(options: Iterable[Any]) -> Any:
    return functools.reduce(operator.or_, options)


def _read_scalar(text: str, options: list[Any]) -> Any:
    """Has tyro read one word; it answers a wrong one with SystemExit."""
    word = text.lower().capitalize()
    kind = {"None": types.NoneType, "True": bool, "False": bool}.get(word)
    flag = f"--value={word if kind in options else text}"
    form = dataclasses.make_dataclass("Form", [("value", _union(options))])
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        return tyro.cli(form, args=[flag], config=(tyro.conf.FlagConversionOff,)).value


def _check_range(value: Any, text: str, path: str) -> None:
    """Refuses a number that became infinite or zero because no float holds it."""
    too_large = value in (math.inf, -math.inf) and "inf" not in text.lower()
    too_small = value == 0 and re.search("[1-9]", re.split("[eE]", text)[0])
    if isinstance(value, float) and (too_large or too_small):
        raise ConfigError(f"{path} must be a number that a float can hold: got {text}")


def encode(value: Any, hint: Any, path: str = "") -> Any:
    """Returns `value` as JSON: tagged unions, tuples as lists, infinities as words.

    Raises:
      ConfigError: the value is not of type `hint`.
    """
    _prepare(hint)
    checked = decode(_CONVERTER.unstructure(value, hint), hint, path)
    return _CONVERTER.unstructure(checked, hint)


def decode(value: Any, hint: Any, path: str = "") -> Any:
    """Returns the value that `encode` wrote; what a hand wrote wrongly is an error.

    Missing keys take the class's defaults.

    Raises:
      ConfigError: unknown or missing key, unknown member, or a value of another type;
        names the path.
    """
    _prepare(hint)
    try:
        return _CONVERTER.structure(value, hint)
    except (cattrs.BaseValidationError, _Misfit, OverflowError) as error:
        raise _explain(error, hint, path) from error


def _explain(error: Exception, hint: Any, path: str) -> Exception:
    """Says what the first error of cattrs' tree of errors is, and where."""
    while isinstance(
        error, cattrs.ClassValidationError | cattrs.IterableValidationError
    ):
        noted, others = error.group_exceptions()
        error, note = noted[0] if noted else (others[0], None)
        if note is not None:
            hint = note.type
            step = getattr(note, "name", None)
            path += f".{step}" if step else f"[{note.index}]"
    path = path.lstrip(".")
    match error:
        case _Misfit():
            must = f"{path or 'the config'} must be {describe(hint)}"
            return ConfigError(f"{must}: got {error}")
        case cattrs.ForbiddenExtraKeysError():
            key = min(error.extra_fields)
            near = nearest(key, fields(error.cl))
            return ConfigError(f"unknown key {f'{path}.{key}'.lstrip('.')!r}{near}")
        case KeyError():
            return ConfigError(f"{path} has no default: give it")
        case ValueError() | OverflowError():
            return ConfigError(f"{path}: {error}" if path else str(error))
    return error


@functools.cache
def _prepare(hint: Any) -> None:
    """Teaches the converter a hint and all inside: strict types, tags of unions."""
    args = () if typing.get_origin(hint) is Literal else typing.get_args(hint)
    for part in fields(hint).values() if dataclasses.is_dataclass(hint) else args:
        if part is not Ellipsis:
            _prepare(part)
    some = [part for part in alternatives(hint) if part is not types.NoneType]
    allowed, inner = members(hint), _union(some) if some else hint
    if len(allowed) > 1:
        configure_tagged_union(inner, _CONVERTER, name, TAG)
        _CONVERTER.register_unstructure_hook_func(lambda each: each == hint, _tag)
    scalar = hint in _JSON_TYPES or not some
    if scalar:
        hook = lambda value, cls: cls(value)  # noqa: E731
    elif len(some) > 1 and not allowed:
        hook = functools.partial(_first, some)
    else:
        hook = _CONVERTER.get_structure_hook(inner)

    def structure(value: Any, _: Any) -> Any:
        if value is None and len(some) < len(alternatives(hint)):
            return None
        if not _fits(value, hint):
            raise _Misfit(_show_json(value))
        tag = value.get(TAG) if len(allowed) > 1 else None
        # A list, because a tag that a hand wrote may have no hash.
        if len(allowed) > 1 and tag not in list(allowed):
            raise _Misfit(f"{TAG!r}: {tag!r}{nearest(str(tag), allowed)}")
        return hook(value, inner)

    if scalar:  # cattrs looks at these before any predicate
        _CONVERTER.register_structure_hook(hint, structure)
    else:
        _CONVERTER.register_structure_hook_func(lambda each: each == hint, structure)
    if typing.get_origin(hint) is tuple:
        to_list = functools.partial(
            _to_list, hint, _CONVERTER.get_unstructure_hook(hint)
        )
        _CONVERTER.register_unstructure_hook_func(lambda each: each == hint, to_list)


def _fits(value: Any, hint: Any) -> bool:
    """Says whether JSON of this outer form may be of a type; looks at no element."""
    if hint in _JSON_TYPES:
        word = hint is float and isinstance(value, str) and value in words.WORDS
        return word or type(value) in _JSON_TYPES[hint]
    if typing.get_origin(hint) is Literal:
        return any(value == x and type(value) is type(x) for x in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and _elements(hint, value) is not None
    return isinstance(value, dict) or not members(hint)


def _first(options: list[Any], value: Any, _: Any) -> Any:
    for option in options:
        with contextlib.suppress(_Misfit, cattrs.BaseValidationError):
            return _CONVERTER.structure(value, option)
    raise _Misfit(_show_json(value))


def _show_json(value: Any) -> str:
    try:
        return json.dumps(value, default=repr)
    except RecursionError:
        return "lists or objects nested too deeply"


def _tag(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    return {TAG: name(type(value)), **_CONVERTER.unstructure(value)}


def _to_list(hint: Any, hook: Callable[[Any], Any], value: Any) -> Any:
    # What is no such tuple is written as text, which `decode` refuses with its path.
    good = isinstance(value, tuple) and _elements(hint, value) is not None
    return hook(value) if good else repr(value)
