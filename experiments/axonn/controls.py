"""What breaks a pipeline, for negative controls."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def summed() -> Iterator[None]:
    """Gradients of micro-batches are summed where they should be averaged."""
    import jax

    from hpcjax.sharding import pipelined

    right = pipelined.pipelined_value_and_grad

    def wrong(schedule: Any, *args: Any, **options: Any) -> Any:
        differentiate, count = right(schedule, *args, **options), schedule.micro_batches

        def run(*given: Any) -> Any:
            found = differentiate(*given)
            return found._replace(grads=jax.tree.map(lambda g: count * g, found.grads))

        return run

    with mock.patch.object(pipelined, "pipelined_value_and_grad", wrong):
        yield
