"""Committed results of tables: written, read, judged anew and compared.

A record `experiments/<paper>/results/<table>.<tier>.json` holds a table's cells, its
verdicts, and of each run the config with the digests of config, code and result, by
which anyone can tell whether today's code made it; see `record_age`.
"""

import base64
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from hpcjax.core import provenance
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.core.files import read_object, write_json
from hpcjax.runs import code, discover, packing, words
from hpcjax.runs.tables import Table, TableResult, Verdict, judge

# Bytes that a record may hold of what only a picture needs.
_FOR_PICTURE = 60_000
# Times measured twice on a machine shared with others may differ by this factor.
_SLACK = 2


class Record(NamedTuple):
    """A committed result.

    Attributes:
      table: the definition of its table.
      tier: its tier.
      content: what the file holds.
    """

    table: Table
    tier: str
    content: Mapping[str, Any]


def record_path(table: Table, tier: str, root: pathlib.Path) -> pathlib.Path:
    """Returns the path of a table's committed result, which may not exist."""
    paper, name = table.id.split("/")
    folder = discover.experiment_folder(paper, root)
    return folder / "results" / f"{name}.{tier}.json"


def read_record(table: Table, tier: str, root: pathlib.Path) -> Record:
    """Reads the committed result of a table.

    Raises:
      ConfigError: nothing was committed.
      DataFormatError: the file cannot be read, or is no record.
    """
    path = record_path(table, tier, root)
    if not path.exists():
        raise ConfigError(f"no committed result to compare with: {path}")
    content = read_object(path)
    for name in ("cells", "claims", "columns", "labels", "provenance", "tuned"):
        if not isinstance(content.get(name), dict):
            raise DataFormatError(f"{path}: {name} must be an object")
    if not all(isinstance(each, dict) for each in content["claims"].values()):
        raise DataFormatError(f"{path}: claims must be objects")
    runs = content.get("runs")
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        raise DataFormatError(
            f"{path}: runs must be a list of objects with row, config and overrides"
        )
    return Record(table, tier, content)


def _is_run(run: Any) -> bool:
    if not isinstance(run, dict) or not isinstance(run.get("overrides"), dict):
        return False
    held = (run.get("row"), run.get("config"), *run["overrides"].values())
    return all(isinstance(each, str) for each in held)


def find_records(root: pathlib.Path, paper: str | None = None) -> Iterator[Record]:
    """Yields every committed result of the tables below a root, or of one paper's."""
    for table in discover.find_tables(root).values():
        ours = paper in (None, table.id.partition("/")[0])
        for tier in table.tiers if ours else ():
            if record_path(table, tier, root).exists():
                yield read_record(table, tier, root)


def to_json(result: TableResult) -> dict[str, Any]:
    """Returns a table's cells, verdicts, runs and provenance, to be committed.

    Commits are left out, for those of a branch vanish when it lands; the digests of the
    code do not.

    Raises:
      ConfigError: the columns for its picture take more than 60 kB.
    """
    dataset, machine = result.dataset, provenance.collect(devices=True)
    packed = _packed(dataset)
    size = len(json.dumps(packed))
    if size > _FOR_PICTURE:
        raise ConfigError(
            f"what the picture of {result.table.id} needs beyond cells may take "
            f"{_FOR_PICTURE} bytes: {list(packed)} take {size}; thin them"
        )
    return {
        "table": result.table.id,
        "tier": result.tier,
        "source": result.source,
        "labels": {
            name: [words.plain(each) for each in dataset[name].values.tolist()]
            for name in dataset.dims
        },
        "columns": {
            name: " ".join(map(str, var.dims))
            for name, var in dataset.data_vars.items()
        },
        "cells": to_cells(dataset),
        "packed": packed,
        "claims": _claims(result.verdicts),
        "tuned": {row: dict(values) for row, values in result.tuned.items()},
        "at_edge": {row: dict(values) for row, values in result.at_edge.items()},
        **({"drifts": dict(result.drifts)} if result.drifts else {}),
        "devices": result.table.tier(result.tier).devices,
        "code": code.of_reduction(result.table.reduce),
        "runs": [_without(run, "commit", "used_again") for run in result.runs],
        "provenance": _without(machine, "git_commit", "git_dirty"),
    }


