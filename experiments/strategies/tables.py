"""Tables of parallel strategies: one model, spread over devices in different ways."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.strategies.survey_tables import IMAGES, SURVEY  # noqa: F401 - its tables
from experiments.strategies.ways import (
    BROKEN,
    DOUBLE,
    DP,
    DP_64,
    DROPS,
    F1B1,
    GPIPE,
    LOCAL,
    ONE,
    OWN,
    SAME,
    SINGLE,
    SLOW,
    STASH,
    STRATEGIES,
    TENSOR,
    TENSOR_64,
    THREE,
    TOKENS,
    WAGMA,
    WAYS,
    ZERO1,
    ZERO2,
    ZERO3,
    plan,
)
from hpcjax.runs import packing, reduce
from hpcjax.runs.pictures import Bars, Lines
from hpcjax.runs.reduce import cell, most, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PEER, TAKEN = "annotated", ", SGD"
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

MISSING, KEYED = "no mean", "keyed by device"
GATE = 1e-5  # of a loss, relative to one device's


def _compare(variant: str = "", **overrides: str) -> Runs:
    return Runs(config=f"strategies/compare{variant}", overrides=overrides)


# Assumed: operations/s of a device, and bytes/s and seconds a message of its link.
DEVICE, LINKS = 1e10, {"slow": (1.25e8, 5e-5), "fast": (1.25e10, 2e-6)}


def _times(name: str, run: "xr.Dataset", piped: "xr.Dataset") -> dict[str, float]:
    """Returns the modelled seconds of a step, by link.

    A token takes 6 operations for each parameter. PipeDream's stages send what 1F1B's
    do and never drain; its compiled step is data parallelism's.
    """
    from hpcjax.hostcomm import MessageCost

    told = STRATEGIES.get(name, {})
    sends = piped if int(told.get("backward.stages", 1)) > 1 else run
    work = 6 * float(run["psi"]) / 4 * TOKENS / (1 if name == ONE else 8) / DEVICE
    work /= 1 - plan(name)["bubble"]
    often = 1 / int(told.get("averaging.period", 1))
    sent, rounds = often * float(sends["sent"].sum()), often * float(sends["rounds"])
    return {
        link: work + MessageCost.of_rate(rate, alpha).seconds(sent, rounds)
        for link, (rate, alpha) in LINKS.items()
    }


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


def _rank(name: str, apart: float) -> str:
    """Says with whom a row is ranked; what should be as one device and is not, nobody.

    What computes something else on purpose is ranked apart.
    """
    if name in STRATEGIES and name not in (*SAME, DROPS, SINGLE):
        return "others"
    return "one device's" if apart <= GATE else "broken"


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
            **plan(name),
        }
        if "losses" not in run:
            continue
        own = cells[name] | _learnt(run["losses"].values, wanted)
        if name in (DROPS, KEYED):  # beside one device with dropout
            own["apart"] = run["distance"]
        differ = run["losses"].values != runs[DP]["losses"].values
        own |= {"differ": np.sum(differ), "ranked": _rank(name, own["apart"])}
        if own["ranked"] == "broken":
            del own["steps"]
        else:
            step = _times(name, run, runs[F1B1])
            own |= {f"{link}_step": 1e3 * step[link] for link in step}
            own |= {f"{link}_time": own["steps"] * step[link] for link in step}
        cells[name] = own
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
        "something else on purpose, and are ranked with others; of averages losses are "
        "the workers' own. Of batches of 64 no steps are taken. dropout: of 0.1, "
        "beside one device with it, the last loss. no mean, summed, keyed by device: "
        "broken, and not ranked. Modelled: 6 operations for a parameter and token at "
        "10 GFLOP/s a device, over what is not idle, then bytes and messages of rings "
        "as compiled, at 1 Gbit/s and 50 µs, or 100 Gbit/s and 2 µs; PipeDream sends "
        "what 1F1B does and never drains; local SGD sends in every fourth step. "
        "Encoding takes no time."
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
        "slow_step": "modelled ms a step, 1 Gbit/s",
        "slow_time": "modelled s to target, 1 Gbit/s",
        "fast_time": "at 100 Gbit/s",
        "ranked": "ranked with",
        "differ": "",
    },
    reduce=compare,
    picture=Lines(
        "step",
        "losses",
        rows=(
            ONE,
            THREE,
            *(SLOW, STASH + OWN, DOUBLE + OWN),
            *(LOCAL, WAGMA, MISSING),
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
            KEYED: _compare(":keyed", **STRATEGIES[DROPS]),
        },
        claims={
            "equal": most("apart", *SAME)
            .at_most(GATE, "farthest loss of 100 steps from one device's, synchronous")
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
            "one stage": cell("differ", SINGLE)
            .at_most(0, "of 100 losses differ in a bit from SGD's in one stage")
            .fails({SINGLE: STASH}),
            "dropout": cell("apart", DROPS)
            .at_most(GATE, "last loss with dropout from one device's, relative")
            .fails({DROPS: KEYED}),
        },
    ),
)
