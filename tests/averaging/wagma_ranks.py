"""What the processes of `test_wagma` do."""

from tests.averaging.eager_ranks import follow


def train(transport, steps, runs):
    """Trains by each of the settings; returns final weights and traces."""
    from hpcjax.averaging import wagma

    return follow(
        transport, steps, lambda tx: (wagma(transport, tx, **given) for given in runs)
    )
