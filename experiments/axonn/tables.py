"""Tables of AxoNN's static half: pipelines in the loop, what they learn and hold."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.axonn.order_tables import LIVE, ORDER  # noqa: F401 - tables of it
from hpcjax.runs import packing, reduce
from hpcjax.runs.pictures import Lines
from hpcjax.runs.reduce import cell
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

ONE, DEEP, WIDE = "one device", "4 stages x 2 data", "2 stages x 2 tensor x 2 data"
PEER, SUMMED, TAKEN = "accumulated", "summed", ", SGD"
DATA = "8 data"
PIPES = (DEEP, WIDE)
_WIDE = {
    "parallel.stages": "2",
    "parallel.tensor": "2",
    "parallel.micro_batches": "4",
}


def _train(name: str, **overrides: str) -> Runs:
    return Runs(config=f"axonn/training{name}", overrides=overrides)


def training(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each way, of the step that is read and the steps taken."""
    import xarray as xr

    runs = {name: reduce.first(row) for name, row in rows.items()}
    wanted = runs[ONE]["losses"].values
    cells: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        own = cells.setdefault(name.removesuffix(TAKEN), {})
        if "losses" in run:
            own["loss"] = run["loss"]
            own["distance"] = np.max(abs(run["losses"].values / wanted - 1))
        else:
            rest = run["psi"] - run["stack"]
            own["state"] = run["state"] / (3 * (run["stack"] / 4 + rest))
        if "permuted" in run and "losses" not in run:
            sent = run["sent"].sel(axis="stage", kind="collective-permute").sum()
            own["permuted"] = sent / run["permuted"]
            own["both_ways"] = sent / run["both_ways"]
    taken = {
        name.removesuffix(TAKEN): run for name, run in runs.items() if TAKEN in name
    }
    curves = {
        name: (runs | taken)[name]["losses"].values for name in cells if name != DATA
    }
    losses = xr.DataArray(
        list(curves.values()),
        {"row": list(curves), "step": runs[ONE]["number"].values},
        ("row", "step"),
    )
    held = losses.reindex(row=list(cells))  # of DATA nothing is held
    return reduce.from_cells(cells).assign(losses=packing.pack(held))


TRAINING = Table(
    id="axonn/training",
    title="AxoNN: a language model trained in the stages of a pipeline",
    paper=(
        "Singh and Bhatele, IPDPS 2022: the loss of training in parallel is that of "
        "serial training (validation on wikitext-103)"
    ),
    caption=(
        "Four blocks of width 64 on characters, batches of 32, on 8 simulated devices, "
        "by 1F1B. state: bytes of a device between steps with AdamW, over 3 (Ψ_stack/4 "
        "+ Ψ_rest), of which tensor parallelism cuts some further; permuted: what a "
        "device passes on in a step, over ticks * bytes of an activation * ways, one "
        "of two stages and two of more (with two ways: of any); both are read from the "
        "compiled step. loss: of the last of 200 steps of SGD with momentum; distance: "
        "relative, the farthest of any step from one device's. accumulated: one device "
        "that takes the micro-batches one after the other. summed: gradients of "
        "micro-batches are summed, not averaged. 8 data: the batch is shared out, and "
        "each device has all of the model."
    ),
    columns={
        "state": "state / formula",
        "permuted": "permuted / formula",
        "both_ways": "with two ways",
        "loss": "loss",
        "distance": "distance from one device",
    },
    reduce=training,
    shows=(
        "A small language model was trained on one device, and by eight in pipelines. "
        "The pipelines' losses should lie on the single device's; summed gradients, "
        "the control, leave it."
    ),
    picture=Lines(
        "step",
        "losses",
        rows=(ONE, *PIPES, PEER, SUMMED),
        label="loss",
        about=PIPES,
        log_x=False,
    ),
    tiers=on_cpu(
        minutes=5.0,
        devices=8,
        runs={
            ONE: _train(":alone"),
            DEEP: _train(""),
            DEEP + TAKEN: _train(":sgd"),
            WIDE: _train("", **_WIDE),
            WIDE + TAKEN: _train(":sgd", **_WIDE),
            PEER: _train(":accumulated"),
            SUMMED: _train(":summed"),
            DATA: _train(":data"),
        },
        claims={
            "losses": reduce.most("distance", *PIPES)
            .at_most(1e-5, "of one device's loss, the farthest of any of 200 steps")
            .fails({DEEP: SUMMED}, only=("distance",)),
            "permuted": abs(reduce.of("permuted", *PIPES) - 1)
            .largest()
            .at_most(0, "farthest ratio of permuted bytes to the formula's from 1")
            .fails(columns={"permuted": "both_ways"}),
            "state": abs(cell("state", DEEP) - 1)
            .at_most(0.01, "of the state from 3 (Ψ_stack/p + Ψ_rest), relative")
            .fails({DEEP: DATA}),
        },
    ),
)

