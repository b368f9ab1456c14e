"""Functions run by several processes of this machine that are connected."""

import contextlib
import dataclasses
import math
import pkgutil
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm.channels import PATIENCE
from hpcjax.hostcomm.link import Link
from hpcjax.hostcomm.local_processes import GRACE, start_processes
from hpcjax.hostcomm.packing import pack, unpack
from hpcjax.hostcomm.rendezvous import listen

_MODULE = "hpcjax.hostcomm.rank_process"


def launch(
    function: Callable[..., Any],
    processes: int,
    *,
    link: Link | None = None,
    arguments: Sequence[Any] = (),
    patience: float = PATIENCE,
    limit: float = math.inf,
    devices: int = 1,
    cores: Sequence[int] | None = None,
) -> list[Any]:
    """Runs a function in new processes that are connected, and returns its results.

    Each process is single-threaded (JAX on its CPU too); there may be more of them than
    cores. What they print is shown if they fail. All have ended when this returns.

    Args:
      function: called as `function(transport, *arguments)`; of a module that can be
        imported. It and its results are made of what `pack` takes.
      processes: how many.
      link: that of each process; None: as fast as the machine is.
      arguments: the same for all.
      patience: seconds in which all must have met, and to wait for a silent rank.
      limit: seconds that the whole may take.
      devices: simulated devices of each process, as JAX sees its CPU.
      cores: one for each process, to which it is pinned; None: any.

    Returns:
      What each rank has returned.

    Raises:
      ConfigError: the function cannot be imported by its name, or an argument not sent.
      HpcjaxError: a rank has failed; with its traceback.
      ProcessLost: a rank has died, or hangs; says which.
    """
    checks.require_count(1, processes=processes, devices=devices)
    checks.require(
        patience > 0 and limit > 0, "must be > 0", patience=patience, limit=limit
    )
    name = importable_name(function)
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(listen(backlog=processes)) for _ in range(processes)
        ]
        asked = {
            "function": name,
            "arguments": list(arguments),
            "addresses": [listener.getsockname() for listener in listeners],
            "token": secrets.token_hex(16),
            "link": None if link is None else dataclasses.asdict(link),
            "patience": patience,
        }
        request = pack(name.partition(":")[2], asked)
        crew = stack.enter_context(
            start_processes(
                _MODULE,
                cores or [None] * processes,
                patience=patience,
                answer_patience=limit,
                grace=min(GRACE, patience),
                listeners=listeners,
                devices=devices,
            )
        )
        return [unpack(reply) for reply in crew.request([request] * processes)]


def importable_name(function: Callable[..., Any]) -> str:
    """Returns `module:name`, by which another process can find a function.

    Raises:
      ConfigError: it is no function of a module that can be imported.
    """
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", "")
    try:
        found = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not function or module == "__main__":
        raise ConfigError(
            f"the processes must be able to import the function: got {name!r} of "
            f"{module!r}; write it as a function of a module"
        )
    return f"{module}:{name}"
