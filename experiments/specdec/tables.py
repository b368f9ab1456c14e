"""Tables of speculative decoding: model and measurement, depth and width, speed-up."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.specdec import throughput
from hpcjax import cost
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Scatter
from hpcjax.runs.tables import Runs, Table, Tier, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "arXiv 2402.01528"
WITHIN = 0.15


def _foretold(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """A row for each draft, sampling and γ, and for plain decoding, γ = 0."""
    run = reduce.single(rows)
    found: dict[str, dict[str, float]] = {}

    def add(name: str, sampling: str, *values: float) -> None:
        cells = dict(zip(_MODEL_COLUMNS, values, strict=True))
        found[f"{name}, {sampling}"] = {"greedy": sampling == "greedy", **cells}

    for sampling in run["sampling"].values.tolist():
        plain = float(run["plain"].sel(sampling=sampling))
        alone = float(run["verify"].sel({"pass": 1}))
        rates = 1 / alone, plain, plain * alone
        add("plain", sampling, 0, 1.0, 1e3 * alone, *rates, 1.0)
        for name, ahead in itertools.product(
            run["draft"].values.tolist(), run["ahead"].values.tolist()
        ):
            at = {"draft": name, "sampling": sampling, "ahead": ahead}
            point = run.sel(at)
            seconds = throughput.times(run, at).iteration(ahead)
            tokens, ours = float(point["tokens"]), float(point["measured"])
            foretold = tokens / seconds
            add(
                f"{name}, {ahead} ahead",
                sampling,
                *(ahead, tokens, 1e3 * seconds, foretold, ours),
                *(ours / foretold, float(point["expected"]) / seconds * alone),
            )
    return reduce.from_cells(found)


_MODEL_COLUMNS = {
    "ahead": "tokens ahead",
    "tokens": "tokens / iteration",
    "milliseconds": "iteration, foretold, ms",
    "foretold": "tokens / s, foretold",
    "measured": "tokens / s, measured",
    "ratio": "measured / foretold",
    "beforehand": "speed-up expected by other prompts",
}


@reduce.Number
def _share_within(table: "xr.Dataset") -> float:
    own = table.isel(row=table["ahead"].values > 0)
    apart = abs(own["foretold"] / own["measured"] - 1).values
    return float(np.mean(np.where(np.isnan(apart), np.nan, apart <= WITHIN)))


# A model that overlooks how many tokens are drafted.
_ONE_AHEAD = {
    f"{draft}, {ahead} ahead, {sampling}": f"{draft}, 1 ahead, {sampling}"
    for draft in ("2 layers", "4 layers", "8 layers, 3 heads")
    for ahead in (2, 4, 6)
    for sampling in ("greedy", "T = 1")
}


@reduce.Number
def _chosen(table: "xr.Dataset") -> float:
    """The rate of what the model chooses over the best one's; the worse sampling."""
    found = []
    for greedy in (True, False):
        own = table.isel(row=table["greedy"].values == greedy)
        chosen = int(np.argmax(own["beforehand"].values))
        found.append(float(own["measured"][chosen] / own["measured"].max()))
    return min(found)


MODEL = Table(
    id="specdec/model",
    title="Throughput of speculative decoding, foretold by its parts and measured",
    paper=f"{PAPER}: throughput by draft latency, target latency and acceptance",
    caption=(
        "SmolLM2-135M in float32 and three pruned and distilled children, one "
        "sequence. Draft step, verification and acceptance are timed apart and give "
        "the time of an iteration; its tokens are the run's own. Draft and tokens "
        "ahead are chosen by the acceptance on other prompts. Reading the prompt "
        "is not counted."
    ),
    benchmark=True,
    shows=(
        "Speculative decoding was timed with many drafts and foretold from its parts. "
        "On the diagonal the two agree."
    ),
    picture=Scatter("foretold", "measured", labels=False),
    columns=_MODEL_COLUMNS,
    reduce=_foretold,
    tiers=on_cpu(
        minutes=25.0,
        runs={"all": Runs(config="specdec/throughput:cpu")},
        claims={
            "foretold": _share_within.at_least(
                0.8, "share of points that are foretold within 15 %"
            ).fails(_ONE_AHEAD, only=("foretold",)),
            "chosen": _chosen.at_least(
                0.95, "rate of the chosen draft and length over the best"
            ).fails(columns={"beforehand": "ahead"}),  # Who drafts most is chosen.
        },
    ),
)


