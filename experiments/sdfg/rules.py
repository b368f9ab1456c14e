"""Every rule on drawn programs: how often it applies, is refused, and is wrong."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from experiments.sdfg import programs
from hpcjax import ir, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

ORDERS = ("forward", "reverse", "drawn")
CONTROLS = {
    "fusion, aliases allowed": ("MapFusion", {"aliases": False}),
    "tiling, not cut": ("MapTiling", {"cut": False}),
    "reduction, not initialised": ("MapReduceFusion", {"initialises": False}),
}
# Figures of why rules were refused.
CAUSES = {
    "alias": "alias",
    "cover": "cover",
    "ranges": "ranges",
    "between": "nothing between",
    "path": "path",
    "resolution": "conflict resolution",
}
NAMES = (
    *("MapFusion", "MapReduceFusion", "MapTiling", "MapInterchange"),
    *("RedundantArray", "InlineNested", "DeadDataflow", *CONTROLS),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Drawn programs.

    Attributes:
      programs: how many.
      seed: of the first; others follow.
    """

    smoke: ClassVar[Mapping[str, str]] = {"programs": "3"}
    figures: ClassVar[Mapping[str, str]] = {
        **{
            name: f"rule: {what}"
            for name, what in {
                "applied": "times that a rule was applied",
                "refused": "times that it was refused",
                **{
                    name: f"of these, for its condition {c!r}"
                    for name, c in CAUSES.items()
                },
                "checks": "results that were compared, in three orders",
                "wrong": "of these, that differ or are not valid",
                "wrong_share": "percent of the checks",
            }.items()
        }
    }

    programs: config.Size = 500
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the rules."""
        return {"rule": NAMES}


def rules() -> "dict[str, Any]":
    """Returns all rules by name, and those that lack a condition."""
    made = {
        name: dataclasses.dataclass(frozen=True)(type(base, (ir.RULES[base],), lacking))
        for name, (base, lacking) in CONTROLS.items()
    }
    return {name: made.get(name) or ir.RULES[name] for name in NAMES}


def judge(graph: "ir.SDFG", rule: Any) -> Iterator[tuple[str, int]]:
    """Yields for each match "applied" or why not, and how many checks are wrong."""
    matches = rule.matches(graph)
    if not matches:
        return
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.integers(-9, 9, [size.constant for size in each.shape])
        for name, each in graph.arrays.items()
        if not each.transient
    }
    wanted = ir.interpret(graph, inputs)
    if issubclass(rule, ir.MapTiling):  # Sizes 2 and 3 in turns.
        matches = [rule.matches(graph, 2 + n % 2)[n] for n in range(len(matches))]
    for each in matches:
        try:
            made = graph.apply(each)
        except ir.CannotApply as error:
            yield error.cause, 0
        else:
            yield "applied", _wrong(made, inputs, wanted)


def _wrong(
    graph: "ir.SDFG", inputs: Mapping[str, Any], wanted: Mapping[str, Any]
) -> int:
    """Returns in how many orders a graph differs, or has a race; all if not valid."""
    try:
        ir.check(graph)
    except ConfigError:
        return len(ORDERS)
    return sum(not _same(graph, inputs, wanted, order) for order in ORDERS)


def _same(
    graph: "ir.SDFG", inputs: Mapping[str, Any], wanted: Mapping[str, Any], order: Any
) -> bool:
    try:
        found = ir.interpret(graph, inputs, order=order, valid=True)
    except ConfigError:
        return False
    return all(np.array_equal(wanted[n], found[n], equal_nan=True) for n in wanted)


def count(
    graphs: "list[ir.SDFG]", names: Iterable[str] = NAMES
) -> "dict[str, collections.Counter[str]]":
    """Returns for each rule how often what happened; wrong checks as "wrong"."""
    found = {}
    every = rules()
    for name in names:
        rule = every[name]
        found[name] = collections.Counter[str]()
        for graph in graphs:
            for what, wrong in judge(graph, rule):
                found[name][what] += 1
                found[name]["wrong"] += wrong
    return found


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Applies every rule wherever its pattern is, and compares."""
    graphs = [programs.draw(cfg.seed + n) for n in range(cfg.programs)]
    rows = list(count(graphs).values())
    applied, wrong = ([row[what] for row in rows] for what in ("applied", "wrong"))
    checks = [len(ORDERS) * n for n in applied]
    return {
        "applied": applied,
        "refused": [row.total() - row["applied"] - row["wrong"] for row in rows],
        **{name: [row[cause] for row in rows] for name, cause in CAUSES.items()},
        "checks": checks,
        "wrong": wrong,
        "wrong_share": [
            100 * w / max(n, 1) for w, n in zip(wrong, checks, strict=True)
        ],
    }
