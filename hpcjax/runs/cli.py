"""The command `hpcjax`: every subcommand calls one documented function.

Nothing here imports JAX before a config has been read and checked.
"""

import contextlib
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from hpcjax.core.errors import ConfigError, HpcjaxError, nearest
from hpcjax.runs import directory, discover, show
from hpcjax.runs.overrides import pairs

Config = Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]]
Overrides = Positional[
    Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE", help_behavior_hint="")
    ]
]
Ids = Positional[
    Annotated[tuple[str, ...], tyro.conf.arg(metavar="ID", help_behavior_hint="")]
]
Root = Annotated[
    pathlib.Path,
    tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: working directory)"),
]
Devices = Annotated[
    int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 1)")
]
Data = Annotated[
    pathlib.Path | None,
    tyro.conf.arg(
        metavar="DIR",
        help_behavior_hint="(default: HPCJAX_DATA, else <root>/.cache/data)",
    ),
]
Format = Literal["rich", "md", "csv", "html", "latex"]

_HERE = pathlib.Path()
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
_DESCRIPTION = """Published methods as composable JAX functions, each tied to a table.

Exit status: 0 done, 1 a claim failed, 2 bad config or usage, 3 data missing or damaged,
4 diverged, 5 checkpoint corrupt, 6 disk full, 75 preempted, 130 interrupted."""


def list_(
    paper: Positional[
        Annotated[str | None, tyro.conf.arg(metavar="PAPER", help_behavior_hint="")]
    ] = None,
    *,
    root: Root = _HERE,
) -> int:
    """List configs and tables.

    Args:
      paper: only this paper's.
      root: folder with further configs.
    """
    output = show.console()
    output.print(show.list_configs(discover.find_configs(root, paper)))
    tables = discover.find_tables(root)
    if paper is not None:
        tables = {key: t for key, t in tables.items() if key.startswith(f"{paper}/")}
    output.print(show.list_tables(tables))
    return 0


def show_(
    config: Config,
    overrides: Overrides = (),
    *,
    root: Root = _HERE,
) -> int:
    """Show a config: keys, types, and what differs from its base.

    Args:
      config: paper/config, paper/config:variant, or a run's config.json.
      overrides: key=value.
      root: folder with further configs.
    """
    loaded = discover.load(config, pairs(overrides), root)
    entries = discover.find_configs(root)
    entry = next((e for e in entries if e.name == loaded.name and not e.problem), None)
    show.console().print(show.page(entry, loaded))
    return 0


def run(
    config: Config,
    overrides: Overrides = (),
    *,
    resume: Annotated[
        str | None, tyro.conf.arg(metavar="ID", help_behavior_hint="")
    ] = None,
    fork: bool = False,
    dry_run: bool = False,
    devices: Devices = None,
    quiet: bool = False,
    root: Root = _HERE,
    data: Data = None,
) -> int:
    """Run a config.

    Args:
      config: paper/config, paper/config:variant, or a run's config.json.
      overrides: key=value, such as optimizer.lr=0.3 or optimizer=sgd.
      resume: id of an interrupted run to continue.
      fork: with --resume, start a child run, whose config may differ.
      dry_run: only say what the run would take.
      devices: devices of the data axis; simulated ones on a CPU.
      quiet: no progress line.
      root: folder that holds runs/ and further configs.
      data: folder of data sets.
    """
    _prepare(data, devices)
    changes = pairs(overrides)
    # The config is checked before anything is imported that starts JAX.
    title = discover.load(config, changes, root).title
    if dry_run:
        return _dry_run(title, config, changes, root, devices)
    from hpcjax.runs import execute

    with _log_to_stderr(quiet):
        result = execute.run(
            config,
            changes,
            root=root,
            resume=resume,
            fork=fork,
            devices=devices,
            quiet=quiet,
        )
    show.console().print(f"run        {result.id}\ndirectory  {result.directory}")
    return 0


def _dry_run(
    title: str,
    config: str,
    changes: dict[str, str],
    root: pathlib.Path,
    devices: int | None,
) -> int:
    from hpcjax.runs import plan

    planned = plan.plan_run(config, changes, root=root, devices=devices)
    text = f"{title} does not train: there is nothing to plan"
    show.console().print(text if planned is None else plan.render_plan(planned))
    return 0


def table(
    ids: Ids = (),
    *,
    tier: str = "cpu",
    check: bool = False,
    fresh: bool = False,
    record: bool = False,
    format: Format = "rich",  # noqa: A002 - the name of the flag
    devices: Devices = None,
    root: Root = _HERE,
    data: Data = None,
) -> int:
    """Make tables, running what is missing; exit status 1 if a claim fails.

    Args:
      ids: paper/table.
      tier: kind of machine: cpu, gpu or model.
      check: compare with the committed result.
      fresh: run everything again.
      record: write the result beside the table's definition, to be committed.
      format: how it is printed.
      devices: simulated devices to offer on a CPU.
      root: folder that holds runs/ and further experiments.
      data: folder of data sets.
    """
    _prepare(data, devices)
    _known(ids, discover.find_tables(root), "table")
    return _build(ids, root, format, tier=tier, check=check, fresh=fresh, record=record)


