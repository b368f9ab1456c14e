"""The environment of processes that we start: imports, devices, and who is who."""

import os
import sys

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
_DEVICES = "--xla_force_host_platform_device_count"


def child(**changes: str) -> dict[str, str]:
    """Returns ours for a child, which is to import what this process can import."""
    places = [place for place in sys.path if place]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **changes}


def portable() -> dict[str, str]:
    """Returns what a process on another machine needs of a child's, and no secrets."""
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
      count: of processes.
      index: which one it is.
    """
    return {ADDRESS: address, COUNT: str(count), INDEX: str(index)}


def simulated(devices: int) -> dict[str, str]:
    """Returns `XLA_FLAGS` as it is, with so many devices of a CPU; the last one counts.

    Examples:
      >>> simulated(4)["XLA_FLAGS"].split()[-1]
      '--xla_force_host_platform_device_count=4'
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}={devices}"
    return {"XLA_FLAGS": flags.strip()}


def simulates() -> bool:
    """Says whether `XLA_FLAGS` already gives the number of a CPU's devices."""
    return _DEVICES in os.environ.get("XLA_FLAGS", "")
