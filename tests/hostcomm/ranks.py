"""What the processes of `test_launch` do."""

import os
import pathlib
import signal
import sys
import time

import numpy as np

from hpcjax import hostcomm
from hpcjax.core.errors import ProcessLost
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


def sleep_through_all_rounds(transport, who, steps):
    """One rank wakes only once all others have taken the results of all steps."""
    partial = hostcomm.PartialAllreduce(transport, 10, mode="solo", limiter=0)
    if transport.rank == who:
        for _ in range(transport.size - 1):
            transport.receive_any("wake")
    for step in range(steps):
        partial.post(step, np.ones(10))
        partial.result(step)
    if transport.rank != who:
        transport.send(who, Tag("wake"), np.zeros(0))
    totals = [result.total.tolist() for result in partial.finish()]
    return totals, tuple(partial.trace())


def die_in_a_round(transport, who, folder):
    """All but one note what they are told and end with the error."""
    sums = hostcomm.PartialAllreduce(transport, 1000, mode="solo", limiter=3)
    _die_averaging(sums, who, folder)


def die_in_a_group(transport, who, folder):
    """The same with averages of models in groups."""
    groups = hostcomm.GroupAllreduce(transport, 1000, 2, 4)
    groups.start(np.ones(1000))
    _die_averaging(groups, who, folder)


def _die_averaging(averaging, who, folder):
    rank = averaging.transport.rank
    try:
        for step in range(1000):
            if rank == who and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)
            averaging.post(step, np.ones(1000))
            averaging.result(step, 60.0)
    except ProcessLost as error:
        pathlib.Path(folder, str(rank)).write_text(str(error))
        raise
