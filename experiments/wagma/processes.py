"""What the processes of the throughput table do: steps that sleep, and averages."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax import hostcomm
from hpcjax.hostcomm import PartialAllreduce, Tag

if TYPE_CHECKING:
    from hpcjax.hostcomm import Transport

METHODS = (
    "allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp", "eager", "waiting", "wagma"
)  # fmt: skip


def steps(transport: "Transport", given: dict[str, Any]) -> dict[str, Any]:
    """Runs all methods in turns with the same delays, each after a warm-up.

    Args:
      transport: ours.
      given: `sleeps`, seconds of each step [step, rank], `numbers` in the model,
        `repetitions`, `warm_up` steps, `group_size`, `tau`, `period` and `seed`.

    Returns:
      `begin` and `end` [repetition, method]; `copy`, seconds to copy the model from the
      device and back; `traces` of "wagma", by repetition.
    """
    import jax
    import jax.numpy as jnp

    own = given["sleeps"][:, transport.rank]
    params = jnp.zeros(given["numbers"])
    begin = time.monotonic()
    for _ in range(5):
        copy = np.array(jax.block_until_ready(params + 1))
        jax.block_until_ready(jnp.asarray(copy))
    copied = (time.monotonic() - begin) / 5
    found: dict[str, list[Any]] = {"begin": [], "end": [], "traces": []}
    for _ in range(given["repetitions"]):
        rows = []
        for method in METHODS:
            worker = _worker(method, transport, given)
            rows.append(_run(transport, worker, own, params, given["warm_up"]))
            if method == "wagma":
                found["traces"].append(tuple(worker.trace()))
        found["begin"].append([begin for begin, _ in rows])
        found["end"].append([end for _, end in rows])
    times = {name: np.array(found[name]) for name in ("begin", "end")}
    return {**times, "traces": found["traces"], "copy": copied}


def _worker(method: str, transport: "Transport", given: dict[str, Any]) -> Any:
    import optax

    from hpcjax import optim

    tx, size = optax.sgd(0.1), given["group_size"]
    if method == "eager":
        partial = PartialAllreduce(transport, given["numbers"], mode="solo", limiter=0)
        return optim.eager_sgd(partial, tx)
    if method in ("wagma", "waiting"):
        avoiding = method == "wagma"
        return optim.wagma(
            transport, tx, group_size=size, tau=given["tau"], wait_avoiding=avoiding
        )
    return {
        "allreduce": optim.allreduce_sgd,
        "local_sgd": lambda *own: optim.local_sgd(*own, period=given["period"]),
        "dpsgd": optim.dpsgd,
        "adpsgd": lambda *own: optim.adpsgd(*own, seed=given["seed"]),
        "sgp": optim.sgp,
    }[method](transport, tx)


def _run(
    transport: "Transport", worker: Any, sleeps: np.ndarray, params: Any, warm_up: int
) -> tuple[float, float]:
    """Returns when the steps after the warm-up began and when they had ended."""
    import jax
    import jax.numpy as jnp

    grads = jnp.ones_like(params)
    state = worker.init(params)
    begin = time.monotonic()
    for step, seconds in enumerate(np.append(np.zeros(warm_up), sleeps)):
        if step == warm_up:
            hostcomm.barrier(transport, tag=Tag("together"))
            begin = time.monotonic()
        time.sleep(seconds)
        params, state = worker.step(grads, state, params)
    jax.block_until_ready(params)
    end = time.monotonic()
    worker.finish(state, params)
    return begin, end
