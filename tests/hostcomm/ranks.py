"""What the processes of `test_launch` do."""

import os
import signal
import sys
import time

import numpy as np

from hpcjax import hostcomm
from hpcjax.hostcomm import Tag
from tests.hostcomm import contract


def what_it_is(transport, factor, array, more):
    total = hostcomm.allreduce(transport, array * transport.rank)
    assert "jax" not in sys.modules
    told = {
        "rank": transport.rank,
        "more": more,
        "threads": os.environ["OMP_NUM_THREADS"],
        "jax": os.environ["JAX_PLATFORMS"],
        "wire": transport.counters().total_sent().wire,
    }
    return told, total * factor, np.float32(transport.size), None


def keep_the_contract(transport):
    return contract.run_all(transport)


def fail(transport, who):
    if transport.rank == who:
        print("the last words")
        raise KeyError("a strange key")
    transport.receive(who, Tag("never"))


def die(transport, who):
    if transport.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    hostcomm.barrier(transport)


def stop(transport, who):
    if transport.rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    hostcomm.barrier(transport)


def sleep(transport, seconds):
    time.sleep(seconds)


def leave_early(transport):
    """Rank 0's words arrive though it has ended long before they are read."""
    if transport.rank == 0:
        transport.send(1, Tag("last"), np.full(100_000, 7))
        return 0
    time.sleep(0.3)
    return int(transport.receive(0, Tag("last"))[-1])


def something_else(transport):
    return object()


def tell_and_wait(transport, path):
    with open(f"{path}{transport.rank}", "w") as file:
        file.write(str(os.getpid()))
    hostcomm.barrier(transport)
    time.sleep(600)
