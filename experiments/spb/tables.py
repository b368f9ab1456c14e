"""SPB's tables: quality; what a role computes, keeps and sends; jobs side by side."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots, Lines, Scatter
from hpcjax.runs.reduce import of
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = (
    "arXiv 2111.10672: little loss of quality [abstract]; its tables are not known, "
    "and roles, blocks and averages are a reconstruction"
)
FULL, QUARTERS, WRONG = "full", "k = 4", "k = 4, wrong divisor"
SEEDS = (0, 1, 2)


def _last(row: "xr.Dataset", steps: int | None = None) -> "xr.DataArray":
    """Returns the mean training loss of the 5 % of steps up to one of them."""
    loss = row["loss"].isel(step=slice(0, steps))
    window = max(1, row.sizes["step"] // 20)
    return loss.isel(step=slice(-window, None)).mean("step")


def quality(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns by row means over seeds, with the range; "plain" rows among themselves.

    Returns:
      `error` in points at the end; `loss`, the final training loss; `share` of a whole
      backward pass that workers do; `full_loss`, of the whole backward pass once it has
      done as much; and `margin`, points of error above it.
    """
    found = {}
    for name, row in rows.items():
        share, full = float(row["share"].mean()), rows[_full(name)]
        done = max(1, round(share * full.sizes["step"]))
        found[name] = {
            **reduce.extent(100 * row["val_error"].isel(eval_step=-1), "error"),
            **reduce.extent(_last(row), "loss"),
            "share": share,
            "full_loss": _last(full, done).mean(skipna=False),
        }
    table = reduce.from_cells(found)
    errors = [float(table["error"].sel(row=_full(name))) for name in found]
    return table.assign(margin=table["error"] - errors)


def _full(name: str) -> str:
    """Returns the row of the same network's whole backward passes."""
    return f"plain, {FULL}" if name.startswith("plain") else FULL


def _partial(k: int, config: str = "spb/digits", divisor: str = "contributors") -> Runs:
    overrides = {"backward.k": str(k), "backward.divisor": divisor}
    return Runs(config=config, overrides=overrides, seeds=SEEDS)


QUALITY = Table(
    id="spb/quality",
    title="Validation error after equally many steps, 8 workers",
    paper=PAPER,
    caption=(
        "digits in place of CIFAR, ResNet-8, 300 steps of SGD at rate 0.1; plain: a "
        "perceptron, 500 small steps without momentum. 359 images held out, so that "
        "one is 0.28 points. Means of three seeds, [lowest, highest]. The 8 workers "
        "are on one device. wrong divisor: averages over all workers, the negative "
        "control of the perceptron, of which alone something is claimed: batch norms "
        "hide it from the ResNet. random freezing: whole backward "
        "passes, then blocks left out at random."
    ),
    shows=(
        "Eight workers left out parts of their backward passes. Further left is less "
        "work: error should not rise as points move there; a wrong divisor is the "
        "control."
    ),
    picture=Scatter("share", "error", labels=True),
    columns={
        "error": "error, points",
        "margin": "above full",
        "loss": "training loss",
        "share": "backward work",
        "full_loss": "full's loss at as much",
    },
    reduce=quality,
    tiers=on_cpu(
        minutes=8.0,
        runs={
            FULL: _partial(1),
            **{f"k = {k}": _partial(k) for k in (2, 4, 8)},
            **{f"k = {k}, fixed": _partial(k, "spb/digits:fixed") for k in (2, 4, 8)},
            WRONG: _partial(4, divisor="workers"),
            "k = 4, random freezing": Runs(
                config="spb/digits:random_freezing", seeds=SEEDS
            ),
            f"plain, {FULL}": _partial(1, "spb/perceptron"),
            f"plain, {QUARTERS}": _partial(4, "spb/perceptron"),
            f"plain, {WRONG}": _partial(4, "spb/perceptron", "workers"),
        },
        claims={
            "plain": reduce.cell("margin", f"plain, {QUARTERS}")
            .at_most(1.0, "points of error that k = 4 has above full, plain")
            .fails({f"plain, {QUARTERS}": f"plain, {WRONG}"}),
        },
    ),
)


