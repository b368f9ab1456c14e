"""Overrides `key=value` of a config, checked before anything is imported or compiled.

A key is a path such as `optimizer.lr`. A member of a union of configs is chosen by its
name, `optimizer=sgd`, which sets that member's defaults. Choices are applied before the
keys below them, in whatever order they are given.
"""

import dataclasses
import difflib
import functools
import operator
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import docstring_parser

from hpcjax.core.config import alternatives, describe
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import values

_CLOSE = 0.5
_UNIT = re.compile(
    r"(seconds|hours|days|joules|watts|bytes( per second)?"
    r"|[mnµ]s|[KMGT]i?B(/s)?|[KMGT]bit/s|[KMG]Hz|K|dB)\b"
)
_PART = 0.85  # of a key's last word: a whole key that is as like comes first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a config.

    Attributes:
      path: such as `optimizer.lr`.
      hint: the field's type.
      value: its value in the config; for a chosen config the member's name.
      group: whether the value is a config with keys of its own.
      settable: False for a group without alternatives.
      help: the field's line of the class's docstring.
    """

    path: str
    hint: Any
    value: Any
    group: bool
    settable: bool
    help: str

    @property
    def type(self) -> str:
        """The field's type in words."""
        return describe(self.hint)

    @property
    def unit(self) -> str:
        """The unit with which the help begins; "" for others."""
        found = _UNIT.match(self.help)
        return found[0] if found else ""

    def __str__(self) -> str:
        held = (
            "no default"
            if self.value is dataclasses.MISSING
            else f"here {values.show(self.value)}"
        )
        text = f": {self.help}" if self.help else ""
        return f"{self.path!r} ({self.type}, {held}{text})"


@functools.cache
def _collect_help(cls: type) -> dict[str, str]:
    """Returns what a config's docstring, and those it extends, say of each field."""
    return {
        each.arg_name: " ".join((each.description or "").split())
        for base in reversed(cls.__mro__)
        for each in docstring_parser.parse(base.__doc__ or "").params
    }


