"""What the subcommands of `hpcjax` share: types of options, environment, log."""

# ruff: noqa: UP045
import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, Literal, Optional

import tyro
from tyro.conf import Positional

from hpcjax.core import environment
from hpcjax.core.errors import ConfigError

Config = Positional[Annotated[str, tyro.conf.arg(metavar="CONFIG")]]
# A bare tuple is of texts for tyro. For `tuple[str, ...]` and `str | None` it
# imports typeguard, a third of the time of a short command.
Overrides = Positional[
    Annotated[tuple, tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint="")]
]
Ids = Positional[
    Annotated[tuple, tyro.conf.arg(metavar="[ID ...]", help_behavior_hint="")]
]
Run = Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
Side = Positional[Annotated[str, tyro.conf.arg(metavar="RUN|CONFIG")]]
Tags = tyro.conf.UseAppendAction[
    Annotated[tuple, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
]
Root = Annotated[
    pathlib.Path,
    tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: working directory)"),
]
Devices = Annotated[
    Optional[int], tyro.conf.arg(metavar="N", help_behavior_hint="(default: 1)")
]
Data = Annotated[
    Optional[pathlib.Path],
    tyro.conf.arg(
        metavar="DIR",
        help_behavior_hint="(default: HPCJAX_DATA, else <root>/.cache/data)",
    ),
]
Tier = Annotated[
    Optional[str],
    tyro.conf.arg(
        metavar="TIER", help_behavior_hint="(default: cpu, or the only one there is)"
    ),
]
Name = Annotated[Optional[str], tyro.conf.arg(metavar="[PAPER]", help_behavior_hint="")]
State = Annotated[Optional[str], tyro.conf.arg(metavar="STATE", help_behavior_hint="")]
Picture = Annotated[
    Optional[pathlib.Path], tyro.conf.arg(metavar="FILE", help_behavior_hint="")
]
Format = Literal["rich", "md", "csv", "html", "latex"]

# Loggers that say in which folder a run is, and what is planned.
_TOLD = ("hpcjax.runs.directory", "hpcjax.runs.plan")
HERE = pathlib.Path()


def prepare(data: pathlib.Path | None, devices: int | None) -> None:
    """Sets the environment variables that JAX and experiments read when they start.

    Args:
      data: folder of data sets; None leaves the environment's.
      devices: devices to simulate, if JAX has only a CPU; None leaves their number.

    Raises:
      ConfigError: fewer than one device.
    """
    if data is not None:
        os.environ["HPCJAX_DATA"] = str(data)
    if devices is None:
        return
    if devices < 1:
        raise ConfigError(f"devices must be at least 1: got {devices}")
    if not environment.simulates():
        os.environ.update(environment.simulated(devices))


@contextlib.contextmanager
def log_to_stderr(quiet: bool) -> Iterator[None]:
    """Shows warnings on standard error, and unless `quiet` what takes its time."""
    # Of an error that Orbax raises, its threads and tasks log all tracebacks besides,
    # some of them as late as at the end of the process.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(
        lambda record: (
            record.levelno >= logging.WARNING or (not quiet and record.name in _TOLD)
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
