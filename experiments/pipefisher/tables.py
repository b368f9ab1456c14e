"""PipeFisher's tables: work against idle time, and how full bubbles become."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import packing, reduce
from hpcjax.runs.pictures import Dots, Lines, Timeline
from hpcjax.runs.tables import Runs, Table, by_model, grid, on_cpu
from hpcjax.runs.targets import first_at_most

if TYPE_CHECKING:
    import xarray as xr

SCHEDULES = ("gpipe", "one_f_one_b", "chimera")
DEPTHS = (4, 8, 16)
# (utilization %, K-FAC's work / idle time, preconditioning / step %) of D = 4, 8, 16.
# What the authors' formulas (scripts/plot_throughput.py of their repository) give for
# their times (p100.csv), to the digits that are compared.
_BASE_ONE_WAY = (
    ("57.1", "2.21", "3.7"),
    ("53.3", "1.51", "1.7"),
    ("51.6", "1.22", "0.8"),
)
_BASE_CHIMERA = (
    ("76.1", "5.28", "4.9"),
    ("68.0", "2.80", "2.2"),
    ("64.5", "2.09", "1.0"),
)
_LARGE_ONE_WAY = (("", "2.33", ""), ("", "1.58", ""), ("", "1.27", ""))
_LARGE_CHIMERA = (("", "5.58", ""), ("", "2.94", ""), ("", "2.18", ""))
_EXPECTED = {
    ("base", "gpipe"): _BASE_ONE_WAY,
    ("base", "one_f_one_b"): _BASE_ONE_WAY,
    ("base", "chimera"): _BASE_CHIMERA,
    ("large", "gpipe"): _LARGE_ONE_WAY,
    ("large", "one_f_one_b"): _LARGE_ONE_WAY,
    ("large", "chimera"): _LARGE_CHIMERA,
}
FIGURES = {
    f"{model} {schedule} D={depth}": figures
    for (model, schedule), rows in _EXPECTED.items()
    for depth, figures in zip(DEPTHS, rows, strict=True)
}
_PRINTED = {"utilization": (100, 1), "ratio": (1, 2), "overhead": (100, 1)}


@reduce.Number
def equal_cells(table: "xr.Dataset") -> float:
    """Counts the cells that equal `FIGURES` to their last digit."""
    return float(
        sum(
            f"{scale * table[column].sel(row=row).item():.{places}f}" == figure
            for row, figures in FIGURES.items()
            for figure, (column, (scale, places)) in zip(
                figures, _PRINTED.items(), strict=True
            )
            if figure
        )
    )


def numbers(rows: reduce.Rows) -> "xr.Dataset":
    """Returns all but the timelines, with a row for each run."""
    dims = ("kind", "device", "bar", "edge")
    return reduce.by_run({name: row.drop_dims(dims) for name, row in rows.items()})


BUBBLE_FILL = Table(
    id="pipefisher/bubble-fill",
    title="K-FAC's work of a refresh over a step's idle time, one block a stage",
    paper="PipeFisher, MLSys 2023: performance model, BERT-Base and Large on P100",
    caption=(
        "Simulated from the authors' published times of one block, 32 examples of 128 "
        "tokens a micro-batch, N = D. A ratio of 2.2 says that a refresh takes at "
        "least 3 steps. 1F1B differs from GPipe in none of these."
    ),
    shows=(
        "K-FAC's work was set against the idle time of simulated pipelines. Above 1 it "
        "fills more than one step; deeper pipelines have more room for it."
    ),
    picture=Lines("D={}", "ratio", label="K-FAC's work / idle time", x_label="stages"),
    columns={
        "utilization": "busy without K-FAC",
        "ratio": "K-FAC / idle",
        "overhead": "preconditioning / step",
    },
    reduce=numbers,
    tiers=by_model(
        minutes=0.2,
        runs=grid(
            "pipefisher/bubble_fill:{1}",
            {model: {"model": model} for model in ("base", "large")},
            SCHEDULES,
            {f"D={depth}": {"stages": str(depth)} for depth in DEPTHS},
            between=" ",
        ),
        claims={
            "cells": equal_cells.at_least(
                36.0, "cells of 36 equal to the last digit"
            ).fails({"base chimera D=4": "base gpipe D=4"})
        },
    ),
)

_SPLIT = grid(
    "pipefisher/fill:{1}",
    {
        "base": {"model": "base", "stages": "4"},
        "large": {"model": "large", "stages": "8"},
    },
    (*SCHEDULES, "zero_bubble_h1"),
    between=" ",
)
_WHOLE = {
    f"{row}, whole": Runs(
        config=runs.config,
        overrides={**runs.overrides, "gate": "device", "panel": "none"},
    )
    for row, runs in _SPLIT.items()
    if row.split()[1] in SCHEDULES
}
CLAIMED = [row for row in _SPLIT if row.split()[1] in SCHEDULES]


def _of(column: str) -> reduce.Number:
    """Returns a column of the rows that are claimed something of."""
    return reduce.Number(lambda table: table[column].sel(row=CLAIMED).values)


_BEYOND = abs(_of("t_step") / _of("t_pipe") - 1 - _of("overhead")).largest()


@reduce.Number
def _late(table: "xr.Dataset") -> float:
    """Returns steps of a refresh beyond ⌈ratio⌉, inf if tasks fit into no bubble."""
    own = table.sel(row=CLAIMED)
    late = own["period"] - np.ceil(own["ratio"])
    return float(late.where(own["unplaced"] == 0, np.inf).max(skipna=False))


_TIMELINES = ("base one_f_one_b",)


def filled(rows: reduce.Rows) -> "xr.Dataset":
    """Returns `numbers`, and the timelines that are drawn."""
    import xarray as xr

    bars = {
        name: reduce.first(row)["bars"]
        for name, row in rows.items()
        if name.startswith(_TIMELINES)
    }
    held = xr.concat(bars.values(), xr.Variable("row", list(bars)), join="outer")
    drawn = packing.pack(held.reindex(row=list(rows)))
    return numbers(rows).assign(bars=drawn)


FILL = Table(
    id="pipefisher/fill",
    title="How full K-FAC makes a pipeline's bubbles, three blocks a stage",
    paper=(
        "PipeFisher, MLSys 2023: timelines of BERT-Base, 4 stages, and BERT-Large, 8 "
        "stages; the measured shares are known from memory only and not quoted"
    ),
    caption=(
        "Simulated from the authors' published times on P100, 32 examples a "
        "micro-batch, N = D; inversions in panels of at most a quarter of a forward "
        "pass. whole: unsplit inversions that wait for all layers of the device, as in "
        "the authors' code. zero_bubble_h1: half of a backward pass taken for its "
        "weights' part; no claim."
    ),
    shows=(
        "K-FAC's work was put into the idle time of a simulated pipeline of four "
        "devices. White is idle: pieces that may be split fill it more than whole "
        "ones."
    ),
    picture=Timeline("bars", rows=_TIMELINES, label="ms"),
    columns={
        "utilization": "busy without K-FAC",
        "filled": "busy with K-FAC",
        "period": "steps a refresh",
        "ratio": "K-FAC / idle",
        "overhead": "preconditioning / step",
        "unplaced": "unplaced",
        "memory": "MB",
    },
    reduce=filled,
    tiers=by_model(
        minutes=0.2,
        runs={**_SPLIT, **_WHOLE},
        claims={
            "utilization": _of("filled")
            .least()
            .at_least(0.85, "GPipe, 1F1B and Chimera are busy ≥ 85 % of the time")
            .fails({"base one_f_one_b": "base one_f_one_b, whole"}),
            "period": _late.at_most(
                1.0, "steps of a refresh beyond ⌈ratio⌉, if all tasks are placed"
            ).fails({"base chimera": "base chimera, whole"}),
            "step": _BEYOND.at_most(
                1e-9, "of a step beyond pipeline and preconditioning"
            ).fails({"base chimera": "base gpipe"}, only=("t_step",)),
        },
    ),
)


def medians(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns medians over the runs of both kinds, with their intervals."""
    run = reduce.single(rows)
    run = run.assign(milliseconds=1e3 * run["seconds"])
    found = {}
    for row in run["row"].values.tolist():
        own = run.sel(row=row)
        found[row] = {"units": float(own["units"].median())}
        for name in ("utilization", "milliseconds", "cpu"):
            found[row] |= reduce.interval(own[name], name)
    plain = found["without"]
    for cells in found.values():
        work, base = (
            each["utilization"] * each["milliseconds"] for each in (cells, plain)
        )
        # Had the bubbles' work come behind a step without it.
        cells["behind"] = plain["milliseconds"] + work - base
    return reduce.from_cells(found)


