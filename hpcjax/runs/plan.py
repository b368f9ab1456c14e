"""What a run would need, without running it: `hpcjax run --dry-run`."""

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from hpcjax.core import compat, provenance, trees
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.runs import code, directory, discover, results
from hpcjax.runs import config as configs
from hpcjax.runs.frames import Frame

log = logging.getLogger(__name__)
# What a run's step does not depend on.
_FREE = ("steps", "eval_every", "checkpoint_every", "keep", "stall_seconds")
_NAMED = 8  # parameters that are named where weight decay leaves some out


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
      peak_bytes: the step's peak memory on one device; of its gradients' program, where
        the update is not traced.
      flops: floating-point operations of one step on one device, counted by XLA, which
        takes one turn of each loop.
      collective_bytes: bytes handed to collectives in one step, per device.
      sent: these by mesh axes and kind, `{"all-gather over data": bytes}`.
      host_bytes: of the training state, what lies in the host's memory.
      facts: figures of the method, such as the ticks of a pipeline.
      shapes: of batches that have several: their numbers over those of the base, by
        shape. Memory, operations and bytes are of the largest.
      processes: that train apart, each with these figures; what they send each other
        while they compute is not among these.
      checkpoints: number of checkpoints that will be written, of which `keep` remain.
      decay: the optimizer's weight decay; 0 if it has none.
      decays: whether it covers each parameter, by path; none without weight decay.
      earlier: the newest run of this code, with as many devices and on such a machine,
        that has finished and differs in seed, length and intervals alone; "" if there
        is none.
      earlier_steps: of that run.
      seconds: of that run's training, without compilation, validation and checkpoints.
      step_seconds: of one of its steps, the median; 0 if it took only one.
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
    sent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0
    facts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    processes: int = 1
    decay: float = 0.0
    decays: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    earlier: str = ""
    earlier_steps: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
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
      DataMissing: the data that the config needs is not here; also of an experiment
        that does not train.
    """
    root = root or pathlib.Path.cwd()
    loaded = discover.load(name, overrides or {}, root)
    if not hasattr(loaded.experiment, "task"):
        _check_data(loaded, root)
        return None
    devices = 1 if devices is None else devices
    loaded.check_devices(devices)
    compat.start_devices()
    log.info("loading the data of %s", loaded.title)
    task = loaded.experiment.task(loaded.config, directory.data_root(root), devices)
    processes = getattr(loaded.config, "processes", 1)
    config = loaded.config.alone() if processes > 1 else loaded.config
    log.info("compiling its training step, which is not run")
    plan = _measure(loaded.title, task, config.train, task.mesh(devices))
    decay, decays = _find_decay(getattr(config, "optimizer", None), task)
    plan = dataclasses.replace(
        plan, decay=decay, decays=decays, **_find_earlier(loaded, root, devices)
    )
    if processes == 1:
        return plan
    epochs, files = plan.epochs * processes, (*plan.files, f"{directory.WORKERS}/")
    return dataclasses.replace(plan, processes=processes, epochs=epochs, files=files)


def _check_data(loaded: discover.Loaded, root: pathlib.Path) -> None:
    """Raises DataMissing if a data set is not here that the config needs.

    Its file says which; one that it names by a value is not needed after an override.
    What no value names goes with those.
    """
    from hpcjax.data import catalog

    try:
        entry, _ = discover.find(loaded.name, root)
    except ConfigError:  # the config.json of a run whose config is gone
        return
    needs = [name for name in entry.needs if name in catalog.CATALOG]
    usual, chosen = _texts(loaded.base), _texts(loaded.config)
    replaced = any(name in usual - chosen for name in needs)
    for name in needs:
        if name in chosen or not (name in usual or replaced):
            catalog.locate(name, directory.data_root(root))


def _texts(config: Any) -> set[str]:
    return {x for x in configs.flatten(config).values() if isinstance(x, str)}


def _find_decay(optimizer: Any, task: Any) -> tuple[float, dict[str, bool]]:
    """Returns an optimizer's weight decay, and whether it covers each parameter."""
    import jax

    from hpcjax import optim

    params, _ = jax.eval_shape(task.model.init, jax.random.key(0))
    for part in _parts(optimizer):
        decay = getattr(part, "weight_decay", 0.0)
        if decay and hasattr(part, "decay_rules"):
            mask = optim.decay_mask(part.decay_rules, params)
            return decay, trees.flatten(mask)
    return 0.0, {}


def _parts(config: Any) -> Iterator[Any]:
    """Yields a config and those within it, as K-FAC has one for its first order."""
    if dataclasses.is_dataclass(config):
        yield config
        for field in dataclasses.fields(config):
            yield from _parts(getattr(config, field.name))


def _find_earlier(
    loaded: discover.Loaded, root: pathlib.Path, devices: int
) -> dict[str, Any]:
    """Returns a finished run with the same training step, and its training seconds.

    Operations do not tell the time, which this machine's load and caches decide.
    """
    content, made_by = configs.to_json(loaded.config), code.of_run(loaded.config)
    here = provenance.cpu_model(), len(provenance.usable_cores()) or os.cpu_count()
    for run in reversed(directory.list_runs(root)):
        with contextlib.suppress(DataFormatError, RecursionError):
            held = run.read_config()
            if run.status != "done" or _step_of(held) != _step_of(content):
                continue
            same = directory.find_run(
                root, configs.digest_json(held), devices=devices, code=made_by
            )
            machines = [(it.get("cpu"), it.get("cores")) for it in run.sessions()]
            if same is None or same.id != run.id or {*machines} != {here}:
                continue
            timed = results.read(run.path / "result.nc").get("seconds")
            if timed is not None:
                each = float(timed.diff("step").median()) if timed.size > 1 else 0.0
                found = {"earlier": run.id, "earlier_steps": timed.size}
                return found | {"seconds": float(timed.max()), "step_seconds": each}
    return {}


