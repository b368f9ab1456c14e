"""A process of `two_processes`: pinned to its core before JAX counts them."""

import sys

from hpcjax.hostcomm import local_processes


def main() -> int:
    """Answers requests until there are no more; returns the exit status."""
    member = local_processes.join_processes(sys.argv[1])
    from experiments.pipefisher import stage

    return stage.serve(member)


if __name__ == "__main__":
    sys.exit(main())
