"""Training by workers in processes of their own, which do not wait for each other."""

import contextlib
import pathlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax import hostcomm
from hpcjax.runs import directory, results
from hpcjax.runs.metrics import Metrics
from hpcjax.runs.processes import in_processes

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.hostcomm import Trace, Transport
    from hpcjax.runs.context import Context
    from hpcjax.runs.training import TrainingConfig
    from hpcjax.train import Task, TrainState


def train_in_processes(
    cfg: "TrainingConfig", ctx: "Context", task: "Callable[..., Task]"
) -> "xr.Dataset":
    """Trains with a process for each worker of `cfg.averaging`.

    The first writes into the run's folder, each of the others into one of its own below
    `workers/`: records, checkpoints, and what it has done, as a trace for each part of
    the run between checkpoints. All save after the same step, and go on from the newest
    step that all of them have. A run that is stopped loses what came after that.

    Returns:
      The history, means over the workers; `worker_seconds`, when each had ended its
      last step, [worker]; and of late workers mean, standard deviation and maximum of
      `staleness`, by how many rounds what they gave was old.
    """
    folder = ctx.directory.path.absolute()
    with ctx.follow():
        states = in_processes(
            _work,
            cfg,
            cfg.averaging.workers,
            given=(
                hostcomm.importable_name(task),
                str(ctx.data_root.absolute()),
                str(folder),
                ctx.mesh.size,
            ),
            devices=ctx.mesh.size,
            root=folder.parents[1],
        )
    ctx.trained = _gather(states)
    return _join(folder, cfg.averaging.workers)


def _work(
    transport: "Transport",
    cfg: "TrainingConfig",
    name: str,
    data_root: str,
    folder: str,
    devices: int,
) -> dict[str, Any]:
    """Trains as one of the workers; returns its part of what `_gather` takes."""
    from hpcjax import train
    from hpcjax.train.watchdog import PROGRESS, Watchdog

    run, rank = pathlib.Path(folder), transport.rank
    own = _folder(run, rank)
    own.mkdir(parents=True, exist_ok=True)
    make = pkgutil.resolve_name(name)
    task = make(cfg, pathlib.Path(data_root), devices, transport)
    task = _keep_traces(task, own)
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.RunDirectory(run).logging(rank))
        checkpoints = train.Checkpoints(own / "checkpoints", keep=cfg.train.keep)
        stack.enter_context(checkpoints)
        watchdog = None
        if least := cfg.train.stall_seconds:
            watchdog = Watchdog(run / PROGRESS, rank, least, transport.size)
            stack.enter_context(watchdog)
        state = train.fit(
            task,
            cfg.train,
            seed=cfg.seed,
            mesh=task.mesh(devices),
            recorder=Metrics(own / "metrics.jsonl"),
            checkpoints=checkpoints,
            watchdog=watchdog,
        )
    import jax

    names = ("step", "skipped", "params", "model_state")
    return jax.device_get({name: getattr(state, name) for name in names})


def _keep_traces(task: "Task", folder: pathlib.Path) -> "Task":
    """Returns a task whose worker keeps what it has done, whenever it pauses."""
    around = task.method.around

    def pause(state: Any) -> Any:
        paused = around.pause(state)
        for first, trace in around.traces[-1:]:
            hostcomm.save_trace(folder / f"trace-{first}.npz", trace)
        return paused

    method = task.method._replace(around=around._replace(pause=pause))
    return task.replace(method=method)


def _folder(run: pathlib.Path, rank: int) -> pathlib.Path:
    return run / directory.WORKERS / str(rank) if rank else run


def _gather(states: "Sequence[dict[str, Any]]") -> "TrainState":
    """Returns the workers' last states as one, as if they had been devices of a mesh.

    Their optimizers' states are in their checkpoints alone.
    """
    import jax

    from hpcjax import train
    from hpcjax.core.method import WORKER_AXIS
    from hpcjax.core.per_device import PerDevice

    stacked = jax.tree.map(lambda *own: np.stack(own), *states)
    mean = jax.tree.map(lambda own: own.mean(0), stacked["model_state"])
    return train.TrainState(
        step=states[0]["step"],
        params=PerDevice(value=stacked["params"], axis=WORKER_AXIS),
        model_state=mean,
        opt_state=(),
        key=None,
        skipped=stacked["skipped"].max(),
    )


def _join(run: pathlib.Path, workers: int) -> "xr.Dataset":
    """Returns what the workers have kept, as one history."""
    import xarray as xr

    folders = [_folder(run, rank) for rank in range(workers)]
    records = [Metrics(own / "metrics.jsonl").read() for own in folders]
    histories = xr.concat(
        [results.history(own, "measured") for own in records], "worker"
    )
    # What one of them has not is not to be hidden by the others.
    history = histories.mean("worker", skipna=False, keep_attrs=True)
    history["worker_seconds"] = "worker", histories["seconds"].values[:, -1]
    stale = [trace.staleness().reshape(-1) for trace in join_parts(folders)]
    if stale:
        every = np.concatenate(stale)
        history["staleness_mean"] = every.mean()
        history["staleness_std"] = every.std()
        history["staleness_max"] = every.max()
    return history


def join_parts(folders: "Sequence[pathlib.Path]") -> "list[Trace]":
    """Returns the traces of all workers, of one part of their run after the other.

    What was kept of parts that were not ended, or were done again, is left out.
    """
    numbers = [int(path.stem.split("-")[1]) for path in folders[0].glob("trace-*.npz")]
    parts, number = [], min(numbers, default=0)
    while all((own / f"trace-{number}.npz").exists() for own in folders):
        own = [hostcomm.load_trace(own / f"trace-{number}.npz") for own in folders]
        parts.append(hostcomm.join_traces(own))
        number += parts[-1].steps
    return parts
