"""What each process of `mpirun` does in `test_mpi`."""

import sys

import numpy as np
import pytest

from hpcjax.core.errors import HpcjaxError, ProcessLost
from hpcjax.hostcomm import Link, MpiTransport, Tag
from tests.hostcomm import contract


def keep_the_contract():
    with MpiTransport(patience=60.0, link=Link(rate=1e9, latency=1e-4)) as transport:
        names = contract.run_all(transport)
    assert len(names) == len(contract.PROGRAMS)
    with pytest.raises(HpcjaxError, match="closed"):
        transport.receive(0, Tag("x"))


def learn_of_an_end():
    """Whomever a rank waits for."""
    transport = MpiTransport(patience=60.0)
    rank = transport.rank
    kind, words = (KeyError, "strange") if rank == 1 else (ProcessLost, "rank 1 has")

    def fail_or_wait():
        with transport:
            if rank == 1:
                raise KeyError("a strange key")
            transport.receive(2 - rank, Tag("never"))

    with pytest.raises(kind, match=words):
        fail_or_wait()


def miss_one():
    transport = MpiTransport(patience=60.0)
    if transport.rank == 1:
        transport.send(0, Tag("last"), np.ones(100_000))
    else:
        with pytest.raises(ProcessLost, match="rank 1 has closed its transport"):
            transport.receive(1, Tag("never"))
        if transport.rank == 0:
            assert transport.receive(1, Tag("last")).sum() == 100_000
    transport.close()


if __name__ == "__main__":
    {each.__name__: each for each in (keep_the_contract, learn_of_an_end, miss_one)}[
        sys.argv[1]
    ]()
    print("well", flush=True)
