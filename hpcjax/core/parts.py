"""The registry of parts that a training config combines; imports no JAX.

A part is a config class with a kind ("optimizer", "model", ...) and a name. A room
lists its parts in `PARTS = {kind: {name: class}}`, with the class by its name in the
room. Further parts come from installed packages, through entry points of the group
`hpcjax.parts` that name such a dict, and from `experiments/<paper>/parts.py` of a root;
there classes are given as "module:Class". Every listed part is accepted by config
fields of its kind, shown by `hpcjax list --parts` and run by the tests over all parts.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import operator
from collections.abc import Mapping
from typing import Any

from hpcjax.core.errors import ConfigError, nearest

KINDS = (
    "dataset",
    "input",
    "model",
    "optimizer",
    "schedule",
    "exchange",
    "averaging",
    "backward",
    "state",
    "sparsity",
    "sharing",
    "parallel",
    "codec",
)
ROOMS = (
    *("data", "models", "optim", "compress", "collectives", "averaging", "sharding"),
    "train",
)
GROUP = "hpcjax.parts"

Listing = Mapping[str, Mapping[str, str]]

_root_listings: dict[str, Listing] = {}
_changes = itertools.count(1)
_version = 0


@dataclasses.dataclass(frozen=True)
class Part:
    """Marks a config field that holds a part: `Annotated[Any, Part("model")]`.

    Attributes:
      kind: one of `KINDS`.
      optional: whether the field may also be None.
    """

    kind: str
    optional: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Raises ConfigError unless the value is such a part."""
        known = classes(self.kind)
        if type(value) in known.values() or (value is None and self.optional):
            return
        none = " or None" if self.optional else ""
        raise ConfigError(
            f"{name} must be a config of {', '.join(known)}{none}: got {value!r}"
        )


def classes(kind: str) -> dict[str, type]:
    """Returns the config classes of a kind by name, imported.

    Raises:
      ConfigError: two parts of one name, or a listing that names no dataclass.
    """
    return {name: _load(kind, name, at) for name, at in list_places(kind).items()}


def list_places(kind: str) -> dict[str, str]:
    """Returns `{name: "module:Class"}` of a kind's parts, without importing them."""
    places: dict[str, str] = {}
    for source, listing in (_built_in() | _installed() | _root_listings).items():
        for unknown in set(listing) - set(KINDS):
            near = nearest(unknown, KINDS)
            raise ConfigError(f"{source} lists parts of no kind {unknown!r}{near}")
        for name, place in listing.get(kind, {}).items():
            if name in places:
                raise ConfigError(
                    f"two {kind}s are named {name!r}: {places[name]} and {place}"
                )
            places[name] = place
    return places


def name_of(cls: type) -> str | None:
    """Returns the name that a class is listed under; None if it is not listed."""
    place = f"{cls.__module__}:{cls.__qualname__}"
    return _names(_version).get(place)


def version() -> int:
    """Returns a number that changes whenever the listed parts do; keys of caches."""
    return _version


def list_of_root(listings: Mapping[str, Listing]) -> None:
    """Replaces the listings that come from roots, `{source: listing}`."""
    global _version  # noqa: PLW0603 - what a process has imported is global, too
    if _root_listings != listings:
        _root_listings.clear()
        _root_listings.update(listings)
        _version = next(_changes)


def union_of(hint: Any) -> Any:
    """Returns the union of all parts that a marked hint allows; None for others."""
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, Part):
            allowed = (*classes(mark.kind).values(), *[None] * mark.optional)
            return functools.reduce(operator.or_, allowed)
    return None


@functools.cache
def _built_in() -> dict[str, Listing]:
    listings: dict[str, Listing] = {}
    for room in ROOMS:
        module = importlib.import_module(f"hpcjax.{room}")
        listings[module.__name__] = {
            kind: {name: f"{module.__name__}:{cls}" for name, cls in parts.items()}
            for kind, parts in module.PARTS.items()
        }
    return listings


@functools.cache
def _installed() -> dict[str, Listing]:
    points = importlib.metadata.entry_points(group=GROUP)
    return {f"{GROUP} {point.name} ({point.value})": point.load() for point in points}


def _load(kind: str, name: str, place: str) -> type:
    module, _, cls = place.partition(":")
    try:
        part = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} is not at {place}: {error}") from error
    if not isinstance(part, type) or not dataclasses.is_dataclass(part):
        raise ConfigError(f"{kind} {name!r} must be a config dataclass: {place}")
    return part


@functools.cache
def _names(_: int) -> dict[str, str]:
    """Returns `{"module:Class": name}`; the argument is `_version`, the cache's key."""
    names = {}
    for kind in KINDS:
        for name, cls in classes(kind).items():
            names[f"{cls.__module__}:{cls.__qualname__}"] = name
    return names
