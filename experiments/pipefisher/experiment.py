"""One step of a pipeline of BERT blocks, simulated, and K-FAC's work in its bubbles."""

import csv
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax import cost, runs, sharding
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

PROFILE = pathlib.Path(__file__).parent / "p100.csv"
WIDTHS = {"base": 768, "large": 1024}
# What a table's timeline calls bars; all others are K-FAC's.
KINDS = {"F": "forward", "B": "backward", "W": "backward", "prec": "preconditioning"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A pipeline, what its stages cost, and how its bubbles are filled.

    Attributes:
      schedule: order of the micro-batches.
      model: BERT whose blocks were profiled.
      micro_batch: examples in a micro-batch.
      stages: D.
      blocks: of each stage.
      micro_batches: N, in a step; None for D.
      chunks: stages of a device, where the schedule is interleaved.
      recompute: backward passes repeat the forward pass.
      gate: what an inversion waits for; see `cost.assign`.
      panel: longest piece of an inversion, in forward passes of a stage; None for any.
      margin: share of its time that a task needs besides.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "micro_batch": "8",
        "blocks": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "utilization filled": ": share of time computed, without and with K-FAC",
        "period": ": steps between refreshes",
        "ratio": ": of K-FAC's work to the idle time of a step",
        "overhead": ": of preconditioning, over a step's passes",
        "unplaced": ": tasks that found no room",
        "t_pipe t_step": ": ms of the passes, and of a step",
        "memory": ": MB of the device that holds most",
        "bars": "kind device bar edge: ms of `packing.timeline`, NaN where none is",
    }

    schedule: Literal[
        "gpipe", "one_f_one_b", "interleaved", "chimera", "zero_bubble_h1"
    ] = "gpipe"
    model: Literal["base", "large"] = "base"
    micro_batch: Literal[8, 16, 32] = 32
    stages: int = 4
    blocks: config.Size = 3
    micro_batches: int | None = None
    chunks: int = 2
    recompute: bool = False
    gate: Literal["device", "layer"] = "layer"
    panel: float | None = 0.25
    margin: float = 0.05
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"kind": 4, "device": self.stages, "bar": 9, "edge": 2}


def profile(cfg: Config) -> dict[str, float]:
    """Returns the published times (ms) and sizes (MB) of a block of `cfg.model`."""
    with PROFILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            model, micro_batch = row.pop("model"), int(row.pop("micro_batch"))
            if (model, micro_batch) == (cfg.model, cfg.micro_batch):
                return {name: float(value) for name, value in row.items()}
    raise ConfigError(f"{PROFILE.name} has no row {cfg.model}, {cfg.micro_batch}")


def make_schedule(cfg: Config) -> "sharding.Schedule":
    """Returns the order of work that the config names."""
    micro_batches = cfg.stages if cfg.micro_batches is None else cfg.micro_batches
    if cfg.schedule == "interleaved":
        return sharding.interleaved(cfg.stages, micro_batches, cfg.chunks)
    makers = {
        "gpipe": sharding.gpipe,
        "one_f_one_b": sharding.one_f_one_b,
        "chimera": sharding.chimera,
        "zero_bubble_h1": sharding.zero_bubble_h1,
    }
    return makers[cfg.schedule](cfg.stages, micro_batches)


def simulate(cfg: Config) -> "cost.FilledSchedule":
    """Returns one refresh of K-FAC in the bubbles of the config's pipeline."""
    block = profile(cfg)
    t_f = cfg.blocks * block["time_f"]
    costs = cost.StageCosts(
        t_f=t_f, t_b=cfg.blocks * block["time_b"], recompute=cfg.recompute
    )
    timeline = cost.simulate(make_schedule(cfg), costs)
    layers = cost.transformer_block(WIDTHS[cfg.model]) * cfg.blocks
    tasks = cost.kfac_tasks(timeline.schedule, [layers] * cfg.stages, kfac_costs(cfg))
    panel = None if cfg.panel is None else cfg.panel * t_f
    return cost.assign(timeline, tasks, margin=cfg.margin, gate=cfg.gate, panel=panel)


def kfac_costs(cfg: Config) -> "cost.KfacCosts":
    """Returns what K-FAC costs at a stage."""
    block = profile(cfg)
    return cost.KfacCosts(
        t_curv=cfg.blocks * block["time_kron"],
        t_inv=cfg.blocks * block["time_inv"],
        t_prec=cfg.blocks * block["time_prec"],
    )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Simulates; leaves the refresh as `timeline.png` and, for Perfetto, as JSON."""
    from hpcjax.core.files import write_json
    from hpcjax.runs import curves, spans_and_fields

    filled = simulate(cfg)
    pipe, found, bars = filled.timeline, figures(cfg, filled), bars_of(cfg, filled)
    rows = {
        f"{cfg.schedule}: {found['utilization'].item():.1%} busy": pipe.bars(),
        f"with K-FAC: {found['filled'].item():.1%} busy": bars,
    }
    curves.save(
        spans_and_fields.draw_timelines(rows), ctx.directory.path / "timeline.png"
    )
    write_json(ctx.directory.path / "timeline.json", cost.chrome_trace(bars))
    return found


def bars_of(cfg: Config, filled: "cost.FilledSchedule") -> "tuple[cost.Bar, ...]":
    """Returns what the devices do in a refresh."""
    schedule = filled.timeline.schedule
    return filled.bars(cost.preconditioning(schedule, kfac_costs(cfg)))


def figures(cfg: Config, filled: "cost.FilledSchedule") -> "runs.Dataset":
    """Returns what is read off a refresh.

    Returns:
      Shares of time that are computed without and with filling, the period, `ratio` of
      K-FAC's work to a step's idle time, times in ms, memory in MB; `bars` as of
      `packing.timeline`, in ms.
    """
    from hpcjax.runs import packing

    pipe = filled.timeline
    bars = [
        bar._replace(kind=KINDS.get(bar.kind.removesuffix(" up"), "K-FAC"))
        for bar in bars_of(cfg, filled)
    ]
    prec = max(cost.preconditioning(pipe.schedule, kfac_costs(cfg)))
    added = sum(filled.added) / filled.period
    return runs.simulated(
        {
            "utilization": pipe.utilization,
            "filled": filled.utilization,
            "period": filled.period,
            "ratio": filled.ratio,
            "overhead": prec / pipe.makespan,
            "unplaced": len(filled.unplaced),
            "t_pipe": float(pipe.makespan),
            "t_step": float(pipe.makespan + added + prec),
            "memory": max(memory(cfg, filled)),
            "bars": packing.timeline({"": bars}).isel(row=0, drop=True),
        },
    )


def memory(cfg: Config, filled: "cost.FilledSchedule") -> list[float]:
    """Returns MB of each device by the paper's model."""
    block = {name: cfg.blocks * value for name, value in profile(cfg).items()}
    parts = cost.StageMemory(
        activations=block["mem_act"],
        peak_errors=block["mem_peak_err"],
        saved_errors=block["mem_save_err"],
        factors=block["mem_kron"],
        params=block["mem_param"],
    )
    schedule = filled.timeline.schedule
    return [
        cost.pipeline_memory(
            parts,
            live_activations=filled.timeline.live_activations(device),
            live_errors=filled.live_errors(device),
            replicas=len(schedule.parts(device)),
            recompute=cfg.recompute,
        )
        for device in range(schedule.devices)
    ]
