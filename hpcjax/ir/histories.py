"""All rules by name, and what those of a history make of a graph."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.ir.removals import (
    DeadDataflow,
    InlineNested,
    MapReduceFusion,
    RedundantArray,
)
from hpcjax.ir.rules import MapFusion, MapInterchange, MapTiling
from hpcjax.ir.sdfg import SDFG

RULES: Mapping[str, Any] = {
    rule.__name__: rule
    for rule in (
        MapFusion,
        MapReduceFusion,
        MapTiling,
        MapInterchange,
        RedundantArray,
        InlineNested,
        DeadDataflow,
    )
}


def replay(history: Iterable[Sequence[Any]], graph: SDFG) -> SDFG:
    """Returns what the rules of a history make of the graph that it began with.

    Args:
      history: `graph.history`, or what JSON makes of it.
      graph: the first.

    Raises:
      ConfigError: the history is of another graph, or names a rule or a field that
        there is not.
      CannotApply: a rule cannot be applied.
    """
    for place, (name, fields) in enumerate(history):
        if place == 0:
            first = fields.get("digest") if name == "graph" else None
            if first != graph.digest:
                raise ConfigError(
                    f"the history began with graph {first}, and {graph.name!r} is "
                    f"{graph.digest}"
                )
            continue
        if name not in RULES:
            raise ConfigError(f"there is no rule {name!r}{nearest(name, RULES)}")
        given = {key: _tuples(value) for key, value in fields.items()}
        wanted = sorted(each.name for each in dataclasses.fields(RULES[name]))
        if sorted(given) != wanted:
            raise ConfigError(f"{name} has fields {wanted}: got {sorted(given)}")
        graph = graph.apply(RULES[name](**given))
    return graph


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