def by_role(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns a row for each network and role; memory in MiB, bytes in KiB."""
    runs = {f"{name}, role": reduce.first(row) for name, row in rows.items()}
    table = reduce.stack(runs, "role", between=" ")
    return table.assign(
        memory=table["memory"] / 2**20,
        sent=table["sent"] / 2**10,
        sent_zeros=table["sent_zeros"] / 2**10,
    ).assign_attrs(source="measured, bytes analytical")


# Roles that all take the whole backward pass.
_WHOLE = {f"chain, role {role}": "chain, role 4" for role in (1, 2, 3)}


@reduce.Number
def _not_growing(table: "xr.Dataset") -> float:
    """Returns how many roles need no more memory than the next shorter one."""
    names = ("chain", "cnn")
    steps = [np.diff(reduce.rows_of(table, name)["memory"].values) for name in names]
    return float(sum((each <= 0).sum() for each in steps))


RESOURCES = Table(
    id="spb/resources",
    title="What a role computes, keeps and sends",
    paper=(
        "arXiv 2111.10672: less network, compute and memory [abstract]; figures not "
        "known, the exact shares are derived"
    ),
    caption=(
        "Counted by XLA in each role's compiled program. chain: 4 blocks of 4 "
        "products, 1024 rows 128 wide; cnn: 8 blocks of one 3x3 convolution of 8 "
        "channels, 64 images of 16x16. Bytes by formula: rings among contributors, "
        "trees to the others; spb/processes counts them."
    ),
    shows=(
        "Workers did backward passes of different length, called roles. What was "
        "counted in compiled programs should lie on what is derived."
    ),
    picture=Lines(
        "role {}", ("flops", "exact"), label="backward FLOPs / all", x_label="role"
    ),
    columns={
        "flops": "backward FLOPs / role k's",
        "exact": "derived",
        "memory": "MiB of temporaries",
        "sent": "KiB sent",
        "sent_zeros": "KiB sent with zeros",
    },
    reduce=by_role,
    tiers=on_cpu(
        minutes=0.5,
        runs={
            "chain": Runs(config="spb/resources"),
            "cnn": Runs(config="spb/resources:cnn"),
        },
        claims={
            "flops": abs(of("flops", "chain") / of("exact", "chain") - 1)
            .largest()
            .at_most(0.02, "largest relative difference of FLOPs from the exact form")
            .fails(_WHOLE, only=("flops",)),
            "monotone": _not_growing.at_most(
                0.0, "roles that need no more memory than a shorter one"
            ).fails(_WHOLE),
            "memory": of("memory", "cnn")
            .then(lambda memory: memory[0] / memory[-1])
            .at_most(0.6, "role 1's memory of role 8's, cnn")
            .fails({"cnn, role 1": "cnn, role 8"}),
        },
    ),
)


def by_process(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns a row for each mode and process; MFLOP, MiB and KiB."""
    runs = {f"{name}, process": reduce.first(row) for name, row in rows.items()}
    table = reduce.stack(runs, "process", between=" ")
    return table.assign(
        flops=table["flops"] / 1e6,
        memory=table["memory"] / 2**20,
        sent=table["sent"] / 2**10,
    )


PROCESSES = Table(
    id="spb/processes",
    title="Four processes, each with the program of its own role",
    paper="arXiv 2111.10672: less network, compute and memory [abstract]",
    caption=(
        "8 tanh layers 256 wide in 4 blocks, roles fixed: process 0 has role 1, "
        "process 3 all of the backward pass. Bytes are counted by the transport. All "
        "processes end with the same parameters, bit for bit. Nothing is timed: a step "
        "takes as long as its longest role, so one job alone gains no time."
    ),
    shows=(
        "Four processes ran programs of their own, with shorter and longer backward "
        "passes. The bars are their memory, which grows with the length."
    ),
    picture=Bars("memory", by=", "),
    columns={
        "flops": "MFLOP a step",
        "memory": "MiB of temporaries",
        "sent": "KiB sent a step",
    },
    reduce=by_process,
    tiers=on_cpu(
        minutes=1.0,
        runs={
            "contributors": Runs(config="spb/processes"),
            "zeros": Runs(config="spb/processes:zeros"),
        },
        claims={
            "bytes": (of("sent", "contributors").sum() / of("sent", "zeros").sum())
            .at_most(0.78, "bytes of contributors over those of zeros")
            .fails(
                {f"contributors, process {p}": f"zeros, process {p}" for p in range(4)}
            )
        },
    ),
)


@reduce.along("policy")
def by_policy(row: "xr.Dataset", policy: str) -> reduce.Cells:
    """Returns means over seeds; `saved` and `takes` are those of the same jobs."""
    own, gang = (row.sel(policy=name) for name in (policy, "gang_fifo"))
    used = own["busy"] + own["switching"]
    return {
        "used": used.mean(),
        # Of GPUs that are taken: a gang's that wait for the longest role save nothing.
        **reduce.extent(100 * (1 - own["held"] / gang["held"]), "saved"),
        "switched": (100 * own["switching"] / used).mean(),
        "computing": (100 * (1 - own["busy"] / gang["busy"])).mean(),
        "derived": (100 * row["derived"]).mean(),
        "bound": (100 * row["bound"]).mean(),
        "held": own["held"].mean(),
        "takes": (own["held"] / gang["held"]).min(),
        "makespan": own["makespan"].mean(),
        "mean": 60 * own["mean"].mean(),
        "late": 60 * own["late"].mean(),
        "slowdown": own["slowdown"].mean(),
        "pair": own["pair"].mean(),
    }


_SMALL, _LARGE = "64 GPUs", "512 GPUs"
_JIGSAW = tuple(f"{size}, jigsaw" for size in (_SMALL, _LARGE))
_NO_ROLES = {name: f"{name}, k = 1" for name in _JIGSAW}
_GANGS = {name: name.replace("jigsaw", "spb_gang") for name in _JIGSAW}


def _jigsaw(column: str, names: Sequence[str] = _JIGSAW) -> reduce.Number:
    """Makes what reads a column of rows of just these names."""
    return reduce.Number(lambda table: table[column].sel(row=list(names)).values)


CLUSTER = Table(
    id="spb/cluster",
    title="GPU time of a simulated cluster's jobs, by who decides what runs where",
    paper=(
        "arXiv 2111.10672: improves large-scale cluster efficiency by as high as 28 % "
        "[abstract]; jobs, costs and policies are not known, all of them are ours"
    ),
    caption=(
        "Jobs of 1 to 16 GPUs, 100 to 400 iterations of about 1 s, 1/3 of it forward, "
        "k up to 4: 300 on 64 GPUs, means of 5 seeds [least, most]; 800 on 512, one "
        "seed. Turning to another job takes 1 % of an iteration, and 40 ms if its "
        "state must come. used: computing and turning. held: GPUs taken, "
        "also idle ones of a gang; saved: of gang FIFO's. computing saved: without "
        "turning; derived: that by formula. gang_srtf knows how long jobs take; las "
        "and jigsaw with k = 1 do the same. pair: seconds of two jobs on two GPUs, to "
        "be computed by hand."
    ),
    shows=(
        "A scheduler of single training steps was simulated on 64 and 512 GPUs. Right "
        "of the line it saves a tenth of the GPU time; whole backward passes save "
        "none."
    ),
    picture=Bars("saved", by=", ", bound="saved", label="GPU time saved, %"),
    columns={
        "used": "used, GPU hours",
        "saved": "saved, %",
        "switched": "turning, % of used",
        "computing": "computing saved, %",
        "derived": "derived, %",
        "held": "held, GPU hours",
        "makespan": "makespan, hours",
        "mean": "completion, minutes",
        "late": "95th percentile",
        "slowdown": "slow-down",
        "pair": "pair, s",
    },
    reduce=by_policy,
    tiers=by_model(
        minutes=4.0,
        runs={
            _SMALL: Runs(config="spb/cluster", seeds=(0, 1, 2, 3, 4)),
            _LARGE: Runs(config="spb/cluster:large"),
        },
        claims={
            "saved": _jigsaw("saved")
            .least()
            .at_least(10.0, "percent of gang FIFO's GPU time that jigsaw saves")
            .fails(_GANGS),
            "not more": _jigsaw("saved")
            .largest()
            .at_most(25.0, "percent of gang FIFO's GPU time that jigsaw saves")
            .fails(columns={"saved": "bound"}),
            "derived": abs(_jigsaw("computing") - _jigsaw("derived"))
            .largest()
            .at_most(0.01, "points between computing saved and what is derived")
            .fails(_NO_ROLES, only=("computing",)),
            "no roles": _jigsaw("saved", tuple(_NO_ROLES.values()))
            .largest()
            .at_most(1.0, "percent of gang FIFO's GPU time saved with k = 1")
            .fails({other: name for name, other in _NO_ROLES.items()}),
            "gang": reduce.least("takes", "spb_gang")
            .at_least(0.98, "GPU time that gangs with roles hold, of gang FIFO's")
            .fails({f"{size}, spb_gang": f"{size}, jigsaw" for size in (_SMALL,)}),
            "by hand": abs(reduce.cell("pair", _JIGSAW[0]) - 50.0)
            .at_most(0.0, "seconds that jigsaw's pair is apart from 50")
            .fails(_NO_ROLES),
            "by hand, gang": abs(reduce.cell("pair", f"{_SMALL}, gang_fifo") - 60.0)
            .at_most(0.0, "seconds that gang FIFO's pair is apart from 60")
            .fails({f"{_SMALL}, gang_fifo": f"{_SMALL}, jigsaw"}),
        },
    ),
)


@reduce.along("order")
def by_order(row: "xr.Dataset", order: str) -> reduce.Cells:
    """Returns medians over repetitions; speed-ups are over the same turn's whole."""
    run = reduce.first(row)
    own, whole = (run.sel(order=name) for name in (order, "whole backward"))
    faster = reduce.interval(whole["seconds"] / own["seconds"], "faster")
    could = float(run["ideal"]) - 1  # 0 where a backward pass is too short to be timed
    return {
        "rate": float(run["iterations"] / own["seconds"].median()),
        **faster,
        "ideal": run["ideal"],
        "gained": (faster["faster"] - 1) / could if could else np.nan,
        "foretold": whole["foretold"] / own["foretold"],
        "idle": 100 * own["idle"].median(),
        "forward": 1e3 * run["forward"].mean(),
        "backward": 1e3 * run["backward"].mean(),
        "apart": own["apart"],
        "others": own["others"],
    }


_TURNS = "2 cores, jigsaw"
_ALIGNED = "2 cores, partial, not interleaved"
TOGETHER = Table(
    id="spb/together",
    title="Two training runs in the same two processes, iteration by iteration",
    paper=(
        "arXiv 2111.10672: a scheduler of single iterations turns what partial "
        "backward passes save into throughput [abstract]; its figures are not known"
    ),
    caption=(
        "Perceptrons of 8 layers 256 wide on digits, 4,096 images a worker, k = 2, 12 "
        "iterations of each; processes of one thread, pinned to a core each. Medians "
        "of 5 turns; speed-ups of the same turn, over whole passes in the same "
        "executor. f, b: forward and backward pass, measured before; ideal: 2 (f + b) "
        "/ (2 f + 1.5 b); foretold: by the simulator. not interleaved: roles fixed, "
        "both whole passes in one process. From other roles: parameters from those of "
        "a run alone with other roles."
    ),
    benchmark=True,
    shows=(
        "Two trainings shared two processes, step by step. Further right is faster "
        "than with whole backward passes; without interleaving nothing should be "
        "gained."
    ),
    picture=Dots("faster", label="times as fast as whole passes"),
    columns={
        "rate": "iterations/s",
        "faster": "faster than whole",
        "ideal": "ideal",
        "gained": "share of ideal gain",
        "foretold": "foretold",
        "idle": "idle, %",
        "forward": "f, ms",
        "backward": "b, ms",
        "apart": "parameters apart",
        "others": "from other roles",
    },
    reduce=by_order,
    tiers=on_cpu(
        minutes=4.0,
        runs={"2 cores": Runs(config="spb/together")},
        claims={
            "faster": reduce.cell("gained", _TURNS)
            .at_least(0.5, "share of the ideal gain that jigsaw has")
            .fails({_TURNS: "2 cores, whole backward"}),
            "interleaved": reduce.over("rate", _TURNS, _ALIGNED)
            .at_least(1.05, "times as fast as partial passes that are not interleaved")
            .fails({_TURNS: _ALIGNED}),
            "beside": reduce.cell("faster", _ALIGNED)
            .at_most(1.05, "speed of partial passes that are not interleaved")
            .fails({_ALIGNED: _TURNS}),
            "same": reduce.most("apart")
            .at_most(1e-5, "largest difference of a parameter from a run alone")
            .fails(columns={"apart": "others"}),
        },
    ),
)
