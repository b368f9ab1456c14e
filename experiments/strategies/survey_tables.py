"""What each strategy holds and sends, by formula and compiled; networks for images."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.strategies import ways
from experiments.strategies.ways import DP, STRATEGIES, WAYS, ZERO1, ZERO3
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

LAYERS, WIDTH = 8, 256

# By strategy: what a device holds with Adam's two moments, and sends in a step, as
# coefficients of numbers of all parameters, those in blocks (stack), all others (rest),
# and what one block passes on of the whole batch (row).
Formula = dict[str, float]
_RING: Formula = {"all": 7 / 8 * 2}
_STAGES: Formula = {"stack": 3 / 4, "rest": 3}
_PIPE: Formula = {"rest": 7 / 8 * 2, "stack": 1 / 4, "row": 2 * 22 / 16}
FORMULAS: dict[str, tuple[Formula, Formula]] = {
    DP: ({"all": 3}, _RING),
    ZERO1: ({"all": 1 + 2 / 8}, _RING),
    ways.ZERO2: ({"all": 3 / 8}, _RING),
    ZERO3: ({"all": 3 / 8}, {"all": 7 / 8 * 3}),
    ways.TENSOR: ({"all": 3 / 4}, {"all": 1 / 4, "row": LAYERS * 3 + 3 / 2}),
    ways.GRID: ({"all": 3 / 8}, {"row": LAYERS * (3 + 3) + 3 / 2}),
    ways.GPIPE: (_STAGES, _PIPE),
    ways.F1B1: (_STAGES, _PIPE),
    ways.ZB: (_STAGES, {}),
    ways.THREE: (_STAGES, {}),
    ways.STASH: ({"all": 3 + 3 / 2}, _RING),
    ways.DOUBLE: ({"all": 3 + 1}, _RING),
    ways.LOCAL: ({"all": 3}, _RING),
}
_CLAIMED = (*WAYS, ways.TENSOR, ways.GPIPE, ways.F1B1)


def _synchronous(name: str) -> str:
    """Says whether a strategy's parts let all devices train on the newest weights."""
    told = STRATEGIES[name]
    late = "averaging" in told or told.get("backward") == "pipedream"
    return "NO" if late else "yes"


def _axes(run: "xr.Dataset") -> str:
    """Returns the axes of the mesh along which devices send more than metrics."""
    sent = run["sent"].sum(("kind", "part"))
    named = [axis for axis in sent["axis"].values.tolist() if axis != "several"]
    return " x ".join(axis for axis in named if sent.sel(axis=axis) > 0.01 * sent.sum())


