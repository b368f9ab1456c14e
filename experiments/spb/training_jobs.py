"""What a process of `together` does: workers' parts of the steps of two runs."""

import dataclasses
import functools
import gc
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.spb.together import ALIGNED, JIGSAW, JOBS, ROWS, WHOLE, Config, plan
from hpcjax import collectives, data, hostcomm, optim, perf, train
from hpcjax.core import trees
from hpcjax.core.errors import HpcjaxError
from hpcjax.core.keys import BatchKey, derive
from hpcjax.core.method import PassResult, StepInput
from hpcjax.core.varying import vary
from hpcjax.hostcomm import Tag, Transport
from hpcjax.optim.partial_backward import stop_below
from hpcjax.runs import training
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding.mesh import data_axes
from hpcjax.train.step import scored_by


class _Unread:
    """A recorder that keeps nothing."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Forgets a record."""

    def rewind(self, step: int) -> float:
        """Returns the seconds of training before a step."""
        del step
        return 0.0


class TrainingJob:
    """A training run of which this process does a worker's part of each step."""

    def __init__(
        self,
        cfg: Config,
        own: TrainingConfig,
        root: pathlib.Path,
        group: collectives.HostGroup,
    ) -> None:
        # Programs run in the thread that calls them, and end when they seem to.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        steps = dataclasses.replace(own.train, steps=cfg.iterations)
        self.own, self.root = dataclasses.replace(own, train=steps), root
        self.task = training.task(self.own, root)
        self.group = group
        self.mesh, self.workers = self.task.mesh(1), cfg.workers
        # Read before: what is measured is computing. Any worker's may be asked for.
        self._batches = [
            [dict(batches[iteration]) for iteration in range(cfg.iterations)]
            for batches in map(self._read, range(cfg.workers))
        ]
        self.begin()
        layers = optim.layers_of_model(self.task.model, self.rows(0, 0)["x"])
        state = self.state
        given = state.params, state.model_state, self.rows(0, 0), state.key
        costs = perf.backward_flops(self.loss, layers, *given)
        self.cuts = optim.partition(costs, cfg.k)
        self.blocks = optim.cut_layers(layers, self.cuts)
        self._gradients = {
            role: self._compile(functools.partial(self._backward, role))
            for role in range(1, cfg.k + 1)
        }
        self._update = self._compile(self._apply)

    def _read(self, worker: int) -> data.Batches:
        """Returns a worker's part of all batches."""
        dataset, size = self.task.dataset, self.own.train.batch_size
        shard = worker, self.workers
        seed, augment = self.own.seed, dataset.augment
        return data.batches(dataset.train, size, seed, augment=augment, shard=shard)

    def _compile(self, body: Any) -> Any:
        """Compiles for a mesh of one device, as optimizers expect axes."""
        everywhere = PartitionSpec()
        return jax.jit(
            jax.shard_map(
                body, mesh=self.mesh, in_specs=everywhere, out_specs=everywhere
            )
        )

    def begin(self) -> None:
        """Starts again from the first parameters."""
        self.state = train.init_state(self.task, self.own.seed, self.mesh)

    def rows(self, iteration: int, worker: int) -> dict[str, Any]:
        """Returns a worker's part of a batch."""
        return self._batches[worker][iteration]

    def loss(self, params: Any, model_state: Any, batch: Any, key: Any) -> Any:
        """Returns the loss in training."""
        outputs, _ = self.task.model.apply(
            params, model_state, batch["x"], train=True, key=key
        )
        return self.task.objective(outputs, batch).means()["loss"]

    def times(self, repetitions: int) -> perf.IterationTimes:
        """Times the roles on this worker's part of the first batch."""
        state = self.state
        given = state.params, state.model_state, self.rows(0, 0), state.key
        return perf.iteration_times(
            self.loss, self.blocks, *given, repetitions=repetitions
        )

    def _backward(self, role: int, state: Any, batch: Any, worker: Any) -> Any:
        def apply(params: Any, *arguments: Any, **options: Any) -> Any:
            stopped = stop_below(params, self.blocks, role)
            return self.task.model.apply(stopped, *arguments, **options)

        axes = data_axes(self.mesh)
        rows = len(batch["y"])
        places = worker * rows + jnp.arange(rows, dtype=jnp.int32)
        key = BatchKey(key=derive(state.key, "step", state.step), rows=places)
        model = self.task.model._replace(apply=apply)
        # Of a worker's own rows: these data sets give no example a weight.
        share = scored_by(self.task, state, batch)
        given = state.model_state, batch, key, state.step, axes, share
        one_pass = StepInput(model, self.task.objective, *given)
        found = optim.whole_backward(one_pass, state.params, None)
        kept = found.grads, (found.model_state, found.means)
        return jax.lax.pmean(vary(kept, axes), axes)

    def _apply(self, state: Any, grads: Any, rest: Any) -> Any:
        axes = data_axes(self.mesh)
        model_state, means = rest
        extras = {"value": means["loss"], "step": state.step}
        result = PassResult(vary(grads, axes), means, model_state, extras)
        update = self.task.method.update
        params, opt_state = update(result, state.opt_state, state.params)
        changed = {"params": params, "opt_state": opt_state, "model_state": model_state}
        return dataclasses.replace(state, step=state.step + 1, **changed)

    def co_job(self) -> perf.CoJob:
        """Returns what the executor calls."""
        return perf.CoJob(self.compute, self.average, self.update)

    def compute(self, task: perf.CoTask) -> Any:
        """Returns gradients, and what else is averaged, of a worker's part."""
        batch = self.rows(task.iteration, task.worker)
        made = self._gradients[task.role](self.state, batch, jnp.int32(task.worker))
        return jax.device_get(made)

    def average(self, own: Any, roles: tuple[int, ...]) -> Any:
        """Returns the mean gradients of contributors, and the mean of the rest."""
        grads, rest = own
        mean = optim.average_contributions(
            self.group, grads, blocks=self.blocks, roles=roles, mode="contributors"
        )
        total = self.group.sum(rest)
        share = jax.tree.map(lambda t, a: (t / len(roles)).astype(a.dtype), total, rest)
        return mean, share

    def update(self, mean: Any) -> None:
        """Takes a step of the optimizer."""
        self.state = jax.block_until_ready(self._update(self.state, *mean))

    def params(self) -> dict[str, np.ndarray]:
        """Returns the parameters by path."""
        return trees.flatten(jax.device_get(self.state.params))

    def alone(self, row: str) -> dict[str, np.ndarray]:
        """Trains as one run on one device, with the same roles, by the usual loop."""
        k = 1 if row == WHOLE else len(self.blocks.paths)
        backward = optim.PartialBackwardConfig(
            k=k,
            workers=self.workers,
            cuts=self.cuts if k > 1 else (),
            rotation="fixed" if row == ALIGNED else "rotate",
        )
        cfg = dataclasses.replace(self.own, backward=backward)
        state = train.fit(
            training.task(cfg, self.root),
            cfg.train,
            seed=cfg.seed,
            mesh=self.mesh,
            recorder=_Unread(),
        )
        return trees.flatten(jax.device_get(state.params))


