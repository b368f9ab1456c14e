"""What each process does: passes of a chain with and without something being sent."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from experiments.gradcomp import chain
from experiments.gradcomp.methods import CONFIGS, HALF
from hpcjax import collectives, cost, hostcomm, perf, sharding
from hpcjax.hostcomm import Agent, Tag, Transport

if TYPE_CHECKING:
    from experiments.gradcomp.overlap import Config as OverlapConfig
    from experiments.gradcomp.validation import Config as ValidationConfig

SIZES = (4, 2**17, 2**20, 2**22)  # links are slow
DENSE = cost.Dense().label
HOST_CONFIGS = {**CONFIGS, HALF.label: collectives.HalfConfig()}


class Worker:
    """A process with its part of the data.

    Args:
      transport: ours.
      sizes: of the chain.
      seed: of parameters and data.
    """

    def __init__(
        self, transport: Transport, sizes: chain.ChainConfig, seed: int
    ) -> None:
        self.cfg, self.transport = sizes, transport
        self.params = jax.device_put(chain.parameters(sizes, seed))
        self.data = jax.device_put(chain.batch(sizes, seed, transport.rank))
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
        thunks = {"alone": lambda: None, "sending": self.send}
        seconds = perf.compare(
            thunks, "alone", repetitions=repetitions, warmup=1, take=self._passes_beside
        )["seconds"].median("repetition")
        ratio = seconds.sel(candidate=["sending"]) / seconds.sel(candidate="alone")
        most = hostcomm.allreduce(
            self.transport,
            ratio.values,
            operation=np.maximum,
            tag=Tag("slowdown", 1),
        )
        return max(1.0, float(most[0]))

    def _passes_beside(self, other: Callable[[], Any]) -> float:
        """Returns seconds of the passes while a thread does something else."""
        hostcomm.barrier(self.transport, tag=Tag("slowdown"))
        with Agent() as agent:
            begin = time.perf_counter()
            agent.submit(other)
            self.compute()
            return time.perf_counter() - begin


def _ignore(number: int, grads: Any) -> None:
    del number, grads


def passes(transport: Transport, cfg: "OverlapConfig") -> dict[str, float]:
    """Returns seconds of the forward and of the backward pass, of all ranks at once."""
    worker = Worker(transport, cfg.chain, cfg.seed)
    measure = functools.partial(perf.time_together, transport, repetitions=cfg.rounds)
    return split(measure(worker.forward), measure(worker.compute))


def split(forward: float, both: float) -> dict[str, float]:
    """Returns seconds of the forward and of the backward pass.

    Of a chain's products two thirds are in the backward pass. Where what was measured
    says less than one third, passes are too short to be told apart.
    """
    return {"forward_s": forward, "backward_s": max(both - forward, both / 3)}


def overlap(transport: Transport, cfg: "OverlapConfig") -> dict[str, Any]:
    """Returns seconds of passes, of sending, of both at a time, one after the other."""
    worker = Worker(transport, cfg.chain, cfg.seed)
    with Agent() as agent:
        thunks = {
            "computing": worker.compute,
            "sending": worker.send,
            "both": worker.averaged(agent),
            "afterwards": lambda: (worker.compute(), worker.send()),
        }
        return in_turns(transport, thunks, cfg.rounds)


def measure(transport: Transport, cfg: "ValidationConfig") -> dict[str, Any]:
    """Calibrates a link and this machine, and measures steps by every method.

    Returns:
      `alpha_s`, `bytes_per_s`, `slowdown`; medians of `forward_s`, `backward_s` and, by
      label, of `encode_decode_s` and `step_s`.
    """
    worker = Worker(transport, cfg.chain, cfg.seed)
    labels, rounds = cfg.methods, cfg.repetitions
    link = perf.calibrate(transport, SIZES, repetitions=3).link
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
        "alpha_s": link.alpha,
        "bytes_per_s": link.bytes_per_s,
        "slowdown": worker.slowdown(rounds),
        **split(seconds["forward"], seconds["both"]),
        "encode_decode_s": {x: seconds.get(f"encode {x}", 0.0) for x in labels},
        "step_s": {x: seconds[f"step {x}"] for x in labels},
    }


def in_turns(
    transport: Transport, thunks: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, np.ndarray]:
    """Returns seconds by round, of all ranks at once; a round before does not count."""
    once = functools.partial(perf.time_together, transport, repetitions=1, warmup=0)
    seconds = perf.compare(
        thunks, next(iter(thunks)), repetitions=rounds, warmup=1, take=once
    )["seconds"]
    return {name: seconds.sel(candidate=name).values for name in thunks}
