"""The subcommands of `hpcjax` that only look: `list` and `show`; see `commands`."""

import contextlib
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tyro.conf import Positional

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import discover, show
from hpcjax.runs.command_options import (
    HERE,
    Config,
    Name,
    Overrides,
    Root,
    State,
    Tags,
)
from hpcjax.runs.overrides import pairs

if TYPE_CHECKING:
    from hpcjax.runs import inventory
    from hpcjax.runs.tables import Table


def list_(
    paper: Positional[Name] = None,
    *,
    all: bool = False,  # noqa: A002 - the name of the flag
    parts: bool = False,
    stale: bool = False,
    markdown: bool = False,
    runs: bool = False,
    state: State = None,
    tag: Tags = (),
    delete: bool = False,
    yes: bool = False,
    root: Root = HERE,
) -> int:
    """List systems, or configs and tables, or parts, stale results, or runs.

    Args:
      paper: list this paper's configs and tables; with --parts, a kind of part.
      all: list the configs and tables of all papers.
      parts: list what a training config can combine instead.
      stale: list the committed results of tables that today's code did not make.
      markdown: list papers with what holds of their committed tables, for a page.
      runs: list the runs in runs/ instead.
      state: with --runs, only those that are running, interrupted, preempted, failed,
        diverged, done or damaged.
      tag: with --runs, only those with this tag; may be repeated.
      delete: with --runs and a paper, a state or a tag, delete them, after asking.
      yes: with --delete, do not ask.
      root: folder with further configs.
    """
    files.check_folder(root)
    output = show.console()
    if runs:
        from hpcjax.runs import inventory

        entries = inventory.list_runs(root, paper, state, tag)
        output.print(show.list_runs(entries))
        if delete:
            if not (paper or state or tag):
                raise ConfigError(
                    "--delete needs a paper, a --state or a --tag: it deletes no runs "
                    "but the listed"
                )
            _delete_runs(entries, yes)
        return 0
    if delete or yes or state is not None or tag:
        raise ConfigError("--state, --tag, --delete and --yes go with --runs")
    if parts:
        discover.activate(root)
        output.print(show.list_parts(paper))
        return 0
    if stale:
        from hpcjax.runs import record_age, table_records

        ages = [
            (record, record_age.find_age(record, root))
            for record in table_records.find_records(root, paper)
        ]
        output.print(show.list_stale(ages))
        return 0
    if markdown:
        from hpcjax.runs import roster

        output.print(roster.markdown(root, paper), soft_wrap=True)
        return 0
    if paper is None and not all:
        from hpcjax.runs import overview

        output.print(show.list_systems(overview.find_systems(root)))
        return 0
    output.print(show.list_configs(discover.find_configs(root, paper)))
    tables = discover.find_tables(root, paper or "*").values()
    output.print(show.list_tables(tables))
    return 0


def _delete_runs(entries: "Sequence[inventory.Entry]", yes: bool) -> None:
    """Deletes the runs that were listed, if that is confirmed."""
    from hpcjax.runs import inventory

    if entries and not yes:
        if not sys.stdin.isatty():
            raise ConfigError("--delete asks before it deletes: here give --yes, too")
        if input(f"Delete these {len(entries)} runs? [y/N] ").lower() != "y":
            return
    inventory.delete(entries)
    show.console().print(f"{len(entries)} runs deleted")


def show_(
    config: Config,
    overrides: Overrides = (),
    *,
    root: Root = HERE,
) -> int:
    """Show what came out for a table, or a config: keys, and what is not its base's.

    Args:
      config: paper/table, paper/config:variant, or a run's config.json.
      overrides: key=value.
      root: folder with further configs.
    """
    paper, slash, _ = config.partition("/")
    known = paper.isidentifier() and slash and ":" not in config
    tables = discover.find_tables(root, paper) if known else {}
    if config in tables and not overrides:
        return _show_table(tables[config], root)
    try:
        loaded = discover.load(config, pairs(overrides), root)
    except ConfigError as error:
        near = nearest(config, tables).replace("; allowed", "; tables")
        if near and not str(error).endswith(near):  # a config's name may be a table's
            told = near.replace("; did you mean", " Or the table")
            raise ConfigError(f"{error}{told}") from error
        raise
    try:
        entry, _ = discover.find(loaded.name, root)
    except ConfigError:  # the config.json of a run whose config is gone
        entry = None
    show.console().print(show.page(entry, loaded))
    return 0


def _show_table(table: "Table", root: pathlib.Path) -> int:
    """Prints the committed results of a table, or how to make them."""
    from hpcjax.runs import render, table_records

    output = show.console()
    for tier, command in zip(table.tiers, table.commands(), strict=True):
        if table_records.record_path(table, tier, root).exists():
            record = table_records.read_record(table, tier, root)
            output.print(render.render_record(record))
            drawn = f"Picture: `{command} --picture FILE.png`"
            output.print(drawn, soft_wrap=True)
        else:
            minutes = table.tier(tier).minutes
            output.print(
                f"{table.title}: nothing is recorded; `{command}` makes it in about "
                f"{minutes:g} min."
            )
    with contextlib.suppress(ConfigError):
        entry, variant = discover.find(table.id, root)
        output.print(f"The config of that name: `hpcjax show {entry.name}:{variant}`")
    return 0