def _walk(cls: type, tree: Mapping[str, Any], prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a config given as JSON, depth first."""
    helps = _collect_help(cls)
    for name, hint in values.fields(cls).items():
        held, path = tree.get(name, dataclasses.MISSING), prefix + name
        member, below = _member(hint, held)
        if not below and held is not dataclasses.MISSING:
            held = values.decode(held, hint, path)
        yield Key(
            path=path,
            hint=hint,
            value=member if below else held,
            group=below is not None,
            settable=_is_choice(hint) or not below,
            help=helps.get(name, ""),
        )
        if below:
            yield from _walk(below, tree[name], path + ".")


def _absent(
    cls: type,
    tree: Mapping[str, Any],
    seen: set[Any],
    prefix: str = "",
    above: tuple[type, ...] = (),
) -> Iterator[tuple[Key, str]]:
    """Yields keys of members that are not chosen, with the choice that has them.

    A member may have a field of its own kind: those `above` are not looked into again.
    Many members have one field, whose members are told once: `seen` collects these.
    """
    for name, hint in values.fields(cls).items():
        path, (_, below) = prefix + name, _member(hint, tree.get(name))
        for member, config_class in values.members(hint).items():
            inner, choice = tree.get(name, {}), f"{path}={member}"
            chosen = config_class is below
            place = path, config_class, chosen
            if place in seen:
                continue
            seen.add(place)
            if not chosen:
                inner = _defaults(config_class)
                yield from (
                    (key, choice) for key in _walk(config_class, inner, path + ".")
                )
            if config_class not in above:
                more = (*above, cls)
                yield from _absent(config_class, inner, seen, path + ".", more)


def _member(hint: Any, held: Any) -> tuple[str, type | None]:
    """Returns name and class of the config in a field given as JSON, if it is one."""
    allowed = values.members(hint)
    if not (allowed and isinstance(held, dict)):
        return "", None
    member = held.get(values.TAG, next(iter(allowed)))
    return member, allowed[member]


def _is_choice(hint: Any) -> bool:
    return bool(values.members(hint)) and len(alternatives(hint)) > 1


def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the defaults of a config class as JSON, without fields that have none."""
    defaults = {}
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING:
            defaults[field.name] = values.encode(
                default, values.fields(cls)[field.name]
            )
    return defaults


def keys(config: Any, pairs: Mapping[str, Any] | None = None) -> dict[str, Key]:
    """Returns the keys of a config by path, including those of its members.

    With `pairs` they are those of the config that `parse` would return, also where it
    would refuse the combination.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Config:
      ...   steps: int = 3
      >>> str(keys(Config())["steps"])
      "'steps' (int, here 3)"
    """
    tree = _change(config, pairs or {})
    return {key.path: key for key in _walk(type(config), tree)}


def pairs(args: Iterable[str]) -> dict[str, str]:
    """Splits `key=value` arguments.

    Raises:
      ConfigError: an argument without `=`, or a key given twice.

    Examples:
      >>> pairs(["optimizer.lr=0.3", "seed=1"])
      {'optimizer.lr': '0.3', 'seed': '1'}
    """
    by_key: dict[str, str] = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise ConfigError(f"overrides are written key=value: got {arg!r}")
        if key in by_key:
            raise ConfigError(f"key given twice: {key}={by_key[key]} and {arg}")
        by_key[key] = value
    return by_key


def parse(config: Any, pairs: Mapping[str, Any]) -> Any:
    """Returns `config` with some keys changed.

    Args:
      config: a frozen dataclass.
      pairs: `{path: text}`; a value that is not a string is taken as it is.

    Raises:
      ConfigError: unknown key (names the nearest one), key of a member that is not
        chosen, value for a group, value of another type, or a combination that the
        config refuses.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Config:
      ...   widths: tuple[int, ...] = (3,)
      >>> parse(Config(), {"widths": "[64,10]"})
      Config(widths=(64, 10))
    """
    return values.decode(_change(config, pairs), type(config))


def _change(config: Any, pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a config with some keys changed, not checked as a whole."""
    cls = type(config)
    tree = values.encode(config, cls)
    for path in sorted(pairs, key=lambda path: path.count(".")):
        known = {key.path: key for key in _walk(cls, tree)}
        if path not in known:
            raise ConfigError(_unknown(path, known, list(_absent(cls, tree, set()))))
        if not known[path].settable:
            raise ConfigError(_is_group(known[path], pairs[path], known))
        *above, name = path.split(".")
        holder = functools.reduce(operator.getitem, above, tree)
        holder[name] = _read(known[path], holder.get(name), pairs[path])
    return tree


def write(config: Any, path: str, value: Any) -> str:
    """Returns the text that `parse` reads as `value`; text is returned as it is.

    Raises:
      ConfigError: unknown key, or a value that no text means, such as a config.
    """
    if isinstance(value, str):
        return value
    try:
        return values.write(value, keys(config)[path].hint)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(key: Key, held: Any, given: Any) -> Any:
    """Returns the new value of a key as JSON."""
    allowed = values.members(key.hint)
    if not isinstance(given, str):
        return values.encode(given, key.hint, key.path)
    if given in allowed:
        tag = {values.TAG: given} if len(allowed) > 1 else {}
        return held if key.value == given else tag | _defaults(allowed[given])
    if allowed and not (
        given.lower() == "none" and type(None) in typing.get_args(key.hint)
    ):
        near = nearest(given, allowed)
        raise ConfigError(f"{key.path} must be {key.type}: got {given!r}{near}")
    return values.encode(values.read(given, key.hint, key.path), key.hint, key.path)


def _is_group(key: Key, given: Any, known: Mapping[str, Key]) -> str:
    inside = [path for path in known if path.startswith(key.path + ".")]
    return (
        f"{key.path} is a group and takes no value: got {key.path}={given}; "
        f"its keys: {', '.join(inside)}"
    )


def _unknown(path: str, known: Mapping[str, Key], absent: list[tuple[Key, str]]) -> str:
    needs = [choice for key, choice in absent if key.path == path]
    if needs:
        group = known[needs[0].partition("=")[0]]
        return (
            f"unknown key {path!r}: belongs to {' or '.join(dict.fromkeys(needs))}; "
            f"this config has {group.path}={values.show(group.value)}"
        )
    own = [key for key in known.values() if key.settable]
    tails = [key for key in own if key.path.endswith("." + path)]
    if tails:
        return f"unknown key {path!r}; did you mean {' or '.join(map(str, tails))}?"
    # Keys of this config come first, as `max` returns the first of equals.
    candidates = [(key, "") for key in own] + absent
    above, _, last = path.rpartition(".")
    if above in known:  # only what follows is wrong
        beside = [(key, of) for key, of in candidates if _above(key.path) == above]
        if hint := _nearest(path, beside):
            return hint
        if said := [key for key in own if _tells(key, last)]:
            return f"unknown key {path!r}; did you mean {' or '.join(map(str, said))}?"
        own = [key for key, of in beside if not of]
    elif hint := _nearest(path, candidates):
        return hint
    return f"unknown key {path!r}; keys: {', '.join(key.path for key in own)}"


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def _tells(key: Key, word: str) -> bool:
    """Returns whether a key has a name in another group, or a word in its help."""
    return key.path.endswith(f".{word}") or word in re.findall(r"\w+", key.help)


def _nearest(path: str, candidates: list[tuple[Key, str]]) -> str:
    """Returns an error that names the key most like a path; "" if none is like it."""
    scored = [(_likeness(path, key.path), key, choice) for key, choice in candidates]
    score, key, choice = max(scored, key=lambda each: each[0])
    also = f" of {choice}" if choice else ""
    hint = f"unknown key {path!r}; did you mean {key}{also}?"
    return hint if score >= _CLOSE else ""


def _likeness(given: str, path: str) -> float:
    if _above(path) == _above(given):
        path, given = path.rpartition(".")[2], given.rpartition(".")[2]
    ratio = difflib.SequenceMatcher(None, path, given).ratio()
    if "." in given:
        return ratio
    last = path.rpartition(".")[2]
    part = difflib.SequenceMatcher(None, last, given).ratio()
    return max(ratio, _PART * part)
