"""Ranks that are threads of the test."""

import concurrent.futures

from hpcjax.core.errors import ProcessLost


def in_threads(program, transports, *arguments):
    """Runs `program(transport, *arguments)` for each, closes all; results by rank."""

    def rank(transport):
        with transport:
            return program(transport, *arguments)

    with concurrent.futures.ThreadPoolExecutor(len(transports)) as threads:
        ranks = [threads.submit(rank, transport) for transport in transports]
    errors = [error for each in ranks if (error := each.exception())]
    # Who failed comes before those who lost it by that.
    for error in sorted(errors, key=lambda error: isinstance(error, ProcessLost)):
        raise error
    return [each.result() for each in ranks]


def close_all(transports):
    """Closes transports of one thread: the first must not wait for the others."""
    for linger in (0.0, 5.0):
        for transport in transports:
            transport.close(linger=linger)
