"""KAISA's tables: steps to the tuned baseline's loss, memory and bytes by the knob."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.kaisa import peer_tables
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots, Lines
from hpcjax.runs.tables import Claim, Runs, Table, Tier, grid, on_cpu
from hpcjax.runs.targets import time_to_targets

if TYPE_CHECKING:
    import xarray as xr

KFAC_JAX = peer_tables.KFAC_JAX
SEEDS = (0, 1, 2, 3, 4)
FRACTIONS = {"1/8": "0.125", "1/4": "0.25", "1/2": "0.5", "1": "1.0"}
BASELINES = {"fashion": "sgd", "phantoms": "adamw"}
# Validations of which means are taken.
SMOOTH = 3
# Nine trials for each: K-FAC has three rates and three dampings.
RATES = {
    "sgd": ("0.02", "0.05", "0.1", "0.2", "0.3", "0.5", "0.8", "1.2", "2.0"),
    "adamw": (
        *("0.0003", "0.001", "0.002", "0.003", "0.005"),
        *("0.008", "0.012", "0.02", "0.03"),
    ),
}
DAMPINGS = ("0.001", "0.01", "0.1")


def _task(task: str, names: tuple[str, ...], rates: tuple[str, ...]) -> dict[str, Runs]:
    """Returns a task's rows, each optimizer tuned over nine trials."""
    axes: dict[str, dict[str, tuple[str, ...]]] = {
        name: {"optimizer.lr": RATES[name]} for name in names
    }
    axes["kfac"] = {"optimizer.base.lr": rates, "optimizer.damping": DAMPINGS}
    return {
        f"{task}/{name}": Runs(
            config=f"kaisa/{task}:{name}",
            seeds=SEEDS,
            tune=grid,
            tune_seeds=(1000, 1001, 1002),
            smooth=SMOOTH,
        )
        for name, grid in axes.items()
    }


