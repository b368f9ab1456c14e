"""The subcommands of `hpcjax` that make tables; see `commands`."""

import pathlib
import time
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import discover, show
from hpcjax.runs.command_options import (
    HERE,
    Data,
    Devices,
    Format,
    Ids,
    Picture,
    Root,
    Tier,
    log_to_stderr,
    prepare,
)


def table(
    ids: Ids = (),
    *,
    tier: Tier = None,
    check: bool = False,
    fresh: bool = False,
    record: bool = False,
    parallel: int = 1,
    picture: Picture = None,
    format: Format = "rich",  # noqa: A002 - the name of the flag
    devices: Devices = None,
    root: Root = HERE,
    data: Data = None,
) -> int:
    """Make tables, running what is missing; exit status 1 if a claim fails.

    Args:
      ids: paper/table; `hpcjax list PAPER` names a paper's.
      tier: kind of machine: cpu, gpu or model.
      check: compare with the committed result.
      fresh: run everything again.
      record: write the result beside the table's definition, to be committed.
      parallel: how many runs are made at a time, each on its share of the cores.
      picture: a png, svg or pdf file for the picture of one table; of its committed
        result, if there is one and nothing else is asked for, for which nothing runs.
      format: how it is printed.
      devices: simulated devices to offer on a CPU; default what the tables need.
      root: folder that holds runs/ and further experiments.
      data: folder of data sets.
    """
    tables = discover.find_tables(root)
    _check_known(ids, tables, "table")
    tiers = [tables[name].tier(tables[name].choose_tier(tier)) for name in ids]
    if picture is not None:
        _check_picture(picture, ids)
        only = tables[ids[0]]
        alone = not (check or fresh or record)
        if alone and _draw_record(only, only.choose_tier(tier), root, picture):
            return 0
    wanted = max(each.devices for each in tiers)
    prepare(data, devices or (wanted if wanted > 1 else None))
    options = {"check": check, "fresh": fresh, "record": record, "parallel": parallel}
    return _build_tables(ids, root, format, picture, tier=tier, **options)


def _check_picture(path: pathlib.Path, ids: Sequence[str]) -> None:
    """Raises ConfigError if a picture cannot be written there, or is of several."""
    if len(ids) != 1:
        raise ConfigError(f"a picture is of one table: got {', '.join(ids)}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a picture ends in .png, .svg or .pdf: got {path}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder for the picture: {path}")


def _draw_record(table: Any, tier: str, root: pathlib.Path, path: pathlib.Path) -> bool:
    """Writes the picture of a committed result; False if there is none."""
    from hpcjax.runs import table_records

    if not table_records.record_path(table, tier, root).exists():
        return False
    record = table_records.read_record(table, tier, root)
    _save_picture(table_records.to_result(record), path)
    return True


def _save_picture(result: Any, path: pathlib.Path) -> None:
    """Writes a table's picture, and prints where it is and what it shows."""
    from hpcjax.runs import curves, drawing, pictures

    figure = drawing.draw(result)
    if figure is None:
        raise ConfigError(f"{result.table.id} has no numbers that can be drawn")
    curves.save(figure, path, [run["id"] for run in result.runs])
    said = f"{pictures.describe(result)} {result.table.shows}".rstrip()
    show.console().print(f"{path}: {said}", soft_wrap=True)


def rejudge(ids: Ids = (), *, tier: Tier = None, root: Root = HERE) -> int:
    """Judge committed tables by their claims as they are; exit status 1 if one fails.

    Nothing is run: claims are computed from the recorded cells, and written there.

    Args:
      ids: paper/table.
      tier: kind of machine: cpu, gpu or model.
      root: folder that holds runs/ and further experiments.
    """
    from hpcjax.runs import render, table_records

    tables, passed = discover.find_tables(root), True
    _check_known(ids, tables, "table")
    for name in ids:
        own = tables[name].choose_tier(tier)
        record = table_records.read_record(tables[name], own, root)
        found = table_records.rejudge(record, root)
        show.console().print(render.list_verdicts(found, name))
        passed = passed and all(verdict.holds for verdict in found)
    return 0 if passed else 1


def confirm(
    ids: Ids = (), *, tier: str = "cpu", root: Root = HERE, data: Data = None
) -> int:
    """Repeat a sample of the runs of committed tables; exit status 1 if a bit differs.

    A table of older code whose sample is equal is then one that this code confirms.

    Args:
      ids: paper/table; default every table of the tier whose runs can be repeated.
      tier: kind of machine: cpu, gpu or model.
      root: folder that holds runs/ and further experiments.
      data: folder of data sets.
    """
    from hpcjax.runs import confirmation

    tables = discover.find_tables(root)
    chosen = ids or confirmation.find_confirmable(tier, root)
    _check_known(chosen, tables, "table")
    prepare(data, None)
    passed = True
    with log_to_stderr(quiet=True):
        for name in chosen:
            found = confirmation.confirm_table(name, root=root, tier=tier)
            show.console().print(show.list_repeated(found))
            passed = passed and found.passed
    return 0 if passed else 1