def work(transport: Transport, cfg: Config, root: str = "data") -> dict[str, Any]:
    """Times the roles, then does both runs in each order of tasks, in turns.

    Returns:
      `times` of each job, means over the processes; `runs`: of each repetition the
      spans by order; `apart` and `others`, see `_compare`.

    Raises:
      HpcjaxError: other processes have other parameters.
    """
    group, folder = collectives.HostGroup(transport), pathlib.Path(root)
    jobs = {name: TrainingJob(cfg, getattr(cfg, name), folder, group) for name in JOBS}
    times = {name: _time(transport, job, cfg.timings) for name, job in jobs.items()}
    rows = {row: plan(cfg, times, row) for row in ROWS}
    for row in ROWS:  # compiles
        run(transport, jobs, tuple(own[:4] for own in rows[row]))
    done, params = [], {}
    for _ in range(cfg.repetitions):
        done.append({})
        for row in ROWS:
            done[-1][row] = run(transport, jobs, rows[row])
            params[row] = {name: job.params() for name, job in jobs.items()}
    _check_equal(transport, params)
    return {
        "times": {
            name: [each.forward, list(each.roles)] for name, each in times.items()
        },
        "runs": done,
        **_compare(transport.rank, jobs, params),
    }


def _time(
    transport: Transport, job: TrainingJob, repetitions: int
) -> perf.IterationTimes:
    """Times the roles in all processes at once, as they will run; returns means."""
    hostcomm.barrier(transport, tag=Tag("times"))
    own = job.times(repetitions)
    every = hostcomm.allgather(transport, np.array([own.forward, *own.roles]))
    forward, *roles = np.mean(every, axis=0).tolist()
    return perf.IterationTimes(forward, tuple(roles))


def run(
    transport: Transport, jobs: Mapping[str, TrainingJob], rows: perf.Rows
) -> list[Any]:
    """Does both runs' tasks from the first parameters on; returns the spans."""
    for job in jobs.values():
        job.begin()
    gc.collect()
    gc.disable()
    hostcomm.barrier(transport, tag=Tag("begin"))
    co_jobs = {name: job.co_job() for name, job in jobs.items()}
    spans = perf.run_tasks(rows, transport.rank, co_jobs)
    gc.enable()
    return [[span.start, span.end, list(span.task)] for span in spans]


def _check_equal(transport: Transport, params: Mapping[str, Any]) -> None:
    parts = (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    own = np.frombuffer(hashlib.sha256(b"".join(parts)).digest(), np.uint8)
    every = hostcomm.allgather(transport, own)
    if (every != own).any():
        raise HpcjaxError("processes have ended with different parameters")


def _compare(
    rank: int, jobs: Mapping[str, TrainingJob], params: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Returns how far runs are from those alone with the same, and with other roles."""
    apart, others = dict.fromkeys(ROWS, 0.0), dict.fromkeys(ROWS, 0.0)
    for name in JOBS[rank : rank + 1]:  # other processes look at theirs
        alone = {row: jobs[name].alone(row) for row in ROWS}
        for row in ROWS:
            apart[row] = _distance(params[row][name], alone[row])
            other = alone[JIGSAW if row == WHOLE else WHOLE]
            others[row] = _distance(params[row][name], other)
    return {"apart": apart, "others": others}


def _distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    return max(float(np.abs(leaf - b[path]).max()) for path, leaf in a.items())
