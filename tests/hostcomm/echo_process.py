"""A process that `test_local_processes` asks."""

import os
import sys

import numpy as np

from hpcjax.hostcomm import local_processes
from hpcjax.hostcomm.channels import Message


def main() -> int:
    member = local_processes.join_processes(sys.argv[1])

    def echo(options):
        told = {
            "rank": member.rank,
            "text": options["text"],
            "jax": "jax" in sys.modules,
        }
        return Message(
            "done", told, {"cores": np.array(sorted(os.sched_getaffinity(0)))}
        )

    def exchange(options):
        (link,) = member.links.values()
        link.send(Message("hello", {"words": f"from {member.rank}"}))
        return Message("done", {"got": link.receive("a greeting").options["words"]})

    def fail(options):
        if member.rank:
            raise ValueError("an odd number")
        return exchange(options)

    return member.serve({"echo": echo, "exchange": exchange, "fail": fail})


if __name__ == "__main__":
    sys.exit(main())
