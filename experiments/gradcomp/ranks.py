"""What each process does: passes of a chain with and without something being sent."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.gradcomp import chain
from experiments.gradcomp.methods import CONFIGS, HALF
from hpcjax import collectives, hostcomm, perf, sharding
from hpcjax.hostcomm import Agent, Tag, Transport

SIZES = (4, 2**17, 2**20, 2**22)  # links are slow
DENSE = perf.Dense().label
HOST_CONFIGS = {**CONFIGS, HALF.label: collectives.HalfConfig()}


class Worker:
    """A process with its part of the data.

    Args:
      transport: ours.
      sizes: fields of a `ChainConfig`, and `seed`.
    """

    def __init__(self, transport: Transport, sizes: Mapping[str, int]) -> None:
        own = dict(sizes)
        seed = own.pop("seed")
        self.cfg = chain.ChainConfig(**own)
        self.transport = transport
        self.params = jax.device_put(chain.parameters(self.cfg, seed))
        self.data = jax.device_put(chain.batch(self.cfg, seed, transport.rank))
        segments = [chain.layer] * self.cfg.layers
        self.staged = sharding.staged_value_and_grad(segments, chain.loss)
        self.segments = segments

    def forward(self) -> Any:
        """Computes the loss."""
        return jax.block_until_ready(self._forward(self.params, *self.data))

    @functools.cached_property
    def _forward(self) -> Callable[..., Any]:
        def loss(params: Any, x: Any, targets: Any) -> Any:
            for kernel in params:
                x = chain.layer(kernel, x)
            return chain.loss(x, targets)

        return jax.jit(loss)

    def compute(self) -> Any:
        """Computes gradients segment by segment; sends nothing."""
        made = self.staged(self.params, *self.data, _ignore)
        return jax.block_until_ready(made)[1]

    def averaged(self, agent: Agent) -> Callable[[], Any]:
        """Returns what computes gradients while those that are ready are averaged."""
        run = sharding.averaged_value_and_grad(
            self.segments, chain.loss, self.transport, agent
        )
        return lambda: run(self.params, *self.data)[1]

    def exchanged(self, label: str) -> Callable[[], Any]:
        """Returns what computes gradients and then averages them by a method."""
        exchange = HOST_CONFIGS[label].make()
        group = collectives.HostGroup(self.transport)
        state = exchange.init(self.params)

        def step() -> Any:
            nonlocal state
            tree = [np.asarray(grad) for grad in self.compute()]
            mean, state = exchange.average(group, tree, state)
            return mean

        return step

    def send(self) -> None:
        """Averages as many bytes as there are gradients, bucket by bucket."""
        bucket = np.zeros(self.cfg.bucket_bytes // 4, np.float32)
        for number in range(self.cfg.layers):
            tag = Tag("sent", number)
            hostcomm.allreduce(self.transport, bucket, tag=tag)

    def slowdown(self, repetitions: int) -> float:
        """Returns how much longer the passes take while as much is sent beside them."""
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * (1 + repetitions)):
            beside = turn % 2 == 1
            hostcomm.barrier(self.transport, tag=Tag("slowdown"))
            with Agent() as agent:
                begin = time.perf_counter()
                if beside:
                    agent.submit(self.send)
                self.compute()
                times[beside].append(time.perf_counter() - begin)
        with_it, without = (np.median(times[beside][1:]) for beside in (True, False))
        ratio = np.array([with_it / without])
        tag = Tag("slowdown", 1)
        most = hostcomm.allreduce(self.transport, ratio, operation=np.maximum, tag=tag)
        return max(1.0, float(most[0]))


def _ignore(number: int, grads: Any) -> None:
    del number, grads


def passes(
    transport: Transport, sizes: Mapping[str, int], repetitions: int
) -> dict[str, float]:
    """Returns seconds of the forward and of the backward pass, of all ranks at once."""
    worker = Worker(transport, sizes)
    measure = functools.partial(perf.together, transport, repetitions=repetitions)
    return split(measure(worker.forward), measure(worker.compute))


def split(forward: float, both: float) -> dict[str, float]:
    """Returns seconds of the forward and of the backward pass.

    Of a chain's products two thirds are in the backward pass. Where what was measured
    says less than one third, passes are too short to be told apart.
    """
    return {"forward_s": forward, "backward_s": max(both - forward, both / 3)}


def overlap(
    transport: Transport, sizes: Mapping[str, int], rounds: int
) -> dict[str, list[float]]:
    """Returns seconds without sending, of sending alone and of both, by round."""
    worker = Worker(transport, sizes)
    with Agent() as agent:
        thunks = {
            "computing": worker.compute,
            "sending": worker.send,
            "both": worker.averaged(agent),
        }
        return in_turns(transport, thunks, rounds)


def measure(
    transport: Transport, sizes: Mapping[str, int], labels: list[str], rounds: int
) -> dict[str, Any]:
    """Calibrates a link and this machine, and measures steps by every method.

    Returns:
      `alpha_s`, `bytes_per_s`, `slowdown`; medians of `forward_s`, `backward_s` and, by
      label, of `encode_decode_s` and `step_s`.
    """
    worker = Worker(transport, sizes)
    system = perf.calibrate(transport, SIZES, repetitions=3)
    grads = worker.compute()
    with Agent() as agent:
        thunks = {"forward": worker.forward, "both": worker.compute}
        for label in labels:
            if label == DENSE:
                thunks[f"step {label}"] = worker.averaged(agent)
                continue
            thunks[f"step {label}"] = worker.exchanged(label)
            exchange = HOST_CONFIGS[label].make()
            thunks[f"encode {label}"] = perf.encode_decode(
                exchange, grads, transport.size, on_host=True
            )
        seconds = {
            name: float(np.median(taken))
            for name, taken in in_turns(transport, thunks, rounds).items()
        }
    return {
        "alpha_s": system.alpha_s,
        "bytes_per_s": system.bytes_per_s,
        "slowdown": worker.slowdown(rounds),
        **split(seconds["forward"], seconds["both"]),
        "encode_decode_s": {x: seconds.get(f"encode {x}", 0.0) for x in labels},
        "step_s": {x: seconds[f"step {x}"] for x in labels},
    }


def in_turns(
    transport: Transport, thunks: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Returns seconds by round, of all ranks at once; a round before does not count.

    In turns, so that a slow moment meets all of them.
    """
    taken: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(1 + rounds):
        for name, thunk in thunks.items():
            seconds = perf.together(transport, thunk, repetitions=1, warmup=0)
            taken[name].append(seconds)
    return {name: seconds[1:] for name, seconds in taken.items()}