def _steps(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Compares the rows of each task with that task's tuned baseline."""
    tasks = [row.partition("/")[0] for row in rows]
    baselines = {task: BASELINES[task] for task in tasks}
    table = time_to_targets(rows, baselines, smooth=SMOOTH)
    steps = table["steps_by_seed"]
    base = steps.sel(row=[f"{task}/{BASELINES[task]}" for task in tasks]).values
    # Where neither comes to the target nobody wins.
    wins = (steps <= 0.75 * base) & np.isfinite(steps)
    return table.assign(wins=wins.sum("seed"))


def _wins(task: str) -> Claim:
    baseline = BASELINES[task]
    claim = reduce.cell("wins", f"{task}/kfac").at_least(
        4.0, f"{task}: seeds of 5 with K-FAC at ≤ 0.75 of the tuned {baseline}"
    )
    return claim.fails({f"{task}/kfac": f"{task}/{baseline}"})


PAPER = (
    "SC 2021, Table 1 and section 5.3: ResNet-50 in 46 epochs against 65 of SGD, U-Net "
    "in 30 against 50, BERT-Large phase 2 in 800 to 1200 iterations against LAMB's 1536"
)
COLUMNS = {
    "best": "best validation loss",
    "steps": "steps to target",
    "ratio": "steps / baseline's",
    "wins": "seeds at ≤ 0.75",
    "target": "target loss",
}

STEPS = Table(
    id="kaisa/steps",
    title="Steps to the tuned baseline's validation loss",
    paper=PAPER,
    caption=(
        "10,000 images of Fashion-MNIST of 7x7 with ResNet-8, batch 512, and "
        "ellipsoid phantoms with a U-Net, against SGD and AdamW. Every optimizer is "
        "the best of 9 trials: 9 rates, for K-FAC 3 rates and 3 dampings, each with "
        "three seeds; cosine schedules. Losses are means of three validations, of "
        "which there are 40 and 30."
    ),
    columns=COLUMNS,
    reduce=_steps,
    tiers=on_cpu(
        minutes=100.0,
        runs={
            **_task("fashion", ("sgd", "adamw"), ("0.1", "0.3", "1.0")),
            **_task("phantoms", ("adamw",), ("0.1", "0.3", "1.0")),
        },
        claims={f"{task}_wins": _wins(task) for task in ("fashion", "phantoms")},
    ),
)


def _sharing(*costs: str) -> dict[str, Runs]:
    shares = {name: {"grad_worker_fraction": text} for name, text in FRACTIONS.items()}
    balanced = {cost: {"cost": cost} for cost in costs}
    return grid("kaisa/sharing", balanced, shares, between=" ")


def _memory(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    table = reduce.by_run(rows)
    kept = table[["factors", "decompositions"]] / 1e6
    overhead = (table["factors"] + table["decompositions"]) / 1e6
    return kept.assign(overhead=overhead, imbalance=table["imbalance"])


@reduce.Number
def _linear(table: "xr.Dataset") -> float:
    """Returns R² of the overhead against the fraction, balanced by memory."""
    rows = [f"memory {name}" for name in FRACTIONS]
    y = table["overhead"].sel(row=rows).values
    x = np.array([float(text) for text in FRACTIONS.values()])
    return float(np.corrcoef(x, y)[0, 1] ** 2)


_LARGEST = reduce.over("overhead", "memory 1", "memory 1/8")
MEMORY = Table(
    id="kaisa/memory",
    title="Bytes that K-FAC keeps on each of 8 devices, ResNet-50",
    paper=(
        "SC 2021, Table 5 and section 5.5: overhead on 64 V100 grows linearly with the "
        "fraction of gradient workers, largest over smallest 1.5 to 2.9"
    ),
    caption=(
        "Shards of the real state on 8 simulated devices, float32, padding included. "
        "`compute` and `memory` say what columns are balanced by. ResNet-50 on 64 "
        "V100 in the paper: 4762 MB with SGD, 5396 to 6608 MB with K-FAC."
    ),
    shows=(
        "K-FAC's inverses were kept by a part of eight devices, or by all. The memory "
        "of a device should grow in a line with that share."
    ),
    picture=Lines(
        " {}",
        "overhead",
        label="MB that K-FAC keeps a device",
        x_label="share of devices with an inverse",
    ),
    columns={
        "factors": "A and G, MB",
        "decompositions": "decompositions, MB",
        "overhead": "together, MB",
        "imbalance": "longest column / mean",
    },
    reduce=_memory,
    tiers=on_cpu(
        minutes=8.0,
        runs=_sharing("memory", "compute"),
        claims={
            "linear": _linear.at_least(
                0.99, "the overhead is linear in the fraction: R²"
            ).fails({"memory 1/2": "memory 1/4"}),
            "most": _LARGEST.at_most(
                2.9, "largest overhead over smallest, at most"
            ).fails(columns={"overhead": "decompositions"}),
            "least": _LARGEST.at_least(
                1.5, "largest overhead over smallest, at least"
            ).fails({"memory 1/8": "memory 1"}),
            "eighth": reduce.over("decompositions", "memory 1/8", "memory 1")
            .at_most(0.15, "decompositions at f = 1/8 over those at f = 1")
            .fails({"memory 1/8": "memory 1"}),
        },
    ),
)

_PARTS = ("reduced", "broadcast", "decomposition_broadcast", "factors_reduced")


def _bytes(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    import xarray as xr

    table = reduce.by_run(rows)
    found = xr.concat([table[part] for part in _PARTS], dim="part")
    formula = xr.concat([table[f"{part}_formula"] for part in _PARTS], dim="part")
    # Nothing where nothing is to be is exact.
    ratio = xr.where((found == 0) & (formula == 0), 1.0, found / formula)
    kept = {part: table[part] / 1e3 for part in _PARTS}
    kept |= {f"{part}_formula": table[f"{part}_formula"] / 1e3 for part in _PARTS}
    ends = {"least": ratio.min("part"), "most": ratio.max("part")}
    return xr.Dataset({**kept, **ends})


@reduce.Number
def _off(table: "xr.Dataset") -> float:
    """Returns the largest relative difference of bytes from their formula."""
    found, formula = (
        np.stack([table[f"{part}{end}"].values for part in _PARTS])
        for end in ("", "_formula")
    )
    # Nothing where nothing is to be is exact.
    size = np.maximum(np.maximum(found, formula), 1e-9)
    return float((abs(found - formula) / size).max())


BYTES = Table(
    id="kaisa/bytes",
    title="Bytes that a step of K-FAC moves between 8 devices",
    paper="SC 2021, section 3.1: what is broadcast to whom, and when",
    caption=(
        "ResNet-8 with group norm, read from the compiled step on 8 simulated devices. "
        "All-reduces: operand on each device. Broadcasts: over all devices together. "
        "Last columns: of the four, each over its formula."
    ),
    shows=(
        "What a step of K-FAC sends was counted in the compiled program. Each kind of "
        "message follows its formula; more memory is fewer broadcasts of results and "
        "more of decompositions."
    ),
    picture=Bars(
        ("reduced", "broadcast", "factors_reduced", "decomposition_broadcast"),
        label="kB",
    ),
    columns={
        "reduced": "gradients, all-reduce, kB each step",
        "broadcast": "results, broadcast, kB each step",
        "factors_reduced": "factors, all-reduce, kB",
        "decomposition_broadcast": "decompositions, broadcast, kB",
        "least": "program / formula, least",
        "most": "program / formula, most",
    },
    reduce=_bytes,
    tiers=on_cpu(
        minutes=4.0,
        runs=_sharing("memory"),
        claims={
            "formula": _off.at_most(
                0.01, "bytes of the program off the formula, of any of the four"
            ).fails(
                {"memory 1/8": "memory 1/4"},
                only=("broadcast", "decomposition_broadcast"),
            ),
        },
    ),
)


_STEP = "a step at intervals of 10 and 100 costs at most 1.25 of SGD's"


def _step_cost(rows: reduce.Rows) -> "xr.Dataset":
    return reduce.ratios(reduce.single(rows)["seconds"], "sgd")


STEP_COST = Table(
    id="kaisa/step-cost",
    title="Time of a step of K-FAC against SGD's, by stage",
    paper="SC 2021, Figure 7: time of K-FAC's stages",
    caption=(
        "Factors every 10, decompositions every 100 steps, from steps of each kind. "
        "cpu: ResNet-20, 32x32, batch 128; gpu: ResNet-50, 224x224, batch 128, "
        "bfloat16 products. Stages: what they add to a step, and that over SGD's step."
    ),
    benchmark=True,
    shows=(
        "The parts of a K-FAC step were timed beside SGD's step. Left of the line "
        "K-FAC at its usual intervals costs at most a quarter more."
    ),
    picture=Dots("ratio", bound="step", log=True, label="time / SGD's step"),
    columns={"milliseconds": "ms", "ratio": "ratio"},
    reduce=_step_cost,
    tiers={
        name: Tier(
            minutes=3.0,
            runs={"all": Runs(config=f"kaisa/step_cost:{name}")},
            claims={
                "step": reduce.cell("ratio", "kfac")
                .at_most(1.25, _STEP)
                .fails({"kfac": "kfac, all at every step"})
            },
        )
        for name in ("cpu", "gpu")
    },
)
