"""SPB's tables: quality at equal steps; what a role computes, keeps and sends."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.reduce import of
from hpcjax.runs.tables import Runs, Table, on_cpu

PAPER = (
    "arXiv 2111.10672: little loss of quality [abstract]; its tables are not known, "
    "and roles, blocks and averages are a reconstruction"
)
FULL, QUARTERS, WRONG = "full", "k = 4", "k = 4, wrong divisor"
SEEDS = (0, 1, 2)


def _last(row: xr.Dataset, steps: int | None = None) -> xr.DataArray:
    """Returns the mean training loss of the 5 % of steps up to one of them."""
    loss = row["loss"].isel(step=slice(0, steps))
    window = max(1, row.sizes["step"] // 20)
    return loss.isel(step=slice(-window, None)).mean("step")


def quality(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
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
            "full_loss": _last(full, done).mean(),
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


def by_role(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
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
def _not_growing(table: xr.Dataset) -> float:
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


def by_process(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
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
