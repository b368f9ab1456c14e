"""Base class of configs: frozen values that are checked by the types of their fields.

A config is a frozen dataclass next to the mechanism it configures. Its module imports
no JAX, so that a wrong key is reported before JAX starts, and it names the function to
call, its `factory`, as text.

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class NoiseConfig(Config):
      factory: ClassVar[str] = "mine.noise:add_noise"

      scale: Annotated[float, Above(0)] = 1.0
      times: Count = 3
      shape: Literal["normal", "uniform"] = "normal"

A rule in `Annotated` is a function of name and value that raises ConfigError. What must
hold between fields is checked in `__post_init__`, after the base class's.

pydantic and msgspec were tried. pydantic checks as much, but takes 0.13 s to import and
2.5 ms a class (this: 1 ms), names no nearest choice and refuses what JAX traces;
msgspec does not check what a constructor is given.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from hpcjax.core import checks, files, parts
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.patterns import check_patterns


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Rule: a value of at least `least`.

    An integer `least`, as in `AtLeast(1)`, allows integers below 2**31; a float one, as
    in `AtLeast(1.0)`, allows finite numbers.

    Attributes:
      least: the smallest allowed value.
    """

    least: float

    def __call__(self, name: str, value: Any) -> None:
        """Raises ConfigError unless the rule holds."""
        if isinstance(self.least, int):
            checks.require_count(self.least, **{name: value})
        checks.require_finite(self.least, **{name: value})


@dataclasses.dataclass(frozen=True)
class Above:
    """Rule: a finite number that is larger than `bound`."""

    bound: float

    def __call__(self, name: str, value: Any) -> None:
        """Raises ConfigError unless the rule holds."""
        if checks.is_plain(value):
            good = self.bound < value < math.inf
            checks.require(
                good, f"{name} must be finite and > {self.bound}", **{name: value}
            )


@dataclasses.dataclass(frozen=True)
class Within:
    """Rule: a number in an interval, written such as `[0, 1)`."""

    interval: str

    def __call__(self, name: str, value: Any) -> None:
        """Raises ConfigError unless the rule holds."""
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        if checks.is_plain(value):
            above = value > low or (value == low and self.interval[0] == "[")
            below = value < high or (value == high and self.interval[-1] == "]")
            rule = f"{name} must be in {self.interval}"
            checks.require(above and below, rule, **{name: value})


def _is_float32(name: str, value: Any) -> None:
    checks.require_float32(**{name: value})


def _is_seed(name: str, value: Any) -> None:
    rule = f"{name} must be at least 0 and less than 2**32"
    checks.require(0 <= value < 2**32, rule, **{name: value})


def _is_file_name(name: str, value: str) -> None:
    files.check_name(value, name)


