"""Tables of speculative decoding: model and measurement, depth and width, speed-up."""

import functools
from collections.abc import Mapping

import numpy as np
import xarray as xr

from experiments.specdec import throughput
from hpcjax import perf
from hpcjax.perf.intervals import bootstrap_median
from hpcjax.runs.tables import Claim, Runs, Table, Tier

PAPER = "arXiv 2402.01528"
WITHIN = 0.15


def _foretold(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """A row for each draft, sampling and γ, and for plain decoding, γ = 0."""
    run = rows["all"].isel(seed=0, drop=True)
    found: dict[str, list] = {name: [] for name in ("row", "greedy", *_MODEL_COLUMNS)}

    def add(name: str, sampling: str, *values: float) -> None:
        columns = (f"{name}, {sampling}", sampling == "greedy", *values)
        for column, value in zip(found, columns, strict=True):
            found[column].append(value)

    for sampling in run["sampling"].values.tolist():
        plain = float(run["plain"].sel(sampling=sampling))
        alone = float(run["verify"].sel({"pass": 1}))
        rates = 1 / alone, plain, plain * alone
        add("plain", sampling, 0, 1.0, 1e3 * alone, *rates, 1.0)
        for name in run["draft"].values.tolist():
            for ahead in run["ahead"].values.tolist():
                at = {"draft": name, "sampling": sampling, "ahead": ahead}
                point = run.sel(at)
                seconds = throughput.times(run, at).iteration(ahead)
                tokens, ours = float(point["tokens"]), float(point["measured"])
                foretold = tokens / seconds
                beforehand = float(point["expected"]) / seconds * alone
                add(
                    f"{name}, {ahead} ahead",
                    sampling,
                    *(ahead, tokens, 1e3 * seconds, foretold, ours),
                    *(ours / foretold, beforehand),
                )
    columns = {name: ("row", found[name]) for name in found if name != "row"}
    return xr.Dataset(columns, coords={"row": found["row"]})


_MODEL_COLUMNS = {
    "ahead": "tokens ahead",
    "tokens": "tokens / iteration",
    "milliseconds": "iteration, foretold, ms",
    "foretold": "tokens / s, foretold",
    "measured": "tokens / s, measured",
    "ratio": "measured / foretold",
    "beforehand": "speed-up expected by other prompts",
}


def _share_within(table: xr.Dataset) -> float:
    own = table.isel(row=table["ahead"].values > 0)
    return float((abs(1 / own["ratio"] - 1) <= WITHIN).mean())


def _chosen(table: xr.Dataset) -> float:
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
    columns=_MODEL_COLUMNS,
    reduce=_foretold,
    tiers={
        "cpu": Tier(
            minutes=25.0,
            runs={"all": Runs(config="specdec/throughput:cpu")},
            claims={
                "foretold": Claim(
                    relation="share of points that are foretold within 15 %",
                    ours=_share_within,
                    at_least=0.8,
                ),
                "chosen": Claim(
                    relation="rate of the chosen draft and length over the best",
                    ours=_chosen,
                    at_least=0.95,
                ),
            },
        )
    },
)


def _latencies(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    run = rows["all"].isel(seed=0, drop=True)
    seconds = run["seconds"].median("repetition")
    sizes = run[["depth", "width", "line", "layer_bytes", "head_bytes"]]
    table = sizes.assign(milliseconds=1e3 * seconds)
    fitted = _fit(table)
    estimate = [
        1e3 * fitted.seconds(int(depth), float(layer), float(head))
        for depth, layer, head in zip(
            *(sizes[name].values for name in ("depth", "layer_bytes", "head_bytes")),
            strict=True,
        )
    ]
    names = [
        f"{'equal parameters: ' if line else ''}{depth} x {width}"
        for depth, width, line in zip(
            *(sizes[name].values for name in ("depth", "width", "line")), strict=True
        )
    ]
    table = table.assign(estimate=("point", estimate))
    table["ratio"] = table["milliseconds"] / table["estimate"]
    return table.rename(point="row").assign_coords(row=names)


def _fit(table: xr.Dataset) -> perf.DraftLatency:
    """Fits the grid alone."""
    dim = table["depth"].dims[0]
    grid = table.isel({dim: ~table["line"].values.astype(bool)})
    return perf.fit_draft_latency(
        grid["depth"].values,
        grid["layer_bytes"].values,
        grid["head_bytes"].values,
        grid["milliseconds"].values / 1e3,
    )


def _line(table: xr.Dataset) -> xr.Dataset:
    return table.isel(row=table["line"].values.astype(bool)).sortby("depth")


_LATENCY_CLAIMS = {
    "layer": Claim(
        relation="time of a layer whatever its width, fitted, us",
        ours=lambda table: 1e6 * _fit(table).layer,
        at_least=0.01,
    ),
    "r_squared": Claim(
        relation="R² of the fit over the grid",
        ours=lambda table: _fit(table).r_squared,
        at_least=0.95,
    ),
    "monotone": Claim(
        relation="of equal parameters, least latency of a draft over a shallower's",
        ours=lambda table: float(
            (
                _line(table)["milliseconds"].values[1:]
                / _line(table)["milliseconds"].values[:-1]
            ).min()
        ),
        at_least=1.0,
    ),
    "line": Claim(
        relation="of equal parameters, largest relative error of the fit",
        ours=lambda table: float(abs(1 / _line(table)["ratio"] - 1).max()),
        at_most=0.2,
    ),
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
    columns={"milliseconds": "ms", "estimate": "fitted, ms", "ratio": "ratio"},
    reduce=_latencies,
    tiers={
        name: Tier(
            minutes=minutes,
            runs={"all": Runs(config=f"specdec/latency:{name}")},
            claims=_LATENCY_CLAIMS,
        )
        for name, minutes in (("cpu", 5.0), ("gpu", 5.0))
    },
)


def _speedups(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    run = rows["all"].isel(seed=0, drop=True)
    measured = run["measured"].transpose("rate", "repetition").values
    low, high = zip(*(bootstrap_median(row) for row in measured), strict=True)
    plain = 1e3 * float(run["plain"].median("repetition"))
    own = np.median(measured, axis=1)
    columns = {
        "ahead": run["ahead"].values,
        "tokens": run["tokens"].values,
        "plain": np.full(len(own), plain),
        "foretold": run["foretold"].values,
        "measured": own,
        "measured_low": list(low),
        "measured_high": list(high),
    }
    return xr.Dataset(
        {name: ("row", values) for name, values in columns.items()},
        coords={"row": [f"{rate:g} accepted" for rate in run["rate"].values]},
    )


def _at(table: xr.Dataset, column: str) -> float:
    return float(table[column].sel(row="0.7 accepted"))


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
    tiers={
        "gpu": Tier(
            minutes=8.0,
            runs={"all": Runs(config="specdec/speedup")},
            claims={
                "speedup": Claim(
                    relation="speed-up where 0.7 of the drafts are accepted",
                    ours=functools.partial(_at, column="measured"),
                    at_least=1.5,
                ),
                "foretold": Claim(
                    relation="relative error of the model there",
                    ours=lambda table: abs(
                        _at(table, "foretold") / _at(table, "measured") - 1
                    ),
                    at_most=WITHIN,
                ),
                "plain": Claim(
                    relation="plain decoding, ms a token (60 % of its floor rate: 5.1)",
                    ours=functools.partial(_at, column="plain"),
                    at_most=5.1,
                ),
            },
        )
    },
)
