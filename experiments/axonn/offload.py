"""Bytes of training beyond parameters and gradients, sampled between tiles."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

from hpcjax import perf, runs, sharding, train
from hpcjax.core import config
from hpcjax.core.trees import num_bytes, num_params
from hpcjax.runs import training

DEVICE, HOST = "device", "pinned_host"
MEMORY = {
    "parameters": ": of the model",
    "beyond": ": bytes of devices besides parameters and gradients",
    "temporaries": ": bytes of these that are no live arrays",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.TrainingConfig):
    """A training run of one device, whose arrays are counted in each step.

    Attributes:
      slices: entries of a slice of one program that loops over flat arrays, which is
        compiled in place of training, for a control; 0 for none.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "1",
        "model.width": "8",
        "model.heads": "2",
        "train.steps": "2",
        "train.batch_size": "2",
    }

    slices: config.Count = 0

    @property
    def figures(self) -> Mapping[str, str]:
        """What is counted; of a program that is compiled only memory."""
        trained = {
            "host": ": bytes of arrays in the host's memory",
            "losses": "step: of the batch",
            "ms": ": of a step, the median",
        }
        return MEMORY if self.slices else MEMORY | trained

    def labels(self) -> "runs.Labels":
        """Returns the numbers of the steps."""
        return {} if self.slices else {"step": range(1, self.train.steps + 1)}


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Takes the steps of the training loop and counts between tiles, or steps."""
    import jax
    import numpy as np

    from hpcjax.train.loop import compile_step, local_batches

    task = training.task(cfg, ctx.data_root, 1)
    shapes, _ = jax.eval_shape(task.model.init, jax.random.key(0))
    size = num_params(shapes)
    if cfg.slices:
        return {"parameters": size, **_loop(cfg, size)}
    mesh, samples = task.mesh(1), Samples()
    with mock.patch.object(optim_tiles(), "update", samples.watched()):
        state = train.init_state(task, cfg.seed, mesh)
        state = task.method.around.start(state, None)
        batches = local_batches(task, cfg.train, cfg.seed)
        batch = sharding.place_batch(batches[0], mesh)
        step, _ = compile_step(task, mesh, state, batch)
        losses, seconds = [], []
        for number in range(cfg.train.steps):
            batch = sharding.place_batch(batches[number], mesh)
            began = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - began)
            samples.take(num_bytes(state.params))
    return {
        "parameters": size,
        "beyond": max(samples.device) + samples.temporaries,
        "temporaries": samples.temporaries,
        "host": max(samples.host),
        "losses": losses,
        "ms": 1e3 * float(np.median(seconds)),
    }


def optim_tiles() -> Any:
    """Returns the class whose update is watched."""
    from hpcjax.optim.tiles import TiledTransform

    return TiledTransform


class Samples:
    """Bytes of arrays that are alive, and of one tile's step.

    Attributes:
      device: besides those that are known, in each sample.
      host: in each sample.
      temporaries: the most of a tile's step.
    """

    def __init__(self) -> None:
        self.device: list[int] = []
        self.host: list[int] = []
        self.temporaries = 0
        self._before = count_bytes(DEVICE)

    def take(self, known: int) -> None:
        """Counts now; `known` are bytes of parameters and gradients."""
        self.device.append(count_bytes(DEVICE) - self._before - known)
        self.host.append(count_bytes(HOST))

    def watched(self) -> Any:
        """Returns the update of tiles that counts after each."""
        plain = optim_tiles().update

        def update(own: Any, grads: Any, state: Any, params: Any, **extras: Any) -> Any:
            known = num_bytes(grads) + num_bytes(params)
            if not self.temporaries:
                self._read(own, grads, state, params, extras)
            watch = lambda: self.take(known)  # noqa: E731
            return plain(own, grads, state, params, watch=watch, **extras)

        return update

    def _read(self, own: Any, *given: Any) -> None:
        """Compiles the step of the largest parameter's first tile."""
        import jax

        *trees, extras = given
        sizes = [leaf.size for leaf in jax.tree.leaves(trees[2])]
        leaves = [span.leaf for span in own.tiles]
        largest = leaves.index(sizes.index(max(sizes)))
        programs = [each.compile() for each in own.lower(largest, *trees, **extras)]
        self.temporaries = max(map(perf.temporary_memory, programs))


def count_bytes(kind: str) -> int:
    """Returns bytes of arrays that are alive in a kind of memory."""
    import jax

    alive = jax.live_arrays()
    return sum(each.nbytes for each in alive if each.sharding.memory_kind == kind)


def _loop(cfg: Config, size: int) -> dict[str, float]:
    """Compiles one program that takes the same step slice after slice."""
    import jax
    import jax.numpy as jnp
    import optax

    tx, count = optax.adamw(1e-3), max(size // cfg.slices, 1)
    master = jax.ShapeDtypeStruct((count * cfg.slices,), "float32")
    narrow = master.update(dtype="float16")

    def step(weights: Any, grads: Any, master: Any, state: Any) -> Any:
        def body(at: Any, held: Any) -> Any:
            start = at * cfg.slices

            def cut(x: Any) -> Any:
                return jax.lax.dynamic_slice_in_dim(x, start, cfg.slices)

            def write(x: Any, part: Any) -> Any:
                return jax.lax.dynamic_update_slice_in_dim(x, part, start, 0)

            weights, master, moments = held
            rest = jax.tree.map(lambda x, y: cut(y) if x.ndim else x, state, moments)
            own = cut(master)
            slope = cut(grads).astype(jnp.float32)
            updates, new = tx.update(slope, rest, own)
            own = own + updates
            return (
                write(weights, own.astype(weights.dtype)),
                write(master, own),
                jax.tree.map(lambda x, y: write(x, y) if x.ndim else y, moments, new),
            )

        return jax.lax.fori_loop(0, count, body, (weights, master, state))

    jitted = jax.jit(step, donate_argnums=(0, 2, 3))
    given = narrow, narrow, master, jax.eval_shape(tx.init, master)
    program = jitted.lower(*given).compile()
    known = num_bytes((narrow, narrow))
    return {
        "beyond": perf.peak_memory(program) - known,
        "temporaries": perf.temporary_memory(program),
    }