def bench(
    ids: Ids = (),
    *,
    tier: str = "cpu",
    check: bool = False,
    format: Format = "rich",  # noqa: A002 - the name of the flag
    root: Root = _HERE,
    data: Data = None,
) -> int:
    """Measure again what the benchmark tables measure.

    Args:
      ids: paper/table; default every benchmark of the tier.
      tier: kind of machine: cpu, gpu or model.
      check: compare with the committed result.
      format: how it is printed.
      root: folder that holds runs/ and further experiments.
      data: folder of data sets.
    """
    _prepare(data, None)
    tables = discover.find_tables(root).items()
    benchmarks = {name: table for name, table in tables if table.benchmark}
    chosen = ids or tuple(k for k, table in benchmarks.items() if tier in table.tiers)
    _known(chosen, benchmarks, "benchmark")
    return _build(chosen, root, format, tier=tier, check=check, fresh=True)


def report(
    ids: Ids = (),
    *,
    path: pathlib.Path | None = None,
    root: Root = _HERE,
) -> int:
    """Write one HTML page on tables and runs.

    Args:
      ids: tables and runs; default every table whose runs have finished.
      path: the page (default: <root>/runs/report.html).
      root: folder that holds runs/.
    """
    from hpcjax.runs import report as reports

    written = reports.write_report(ids, root=root, path=path)
    show.console().print(str(written))
    return 0


def data(
    action: Positional[Literal["list", "fetch"]],
    names: Ids = (),
    *,
    root: Root = _HERE,
    data: Data = None,
) -> int:
    """List data sets, or fetch some.

    Args:
      action: what to do.
      names: data sets to fetch.
      root: folder below which data sets lie by default.
      data: folder of data sets.
    """
    from hpcjax.data import _fetch, catalog

    _prepare(data, None)
    place = directory.data_root(root)
    if action == "list":
        rows = catalog.listing(place)
        columns = tuple(rows[0])
        output = show.frame(
            f"Data sets in {place}",
            columns,
            ([row[c] for c in columns] for row in rows),
        )
        show.console().print(output)
        return 0
    if not names:
        raise ConfigError(f"name the data sets to fetch: {', '.join(catalog.CATALOG)}")
    for name in names:
        _fetch.fetch(name, place)
    return 0


def doctor(*, root: Root = _HERE, data: Data = None) -> int:
    """Say what works on this machine; exit status 1 if something needed does not.

    Args:
      root: folder below which data sets lie by default.
      data: folder of data sets.
    """
    from hpcjax.runs import doctor as examination

    _prepare(data, None)
    checks = examination.examine(root)
    show.console().print(examination.render(checks))
    return 0 if examination.healthy(checks) else 1


COMMANDS = {
    "list": list_,
    "show": show_,
    "run": run,
    "table": table,
    "report": report,
    "data": data,
    "bench": bench,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: arguments; default those of the process.

    Returns:
      The exit status, as `hpcjax --help` lists them.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except HpcjaxError as error:
        show.console(stderr=True).print(f"error: {error}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        show.console(stderr=True).print("interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(args: list[str]) -> int:
    if args == ["--version"]:
        import hpcjax

        show.console().print(hpcjax.__version__)
        return 0
    try:
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="hpcjax",
            description=_DESCRIPTION,
            args=_overrides_last(args) or ["--help"],
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def _overrides_last(args: list[str]) -> list[str]:
    """Moves `key=value` behind everything else: tyro wants them in one place."""
    changes = [arg for arg in args if _OVERRIDE.match(arg)]
    return [arg for arg in args if not _OVERRIDE.match(arg)] + changes


def _prepare(data: pathlib.Path | None, devices: int | None) -> None:
    """Sets what JAX and the experiments read from the environment when they start."""
    if data is not None:
        os.environ["HPCJAX_DATA"] = str(data)
    if devices is None:
        return
    if devices < 1:
        raise ConfigError(f"devices must be at least 1: got {devices}")
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_FLAG}={devices}".strip()


@contextlib.contextmanager
def _log_to_stderr(quiet: bool) -> Iterator[None]:
    """Shows warnings, and unless `quiet` where the run lies, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(
        lambda record: (
            record.levelno >= logging.WARNING
            or (not quiet and record.name == directory.__name__)
        )
    )
    logger = logging.getLogger("hpcjax")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(handler)


def _known(ids: Sequence[str], allowed: Sequence[str] | dict, what: str) -> None:
    if not ids:
        raise ConfigError(f"name a {what}: {', '.join(allowed) or 'there is none'}")
    for name in ids:
        if name not in allowed:
            raise ConfigError(f"unknown {what} {name!r}{nearest(name, allowed)}")


def _build(ids: Sequence[str], root: pathlib.Path, form: Format, **options: Any) -> int:
    from hpcjax.runs import build, render

    passed = True
    with _log_to_stderr(quiet=True):
        for name in ids:
            result = build.build_table(name, root=root, **options)
            printed = render.render_table(result, form)
            show.console().print(printed, soft_wrap=isinstance(printed, str))
            passed = passed and result.passed
    return 0 if passed else 1