_GAINED = reduce.above("utilization", "filled", "without") * 100
TWO_PROCESSES = Table(
    id="pipefisher/two-processes",
    title="GPipe of two processes, measured without and with K-FAC in its bubbles",
    paper="PipeFisher, MLSys 2023: its claim, on 2 cores in place of its GPUs",
    caption=(
        "Two stages of 8 tanh layers 256 wide, 2 micro-batches of 3072 rows; one "
        "process a stage, each pinned to a core. Busy: forward and backward passes and "
        "the K-FAC work that the schedule has placed, of the time between step ends; "
        "preconditioning is time that is not busy. Medians of 5 runs of whole "
        "refreshes of at least 15 steps, in turns, and of the steps of each. cpu: CPU "
        "time of a process by the system's account, the larger one of both."
    ),
    benchmark=True,
    shows=(
        "A pipeline of two processes ran with and without K-FAC in its gaps. It should "
        "be busier, left, and take hardly longer a step, right."
    ),
    picture=Dots(("utilization", "milliseconds")),
    columns={
        "utilization": "busy",
        "milliseconds": "ms per step",
        "behind": "ms, its work behind a step",
        "units": "K-FAC tasks a refresh",
        "cpu": "cpu",
    },
    reduce=medians,
    tiers=on_cpu(
        minutes=2.0,
        runs={"all": Runs(config="pipefisher/two_processes")},
        claims={
            "points": _GAINED.at_least(
                15.0, "points of busy time that filling gains"
            ).fails({"filled": "without"}),
            "step": reduce.over("milliseconds", "filled", "without")
            .at_most(1.2, "a step with K-FAC takes at most 1.2 of one without")
            .fails(columns={"milliseconds": "behind"}),
        },
    ),
)


