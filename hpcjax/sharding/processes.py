"""Several processes as one JAX program, on one machine or many."""

import contextlib
import json
import os
import secrets
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from hpcjax import hostcomm
from hpcjax.core.environment import ADDRESS, COUNT, INDEX
from hpcjax.core.errors import ConfigError

_ROOM = 4096


def connect(heartbeat_seconds: int = 10) -> None:
    """Joins the processes of one run; must be called before any other use of JAX.

    JAX recognises Slurm, Open MPI and cloud clusters. Elsewhere the environment must
    have `JAX_COORDINATOR_ADDRESS` (`host:port` of process 0), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`.

    Args:
      heartbeat_seconds: if a process is silent for so long, all others are ended.

    Raises:
      ConfigError: neither a known cluster nor the three variables, or counts that are
        not numbers.
    """
    present = [name for name in (ADDRESS, COUNT, INDEX) if name in os.environ]
    numbers: dict[str, Any] = {}
    if COUNT in present or INDEX in present:
        if len(present) < 3:
            missing = sorted({ADDRESS, COUNT, INDEX} - set(present))
            raise ConfigError(f"also set {', '.join(missing)}: got only {present}")
        try:
            numbers = {
                "num_processes": int(os.environ[COUNT]),
                "process_id": int(os.environ[INDEX]),
            }
        except ValueError as error:
            raise ConfigError(f"{COUNT} and {INDEX} must be numbers") from error
    # The training loop handles SIGTERM itself: it saves a checkpoint and ends.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=heartbeat_seconds,
            # A process that fails must not wait for the others, which wait for it in a
            # collective.
            shutdown_timeout_seconds=2,
            **numbers,
        )
    except ValueError as error:
        raise ConfigError(
            f"no cluster that JAX knows ({error}); elsewhere set {ADDRESS}, {COUNT} "
            f"and {INDEX}"
        ) from error
    if jax.default_backend() == "cpu":
        # Gloo pairs collectives by their order. XLA keeps an order between those of a
        # program that do not depend on each other, but a program that it reads from
        # the cache of compiled ones has lost it: sums of two processes then meet in
        # the wrong pairs, and one process is aborted.
        jax.config.update("jax_enable_compilation_cache", False)


def broadcast(text: str) -> str:
    """Returns process 0's text in every process; all processes must call it.

    Raises:
      ValueError: the text is longer than 4096 bytes.
    """
    if jax.process_count() == 1:
        return text
    encoded = text.encode()
    if len(encoded) > _ROOM:
        raise ValueError(f"at most {_ROOM} bytes can be sent: got {len(encoded)}")
    padded = np.zeros(_ROOM, np.uint8)
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    return received.tobytes().rstrip(b"\0").decode()


def wait_for_all(what: str) -> None:
    """Returns once every process has called it with the same text."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def host_transport() -> contextlib.AbstractContextManager[hostcomm.Transport | None]:
    """Connects the hosts of an SPMD run, beside what their devices exchange.

    All processes must call it. Process 0 listens at the address at which JAX's
    coordinator is reached, or else at its machine's name, and tells the others the port
    and a secret.

    Returns:
      The transport, whose ranks are the processes; None, as a context, of one alone.

    Raises:
      ProcessLost: one has not come.
    """
    rank, size = jax.process_index(), jax.process_count()
    if size == 1:
        return contextlib.nullcontext(None)
    listener, told = None, ""
    if rank == 0:
        host = os.environ.get(ADDRESS, "").rpartition(":")[0].strip("[]")
        host = host or socket.gethostname()
        listener = hostcomm.listen(host, backlog=size)
        told = json.dumps([host, listener.getsockname()[1], secrets.token_hex(16)])
    host, port, secret = json.loads(broadcast(told))
    return hostcomm.join(rank, size, (host, port), secret, listener=listener)
