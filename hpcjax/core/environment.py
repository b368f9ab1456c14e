"""Environment variables of the processes we start: imports, devices and their ranks."""

import os
import sys

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
_DEVICES = "--xla_force_host_platform_device_count"


def child(**changes: str) -> dict[str, str]:
    """Returns this environment with a PYTHONPATH of all that is importable here."""
    places = [place for place in sys.path if place]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **changes}


def portable() -> dict[str, str]:
    """Returns only what a process on another machine needs: no secrets are sent."""
    taken = ("PYTHONPATH", "HPCJAX_DATA", "XLA_FLAGS")
    return {
        name: value
        for name, value in child().items()
        if name in taken or name.startswith("JAX_")
    }


def member(address: str, count: int, index: int) -> dict[str, str]:
    """Returns the variables by which `sharding.connect` finds the others of a run.

    Args:
      address: `host:port` of process 0.
      count: number of processes.
      index: rank of this process.
    """
    return {ADDRESS: address, COUNT: str(count), INDEX: str(index)}


def simulated(devices: int, flags: str | None = None) -> dict[str, str]:
    """Returns `XLA_FLAGS` that simulate several devices on a CPU.

    Args:
      devices: number of devices; it is appended, since XLA takes the last one given.
      flags: other flags; None for those of this process.

    Examples:
      >>> simulated(4)["XLA_FLAGS"].split()[-1]
      '--xla_force_host_platform_device_count=4'
    """
    if flags is None:
        flags = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{flags} {_DEVICES}={devices}".strip()}


def simulates() -> bool:
    """Says whether `XLA_FLAGS` already sets a number of simulated devices."""
    return _DEVICES in os.environ.get("XLA_FLAGS", "")