def _step_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config's JSON without what no step's time depends on."""
    held = dict(content.get("values", {}))
    train = dict(held.get("train", {}))
    step = {name: value for name, value in train.items() if name not in _FREE}
    return {"class": content.get("class"), **held, "train": step, "seed": None}


def _measure(name: str, task: Any, config: Any, mesh: Any) -> Plan:
    import jax

    from hpcjax import data, perf, train
    from hpcjax.runs import program

    shapes, drawn = {}, train.accumulating(task, config, mesh).dataset.train
    slots = len(drawn) / config.batch_size
    if isinstance(drawn, data.ShapedSampler):
        slots = drawn.slots(config.batch_size)
        base = config.batch_size * math.prod(task.dataset.inputs)
        for batch in train.list_shapes(drawn, config.batch_size):
            shapes["x".join(map(str, batch["x"].shape))] = batch["x"].size / base
    step = program.compile_step(task, config, mesh)
    local = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.sharding.shard_shape(leaf.shape), leaf.dtype
        ),
        dataclasses.replace(step.state, key=None),
    )
    on_host = [
        leaf
        for leaf in jax.tree.leaves(step.state)
        if leaf.sharding.memory_kind == "pinned_host"
    ]
    every = config.checkpoint_every
    # What stays among one device, which XLA keeps on a CPU, is not in it.
    sent = {
        f"{kind} over {' and '.join(axes)}": count
        for (axes, kind), count in sorted(
            perf.bytes_by_axis(step.compiled, mesh).items()
        )
    }
    return Plan(
        name=name,
        devices=mesh.size,
        steps=config.steps,
        epochs=config.steps / slots,
        parameters=trees.num_params(step.params),
        state_bytes=trees.num_bytes(local) - trees.num_bytes(on_host),
        host_bytes=trees.num_bytes(on_host),
        peak_bytes=perf.peak_memory(step.compiled),
        flops=perf.flops(step.compiled),
        collective_bytes=sum(sent.values()),
        sent=sent,
        facts=task.method.facts,
        shapes=shapes,
        checkpoints=1 + (config.steps - 1) // every if every else 1,
    )


def render_plan(plan: Plan) -> RenderableType:
    """Returns the plan as a table for `rich`."""
    lines = {
        "processes": f"{plan.processes}, each with the figures below",
        "devices": f"{plan.devices}",
        "steps": f"{plan.steps} ({plan.epochs:.1f} epochs)",
        "parameters": f"{plan.parameters:,}",
        "training state per device": _bytes(plan.state_bytes),
        "training state on the host": (
            _bytes(plan.host_bytes) if plan.host_bytes else ""
        ),
        "peak memory of a step per device": _bytes(plan.peak_bytes),
        "operations of a step per device": f"{plan.flops:.3g} FLOP, one turn of loops",
        "communicated by a step per device": _bytes(plan.collective_bytes),
        "figures of the method": ", ".join(
            f"{name} {value:.4g}" for name, value in plan.facts.items()
        ),
        "checkpoints": f"{plan.checkpoints}",
        "weight decay": _render_decay(plan),
        "training takes": "unknown: no run of this config and code has finished here",
        "files": ", ".join(plan.files),
    }
    for shape, share in plan.shapes.items():
        lines[f"batches of {shape}"] = f"{share:.3f} of the base's pixels"
    if len(plan.sent) > 1:
        told = (f"{name} {_bytes(count)}" for name, count in plan.sent.items())
        lines["communicated by a step per device"] += f" ({', '.join(told)})"
    if plan.earlier:
        lines["training takes"] = _render_time(plan)
    if plan.processes == 1:
        del lines["processes"]
    told = [(label, value) for label, value in lines.items() if value]
    return Frame(f"{plan.name} (not run)", ("figure", "value"), told)


def _render_time(plan: Plan) -> str:
    if plan.steps == plan.earlier_steps:
        return f"{plan.seconds:.3g} s, as in run {plan.earlier}"
    # Of a short run the first steps are most of the time, and later ones are faster.
    each = plan.step_seconds or plan.seconds
    return (
        f"about {each * plan.steps:.3g} s, as a step takes {each:.3g} s in run "
        f"{plan.earlier}"
    )


def _render_decay(plan: Plan) -> str:
    if not plan.decay:
        return "none"
    left = [path for path, decays in plan.decays.items() if not decays]
    if not left:
        return f"{plan.decay:g} on all {len(plan.decays)} arrays"
    named = ", ".join(left[:_NAMED])
    if len(left) > _NAMED:
        named += f" and {len(left) - _NAMED} more"
    covered = len(plan.decays) - len(left)
    return f"{plan.decay:g} on {covered} of {len(plan.decays)} arrays: not on {named}"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
