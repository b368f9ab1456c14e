"""The subcommands of `hpcjax`: each calls one documented function and prints.

Nothing here imports JAX before a config has been read and checked.
"""

import pathlib
from typing import Annotated, Any, Literal

import tyro

from hpcjax.core.errors import ConfigError
from hpcjax.runs import discover, show
from hpcjax.runs.command_options import (
    HERE,
    Config,
    Data,
    Devices,
    Ids,
    Overrides,
    Root,
    Run,
    Side,
    Tags,
    Tier,
    log_to_stderr,
    prepare,
)
from hpcjax.runs.frames import Frame
from hpcjax.runs.overrides import pairs
from hpcjax.train.writers import WriterName

_NO_VALUE = 8  # exit status of a sweep without any
_FAILED = 1  # of a run that did not reach what it is for, and of a failed claim


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
    processes: Devices = None,
    restart: int = 0,
    distributed: bool = False,
    log: tyro.conf.UseAppendAction[tuple[WriterName, ...]] = (),
    tag: Tags = (),
    trust: bool = False,
    profile: bool = False,
    quiet: bool = False,
    root: Root = HERE,
    data: Data = None,
) -> int:
    """Run a config.

    Args:
      config: paper/config, paper/config:variant, or a run's config.json.
      overrides: key=value, such as optimizer.lr=0.3 or optimizer=sgd.
      resume: id of an interrupted run to continue; last is the newest one of this
        config, or a new run if there is none.
      fork: with --resume, start a child run, whose config may differ.
      dry_run: only show the config and say what the run would take.
      devices: devices of the data axis; simulated ones on a CPU.
      processes: start so many processes on this machine, which share the devices.
      restart: begin anew from the last checkpoint so often when a process is lost.
      distributed: this is one of several processes, started by Slurm, mpirun, or with
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set.
      log: copy the records for this service, below the run's folder; may be repeated.
      tag: a word by which `hpcjax list --runs --tag` finds the run; may be repeated.
      trust: with --resume, also load a checkpoint without a manifest, of which nothing
        can be verified.
      profile: trace five training steps with JAX's profiler, in the run's folder.
      quiet: no progress line.
      root: folder that holds runs/ and further configs.
      data: folder of data sets.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes must be at least 1: got {processes}")
    if profile and (processes is not None or restart):
        raise ConfigError(
            "--profile traces one process: give no --processes, --restart"
        )
    prepare(data, devices)
    changes = pairs(overrides)
    # The config is checked before anything is imported that starts JAX.
    loaded = discover.load(config, changes, root)
    if dry_run:
        with log_to_stderr(quiet):
            return _dry_run(loaded, config, changes, root, devices or processes)
    from hpcjax.runs import execute, launch

    options: dict[str, Any] = {
        "root": root,
        "resume": resume,
        "fork": fork,
        "devices": devices,
        "log": log,
        "tags": tag,
        "trust": trust,
        "quiet": quiet,
    }
    with log_to_stderr(quiet):
        if processes is not None or restart:
            count = 1 if processes is None else processes
            launch.launch(config, changes, processes=count, restart=restart, **options)
            return 0  # the first process has said where the result is
        options |= {"distributed": distributed, "profile": profile}
        result = execute.run(config, changes, **options)
    output = show.console()
    if result.leads:
        if loaded.steps is None:
            from hpcjax.runs import render

            output.print(render.render_figures(result.dataset))
            rest = f'All values: hpcjax.runs.load_result("{result.id}")'
            output.print(rest, soft_wrap=True)
        text = f"run        {result.id}\ndirectory  {result.directory}"
        output.print(text, soft_wrap=True)  # to be copied
    # An attribute in which an experiment says what it did not reach.
    if failed := result.dataset.attrs.get("failed", ""):
        output.print(f"failed     {failed}")
    return _FAILED if failed else 0


def _dry_run(
    loaded: discover.Loaded,
    config: str,
    changes: dict[str, str],
    root: pathlib.Path,
    devices: int | None,
) -> int:
    """Prints a config and what its run would take, without running it."""
    from hpcjax.runs import plan

    show.console().print(show.describe_keys(loaded))
    planned = plan.plan_run(config, changes, root=root, devices=devices)
    text = f"{loaded.title} does not train: there is nothing to plan"
    show.console().print(text if planned is None else plan.render_plan(planned))
    return 0


def sweep(
    config: Config,
    overrides: Overrides = (),
    *,
    sampler: Annotated[
        Literal["grid", "random", "halton", "tpe", "gp"] | None,
        tyro.conf.arg(
            metavar="{grid,random,halton,tpe,gp}", help_behavior_hint="(default: grid)"
        ),
    ] = None,
    trials: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")
    ] = None,
    by: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: val_loss)"),
    ] = None,
    subject_to: Annotated[
        str | None, tyro.conf.arg(metavar="NAME<=BOUND", help_behavior_hint="")
    ] = None,
    seed: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 0)")
    ] = None,
    name: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")
    ] = None,
    parallel: int = 1,
    launcher: str = "local",
    retry_failed: bool = False,
    plot: bool = False,
    quiet: bool = False,
    root: Root = HERE,
    data: Data = None,
) -> int:
    """Run a config under many overrides; run it again to go on with what is missing.

    Exit status 8 if no trial has a value, or none of them keeps the constraint.

    Args:
      config: paper/config, paper/config:variant, or the name of a sweep that is there,
        of which only the number of trials may change.
      overrides: key=a,b,c is varied, as is key=log(1e-3,1), uniform, int and logint;
        key=value is set for all. Without any, the config file's own sweep.
      sampler: how points are chosen.
      trials: how many, for samplers other than grid.
      by: variable of the results whose least finite value a trial is judged by.
      subject_to: scalar of the results, or the last value of a column, that the best
        trial must keep; the sampler gp looks for points that do.
      seed: of the sampler.
      name: folder below sweeps/ (default: from the config and what is varied).
      parallel: how many workers.
      launcher: local, ray or slurm, with options such as slurm:slurm_partition=gpu.
      retry_failed: try trials again that have failed.
      plot: write a picture of the response.
      quiet: no progress line.
      root: folder that holds sweeps/, runs/ and further configs.
      data: folder of data sets.
    """
    prepare(data, None)
    from hpcjax.runs import sweeps

    options = {"sampler": sampler, "trials": trials, "seed": seed, "by": by}
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    if subject_to is not None:
        given["subject_to"] = sweeps.parse_constraint(subject_to)
    wanted, title = sweeps.find(config, pairs(overrides), root, name=name, **given)
    with log_to_stderr(quiet):
        result = sweeps.run_sweep(
            wanted,
            name=title,
            root=root,
            parallel=parallel,
            launcher=sweeps.make_launcher(launcher),
            retry_failed=retry_failed,
            quiet=quiet,
        )
    show.console().print(sweeps.summary(result))
    if plot:
        show.console().print(
            f"picture    {sweeps.save_picture(result)}", soft_wrap=True
        )
    return 0 if result.successes else _NO_VALUE


def report(
    ids: Ids = (),
    *,
    path: Annotated[
        pathlib.Path | None,
        tyro.conf.arg(
            metavar="FILE", help_behavior_hint="(default: <root>/runs/report.html)"
        ),
    ] = None,
    tier: Tier = None,
    root: Root = HERE,
) -> int:
    """Write one HTML page on tables, sweeps and runs.

    Args:
      ids: tables, sweeps and runs; default all that has finished, newest first.
      path: the page.
      tier: kind of machine of the tables: cpu, gpu or model.
      root: folder that holds runs/ and sweeps/.
    """
    from hpcjax.runs import report as reports

    written = reports.write_report(ids, root=root, path=path, tier=tier)
    show.console().print(str(written), soft_wrap=True)
    return 0


def verify(run: Run, *, root: Root = HERE) -> int:
    """Read all that a run has written; exit status 5 or 3 if something is damaged.

    Args:
      run: id of a run, or its last six digits.
      root: folder that holds runs/.
    """
    from hpcjax.runs import _verify

    findings = _verify.verify(run, root=root)
    show.console().print(_verify.render(findings))
    return _verify.exit_status(findings)


def diff(old: Side, new: Side, *, root: Root = HERE) -> int:
    """Show how two runs or configs differ.

    Args:
      old: id of a run or its last six digits, or paper/config:variant.
      new: the same.
      root: folder that holds runs/ and further configs.
    """
    from hpcjax.runs import difference

    show.console().print(
        difference.render(difference.compare_runs(old, new, root=root))
    )
    return 0


def list_data(*, root: Root = HERE, data: Data = None) -> int:
    """List data sets: which are here, and how to get the others.

    Args:
      root: folder below which data sets lie by default.
      data: folder of data sets.
    """
    from hpcjax.data import catalog
    from hpcjax.runs import directory

    prepare(data, None)
    place = directory.data_root(root)
    rows = catalog.list_entries(place)
    columns = tuple(rows[0])
    cells = [[row[name] for name in columns] for row in rows]
    show.console().print(Frame(f"Data sets in {place}", columns, cells))
    return 0


def fetch_data(names: Ids = (), *, root: Root = HERE, data: Data = None) -> int:
    """Fetch data sets from where they are published, and check what came.

    What is here already is not fetched again. `hpcjax data list` names them all.

    Args:
      names: the data sets, at least one.
      root: folder below which data sets lie by default.
      data: folder of data sets.
    """
    from hpcjax.data import _fetch, catalog
    from hpcjax.runs import directory

    prepare(data, None)
    if not names:
        raise ConfigError(f"name the data sets to fetch: {', '.join(catalog.CATALOG)}")
    for name in names:
        _fetch.fetch(name, directory.data_root(root))
    return 0


def data(
    status: tyro.conf.OmitArgPrefixes[
        Annotated[int, tyro.conf.subcommand("list", constructor=list_data)]
        | Annotated[int, tyro.conf.subcommand("fetch", constructor=fetch_data)]
    ],
) -> int:
    """List data sets, or fetch some."""
    return status


def doctor(*, root: Root = HERE, data: Data = None) -> int:
    """Say what works on this machine; exit status 2 if something needed does not.

    Args:
      root: folder below which data sets lie by default.
      data: folder of data sets.
    """
    from hpcjax.runs import doctor as examination

    prepare(data, None)
    checks = examination.examine(root)
    show.console().print(examination.render(checks))
    return 0 if examination.healthy(checks) else ConfigError.exit_code
