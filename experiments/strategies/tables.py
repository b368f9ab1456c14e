"""Tables of parallel strategies: one model, spread over devices in different ways."""

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.runs import packing, reduce
from hpcjax.runs.pictures import Bars, Lines
from hpcjax.runs.reduce import cell, most, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

DP, ZERO1, ZERO2, ZERO3 = WAYS = ("data parallel", "zero 1", "zero 2", "zero 3")
PEER, BROKEN, TAKEN = "annotated", "summed", ", SGD"
SHARE = 7 / 8
STATE, SENT = np.array([3, 1.25, 0.375, 0.375]), np.array([2, 2, 2, 3])
ALL_DP = dict.fromkeys(WAYS, DP)


def _both(way: str, name: str = "zero", **overrides: str) -> dict[str, Runs]:
    """Returns the runs of a row: the step of AdamW, and what SGD learns."""
    return {
        way: Runs(config=f"strategies/{name}", overrides=overrides),
        way + TAKEN: Runs(config=f"strategies/{name}:sgd", overrides=overrides),
    }


def _zero(way: str, stage: str) -> dict[str, Runs]:
    return _both(way, **{"parallel": "zero", "parallel.stage": stage})


def zero(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each way, of both its runs."""
    cells: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        run, own = reduce.first(row), cells.setdefault(name.removesuffix(TAKEN), {})
        if "apart" in run:
            own["distance"] = run["apart"]
        else:
            own["state"] = run["state"] / run["psi"]
            own["temporaries"] = run["temporaries"] / run["psi"]
            own["sent"] = run["sent"].sum() / (SHARE * run["psi"])
            own["depth"] = run["depth"]
    return reduce.from_cells(cells)


ZERO = Table(
    id="strategies/zero",
    title="ZeRO: a language model spread over 8 devices",
    paper=(
        "Rajbhandari et al., arXiv 1910.02054, 2020, §5 and §7: state falls with the "
        "devices; stages 1 and 2 send what data parallelism sends, stage 3 half more"
    ),
    caption=(
        "Six blocks of width 256, float32. Of the compiled step with AdamW on 8 "
        "simulated devices, in units of the parameters' bytes: what a device holds "
        "between steps, and besides during a step; what it sends by rings, over 7/8. "
        "Stage 2 holds parameters as stage 3 does, and gathers them once a step. "
        "depth: the most blocks of which a step fits into 1 GiB, by compiling alone. "
        "distance: of the farthest parameter from training on one device, 20 steps of "
        "SGD with momentum, in runs of their own. annotated: one program of jit, told "
        "the shardings of parameters alone; it does not keep the old state until the "
        "new is known to be finite, as the loop does. summed: stage 3, gradients "
        "summed, not averaged."
    ),
    shows=(
        "A language model was spread over eight devices by ZeRO's stages. State and "
        "memory should shrink from stage to stage, what is sent grow only at the last."
    ),
    picture=Bars(
        ("state", "temporaries", "sent"),
        rows=("parallel", "zero", "annotated"),
        label="numbers / Ψ",
    ),
    columns={
        "state": "state / Ψ",
        "temporaries": "temporaries / Ψ",
        "sent": "sent / (7/8 Ψ)",
        "depth": "largest depth",
        "distance": "distance from one device",
    },
    reduce=zero,
    tiers=on_cpu(
        minutes=4.0,
        devices=8,
        runs={
            **_both(DP),
            **_zero(ZERO1, "1"),
            **_zero(ZERO2, "2"),
            **_zero(ZERO3, "3"),
            **_both(PEER, "annotated"),
            BROKEN: Runs(config="strategies/zero:summed"),
        },
        claims={
            "state": abs(reduce.of("state", *WAYS) / STATE - 1)
            .largest()
            .at_most(0.01, "farthest relative distance from 3, 1.25, 0.375, 0.375 Ψ")
            .fails(ALL_DP),
            "sent": abs(reduce.of("sent", *WAYS) / SENT - 1)
            .largest()
            .at_most(0.005, "farthest relative distance from 2, 2, 2, 3 times 7/8 Ψ")
            .fails(ALL_DP),
            "temporaries": reduce.over("temporaries", ZERO3, ZERO1)
            .at_most(0.5, "of stage 1's temporaries at stage 3")
            .fails({ZERO3: ZERO2}),
            "equal": reduce.most("distance", *WAYS)
            .at_most(1e-5, "farthest parameter from one device's after 20 steps")
            .fails({ZERO3: BROKEN}, only=("distance",)),
            "depth": reduce.over("depth", ZERO3, DP)
            .at_least(4.0, "times the depth of data parallelism in 1 GiB at stage 3")
            .fails({ZERO3: DP}),
        },
    ),
)

ONE, TENSOR, GRID = "one device", "tensor 1x4", "tensor 2x4"
GPIPE, F1B1, ZB = "GPipe", "1F1B", "ZB-H1"
THREE = "2 stages x 2 tensor x 2 data"
STASH, DOUBLE, SINGLE = "PipeDream", "PipeDream-2BW", "PipeDream, 1 stage"
# Rows whose names contain no other's: claims pick rows by parts of their names.
DP_64, TENSOR_64, SLOW = "dp, batch 64", "tensor, batch 64", "dp, lr 0.03"
OWN, MISSING = ", lr 0.03", "no mean"
# What computes the numbers of one device, and may be ranked.
SAME = (*WAYS, TENSOR, GRID, GPIPE, F1B1, ZB, THREE)
_TENSOR = {"parallel": "tensor3d", "parallel.col": "4"}
_LARGE = {"train.batch_size": "64", "taken": "0"}


def _pipe(schedule: str, stages: int = 4, tensor: int = 1) -> dict[str, str]:
    told = {"schedule": schedule, "stages": stages, "tensor": tensor}
    told = {"micro_batches": 8, **told}
    return {"parallel": "pipeline"} | {f"parallel.{k}": str(v) for k, v in told.items()}


def _late(stages: int = 4, versions: str = "stash") -> dict[str, str]:
    told = {"backward.stages": str(stages), "backward.versions": versions}
    return {"backward": "pipedream", **told}


STRATEGIES: dict[str, dict[str, str]] = {
    DP: {},
    **{way: {"parallel": "zero", "parallel.stage": way[-1]} for way in WAYS[1:]},
    TENSOR: _TENSOR,
    GRID: {**_TENSOR, "parallel.row": "2"},
    GPIPE: _pipe("gpipe"),
    F1B1: _pipe("one_f_one_b"),
    ZB: _pipe("zero_bubble_h1"),
    THREE: _pipe("one_f_one_b", stages=2, tensor=2),
    "PowerSGD": {"exchange": "power_sgd"},
    "Ok-Topk": {"exchange": "ok_topk", "exchange.density": "0.05"},
    "local SGD": {"averaging": "local_sgd", "averaging.period": "4", "taken": "0"},
    "WAGMA": {"averaging": "wagma", "taken": "0"},
    SINGLE: _late(1),
    DP_64: _LARGE,
    TENSOR_64: _TENSOR | _LARGE,
}
# At the common rate, and at a lower one.
for _name, _own, _more in (
    (DP, SLOW, {}),
    (STASH, STASH + OWN, _late()),
    (DOUBLE, DOUBLE + OWN, _late(4, "double")),
):
    STRATEGIES |= {_name: _more, _own: {**_more, "optimizer.lr": "0.03"}}


def _compare(variant: str = "", **overrides: str) -> Runs:
    return Runs(config=f"strategies/compare{variant}", overrides=overrides)


def _plan(name: str) -> dict[str, float]:
    """Returns what a schedule idles and keeps; a backward pass is twice as long."""
    from hpcjax import cost, sharding

    told = STRATEGIES.get(name, {})
    if told.get("parallel") != "pipeline":
        return {"bubble": 0.0}
    stages, count = (int(told[f"parallel.{k}"]) for k in ("stages", "micro_batches"))
    schedule = getattr(sharding, told["parallel.schedule"])(stages, count)
    line = cost.simulate(schedule, cost.StageCosts(t_f=1.0, t_b=2.0))
    held = sharding.tick_table(schedule).saved_buffers
    return {"bubble": 1 - 3 * count / line.makespan, "held": held}


def _learnt(losses: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """Returns how far losses are from one device's, and when they are at the target."""
    finite = np.nan_to_num(losses, nan=np.inf, posinf=np.inf)
    smooth = np.convolve(finite, np.full(10, 0.1), "valid")
    reached = np.flatnonzero(smooth <= wanted[50:60].mean())
    return {
        "apart": np.max(abs(finite / wanted - 1)),
        "loss": smooth[-1],
        "steps": reached[0] + 10 if len(reached) else np.inf,
    }


def compare(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each strategy, and the losses of its steps."""
    import xarray as xr

    runs = {name: reduce.first(row) for name, row in rows.items()}
    wanted = runs[ONE]["losses"].values
    cells: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        sent, psi = float(run["sent"].sum()), float(run["psi"])
        cells[name] = {
            "state": run["state"] / psi,
            "temporaries": run["temporaries"] / psi,
            "sent": sent / (SHARE * psi),
            **_plan(name),
        }
        if "losses" in run:
            cells[name] |= _learnt(run["losses"].values, wanted)
    taken = {name: run["losses"] for name, run in runs.items() if "losses" in run}
    curves = xr.concat(
        taken.values(), xr.DataArray(list(taken), dims="row", name="row")
    )
    held = curves.reindex(row=list(cells)).rename(number="step")
    drawn = held.where(np.isfinite(held))  # a curve that diverged ends
    return reduce.from_cells(cells).assign(losses=packing.pack(drawn))


COMPARE = Table(
    id="strategies/compare",
    title="Every way to train one network on 8 devices",
    paper=(
        "Lin et al., arXiv 2111.04949: performance, statistical efficiency and memory "
        "of a strategy belong together; no figure of theirs can be had here"
    ),
    caption=(
        "Four blocks of width 64 on characters, batches of 32, 100 steps of SGD with "
        "momentum at rate 0.1, on 8 simulated devices; pipelines have 4 stages and 8 "
        "micro-batches, PipeDream 4 stages. Of the compiled step, in units of the "
        "parameters' bytes Ψ: what a device holds between steps and besides, and sends "
        "by rings, over 7/8. bubble, inputs held: of the schedule, simulated: its idle "
        "share, and the most micro-batches that a stage has in flight. apart: the "
        "farthest loss of any step from one device's, relative; loss: mean of the last "
        "10; steps: until the mean of 10 is what one device has in steps 51 to 60, inf "
        "if never. PowerSGD, Ok-Topk (5 %), PipeDream and averages of models compute "
        "something else on purpose, and are ranked apart; of averages, and of batches "
        "of 64, no steps are taken. no mean, summed: broken."
    ),
    shows=(
        "One small language model was trained in every way that the house has. "
        "Synchronous ones should lie on one device's curve; weights that are some "
        "updates old leave it, and diverge at its rate."
    ),
    columns={
        "state": "state / Ψ",
        "temporaries": "temporaries / Ψ",
        "sent": "sent / (7/8 Ψ)",
        "bubble": "bubble",
        "held": "inputs held",
        "apart": "loss apart",
        "loss": "loss",
        "steps": "steps to target",
    },
    reduce=compare,
    picture=Lines(
        "step",
        "losses",
        rows=(
            ONE,
            THREE,
            *(f"{name}, lr 0.03" for name in (DP, STASH, DOUBLE)),
            MISSING,
        ),
        label="loss",
        log_x=False,
    ),
    tiers=on_cpu(
        minutes=10.0,
        devices=8,
        runs={
            ONE: _compare(":alone"),
            **{name: _compare(**told) for name, told in STRATEGIES.items()},
            MISSING: _compare(":missing"),
            BROKEN: _compare(":summed"),
        },
        claims={
            "equal": most("apart", *SAME)
            .at_most(1e-5, "farthest loss of 100 steps from one device's, synchronous")
            .fails({DP: MISSING}, {ZERO3: BROKEN}, {F1B1: STASH}),
            "memory": over("state", ZERO3, DP)
            .at_most(0.15, "of data parallelism's state at stage 3")
            .fails({ZERO3: ZERO1}),
            "held": over("held", F1B1, GPIPE)
            .at_most(0.5, "of GPipe's inputs in 1F1B, 8 micro-batches in 4 stages")
            .fails({F1B1: GPIPE}),
            "batch": (over("sent", TENSOR_64, TENSOR) - over("sent", DP_64, DP))
            .at_least(0.5, "how much more a double batch adds to tensor's bytes")
            .fails({TENSOR_64: DP_64, TENSOR: DP}),
            "one stage": abs(cell("loss", SINGLE) - cell("loss", DP))
            .at_most(0, "PipeDream of one stage from SGD, loss")
            .fails({SINGLE: STASH}),
        },
    ),
)