def _latencies(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    run = reduce.single(rows)
    seconds = run["seconds"].median("repetition")
    sizes = run[["depth", "width", "line", "layer_bytes", "head_bytes"]]
    table = sizes.assign(milliseconds=1e3 * seconds)
    fitted = _fit(table)
    costs = (sizes[x].values for x in ("depth", "layer_bytes", "head_bytes"))
    estimate = [
        1e3 * fitted.seconds(int(depth), float(layer), float(head))
        for depth, layer, head in zip(*costs, strict=True)
    ]
    shapes = zip(*(sizes[x].values for x in ("depth", "width", "line")), strict=True)
    names = [
        f"{'equal parameters: ' if line else ''}{depth} x {width}"
        for depth, width, line in shapes
    ]
    table = table.assign(estimate=("point", estimate))
    table["ratio"] = table["milliseconds"] / table["estimate"]
    return table.rename(point="row").assign_coords(row=names)


def _fit(table: "xr.Dataset") -> cost.DraftLatency:
    """Fits the grid alone."""
    dim = table["depth"].dims[0]
    grid = table.isel({dim: ~table["line"].values.astype(bool)})
    return cost.fit_draft_latency(
        grid["depth"].values,
        grid["layer_bytes"].values,
        grid["head_bytes"].values,
        grid["milliseconds"].values / 1e3,
    )


def _line(column: str) -> reduce.Number:
    """Returns a column of the drafts with equally many parameters, by depth."""
    return reduce.Number(
        lambda table: (
            table.isel(row=table["line"].values.astype(bool))
            .sortby("depth")[column]
            .values
        )
    )


@reduce.Number
def _line_error(table: "xr.Dataset") -> float:
    """Returns the fit's largest relative error at equally many parameters."""
    line, fitted = table.isel(row=table["line"].values.astype(bool)), _fit(table)
    bytes_ = line["depth"] * line["layer_bytes"] + line["head_bytes"]
    seconds = fitted.layer * line["depth"] + fitted.byte * bytes_ + fitted.head
    return float(abs(1e3 * seconds / line["milliseconds"] - 1).max(skipna=False))


# A model for which a layer's bytes do not depend on its width.
_NO_WIDTH = {"layer_bytes": "depth"}
_LATENCY_CLAIMS = {
    "r_squared": reduce.Number(lambda table: _fit(table).r_squared)
    .at_least(0.95, "R² of the fit over the grid")
    .fails(columns=_NO_WIDTH),
    "monotone": _line("milliseconds")
    .then(lambda ms: (ms[1:] / ms[:-1]).min())
    .at_least(1.0, "of equal parameters, least latency of a draft over a shallower's")
    # As if latency went with the width alone.
    .fails(columns={"milliseconds": "width"}),
    "line": _line_error.at_most(
        0.2, "of equal parameters, largest relative error of the fit"
    ).fails(columns=_NO_WIDTH),
}

DEPTH_WIDTH = Table(
    id="specdec/depth-width",
    title="Latency of a draft step by depth and width",
    paper=f"{PAPER}: at equal parameters the shallower, wider draft is faster",
    caption=(
        "Random weights of LLaMA's form, one sequence, cache half full. Fitted on the "
        "grid: depth (layer + bytes of a layer / bandwidth) + head. cpu: float32, 256 "
        "words, line of 0.8 M parameters; gpu: bfloat16, 32 000 words, 200 M."
    ),
    benchmark=True,
    shows=(
        "Draft models of many depths and widths were timed, and a formula fitted. On "
        "the diagonal it is right."
    ),
    picture=Scatter("estimate", "milliseconds", labels=False),
    columns={"milliseconds": "ms", "estimate": "fitted, ms", "ratio": "ratio"},
    reduce=_latencies,
    tiers={
        name: Tier(
            minutes=5.0,
            runs={"all": Runs(config=f"specdec/latency:{name}")},
            claims=_LATENCY_CLAIMS,
        )
        for name in ("cpu", "gpu")
    },
)


def _speedups(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    run = reduce.single(rows)
    plain = 1e3 * float(run["plain"].median("repetition"))
    found = {"plain": {"plain": plain, "tokens": 1.0, "foretold": 1.0, "measured": 1.0}}
    for rate in run["rate"].values:
        own = run.sel(rate=rate)
        found[f"{rate:g} accepted"] = {
            "plain": plain,
            **{name: own[name].item() for name in ("ahead", "tokens", "foretold")},
            **reduce.interval(own["measured"], "measured"),
        }
    return reduce.from_cells(found)


_RATE = "0.7 accepted"
# 60 % of the rate at which plain decoding could read the weights: a baseline that is
# slower is taken as if it were as fast.
_PLAIN = 5.1

_ERROR = abs(reduce.cell("foretold", _RATE) / reduce.cell("measured", _RATE) - 1)
SPEEDUP = Table(
    id="specdec/speedup",
    title="Speed-up over plain decoding with a draft of two layers, LLaMA-7B's shape",
    paper=f"{PAPER}: few and wide layers make the better draft",
    caption=(
        "Random bfloat16 weights, one sequence; acceptance is drawn beforehand, all "
        "other work is done. How many tokens are drafted is chosen by the parts' "
        "times. Ratios of the same round."
    ),
    benchmark=True,
    columns={
        "ahead": "tokens ahead",
        "tokens": "tokens / iteration",
        "plain": "plain, ms a token",
        "foretold": "speed-up, foretold",
        "measured": "speed-up",
    },
    reduce=_speedups,
    tiers=on_gpu(
        minutes=8.0,
        runs={"all": Runs(config="specdec/speedup")},
        claims={
            "speedup": (
                reduce.cell("measured", _RATE)
                * reduce.cell("plain", _RATE).then(lambda ms: min(1.0, _PLAIN / ms))
            )
            .at_least(1.5, "speed-up over ≤ 5.1 ms a token, 0.7 of drafts accepted")
            .fails({_RATE: "plain"}),
            # A model for which drafting takes no time.
            "foretold": _ERROR.at_most(
                WITHIN, "relative error of the model there"
            ).fails(columns={"foretold": "tokens"}),
        },
    ),
)
