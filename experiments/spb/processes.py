"""Processes that each compile their own role: what they compute, keep and send."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import collectives, hostcomm, optim, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import HpcjaxError

PATIENCE = 120.0
FIGURES = ("flops", "memory", "sent", "loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A chain of tanh layers, learned by processes of different roles.

    Attributes:
      k: blocks; as many processes.
      layers: of each block.
      width: of every layer.
      rows: examples of a process.
      lr: learning rate of the steps.
      steps: how many.
      rotation: "fixed": a process has the program of one role, and its memory.
      mode: what is sent; see `optim.contributor_mean`.
      seed: of parameters and data.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "k": "2",
        "layers": "1",
        "width": "4",
        "rows": "2",
        "steps": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "flops": "process: of its program",
        "memory": "process: bytes of temporaries, the largest of its programs",
        "sent": "process: bytes of arrays in a step",
        "loss": "process: of its last step",
    }

    k: config.Size = 4
    layers: config.Size = 2
    width: config.Size = 256
    rows: config.Size = 2048
    lr: float = 0.1
    steps: config.Size = 8
    rotation: Literal["rotate", "fixed"] = "fixed"
    mode: Literal["zeros", "contributors"] = "contributors"
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"process": range(self.k)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains in processes, which may share cores: nothing is timed.

    Raises:
      HpcjaxError: the processes have not all come to the same parameters.
    """
    found = runs.in_processes(work, cfg, cfg.k, patience=PATIENCE)
    ends = {each["digest"] for each in found}
    if len(ends) != 1:
        raise HpcjaxError(f"replicas differ after {cfg.steps} steps: {sorted(ends)}")
    columns = {name: ("process", [each[name] for each in found]) for name in FIGURES}
    return runs.measured(columns, coords={"process": list(range(cfg.k))})


def work(transport: "hostcomm.Transport", cfg: Config) -> dict[str, Any]:
    """Trains as one of the processes; returns its figures."""
    import hashlib

    import jax

    params, x, y = problem(cfg, transport.rank)
    names = sorted(params)
    blocks = optim.Blocks(
        tuple(tuple(names[j * cfg.layers : (j + 1) * cfg.layers]) for j in range(cfg.k))
    )
    group, programs, losses = collectives.HostGroup(transport), {}, []
    for step in range(cfg.steps):
        roles = optim.roles(transport.size, cfg.k, step, cfg.rotation)
        role = roles[transport.rank]
        if role not in programs:
            made = jax.jit(optim.partial_value_and_grad(_loss, blocks, role))
            programs[role] = made.lower(params, x, y).compile()
        value, grads = jax.device_get(programs[role](params, x, y))
        mean = optim.average_contributions(
            group, grads, blocks=blocks, roles=roles, mode=cfg.mode
        )
        params = {
            name: p - np.float32(cfg.lr) * mean[name] for name, p in params.items()
        }
        losses.append(float(value))
    parts = b"".join(params[name].tobytes() for name in names)
    memory = [perf.temporary_memory(p) for p in programs.values()]
    return {
        "flops": sum(map(perf.flops, programs.values())) / len(programs),
        "memory": max(memory),
        "sent": transport.counters().total_sent().payload / cfg.steps,
        "loss": losses[-1],
        "digest": hashlib.sha256(parts).hexdigest(),
    }


def problem(cfg: Config, rank: int) -> "tuple[dict[str, np.ndarray], Any, Any]":
    """Returns parameters, the same in all processes, and a process's own examples."""
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    shape = cfg.width, cfg.width
    params = {
        f"layer_{index:03}": (
            rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(cfg.width))
        )
        for index in range(cfg.k * cfg.layers)
    }
    own = np.random.Generator(np.random.Philox([cfg.seed, rank + 1]))
    x = own.standard_normal((cfg.rows, cfg.width), np.float32)
    return params, x, np.tanh(x[:, ::-1])


def _loss(params: dict[str, Any], x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean((x - y) ** 2)
