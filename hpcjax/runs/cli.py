"""The command `hpcjax`: runs a subcommand and turns errors into exit statuses."""

import inspect
import os
import re
import sys
from collections.abc import Sequence

import tyro

from hpcjax.core.errors import HpcjaxError
from hpcjax.runs import commands, show, table_commands

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_KEY = re.compile(r"[A-Za-z_][\w.]*")
_DESCRIPTION = """Published methods as composable JAX functions, each tied to a table.

Exit status: 0 done, 1 a claim failed, 2 bad config or usage, 3 data missing or damaged,
4 diverged, 5 checkpoint corrupt, 6 disk full, 7 a process was lost,
75 preempted, 130 interrupted."""


COMMANDS = {
    "list": commands.list_,
    "show": commands.show_,
    "run": commands.run,
    "sweep": commands.sweep,
    "table": table_commands.table,
    "report": commands.report,
    "verify": commands.verify,
    "diff": commands.diff,
    "data": commands.data,
    "bench": table_commands.bench,
    "doctor": commands.doctor,
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
        # The reader of a pipe has closed it; the interpreter flushes stdout once more
        # at exit, which must not fail again.
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
            args=_overrides_last(_as_overrides(args)) or ["--help"],
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def _overrides_last(args: list[str]) -> list[str]:
    """Moves `key=value` arguments to the end, as tyro wants them in one place."""
    changes = [arg for arg in args if _OVERRIDE.match(arg)]
    return [arg for arg in args if not _OVERRIDE.match(arg)] + changes


def _as_overrides(args: list[str]) -> list[str]:
    """Returns `--key value` as `key=value` where the command has no such option."""
    if not args or args[0] not in COMMANDS:
        return args
    options = inspect.signature(COMMANDS[args[0]]).parameters
    if "overrides" not in options:
        return args
    parsed, rest = args[:1], args[1:]
    while rest:
        option, equals, value = rest[0].partition("=")
        key = option.removeprefix("--")
        known = key.replace("-", "_") in options or key == "help"
        if known or key == option or not _KEY.fullmatch(key):
            parsed.append(rest.pop(0))
        elif equals:
            parsed.append(f"{key}={value}")
            rest.pop(0)
        elif len(rest) > 1 and not rest[1].startswith("--"):
            parsed.append(f"{key}={rest[1]}")
            del rest[:2]
        else:
            parsed.append(rest.pop(0))
    return parsed
