"""Tables of parallel strategies: one model, spread over devices in different ways."""

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars
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
