"""Which code made a result: whether a run, or a committed table, is of today's.

A run is of the code that its config's classes and the `run` of its experiment depend
on, a table besides of what its `reduce` depends on; see `core.sources`.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from hpcjax.core.sources import Sources

Age = Literal["this code", "older code", "unknown"]
_PACKAGES = ("hpcjax", "experiments")
# What `Context.train` calls, which an experiment reaches by its context alone.
_TRAINING = ("hpcjax.train.loop:fit", "hpcjax.runs.results:history")


def of_run(config: Any, *, fresh: bool = False) -> str:
    """Returns the digest of all code that a run of a config depends on, 16 hex digits.

    Args:
      config: the config; its module must define `run`.
      fresh: read the files as they are now, instead of as they were when this process
        first asked.
    """
    classes = {type(each) for each in _parts(config)}
    places = {f"{cls.__module__}:{cls.__qualname__}" for cls in classes}
    places.add(f"{type(config).__module__}:run")
    if hasattr(config, "train"):
        places |= {*_TRAINING}
    return _digest(places, fresh)


def of_function(function: Callable[..., Any], *, fresh: bool = False) -> str:
    """Returns the digest of the code that a function at a module's top level needs."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = function.__qualname__.partition(".")[0]
    whole = not name.isidentifier()  # a lambda
    return _digest({f"{function.__module__}:{'*' if whole else name}"}, fresh)


def age(recorded: str | None, now: str) -> Age:
    """Returns how a recorded digest stands to that of the code as it is."""
    if not recorded:
        return "unknown"
    return "this code" if recorded == now else "older code"


def forget() -> None:
    """Lets this process read the files again, as after its code was loaded anew."""
    _read_once.cache_clear()


def _digest(places: set[str], fresh: bool) -> str:
    packages = {place.partition(".")[0].partition(":")[0] for place in places}
    used = tuple(sorted(packages.union(_PACKAGES) & set(sys.modules)))
    # The folders of `experiments` are those of the roots in use.
    folders = tuple(str(getattr(sys.modules[name], "__path__", "")) for name in used)
    sources = Sources(used) if fresh else _read_once(used, folders)
    return sources.digest(places)


@functools.cache
def _read_once(packages: tuple[str, ...], folders: tuple[str, ...]) -> Sources:
    return Sources(packages)


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
