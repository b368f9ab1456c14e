"""What a process of `live` does: the passes of one stage, in each order in turns."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.axonn.live import DEEP, F1B1, GPIPE, ORDERS, Config
from hpcjax import perf, sharding
from hpcjax.hostcomm import Transport


def layers(params: Any, x: Any, _: Any) -> jax.Array:
    """Returns outputs `[rows, width]` of a stage with kernels `[n, width, width]`."""
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return x


def loss(params: Any, x: Any, target: Any) -> jax.Array:
    """Returns the mean squared error of the last stage."""
    return jnp.mean((layers(params, x, None) - target) ** 2)


def work(transport: Transport, cfg: Config) -> dict[str, Any]:
    """Runs a batch of each draw in each order.

    Returns:
      By order `spans`, of each draw the start, end, kind and micro-batch of ops, and
      `distance`, of gradients from `jax.grad`'s; `summed`, of m times these.
    """
    stage = _Stage(transport, cfg)
    for order in ORDERS:
        stage.run(order, np.zeros((cfg.stages, cfg.micro_batches, 2)))  # compiles
    told: dict[str, Any] = {"spans": {order: [] for order in ORDERS}}
    for draw in range(cfg.draws):
        for order, rows in told["spans"].items():
            rows.append(stage.run(order, cfg.durations(order, draw)))
    return told | {"distance": stage.distance, "summed": stage.summed}


class _Stage:
    """A stage of the model, in all orders."""

    def __init__(self, transport: Transport, cfg: Config) -> None:
        self.distance, self.summed = (dict.fromkeys(ORDERS, 0.0) for _ in range(2))
        self._transport, self._size = transport, (cfg.stages, cfg.micro_batches)
        self._steps = 0
        kernels, x, targets = _draw(cfg)
        functions = [layers] * (cfg.stages - 1) + [loss]
        perf.check_stages(functions, list(kernels), x[0], targets[0])
        at, last = transport.rank, transport.rank == cfg.stages - 1
        self._wanted = jax.grad(_whole)(kernels, x, targets)[at]
        self._work = perf.StageWork(
            functions[at],
            kernels[at],
            cfg.micro_batches,
            inputs=None if at else x,
            targets=targets if last else None,
        )

    def run(self, order: str, durations: np.ndarray) -> list[list[Any]]:
        """Runs a batch whose ops take these seconds, compares its gradient."""
        stages, count = self._size
        own = durations[self._transport.rank]

        def run_op(op: sharding.Op, received: np.ndarray | None) -> np.ndarray | None:
            end = time.perf_counter() + own[op.micro_batch, int(op.kind == "B")]
            result = self._work.run_op(op, received)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        device = perf.DeviceWork(run_op=run_op, run_task=print, flush=lambda _: None)
        schedule, row = None, None
        if order in (F1B1, GPIPE):
            make = sharding.one_f_one_b if order == F1B1 else sharding.gpipe
            schedule = make(stages, count)
            row = schedule.orders[self._transport.rank]
        else:
            deep = stages * (2 if order == DEEP else 1)
            row = sharding.MessageDriven(stages, self._transport.rank, count, deep)
        pipeline = perf.HostPipeline(schedule, self._transport, device)
        pipeline.step(self._steps, row)
        self._steps += 1
        gradient = self._work.take_gradient()
        for told, scale in ((self.distance, 1), (self.summed, count)):
            away = abs(np.asarray(scale * gradient - self._wanted)).max()
            told[order] = float(np.maximum(told[order], away))  # NaN stays
        return [
            [span.start, span.end, span.work.kind, span.work.micro_batch]
            for span in pipeline.spans
            if isinstance(span.work, sharding.Op)
        ]


def _draw(cfg: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns kernels of each stage, and micro-batches of inputs and targets."""
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    square = cfg.stages, cfg.layers // cfg.stages, cfg.width, cfg.width
    kernels = rng.standard_normal(square, np.float32) / np.sqrt(cfg.width)
    rows = cfg.micro_batches, cfg.rows // cfg.micro_batches, cfg.width
    x, targets = rng.standard_normal((2, *rows), np.float32)
    return kernels.astype(np.float32), x, targets


def _whole(kernels: Any, x: Any, targets: Any) -> jax.Array:
    """Returns the loss of the whole batch in one program."""
    return loss(kernels.reshape(-1, *kernels.shape[2:]), x, targets)
