"""Whether today's code made a committed result, or repeats it.

A record is of this code if all digests that it holds of configs and code are those of
today. If they are not, `confirmation` can show on a sample of the runs that today's
code computes the same numbers, and writes so into the record.
"""

import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.runs import code, discover
from hpcjax.runs import config as configs
from hpcjax.runs.table_records import Record
from hpcjax.runs.tables import Runs

_OF_RUNS = ("the code", "the config")


# What a record is if its parts are of several ages: the first of these.
_WORST: tuple[code.Age, ...] = ("older code", "unknown", "confirmed", "this code")


class Age(NamedTuple):
    """How a record stands to today's code.

    Attributes:
      age: `"this code"`; `"confirmed"` if older code made it and today's repeats a
        sample of it bit for bit; `"older code"`; or `"unknown"`.
      reasons: what differs or is unknown, in words.
    """

    age: code.Age
    reasons: tuple[str, ...]

    @property
    def stale(self) -> bool:
        """Whether nothing says that today's code makes the same numbers."""
        return self.age not in ("this code", "confirmed")


def find_age(record: Record, root: pathlib.Path) -> Age:
    """Compares a record's digests with those of today's configs and code."""
    reduced = code.age(
        record.content.get("code"), code.of_reduction(record.table.reduce)
    )
    found = Counter(
        (which, what)
        for run in record.content.get("runs", ())
        for which, what in _compare_run(run, root)
    )
    found[reduced, "the reduction"] += reduced != "this code"
    found["older code", "the table"] += not is_of_table(record)
    total = len(record.content.get("runs", ()))
    differing = {key: count for key, count in found.items() if count}
    ages = {"this code", *(which for which, _ in differing)}
    age = next(which for which in _WORST if which in ages)
    reasons = (
        f"{what}{f' of {count} of {total} runs' * (what in _OF_RUNS)}: {which}"
        for (which, what), count in sorted(differing.items())
    )
    return Age(age, tuple(reasons))


def is_of_table(record: Record) -> bool:
    """Returns whether the runs of a record are those that its table asks for today."""
    tier, content = record.table.tier(record.tier), record.content
    wanted = set()
    for row, runs in tier.runs.items():
        tuned = content["tuned"].get(runs.like or row, {})
        chosen = {key: tuned.get(key) for key in runs.takes} if runs.like else tuned
        wanted |= {_key(row, runs, chosen, seed, False) for seed in runs.seeds}
        if runs.tune:
            wanted |= {
                _key(row, runs, trial, seed, True)
                for trial in runs.trials()
                for seed in runs.tune_seeds
            }
    held = {
        (
            run["row"],
            run["config"],
            tuple(sorted(run["overrides"].items())),
            bool(run.get("tuning")),
        )
        for run in content["runs"]
    }
    return held == wanted and content.get("devices", tier.devices) == tier.devices


def _key(
    row: str, runs: Runs, chosen: Mapping[str, Any], seed: int, tuning: bool
) -> tuple[Any, ...]:
    overrides = {**runs.overrides, **chosen, "seed": str(seed)}
    return row, runs.config, tuple(sorted(overrides.items())), tuning


def digests_now(run: Mapping[str, Any], root: pathlib.Path) -> dict[str, str]:
    """Returns the digests of config and code that a record's run would have today."""
    config = discover.load(run["config"], run["overrides"], root).config
    return {"config_digest": configs.digest(config), "code": code.of_run(config)}


def _compare_run(
    run: Mapping[str, Any], root: pathlib.Path
) -> Iterator[tuple[code.Age, str]]:
    try:
        now = digests_now(run, root)
    except ConfigError:
        yield "older code", "the config"
        return
    if run.get("confirmed") == now:
        yield "confirmed", "the code"
        return
    if run.get("config_digest") != now["config_digest"]:
        yield "older code", "the config"
    which = code.age(run.get("code"), now["code"])
    if which != "this code":
        yield which, "the code"