def _are_rules(name: str, value: Any) -> None:
    rule = f"{name} must be (regex, chosen) pairs, at least one"
    checks.require(bool(value), rule, **{name: value})
    check_patterns(name, [pattern for pattern, _ in value])


Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]
Several = Annotated[int, AtLeast(2)]
Bytes = Annotated[int, Above(0)]  # also of more than 2 GiB
Seed = Annotated[int, _is_seed]  # an unsigned number of 32 bits
Decay = Annotated[float, Within("[0, 1)")]
Share = Annotated[float, Within("(0, 1)")]
Fraction = Annotated[float, Within("(0, 1]")]
Positive = Annotated[float, Above(0)]
NotNegative = Annotated[float, AtLeast(0.0)]
Float32 = Annotated[float, _is_float32]  # zero or a positive number of that dtype
FileName = Annotated[str, _is_file_name]
Patterns = Annotated[tuple[str, ...], check_patterns]
PathRules = Annotated[tuple[tuple[str, bool], ...], _are_rules]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of configs.

    Attributes:
      factory: `"module:function"`, which `make` calls with the fields as arguments.
      smoke: `{field: text}`, overrides under which this is tiny and yet does all that
        it does.
      figures: `{"names": "dimensions: meaning"}`, of the result of an experiment, or
        those that a part adds to the result of a training.
    """

    factory: ClassVar[str] = ""
    smoke: ClassVar[Mapping[str, str]] = {}
    figures: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Raises TypeError with the nearest name if one given is that of no field."""
        _check_names(cls.__name__, given, [f.name for f in dataclasses.fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(type(self), **fields_of(self))

    @classmethod
    def of(cls, options: Mapping[str, Any], function: Callable[..., Any]) -> Self:
        """Returns the config with these fields, as `**options` of a function give them.

        `optax.inject_hyperparams` passes the options as one argument of that name: a
        dictionary under the key "options" is merged with the others, if no field is
        called so.

        Raises:
          TypeError: an option that is no field; has the nearest argument of `function`.
        """
        own = inspect.signature(function).parameters.values()
        named = [each.name for each in own if each.kind is not each.VAR_KEYWORD]
        names = [*named, *(f.name for f in dataclasses.fields(cls))]
        given = dict(options)
        if "options" not in names:
            given |= given.pop("options", {})
        _check_names(function.__name__, given, names)
        return cls(**given)

    def find_factory(self) -> Callable[..., Any]:
        """Returns the factory; imports its module, and JAX with it."""
        return find_function(self.factory)

    def make(self, *args: Any, **runtime: Any) -> Any:
        """Calls the factory with the fields and with what only a run knows."""
        return self.find_factory()(*args, **fields_of(self), **runtime)


def _check_names(of: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise TypeError(
                f"{of}() got an unexpected keyword argument {name!r}"
                f"{nearest(name, allowed)}"
            )


def find_function(place: str) -> Callable[..., Any]:
    """Returns the function at "module:function"; imports its module."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def fields_of(config: Any) -> dict[str, Any]:
    """Returns `{name: value}` of a dataclass, without converting nested ones.

    Examples:
      >>> fields_of(dataclasses.make_dataclass("C", ["width"])(3))
      {'width': 3}
    """
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def smoke_of(config: Any) -> dict[str, str]:
    """Returns `{path: text}`, the overrides that make a config and all its parts tiny.

    Those of a config win over what its parts say.

    Examples:
      >>> inner = dataclasses.make_dataclass("C", ["width"], frozen=True)
      >>> inner.smoke = {"width": "2"}
      >>> smoke_of(dataclasses.make_dataclass("D", ["model"], frozen=True)(inner(64)))
      {'model.width': '2'}
    """
    found: dict[str, str] = {}
    for name, value in fields_of(config).items():
        if dataclasses.is_dataclass(value):
            found |= {f"{name}.{path}": t for path, t in smoke_of(value).items()}
    return replace_parts(found, getattr(config, "smoke", {}))


def replace_parts(said: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Returns overrides in which `own` win; what they set anew keeps none from before.

    Examples:
      >>> replace_parts({"model.depth": "1", "steps": "9"}, {"model": "mlp"})
      {'steps': '9', 'model': 'mlp'}
    """
    replaced = tuple(f"{path}." for path in own)
    kept = {path: t for path, t in said.items() if not path.startswith(replaced)}
    return kept | dict(own)


def check_fields(cls: type, /, **values: Any) -> None:
    """Raises ConfigError unless each value is allowed for the field of its name.

    A function that takes a config's fields as arguments checks them with this. Numbers
    that JAX traces are not checked.

    Examples:
      >>> sizes = dataclasses.make_dataclass("C", [("width", Size), ("depth", Size)])
      >>> check_fields(sizes, width=3)
    """
    for name, value in values.items():
        _check(name, value, _hints(cls)[name])


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _check(name: str, value: Any, hint: Any) -> None:
    for option in alternatives(hint):
        plain, *rules = _unwrap(option)
        if fits(value, plain):
            if typing.get_origin(plain) is tuple:
                for place, (each, inner) in enumerate(elements(plain, value) or ()):
                    _check(f"{name}[{place}]", each, inner)
            for rule in rules:
                rule(name, value)
            return
    words = [str(c) for option in alternatives(hint) for c in choices(option)]
    near = nearest(value, words) if isinstance(value, str) and words else ""
    raise ConfigError(f"{name} must be {describe(hint)}: got {name}={value!r}{near}")


def _unwrap(hint: Any) -> tuple[Any, ...]:
    """Returns the type and the rules of `Annotated[type, rule, ...]`."""
    annotated = typing.get_origin(hint) is Annotated
    return typing.get_args(hint) if annotated else (hint,)


def choices(hint: Any) -> tuple[Any, ...]:
    """Returns the values that a `Literal` allows; nothing for any other hint."""
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def fits(value: Any, hint: Any) -> bool:
    """Says whether a value has the type `hint`, apart from rules and tuple elements."""
    if hint is float:
        # `bool` is a subclass of `int`. Whatever has a dtype is an array or is traced.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number or hasattr(value, "dtype")
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if allowed := choices(hint):
        # Types are compared, too, since True == 1 and 1 == 1.0.
        return any(value == c and type(value) is type(c) for c in allowed)
    kind = typing.get_origin(hint) or hint
    if kind is tuple and isinstance(value, tuple):
        return elements(hint, value) is not None
    return kind is Any or isinstance(value, kind)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union in order; `(hint,)` for any other hint."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def elements(hint: Any, items: Any) -> list[tuple[Any, Any]] | None:
    """Pairs a tuple's elements with their hints; None if their number is wrong."""
    args = typing.get_args(hint)
    # tuple[X, ...] has the arguments (X, Ellipsis): one hint for all elements.
    hints = args[:1] * len(items) if args[-1:] == (Ellipsis,) else args
    return list(zip(items, hints, strict=True)) if len(hints) == len(items) else None


def choice_name(cls: type) -> str:
    """Returns the name by which a config class is chosen, `sgd` for SgdConfig.

    That is the name it is listed under as a part, otherwise its class name in lower
    case without `Config`.
    """
    return parts.name_of(cls) or cls.__name__.removesuffix("Config").lower()


def describe(hint: Any) -> str:
    """Returns a type in words, such as `float | 'dynamic' | none` or `[int, ...]`."""
    hint, *_ = _unwrap(hint)
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
    return choice_name(hint) if dataclasses.is_dataclass(hint) else str(hint.__name__)