def survey(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each strategy: figures of the step, and of its formulas."""
    cells: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        run, formulas = reduce.first(row), FORMULAS[name]
        psi = float(run["psi"])
        stack = LAYERS * (12 * WIDTH**2 + 13 * WIDTH)
        sizes = {"all": psi / 4, "stack": stack, "rest": psi / 4 - stack}
        sizes["row"] = ways.TOKENS * WIDTH
        held, sent = (
            sum(each * sizes[term] for term, each in own.items()) or np.nan
            for own in formulas
        )
        cells[name] = {
            "parallelism": _axes(run),
            "synchronous": _synchronous(name),
            "bubble": ways.plan(name)["bubble"],
            "holds": _print(formulas[0]),
            "held": 4 * held / psi,
            "state": run["state"] / psi,
            "sends": _print(formulas[1]),
            "volume": 4 * sent / psi,
            "sent": run["sent"].sum() / psi,
        }
    return reduce.from_cells(cells)


def _print(formula: Formula) -> str:
    return " + ".join(f"{each:g} {term}" for term, each in formula.items())


def _far(column: str, formula: str, *rows: str) -> reduce.Number:
    return abs(reduce.of(column, *rows) / reduce.of(formula, *rows) - 1).largest()


SURVEY = Table(
    id="strategies/survey",
    title="What each parallel strategy holds and sends, by formula",
    paper=(
        "Lin et al., arXiv 2111.04949, a survey of frameworks by their parallelism; "
        "formulas of the papers of the strategies"
    ),
    caption=(
        "Eight blocks of width 256, AdamW in float32, on 8 simulated devices, batches "
        "of 32 x 8 tokens; pipelines of 4 stages have 8 micro-batches of 2 rows. all, "
        "stack, rest: numbers of all parameters, of those in blocks, of others; row: "
        "of what a block passes on. Held between steps and sent in a step, over Ψ, by "
        "the formula and compiled. parallelism: the axes along which devices send; NO: "
        "weights of others, or older ones. Formulas leave out metrics, norms, whole on "
        "all devices, and of tensor 2x4 the loss and norms' moments. PipeDream's step "
        "here is data parallelism's with older weights; local SGD sends each fourth."
    ),
    shows=(
        "All strategies were compiled for one language model. What a device holds and "
        "sends should be what each strategy's formula says."
    ),
    picture=Bars(("held", "state"), label="held / Ψ"),
    columns={
        "parallelism": "parallelism",
        "synchronous": "synchronous",
        "bubble": "bubble",
        "holds": "holds",
        "held": "held / Ψ",
        "state": "compiled",
        "sends": "sends",
        "volume": "sent / Ψ",
        "sent": "compiled",
    },
    reduce=survey,
    tiers=on_cpu(
        minutes=3.0,
        devices=8,
        runs={
            name: Runs(config="strategies/survey", overrides=STRATEGIES[name])
            for name in FORMULAS
        },
        claims={
            "memory": _far("state", "held", *_CLAIMED, ways.GRID)
            .at_most(0.01, "farthest relative distance from the formula, synchronous")
            .fails({ZERO3: DP}, {ways.F1B1: DP}, only=("state",)),
            "volume": _far("sent", "volume", *_CLAIMED)
            .at_most(0.005, "farthest relative distance from the formula, synchronous")
            .fails({ZERO3: ZERO1}, {ways.TENSOR: DP}, only=("sent",)),
        },
    ),
)

OWN, STALE, AVERAGED = "own statistics", "PipeDream", "local SGD"
BIG = {"VGG-16": "strategies/images:vgg16", "GPT-2 medium": "strategies/gpt2_medium"}
VGG, GPT = BIG


def _images(**overrides: str) -> Runs:
    return Runs(config="strategies/images", overrides=overrides)


def images(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each way to train a network, and for those only compiled."""
    cells: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        run = reduce.first(row)
        own = {"millions": run["psi"] / 4e6, "state": run["state"] / run["psi"]}
        own["temporaries"] = run["temporaries"] / run["psi"]
        own["sent"] = run["sent"].sum() / run["psi"]
        own |= {x: run[x] for x in ("apart", "distance", "depth") if x in run}
        if "losses" in run:
            plain = reduce.first(rows[DP])["losses"].values
            own["beside"] = abs(run["losses"].values / plain - 1).max()
            own["loss"] = run["losses"][-10:].mean(skipna=False)
        cells[name] = own
    return reduce.from_cells(cells)


def _farthest(column: str) -> reduce.Number:
    """Of the ways by their whole names, which other rows' contain."""
    return reduce.Number(lambda table: table[column].sel(row=[*WAYS])).largest()


IMAGES = Table(
    id="strategies/images",
    title="A network for images in every way, and two large networks compiled",
    paper=(
        "Lin et al., arXiv 2111.04949: VGG-16 on ImageNet and GPT-2 medium; no figure "
        "of theirs can be had here"
    ),
    caption=(
        "VGG-11 of an eighth of the width on MNIST at 32x32, batches of 64, 20 steps "
        "of SGD with momentum at rate 0.001 on 8 simulated devices; batch statistics "
        "are of the whole batch, but for own statistics, of each device's rows, and of "
        "workers whose models are averaged. apart: farthest parameter from one "
        "device's; loss apart: of the last loss; beside it, the farthest of 20 losses "
        "from data parallelism's. PipeDream is compared with itself on one device. "
        "VGG-16 at CIFAR's head and GPT-2 medium's blocks on characters are compiled "
        "with SGD with momentum, and not run; depth: the most blocks that "
        "fit into 8 GiB."
    ),
    shows=(
        "A small VGG was trained in several ways, and two large networks compiled. "
        "Synchronous ways should be one device's, if batch statistics are."
    ),
    picture=Bars(("state", "temporaries", "sent"), label="numbers / Ψ"),
    columns={
        "millions": "parameters, millions",
        "state": "state / Ψ",
        "temporaries": "temporaries / Ψ",
        "sent": "sent / Ψ",
        "apart": "parameters apart",
        "distance": "loss apart",
        "beside": "from data parallelism's",
        "loss": "loss, last 10",
        "depth": "largest depth",
    },
    reduce=images,
    tiers=on_cpu(
        minutes=6.0,
        devices=8,
        runs={
            **{way: _images(**STRATEGIES[way]) for way in WAYS},
            AVERAGED: _images(**STRATEGIES[ways.LOCAL]),
            STALE: _images(**STRATEGIES[STALE]),
            OWN: _images(**{"model.sync_axis": "none"}),
            **{
                f"{name}, {way}": Runs(config=config, overrides=STRATEGIES[way])
                for name, config in BIG.items()
                for way in (DP, ZERO3)
            },
        },
        claims={
            "equal": _farthest("distance")
            .at_most(1e-3, "farthest loss of step 20 from one device's, relative")
            .fails({DP: OWN}),
            "alike": _farthest("beside")
            .at_most(1e-6, "farthest of 20 losses from data parallelism's, ZeRO's")
            .fails({ZERO3: OWN}),
            "full size": reduce.over("state", f"{VGG}, {ZERO3}", f"{VGG}, {DP}")
            .at_most(0.13, "of data parallelism's state at stage 3, of VGG-16")
            .fails({f"{VGG}, {ZERO3}": f"{VGG}, {DP}"}),
            "depth": reduce.over("depth", f"{GPT}, {ZERO3}", f"{GPT}, {DP}")
            .at_least(4.0, "times the depth of data parallelism in 8 GiB at stage 3")
            .fails({f"{GPT}, {ZERO3}": f"{GPT}, {DP}"}),
        },
    ),
)