def _without(mapping: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def describe_origin(record: Record) -> str:
    """Returns by what command a record was made, when and on what machine."""
    made = record.content["provenance"]
    place = list[str](record.table.tiers).index(record.tier)
    command = record.table.commands()[place]
    devices = ", ".join(map(str, made.get("devices", ())))
    return f"`{command}` on {made['started'][:10]} ({made['cpu']}, {devices})"


def to_cells(dataset: xr.Dataset) -> dict[str, Any]:
    """Returns `{"row.column": value}`, labels of further dimensions joined by `|`."""
    cells = {}
    for column, values in dataset.drop_vars(_packed(dataset)).data_vars.items():
        labels = [values[dim].values.tolist() for dim in values.dims]
        flat = values.values.reshape(-1).tolist()
        for place, value in zip(itertools.product(*labels), flat, strict=True):
            cells[_cell(place, str(column))] = words.plain(value)
    return cells


def _packed(dataset: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Returns the columns of steps, see `packing.pack`, which have no cells."""
    return {
        str(name): {
            "scale": var.attrs["scale"],
            "offset": var.attrs["offset"],
            "steps": base64.b64encode(var.values.astype("<u2").tobytes()).decode(),
        }
        for name, var in dataset.data_vars.items()
        if packing.is_packed(var)
    }


def _cell(place: tuple[Any, ...], column: str) -> str:
    return "|".join(map(str, place or (0,))) + f".{column}"


def to_dataset(record: Record) -> xr.Dataset:
    """Returns the table that a record's cells are of.

    Raises:
      DataFormatError: a cell or what describes the cells is missing.
    """
    try:
        content = record.content
        labels, cells = content["labels"], content["cells"]
        columns: dict[str, Any] = {}
        for column, names in content["columns"].items():
            dims = names.split()
            if column in content.get("packed", {}):
                columns[column] = _unpack(content["packed"][column], dims, labels)
                continue
            places = itertools.product(*(labels[dim] for dim in dims))
            values = [words.number(cells[_cell(place, column)]) for place in places]
            shape = [len(labels[dim]) for dim in dims]
            columns[column] = (dims, np.array(values).reshape(shape))
        return xr.Dataset(columns, coords=labels)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        name = f"the record of {record.table.id}, tier {record.tier}"
        raise DataFormatError(f"{name}, does not hold its cells: {error!r}") from error


def _unpack(
    held: Mapping[str, Any], dims: list[str], labels: Mapping[str, Any]
) -> tuple[list[str], np.ndarray, dict[str, float]]:
    """Returns a column of steps as it was before it was written."""
    steps = np.frombuffer(base64.b64decode(held["steps"]), "<u2").astype(np.uint16)
    shape = [len(labels[dim]) for dim in dims]
    attrs = {name: float(held[name]) for name in ("scale", "offset")}
    return dims, steps.reshape(shape), attrs


def to_result(record: Record) -> TableResult:
    """Returns a record as the table that was made, judged anew, to be printed.

    The rows' histories are not in a record, so that `rows` is empty.

    Raises:
      DataFormatError: a cell or what describes the cells is missing.
    """
    dataset, content = to_dataset(record), record.content
    return TableResult(
        table=record.table,
        tier=record.tier,
        dataset=dataset.assign_attrs(source=content.get("source", "unknown")),
        verdicts=judge(record.table.tier(record.tier), dataset),
        runs=tuple(content["runs"]),
        tuned=content["tuned"],
        at_edge=content.get("at_edge", {}),
        drifts=content.get("drifts", {}),
        rows={},
    )


def find_false_claims(record: Record) -> tuple[str, ...]:
    """Returns what a record says of its claims but its cells do not, in words."""
    said = record.content.get("claims", {})
    try:
        verdicts = judge(record.table.tier(record.tier), to_dataset(record))
    except DataFormatError as error:
        return (str(error),)
    follow = _claims(verdicts)
    return tuple(
        f"claim {name}: committed {_words(said.get(name))}, of its cells follows "
        f"{_words(follow.get(name))}"
        for name in dict.fromkeys([*said, *follow])
        if not _agree(said.get(name), follow.get(name))
    )


def rejudge(record: Record, root: pathlib.Path) -> tuple[Verdict, ...]:
    """Writes into a committed result what today's claims say of its cells.

    Raises:
      ConfigError: a claim or its negative control has no number, as of a cell that the
        record lacks; nothing is written.
    """
    verdicts = judge(record.table.tier(record.tier), to_dataset(record))
    lacking = [v.name for v in verdicts if any(map(math.isnan, (v.ours, *v.broken)))]
    if lacking:
        raise ConfigError(
            f"the record of {record.table.id} lacks what claims {lacking} are computed "
            f"from: make it again: hpcjax table {record.table.id} --record"
        )
    judged = {**record.content, "claims": _claims(verdicts)}
    write_json(record_path(record.table, record.tier, root), judged)
    return verdicts


def _claims(verdicts: Iterable[Verdict]) -> dict[str, dict[str, Any]]:
    """Returns verdicts as a record holds them."""
    return {
        v.name: {"ours": words.plain(v.ours), "bound": v.bound, "holds": v.holds}
        for v in verdicts
    }


def _agree(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    if one is None or other is None:
        return False
    same = all(one.get(name) == other.get(name) for name in ("bound", "holds"))
    return same and _same(words.number(one.get("ours")), words.number(other["ours"]))


def _words(claim: Mapping[str, Any] | None) -> str:
    return "nothing" if claim is None else json.dumps(claim, ensure_ascii=False)


def require_comparable(record: Record) -> None:
    """Checks that a committed table can be compared with one that is made here."""
    if not record.table.benchmark:
        return
    gpu = record.tier == "gpu"
    here, there = provenance.collect(devices=gpu), record.content["provenance"]
    kind = ("devices",) if gpu else ("cpu", "cpu_count")
    ours, theirs = ({key: each.get(key) for key in kind} for each in (here, there))
    if ours != theirs:
        raise ConfigError(
            f"{record.table.id} measures time, and its committed result is of another "
            f"machine, {theirs}: this one is {ours}; leave out --check"
        )


def compare(
    dataset: xr.Dataset, old: Mapping[str, Any], table: Table
) -> tuple[str, ...]:
    """Returns how a table differs from its committed result.

    A cell with a committed interval must lie within it; others must be equal to six
    digits. Columns whose names end in `seconds` and that have no interval are not
    compared, as no two runs take the same time.

    Of benchmarks only the times are compared, see `Table.times`. They must be within a
    factor of 2 of the committed values or intervals. Other columns are left to claims.

    Args:
      dataset: the table that was made.
      old: the cells of the committed one.
      table: the definition of both.
    """
    new = to_cells(dataset)
    differences = [
        f"{cell}: only in one of both" for cell in sorted(set(old) ^ set(new))
    ]
    for cell in sorted(set(old) & set(new)):
        row, column = cell.rsplit(".", 1)
        if column.endswith(("_low", "_high")):
            continue
        before, now = old[cell], new[cell]
        low, high = old.get(f"{row}.{column}_low"), old.get(f"{row}.{column}_high")
        interval = isinstance(low, float) and isinstance(high, float)
        if table.benchmark:
            bounds = (low, high) if interval else (before, before)
            if column in table.times and _far(now, *bounds):
                differences.append(f"{cell}: {now} beside {before} or so")
        elif interval and isinstance(now, float):
            if not low <= now <= high:
                differences.append(f"{cell}: {now:.6g} outside [{low:.6g}, {high:.6g}]")
        elif not _same(before, now) and not column.endswith("seconds"):
            differences.append(f"{cell}: {now} instead of {before}")
    return tuple(differences)


def _far(now: Any, low: Any, high: Any) -> bool:
    """Returns whether a time is not within a factor `_SLACK` of an interval."""
    now, low, high = (words.number(each) for each in (now, low, high))
    if not all(math.isfinite(each) for each in (now, low, high)):
        return words.plain(now) != words.plain(low)
    return not low / _SLACK <= now <= high * _SLACK


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        equal = math.isclose(left, right, rel_tol=1e-6)
        return equal or (math.isnan(left) and math.isnan(right))
    return left == right
