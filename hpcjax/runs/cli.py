"""The command `hpcjax`: runs a subcommand and turns errors into exit statuses."""

import contextlib
import errno
import inspect
import io
import os
import re
import select
import sys
import traceback
from collections.abc import Sequence

import tyro

from hpcjax.core.errors import ConfigError, DiskFull, HpcjaxError
from hpcjax.runs import commands, list_commands, show, table_commands

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_DESCRIPTION = """Published methods as composable JAX functions, each tied to a table.

Exit status:
0 done, 1 a claim or `confirm` failed, 2 bad config, usage or place,
3 data missing or damaged, 4 diverged, 5 checkpoint corrupt, 6 disk full,
7 a process was lost, 8 no trial of a sweep has a value,
9 a logging service failed, 70 a fault in the code, 75 preempted,
130 interrupted, 141 nobody reads the output."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRONG_PLACE = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR),
)
_FAULT, _UNREAD = 70, 141


COMMANDS = {
    "list": list_commands.list_,
    "show": list_commands.show_,
    "run": commands.run,
    "sweep": commands.sweep,
    "table": table_commands.table,
    "confirm": table_commands.confirm,
    "rejudge": table_commands.rejudge,
    "report": commands.report,
    "verify": commands.verify,
    "diff": commands.diff,
    "data": commands.data,
    "bench": table_commands.bench,
    "doctor": commands.doctor,
}


def main(argv: Sequence[str] | None = None) -> int:  # noqa: PLR0911 - an error each
    """Runs one command.

    Args:
      argv: arguments; default those of the process.

    Returns:
      The exit status, as `hpcjax --help` lists them.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(args)
        sys.stdout.flush()
        return status
    except HpcjaxError as error:
        _tell(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _tell("interrupted")
        return 130
    except show.Unread:
        return _leave_unread()
    except BrokenPipeError:  # of the output, or of what an experiment writes to
        return _tell_fault() if _is_read() else _leave_unread()
    except OSError as error:
        if error.errno not in (*_FULL, *_WRONG_PLACE):
            return _tell_fault()
        _tell(f"error: {error}")
        full = error.errno in _FULL
        return DiskFull.exit_code if full else ConfigError.exit_code
    except Exception:
        return _tell_fault()


def _is_read() -> bool:
    """Returns whether there is still somebody to read the output."""
    watched = select.poll()
    with contextlib.suppress(io.UnsupportedOperation):  # it is no file
        watched.register(sys.stdout, 0)
    return not any(event & select.POLLERR for _, event in watched.poll(0))


def _leave_unread() -> int:
    # The interpreter flushes stdout once more at exit, which must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD


def _tell_fault() -> int:
    _tell(traceback.format_exc())
    _tell("error: a fault in hpcjax or in the code that it ran; see above")
    return _FAULT


def _tell(text: str) -> None:
    """Prints a line on standard error, if somebody reads it."""
    with contextlib.suppress(OSError, show.Unread):
        show.console(stderr=True).print(text, soft_wrap=True)


def _dispatch(args: list[str]) -> int:
    if args == ["--version"]:
        import hpcjax

        show.console().print(hpcjax.__version__)
        return 0
    args = _overrides_last(_as_overrides(args)) or ["--help"]
    marks = (tyro.conf.FlagCreatePairsOff,)
    try:
        # Of all commands tyro makes a union, and for it imports typeguard: a third of
        # the time of a short command.
        if args[0] in COMMANDS:
            name, *rest = args
            known = COMMANDS[name]
            return tyro.cli(known, prog=f"hpcjax {name}", args=rest, config=marks)
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="hpcjax",
            description=_DESCRIPTION,
            args=args,
            config=marks,
        )
    except SystemExit as stop:
        if isinstance(stop.code, int):
            return stop.code
        _tell(str(stop.code or ""))
        return _FAULT if stop.code else 0


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
        written = option.removeprefix("--")
        key = written.replace("-", "_")
        known = key in options or key == "help"
        if known or written == option or not _KEY.fullmatch(written):
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
