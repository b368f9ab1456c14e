"""What a run would need, without running it: `hpcjax run --dry-run`."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table as RichTable

from hpcjax.core import compat, trees
from hpcjax.runs import directory, discover


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures of a run that are read from its compiled training step.

    Attributes:
      name: config and variant.
      devices: devices of the data axis.
      steps: optimizer steps.
      epochs: passes over the training set.
      parameters: scalars in the model.
      state_bytes: parameters, optimizer state and running statistics on one device.
      peak_bytes: the step's peak memory on one device.
      flops: floating-point operations of one step on one device, counted by XLA.
      collective_bytes: bytes handed to collectives in one step, per device.
      processes: that train apart, each with these figures; what they send each other
        while they compute is not among these.
      checkpoints: number of checkpoints that will be written, of which `keep` remain.
      files: what the run directory will contain.
    """

    name: str
    devices: int
    steps: int
    epochs: float
    parameters: int
    state_bytes: int
    peak_bytes: int
    flops: float
    collective_bytes: int
    checkpoints: int
    processes: int = 1
    files: tuple[str, ...] = (
        "config.json",
        "provenance.json",
        "metrics.jsonl",
        "checkpoints/",
        "result.nc",
        "log.txt",
        "status",
    )


def plan_run(
    name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    root: pathlib.Path | None = None,
    devices: int | None = None,
) -> Plan | None:
    """Compiles a config's training step and returns its figures.

    Args:
      name: `paper/config[:variant]`, or the path of a run's `config.json`.
      overrides: `{"optimizer.lr": "0.3"}`, values as on the command line.
      root: folder of configs and data; default the working directory.
      devices: devices of the data axis; default one.

    Returns:
      The plan; None for an experiment that does not train.

    Raises:
      ConfigError: a name, key, value or combination that cannot be used.
      DataMissing: the data set, whose shapes are needed, is not here.
    """
    root = root or pathlib.Path.cwd()
    loaded = discover.load(name, overrides or {}, root)
    if not hasattr(loaded.experiment, "task"):
        return None
    devices = 1 if devices is None else devices
    task = loaded.experiment.task(loaded.config, directory.data_root(root), devices)
    processes = getattr(loaded.config, "processes", 1)
    config = loaded.config.alone() if processes > 1 else loaded.config
    plan = _measure(loaded.title, task, config.train, task.mesh(devices))
    if processes == 1:
        return plan
    epochs, files = plan.epochs * processes, (*plan.files, f"{directory.WORKERS}/")
    return dataclasses.replace(plan, processes=processes, epochs=epochs, files=files)


def _measure(name: str, task: Any, config: Any, mesh: Any) -> Plan:
    import jax

    from hpcjax import perf, train

    train.check_batch(task, config, mesh)
    state = train.state_shapes(task, mesh)
    batch = train.batch_shapes(task, config.batch_size, mesh)
    # What is read here is the same to a thousandth, and bytes sent are to the byte.
    options = compat.quick_compilation(mesh.devices.flat[0].platform)
    lowered = train.train_step(task, mesh, state).lower(state, batch)
    compiled = lowered.compile(compiler_options=options)
    local = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.sharding.shard_shape(leaf.shape), leaf.dtype
        ),
        dataclasses.replace(state, key=None),
    )
    model, _ = jax.eval_shape(task.model.init, jax.random.key(0))
    every = config.checkpoint_every
    return Plan(
        name=name,
        devices=mesh.size,
        steps=config.steps,
        epochs=config.steps * config.batch_size / len(task.dataset.train),
        parameters=trees.num_params(model),
        state_bytes=trees.num_bytes(local),
        peak_bytes=perf.peak_memory(compiled),
        flops=perf.flops(compiled),
        # On CPU XLA does not remove collectives over one device, which send nothing.
        collective_bytes=perf.collective_bytes(compiled) if mesh.size > 1 else 0,
        checkpoints=1 + (config.steps - 1) // every if every else 1,
    )


def render_plan(plan: Plan) -> RichTable:
    """Returns the plan as a table for `rich`."""
    table = RichTable(title=f"{plan.name} (not run)", box=box.SIMPLE, show_header=False)
    lines = {
        "processes": f"{plan.processes}, each with the figures below",
        "devices": f"{plan.devices}",
        "steps": f"{plan.steps} ({plan.epochs:.1f} epochs)",
        "parameters": f"{plan.parameters:,}",
        "training state per device": _bytes(plan.state_bytes),
        "peak memory of a step per device": _bytes(plan.peak_bytes),
        "operations of a step per device": f"{plan.flops:.3g} FLOP",
        "communicated by a step per device": _bytes(plan.collective_bytes),
        "checkpoints": f"{plan.checkpoints}",
        "files": ", ".join(plan.files),
    }
    if plan.processes == 1:
        del lines["processes"]
    for label, value in lines.items():
        table.add_row(label, value)
    return table


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
