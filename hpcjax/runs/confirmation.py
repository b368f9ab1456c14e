"""Showing on a sample that today's code repeats a committed result, bit for bit.

Any change of the loop makes every table of trainings one of older code, and to make
them all again takes hours. Most such changes change no number. `confirm_table` makes a
sample of a table's runs again, and where every bit of their results is the recorded
one, the record says that today's code was compared with the code that made it.
"""

import contextlib
import itertools
import logging
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hpcjax.core import provenance
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.files import write_json
from hpcjax.runs import ahead, build, code, directory, discover, results
from hpcjax.runs.record_age import digests_now, find_age, is_of_table
from hpcjax.runs.table_records import Record, find_records, read_record, record_path

log = logging.getLogger(__name__)


class Repeated(NamedTuple):
    """A run of a record that was made again.

    Attributes:
      row: of the table.
      title: its config, and what changes it.
      same: whether all bits of the results are equal.
    """

    row: str
    title: str
    same: bool


class Confirmation(NamedTuple):
    """What came out.

    Attributes:
      table: its id.
      repeated: the sample; empty if the record is of this code, or confirmed by it.
      total: number of all runs of the record.
      machine: `{what: (there, here)}`, why bits may differ although the code does not.
    """

    table: str
    repeated: tuple[Repeated, ...]
    total: int
    machine: Mapping[str, tuple[Any, Any]]

    @property
    def passed(self) -> bool:
        """Whether every run of the sample has the recorded bits."""
        return all(run.same for run in self.repeated)


def confirm_table(
    table_id: str, *, root: pathlib.Path | None = None, tier: str = "cpu"
) -> Confirmation:
    """Makes a sample of a committed table's runs again, and compares the results.

    The sample has a run of each row, and for rows that are tuned one of each code that
    was tried. Which one, the digest of today's code draws, so that nobody chooses it.
    Each run gets as many cores as it had, for with another number sums are added in
    another order. If all are equal, the record is written with today's digests beside
    the old ones.
    """
    root = root or pathlib.Path.cwd()
    tables = discover.find_tables(root)
    if table_id not in tables:
        raise ConfigError(f"unknown table {table_id!r}{nearest(table_id, tables)}")
    record = read_record(tables[table_id], tier, root)
    runs = record.content["runs"]
    if not find_age(record, root).stale:
        return Confirmation(table_id, (), len(runs), {})
    require_confirmable(record)
    now = [digests_now(run, root) for run in runs]
    sample = draw_sample(runs, now)
    devices = record.content.get("devices", 1)
    repeat((runs[index] for index in sample), root, devices)
    repeated = []
    for index in sample:
        found = directory.find_run(
            root,
            now[index]["config_digest"],
            ("done", "diverged"),
            devices=devices,
            code=now[index]["code"],
        )
        made = None if found is None else results.digest(build.read_run(found))
        run, same = runs[index], made == runs[index]["result"]
        changes = " ".join(f"{key}={text}" for key, text in run["overrides"].items())
        repeated.append(Repeated(run["row"], f"{run['config']} {changes}", same))
    machine = _compare_machines(record.content["provenance"])
    outcome = Confirmation(table_id, tuple(repeated), len(runs), machine)
    if outcome.passed:
        write_json(
            record_path(record.table, tier, root),
            {**record.content, "runs": _confirm(runs, now, sample)},
        )
    return outcome


def _compare_machines(there: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns what of processor and versions differs, `{name: (there, here)}`."""
    here = provenance.collect(devices=True)
    pairs = {"cpu": (there.get("cpu"), here["cpu"])}
    for name in set(there.get("versions", ())) & set(here["versions"]):
        pairs[name] = there["versions"][name], here["versions"][name]
    return {name: pair for name, pair in sorted(pairs.items()) if pair[0] != pair[1]}


def find_confirmable(tier: str, root: pathlib.Path) -> tuple[str, ...]:
    """Returns the tables whose records are of older code, but can be confirmed."""
    found = []
    for record in find_records(root):
        if record.tier == tier and find_age(record, root).stale:
            with contextlib.suppress(ConfigError):
                require_confirmable(record)
                found.append(record.table.id)
    return tuple(found)


def require_confirmable(record: Record) -> None:
    """Raises ConfigError unless a record's runs can be compared with today's."""
    name, runs = record.table.id, record.content["runs"]
    again = f"make it again: hpcjax table {name} --record"
    if record.table.benchmark:
        raise ConfigError(f"{name} measures time, which no run repeats; {again}")
    if not all(run.get("result") and run.get("cores") for run in runs):
        raise ConfigError(f"the record of {name} has runs without a digest; {again}")
    if any(run.get("parent") for run in runs):
        raise ConfigError(f"runs of {name} start from others of it; {again}")
    reduced = code.of_reduction(record.table.reduce)
    if record.content.get("code") != reduced or not is_of_table(record):
        raise ConfigError(f"{name} makes its table, or asks for runs, anew; {again}")


def draw_sample(
    runs: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, str]]
) -> list[int]:
    """Returns the places of the runs to repeat: one of each row and pair of codes."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, (run, today) in enumerate(zip(runs, now, strict=True)):
        tuning = bool(run.get("tuning"))
        key = (run["row"], tuning, *(() if not tuning else (run["code"],)))
        groups.setdefault((*key, today["code"]), []).append(index)
    return [group[int(key[-1], 16) % len(group)] for key, group in groups.items()]


def repeat(runs: Iterable[Mapping[str, Any]], root: pathlib.Path, devices: int) -> None:
    """Makes runs of a record again, each on as many cores as it had.

    Raises:
      ConfigError: there are fewer cores here.
    """

    def count(run: Mapping[str, Any]) -> int:
        return run["cores"]

    here = len(provenance.usable_cores())
    for cores, group in itertools.groupby(sorted(runs, key=count), count):
        if here and cores > here:
            raise ConfigError(f"made on {cores} cores: here are {here}")
        wanted = [ahead.Wanted(run["config"], run["overrides"]) for run in group]
        parallel = max(1, here // cores)
        log.info("%d runs again, %d at a time", len(wanted), parallel)
        options = {"root": root, "devices": devices, "cores": cores}
        ahead.make_runs(wanted, parallel, fresh=True, **options)


def _confirm(
    runs: Iterable[Mapping[str, Any]],
    now: Iterable[Mapping[str, str]],
    sample: Iterable[int],
) -> list[dict[str, Any]]:
    """Returns runs with today's digests, and which of them were repeated."""
    chosen = set(sample)
    return [
        {**run, "confirmed": dict(today), "repeated": index in chosen}
        for index, (run, today) in enumerate(zip(runs, now, strict=True))
    ]