def bench(
    ids: Ids = (),
    *,
    tier: str = "cpu",
    check: bool = False,
    minutes: Annotated[
        float | None, tyro.conf.arg(metavar="M", help_behavior_hint="")
    ] = None,
    archive: Annotated[
        pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")
    ] = None,
    format: Format = "rich",  # noqa: A002 - the name of the flag
    root: Root = HERE,
    data: Data = None,
) -> int:
    """Measure again what the benchmark tables measure.

    Args:
      ids: paper/table; default every benchmark of the tier.
      tier: kind of machine: cpu, gpu or model.
      check: compare with the committed result.
      minutes: make and record what is missing or of older code, as far as it fits in
        so many minutes; on a GPU first test the kernels. Call it again to go on.
      archive: with `minutes`, a zip file of all records, written anew after each one;
        unpacked in a checkout it puts them where they belong.
      format: how it is printed.
      root: folder that holds runs/ and further experiments.
      data: folder of data sets.
    """
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"minutes must be more than 0: got {minutes:g}")
    prepare(data, None)
    tables = discover.find_tables(root).items()
    benchmarks = {name: table for name, table in tables if table.benchmark}
    chosen = ids or tuple(k for k, table in benchmarks.items() if tier in table.tiers)
    _check_known(chosen, benchmarks, "benchmark")
    if minutes is not None:
        wanted = [benchmarks[k] for k in chosen]
        return _bench_within(minutes, wanted, tier, root, format, archive)
    if archive is not None:
        raise ConfigError(f"an archive holds what `minutes` records: got {archive}")
    if check and not ids:
        chosen = _keep_recorded(chosen, tier, root)
    return _build_tables(chosen, root, format, tier=tier, check=check, fresh=True)


def _bench_within(
    minutes: float,
    chosen: list[Any],
    tier: str,
    root: pathlib.Path,
    form: Format,
    archive: pathlib.Path | None,
) -> int:
    """Makes and records benchmarks for some minutes; returns 1 if not all hold."""
    from hpcjax.runs import benchmarks, render

    output, begin = show.console(), time.monotonic()
    if tier == "gpu":
        output.print(f"kernels: {benchmarks.check_kernels(60 * minutes)}")
    wanted = benchmarks.wanted_first(chosen, tier, root)
    done = len(chosen) - len(wanted)
    output.print(
        f"{done} of {len(chosen)} benchmarks are recorded of this code on "
        f"{benchmarks.describe_device()}"
    )
    left, passed = minutes - (time.monotonic() - begin) / 60, True
    with log_to_stderr(quiet=True):
        for table, result, why in benchmarks.make_within(left, wanted, tier, root):
            if archive is not None:
                benchmarks.write_archive(archive, chosen, tier, root)
            if result is None:
                output.print(f"{table.id}: not made: {why}")
                passed = False
                continue
            printed = render.render_table(result, form)
            output.print(printed, soft_wrap=isinstance(printed, str))
            passed = passed and result.passed
    return 0 if passed else 1


def _check_known(ids: Sequence[str], allowed: Sequence[str] | dict, what: str) -> None:
    """Raises ConfigError if there are no ids, or an unknown one."""
    if not ids:
        raise ConfigError(f"name a {what}: {', '.join(allowed) or 'there is none'}")
    for name in ids:
        if any(each.startswith(f"{name}/") for each in allowed):
            raise ConfigError(
                f"{name!r} is a paper: `hpcjax list {name}` names its {what}s"
            )
        if name not in allowed:
            raise ConfigError(f"unknown {what} {name!r}{nearest(name, allowed)}")


def _keep_recorded(
    ids: Sequence[str], tier: str, root: pathlib.Path
) -> tuple[str, ...]:
    """Returns the tables with a committed result; prints which have none."""
    from hpcjax.runs import table_records

    tables = discover.find_tables(root)
    paths = {name: table_records.record_path(tables[name], tier, root) for name in ids}
    without = [name for name, path in paths.items() if not path.exists()]
    if without:
        message = f"nothing is committed of {', '.join(without)}: not measured"
        show.console(stderr=True).print(message, soft_wrap=True)
    return tuple(name for name in ids if name not in without)


def _build_tables(
    ids: Sequence[str],
    root: pathlib.Path,
    form: Format,
    picture: pathlib.Path | None = None,
    **options: Any,
) -> int:
    """Makes and prints tables; returns 1 if a claim or a comparison fails."""
    from hpcjax.runs import build, render, table_records

    if options["check"]:
        tables, tier = discover.find_tables(root), options["tier"]
        for name in ids:
            # Raises before any table is made if one cannot be compared.
            own = tables[name].choose_tier(tier)
            old = table_records.read_record(tables[name], own, root)
            table_records.require_comparable(old)
    passed = True
    with log_to_stderr(quiet=True):
        for name in ids:
            result = build.build_table(name, root=root, **options)
            printed = render.render_table(result, form)
            show.console().print(printed, soft_wrap=isinstance(printed, str))
            passed = passed and result.passed
            if picture is not None:
                _save_picture(result, picture)
    return 0 if passed else 1