GPIPE, F1B1, BUBBLE, WHOLE = "GPipe", "1F1B", "ZB-H1, m=8", "one device, m=8"
UNCUT = "4 stages, batch uncut"
COUNTS = (4, 8, 16)
SCHEDULES = {GPIPE: "gpipe", F1B1: "one_f_one_b"}
ROWS = [f"{name}, m={count}" for name in SCHEDULES for count in COUNTS]


def _compile(schedule: str, count: int, parts: int = 1) -> Runs:
    return Runs(
        config="axonn/schedules",
        overrides={
            "parallel.schedule": schedule,
            "parallel.micro_batches": str(count // parts),
            "train.batch_size": str(32 * count),
        },
    )


def _at(name: str, count: int) -> str:
    return f"{name}, m={count}"


def _grown(name: str) -> reduce.Number:
    """Reads how many inputs more a stage needs with 16 micro-batches than with 8."""
    return cell("temporaries", _at(name, 16)) - cell("temporaries", _at(name, 8))


def _instead(name: str, other: str) -> dict[str, str]:
    return {_at(name, count): _at(other, count) for count in COUNTS}


_HELD = np.array([*COUNTS, *(min(4, count) for count in COUNTS)])

SCHEDULED = Table(
    id="axonn/schedules",
    title="AxoNN: what schedules of four stages keep and idle",
    paper=(
        "Singh and Bhatele, IPDPS 2022: at most as many micro-batches are in flight as "
        "there are stages; GPipe has all in flight"
    ),
    caption=(
        "One block of width 32 in each of 4 stages, 32 rows in a micro-batch, on 4 "
        "simulated devices, by compiling alone. temporaries: bytes that a device needs "
        "during a step, besides its state, in inputs of a stage. idle: share of the "
        "ticks that the program has been compiled to, over (p - 1)/(m + p - 1). Read "
        "off the schedule alone, as formulas are: inputs that a stage is planned to "
        "keep at most; makespan over (m + p - 1)(t_f + t_b), and with latency c, over "
        "the same and 2 (p - 1) c. one device: the whole batch at once, blocks "
        "recomputed; batch uncut: the same in four stages."
    ),
    columns={
        "temporaries": (
            "temporaries / input",
            lambda run, rows: run["temporaries"] / rows[ROWS[0]]["input"],
        ),
        "held": "inputs",
        "idle": "idle / formula",
        "makespan": "makespan / formula",
        "late": "with latency",
    },
    shows=(
        "A pipeline of four stages was compiled with two orders of its work. GPipe's "
        "memory should grow with the micro-batches, 1F1B's should not."
    ),
    picture=Lines("m={}", "temporaries", rows=(GPIPE, F1B1), x_label="micro-batches m"),
    tiers=on_cpu(
        minutes=3.0,
        devices=4,
        runs={
            **{
                _at(name, count): _compile(schedule, count)
                for name, schedule in SCHEDULES.items()
                for count in COUNTS
            },
            BUBBLE: _compile("zero_bubble_h1", 8),
            UNCUT: _compile("gpipe", 8, parts=8),
            WHOLE: Runs(config="axonn/schedules:whole"),
        },
        claims={
            "GPipe grows": abs(_grown(GPIPE) - 8)
            .at_most(1, "inputs that GPipe's growth from m=8 to m=16 is off 8")
            .fails(_instead(GPIPE, F1B1)),
            "1F1B does not": abs(_grown(F1B1))
            .at_most(1, "inputs that 1F1B's temporaries grow from m=8 to m=16")
            .fails(_instead(F1B1, GPIPE)),
            "inputs": abs(reduce.of("held", *ROWS) - _HELD)
            .largest()
            .at_most(0, "inputs that a stage keeps off m (GPipe), min(p, m) (1F1B)")
            .fails(_instead(F1B1, GPIPE)),
            "idle": abs(reduce.of("idle", *ROWS) - 1)
            .largest()
            .at_most(1e-9, "of the formula's idle share, the farthest")
            .fails({_at(F1B1, 8): BUBBLE}),
            "makespan": abs(reduce.of("makespan", *ROWS) - 1)
            .largest()
            .at_most(0, "of the formula's makespan, the farthest")
            .fails({_at(F1B1, 8): BUBBLE}),
            "latency": abs(reduce.of("late", *ROWS[: len(COUNTS)]) - 1)
            .largest()
            .at_most(0, "of the formula's makespan of GPipe with latency")
            .fails(_instead(GPIPE, F1B1)),
            "whole batch": reduce.over("temporaries", _at(F1B1, 8), WHOLE)
            .at_most(0.5, "of the temporaries of one device with blocks recomputed")
            .fails({_at(F1B1, 8): UNCUT}),
        },
    ),
)

ADAMW, LOOP, SPACE = "AdamW", "one program's loop", "tiles on the device"
TILED, NARROW, OTHER = "tiles on the host", "the same, float16", "smaller tiles"
WIDTHS = {4: "56", 16: "112", 64: "228"}
TILE = 20_000


def _tiles(name: str, count: int) -> str:
    return f"{name}, N={count}"


def _offloaded(name: str, config: str, *counts: int) -> dict[str, Runs]:
    return {
        _tiles(name, count): Runs(
            config=f"axonn/offload:{config}",
            overrides={"model.width": WIDTHS[count]},
        )
        for count in counts
    }


def offloaded(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each size of each way, with losses beside those of others."""
    runs = {name: reduce.first(row) for name, row in rows.items()}
    cells: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        size, (_, count) = run["parameters"], name.split("N=")
        cells[name] = {
            "parameters": size,
            "beyond": run["beyond"] / 1e6,
            "tiles": run["beyond"] / TILE,
            "temporaries": run["temporaries"] / 1e6,
        }
        if "losses" in run:
            adamw, tiled = (
                abs(run["losses"] / runs[f"{way}, N={count}"]["losses"] - 1).max(
                    skipna=False
                )
                for way in (ADAMW, TILED)
            )
            found = {"host": run["host"] / size, "distance": adamw, "cut": tiled}
            cells[name] |= {**found, "ms": run["ms"]}
    return reduce.from_cells(cells)


_HOSTED = [_tiles(name, count) for name in (TILED, NARROW) for count in WIDTHS]
_NARROWED = [_tiles(NARROW, count) for count in WIDTHS]
_LARGEST = {_tiles(name, 64): _tiles(SPACE, 64) for name in (TILED, NARROW)}

OFFLOAD = Table(
    id="axonn/offload",
    title="AxoNN: what a device holds where the optimizer's state is the host's",
    paper=(
        "Singh and Bhatele, IPDPS 2022: 4 times less memory of a GPU; 4 φ + 16 tile "
        "bytes for φ parameters (§2.4)"
    ),
    caption=(
        "A language model of about N tiles of 20,000 parameters, 10 steps of AdamW on "
        "characters. beyond: most bytes of a device besides parameters and gradients: "
        "live arrays between tiles (of AdamW between steps) and temporaries of a "
        "tile's compiled step. host: bytes of live arrays in its memory. losses: the "
        "farthest of any step from AdamW's, and from tiles of 20,000 on the host. "
        "float16 and bfloat16: weights, float32 ones lie in the tiles; smaller: of "
        "6,000. one program's loop: the step of slices of flat arrays, compiled alone."
    ),
    columns={
        "parameters": "parameters",
        "beyond": "beyond, MB",
        "tiles": "beyond / tile",
        "temporaries": "temporaries, MB",
        "host": "host / parameter",
        "distance": "losses from AdamW's",
        "cut": "losses from other tiles'",
        "ms": "ms a step",
    },
    reduce=offloaded,
    shows=(
        "A language model was trained with its optimizer's state on the device, or in "
        "tiles on the host. What the device holds beyond parameters and gradients "
        "should not grow with the model."
    ),
    picture=Lines(
        "N={}",
        "beyond",
        rows=(ADAMW, LOOP, TILED, NARROW),
        x_label="tiles of 20,000 parameters",
    ),
    tiers=on_cpu(
        minutes=4.0,
        runs={
            **_offloaded(ADAMW, "adamw", *WIDTHS),
            **_offloaded(TILED, "host", *WIDTHS),
            **_offloaded(NARROW, "float16", *WIDTHS),
            **_offloaded("the same, bfloat16", "bfloat16", 64),
            **_offloaded(SPACE, "device", 64),
            **_offloaded(OTHER, "other", 4),
            **_offloaded(LOOP, "loop", *WIDTHS),
        },
        claims={
            "no growth": reduce.most("tiles", *_HOSTED)
            .at_most(
                32, "bytes a tile's entry beyond parameters and gradients, at all N"
            )
            .fails(
                _LARGEST,
                {_tiles(NARROW, count): _tiles(LOOP, count) for count in WIDTHS},
            ),
            "AdamW grows": reduce.over("beyond", _tiles(ADAMW, 64), _tiles(ADAMW, 4))
            .at_least(15, "times the bytes beyond of AdamW at N=4, at N=64")
            .fails({_tiles(ADAMW, count): _tiles(TILED, count) for count in WIDTHS}),
            "losses": reduce.most(
                "distance", *(_tiles(TILED, count) for count in WIDTHS)
            )
            .at_most(1e-6, "of AdamW's loss, the farthest of any of 10 steps")
            .fails({_tiles(TILED, count): _tiles(NARROW, count) for count in WIDTHS}),
            "any tile": cell("cut", _tiles(OTHER, 4))
            .at_most(0, "of the loss with tiles of 20,000, with tiles of 6,000")
            .fails({_tiles(OTHER, 4): _tiles(NARROW, 4)}),
            "host": abs(reduce.of("host", *_NARROWED) / 12 - 1)
            .largest()
            .at_most(0.01, "of the host's bytes from 12 a parameter, relative")
            .fails({_tiles(NARROW, count): _tiles(TILED, count) for count in WIDTHS}),
        },
    ),
)
