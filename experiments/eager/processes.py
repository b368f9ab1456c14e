"""What the processes of the experiments do: steps that sleep, and training."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax import hostcomm
from hpcjax.hostcomm import PartialAllreduce, Tag

if TYPE_CHECKING:
    from hpcjax.hostcomm import Transport

MODES = ("sync", "majority", "solo")


def steps(transport: "Transport", given: dict[str, Any]) -> dict[str, Any]:
    """Runs all modes in turns with the same delays, after a warm-up.

    Args:
      transport: ours.
      given: `sleeps`, seconds of each step [step, rank], `numbers` in a message,
        `repetitions`, `base`, `calibration` steps, `limiter` and `seed`.

    Returns:
      `ping`, seconds of a small message and of one of the size; `round`, seconds of a
      synchronous round of all; `begin` and `end` [repetition, mode]; and `traces` and
      `contributors`, by repetition and mode.
    """
    size, seed = given["numbers"], given["seed"]
    own = given["sleeps"][:, transport.rank]
    ping = hostcomm.ping_pong(transport, [4, 4 * size])
    alone = np.full(given["calibration"], given["base"])
    _, seconds, _ = _run(transport, alone, size, {"mode": "sync"})
    runs = [
        [
            _run(
                transport,
                own,
                size,
                {"mode": mode, "limiter": given["limiter"], "seed": seed},
            )
            for mode in MODES
        ]
        for _ in range(given["repetitions"])
    ]
    return {
        "ping": ping,
        "round": float(np.median(np.diff(seconds)) - given["base"]),
        "begin": np.array([[run[1][0] for run in row] for row in runs]),
        "end": np.array([[run[1][-1] for run in row] for row in runs]),
        "traces": [[tuple(run[0]) for run in row] for row in runs],
        "contributors": np.array([[run[2] for run in row] for row in runs]),
    }


def _run(
    transport: "Transport", sleeps: np.ndarray, size: int, settings: dict[str, Any]
) -> tuple[hostcomm.PartialTrace, np.ndarray, float]:
    """Returns the trace, when each step began and the last ended, and contributors."""
    partial = PartialAllreduce(transport, size, **settings)
    gradient = np.ones(size, np.float32)
    contributors = []
    hostcomm.barrier(transport)
    times = [time.monotonic()]
    for step, seconds in enumerate(sleeps):
        time.sleep(seconds)
        partial.post(step, gradient)
        contributors += [each.contributors for each in partial.result(step)]
        times.append(time.monotonic())
    partial.finish()
    return partial.trace(), np.array(times), float(np.mean(contributors))


def latencies(transport: "Transport", given: dict[str, Any]) -> dict[str, Any]:
    """Measures from arrival to result, all arriving one after the other.

    Args:
      transport: ours.
      given: `bytes` of the messages, `sleeps` [round, rank] and `seed`.

    Returns:
      `ping`, seconds of a message of each size; `latency` and `fresh`, means over
      rounds, [mode, size].
    """
    shape = len(MODES), len(given["bytes"])
    latency, fresh = np.zeros(shape), np.zeros(shape)
    for row, mode in enumerate(MODES):
        for column, count in enumerate(given["bytes"]):
            size = count // 4
            partial = PartialAllreduce(
                transport, size, mode=mode, limiter=0, seed=given["seed"]
            )
            gradient, spent = np.ones(size, np.float32), []
            for step, seconds in enumerate(given["sleeps"][:, transport.rank]):
                hostcomm.barrier(transport, tag=Tag("together", step))
                time.sleep(seconds)
                begin = time.monotonic()
                partial.post(step, gradient)
                partial.result(step)
                spent.append(time.monotonic() - begin)
            partial.finish()
            latency[row, column] = np.mean(spent)
            fresh[row, column] = np.mean(partial.stats().fresh)
    ping = hostcomm.ping_pong(transport, given["bytes"])
    return {"ping": ping, "latency": latency, "fresh": fresh}


def train(transport: "Transport", given: dict[str, Any]) -> dict[str, Any]:
    """Learns a hyperplane from this process's shard, with each mode.

    Args:
      transport: ours.
      given: `task`, the sizes of a `Hyperplane`; `sleeps` [step, rank]; `lr`,
        `limiter`, `missed`, `sync_models_every` and `seed`.

    Returns:
      `loss` of the parameters at each step's begin and at the end, and `seconds` at
      which they were there, [mode, step + 1]; `traces`, by mode.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from experiments.eager.hyperplane import Hyperplane
    from hpcjax import optim

    task, seed = Hyperplane(**given["task"]), given["seed"]
    x, y = map(jnp.asarray, task.shard(seed, transport.rank, transport.size))
    gradient = jax.jit(task.gradient(transport.size))
    excess = jax.jit(task.excess(seed))
    found: dict[str, list[Any]] = {"loss": [], "seconds": [], "traces": []}
    for mode in MODES:
        partial = PartialAllreduce(
            transport,
            task.dims + 1,
            mode=mode,
            limiter=given["limiter"],
            missed=given["missed"],
            seed=seed,
        )
        worker = optim.eager_sgd(
            partial,
            optax.sgd(given["lr"]),
            sync_models_every=given["sync_models_every"],
        )
        params = jnp.zeros(task.dims + 1)
        state = worker.init(params)
        jax.block_until_ready((gradient(params, x, y, 0), excess(params)))
        hostcomm.barrier(transport, tag=Tag("together"))
        begin, losses, times = time.monotonic(), [], []
        for step, pause in enumerate(given["sleeps"][:, transport.rank]):
            losses.append(excess(params))
            times.append(time.monotonic() - begin)
            time.sleep(pause)
            _, grads = gradient(params, x, y, step)
            params, state = worker.step(grads, state, params)
        times.append(time.monotonic() - begin)
        params, state = worker.finish(state, params)
        losses.append(excess(params))
        found["loss"].append(np.array(losses))
        found["seconds"].append(np.array(times))
        found["traces"].append(tuple(worker.trace()))
    return {
        **found,
        "loss": np.array(found["loss"]),
        "seconds": np.array(found["seconds"]),
    }