def _smooth(row: "xr.Dataset") -> "xr.DataArray":
    """Returns the mean training loss of the last 5 % of steps up to each step."""
    return row["loss"].rolling(step=max(1, row.sizes["step"] // 20)).mean()


def training(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Compares, seed by seed, when training comes to where LAMB's ends.

    Returns:
      By row the medians over seeds, with their intervals: `loss` at the end, `steps` to
      LAMB's, and `time` to it, simulated and over LAMB's whole run; and by seed
      `steps_by_seed`.
    """
    import xarray as xr

    losses = {name: _smooth(row) for name, row in rows.items()}
    target = losses["lamb"].isel(step=-1)
    whole = losses["lamb"].sizes["step"]
    steps = {n: first_at_most(each, target, "step") for n, each in losses.items()}
    found = {
        name: {
            **reduce.interval(losses[name].isel(step=-1), "loss"),
            **reduce.interval(steps[name], "steps"),
            **reduce.interval(steps[name] * row.get("step_time", 1.0) / whole, "time"),
        }
        for name, row in rows.items()
    }
    by_seed = xr.concat(list(steps.values()), dim="row")
    made = reduce.from_cells(found).assign(steps_by_seed=by_seed)
    return made.assign_attrs(source="measured, time simulated")


@reduce.Number
def _stale(table: "xr.Dataset") -> float:
    steps = table["steps_by_seed"]
    return float(
        (steps.sel(row="pipefisher") / steps.sel(row="fresh")).median(skipna=False)
    )


_SEEDS = (0, 1, 2, 3, 4)
_TUNED = {
    "optimizer.base.lr": ("0.01", "0.03", "0.1"),
    "optimizer.damping": ("0.01", "0.03", "0.1"),
}
_RATES = ("0.003", "0.006", "0.01", "0.02", "0.03", "0.05", "0.08", "0.12", "0.2")
_TRIED = {"tune_seeds": (1000, 1001, 1002), "smooth": 3}
TRAINING = Table(
    id="pipefisher/training",
    title="Steps and simulated time to LAMB's final training loss",
    paper=(
        "PipeFisher, MLSys 2023, BERT-Base: NVLAMB's final loss in 50 to 75 % of the "
        "time [abstract]"
    ),
    recalled={"pipefisher": "42 % of the steps"},
    caption=(
        "Characters of the King James Bible, two Transformer blocks, one a stage of a "
        "simulated GPipe, 2,000 steps. Both optimizers are the best of 9 trials by "
        "validation loss, each with three seeds. "
        "Losses are means over 5 % of the steps. fresh: inverts at every step, at "
        "pipefisher's rate and damping, as if that took no time."
    ),
    shows=(
        "A language model was trained by LAMB, and by K-FAC with fresh and with late "
        "inverses. Further left comes to LAMB's final loss in fewer steps, or less "
        "time."
    ),
    picture=Dots(("steps", "time")),
    columns={
        "loss": "final training loss",
        "steps": "steps to LAMB's",
        "time": "time / LAMB's, simulated",
    },
    reduce=training,
    tiers=on_cpu(
        minutes=20.0,
        runs={
            "lamb": Runs(
                config="pipefisher/training:lamb",
                seeds=_SEEDS,
                tune={"optimizer.lr": _RATES},
                **_TRIED,
            ),
            "pipefisher": Runs(
                config="pipefisher/training", seeds=_SEEDS, tune=_TUNED, **_TRIED
            ),
            "fresh": Runs(
                config="pipefisher/training:fresh",
                seeds=_SEEDS,
                like="pipefisher",
                takes=tuple(_TUNED),
            ),
        },
        claims={
            "time": reduce.cell("time", "pipefisher")
            .at_most(0.8, "simulated time to LAMB's final loss, of LAMB's")
            .fails({"pipefisher": "lamb"}),
            "stale": _stale.at_most(
                1.05, "steps with late inverses over those with fresh ones"
            ).fails({"pipefisher": "lamb"}),
        },
    ),
)
