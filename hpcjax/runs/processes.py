"""Running a function of a config in new processes of this machine."""

import pathlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcjax import hostcomm
from hpcjax.core import drift
from hpcjax.hostcomm.channels import PATIENCE
from hpcjax.runs import config as configs
from hpcjax.runs import discover

if TYPE_CHECKING:
    from hpcjax.hostcomm import Link, Transport


def in_processes(
    work: Callable[..., Any],
    cfg: Any,
    processes: int,
    *,
    given: Sequence[Any] = (),
    link: "Link | None" = None,
    devices: int = 1,
    cores: Sequence[int] | None = None,
    patience: float = PATIENCE,
    root: pathlib.Path | None = None,
) -> list[Any]:
    """Runs `work(transport, cfg, *given)` in new processes that are connected.

    Each process finds the experiments and configs of the root of `work`, and has a JAX
    of its own: a CPU with `devices` simulated devices, with a thread for each. See
    `hostcomm.launch` for the rest.

    Args:
      work: a function of a module. Its results, and `given`, must be values that
        `hostcomm.pack` can send.
      cfg: a config, the same for all processes.
      processes: number of processes.
      given: further arguments, the same for all processes.
      link: a simulated network link for each process; None for the machine's speed.
      devices: simulated devices of each process.
      cores: one for each process, to which it is pinned; None: any.
      patience: seconds that a process waits for another one.
      root: folder of experiments and configs; None: that which `work` is of.

    Returns:
      The result of each process.

    Raises:
      ConfigError: `work` cannot be imported, or something cannot be sent.
      HpcjaxError: a process has failed, died or hangs; says which.
    """
    name = hostcomm.importable_name(work)
    if root is None:
        file = pathlib.Path(str(sys.modules[work.__module__].__file__))
        root = file.parents[work.__module__.count(".")]
    found = hostcomm.launch(
        _work,
        processes,
        link=link,
        arguments=(str(root), name, configs.to_json(cfg), list(given)),
        devices=devices,
        cores=cores,
        patience=patience,
    )
    drift.tell(*(each for _, moved in found for each in moved))
    return [result for result, _ in found]


def _work(
    transport: "Transport", root: str, name: str, cfg: Any, given: Sequence[Any]
) -> Any:
    discover.activate(pathlib.Path(root))
    work = pkgutil.resolve_name(name)
    with drift.listening() as moved:
        return work(transport, configs.from_json(cfg), *given), moved
