"""Which code made a result: whether a run, or a committed table, is of today's.

A run is of the code that its config's classes and the `run` of its experiment depend
on, a table besides of what its `reduce` depends on; see `core.sources`.
"""

import dataclasses
import functools
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from hpcjax.core.errors import ConfigError
from hpcjax.core.sources import Sources

Age = Literal["this code", "confirmed", "older code", "unknown"]
_readings = itertools.count(1)
_PACKAGES = ("hpcjax", "experiments")
# What every run has, or a training has by its context, without that a name says so.
_ALWAYS = ("hpcjax.sharding.mesh:data_mesh",)
_TRAINING = ("hpcjax.runs.context:Context",)
# How the rows of a table are joined and a tuned row is chosen.
_TABLES = tuple(
    f"hpcjax.runs.results:{name}" for name in ("over_seeds", "least", "smoothed")
)
# Errors, folders, locks, terminals: they say what happened, and change no number.
_IGNORED = (
    "hpcjax",
    *(f"hpcjax.core.{name}" for name in ("errors", "files", "parts", "provenance")),
    *(
        f"hpcjax.runs.{name}"
        for name in (
            "config",
            "directory",
            "discover",
            "lock",
            "overrides",
            "places",
            "progress",
            "run_directory",
            "signals",
            "values",
            "words",
        )
    ),
    *(f"hpcjax.train.{name}" for name in ("watchdog", "writers")),
)


class CodeChanged(ConfigError):
    """The code has changed while it ran: what it has made cannot be traced."""


def of_run(config: Any, *, reading: int = 0) -> str:
    """Returns the digest of all code that a run of a config depends on, 16 hex digits.

    Args:
      config: the config; its module must define `run`.
      reading: 0 for the files as they were when this process first asked; another
        number from `read_again` for what they held then.
    """
    classes = {type(each) for each in _parts(config)}
    places = {f"{cls.__module__}:{cls.__qualname__}" for cls in classes}
    places.add(f"{type(config).__module__}:run")
    places |= {*_ALWAYS, *(_TRAINING if hasattr(config, "train") else ())}
    places.update(getattr(config, "uses", ()))  # what it names, "module:function"
    return _digest(places, reading)


def of_reduction(function: Callable[..., Any]) -> str:
    """Returns the digest of the code that makes a table of its runs.

    Args:
      function: the table's `reduce`, from the top level of a module; or a partial one,
        such as `reduce.of_columns` makes, which depends on all that it is given.
    """
    places, given = set(_TABLES), []
    for each in _depends(function):
        if callable(each):
            places.add(_place_of(each))
        else:
            given.append(each)
    found = _digest(places, 0)
    if not given:
        return found
    return hashlib.sha256(f"{found} {given}".encode()).hexdigest()[:16]


def _depends(given: Any) -> Iterator[Any]:
    """Yields a function, or what a partial one calls and is given, to the last value.

    Functions are yielded as they are, all else as text.
    """
    if isinstance(given, functools.partial):
        for each in (given.func, *given.args, *given.keywords.items()):
            yield from _depends(each)
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from _depends(each)
    elif isinstance(given, dict):
        yield from _depends(list(given.items()))
    else:
        plain = not callable(given) or isinstance(given, type)
        yield repr(given) if plain else given


def _place_of(function: Callable[..., Any]) -> str:
    """Returns "module:name" of a function; of one without a name the whole module."""
    function = inspect.unwrap(function)
    *within, name = function.__qualname__.split(".<locals>.")
    if not name.isidentifier():  # a lambda, whose arguments may stand anywhere
        return f"{function.__module__}:*"
    return f"{function.__module__}:{(*within, name)[0].partition('.')[0]}"


def of_package(name: str) -> str:
    """Returns the digest of all that a package offers, and of what that depends on."""
    return _digest({f"{name}:*"}, 0)


def age(recorded: str | None, now: str) -> Age:
    """Returns how a recorded digest stands to that of the code as it is."""
    if not recorded:
        return "unknown"
    return "this code" if recorded == now else "older code"


def forget() -> None:
    """Lets this process read the files again, as after its code was loaded anew."""
    _read.cache_clear()


def read_again() -> int:
    """Returns a number by which `of_run` reads the files as they are now."""
    return next(_readings)


def _digest(places: set[str], reading: int) -> str:
    packages = {place.partition(".")[0].partition(":")[0] for place in places}
    used = tuple(sorted(packages.union(_PACKAGES) & set(sys.modules)))
    # The folders of `experiments` are those of the roots in use.
    folders = tuple(str(getattr(sys.modules[name], "__path__", "")) for name in used)
    return _read(used, folders, reading).digest(places)


@functools.lru_cache(maxsize=8)
def _read(packages: tuple[str, ...], folders: tuple[str, ...], reading: int) -> Sources:
    return Sources(packages, _IGNORED)


def _parts(config: Any) -> Iterator[Any]:
    """Yields a config and all that are in it."""
    if dataclasses.is_dataclass(config):
        yield config
        for field in dataclasses.fields(config):
            yield from _parts(getattr(config, field.name))
    elif isinstance(config, (tuple, list)):
        for each in config:
            yield from _parts(each)
    elif isinstance(config, dict):
        yield from _parts(list(config.values()))
