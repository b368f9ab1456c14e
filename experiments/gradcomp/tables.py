"""When compressing gradients pays: by a model, and how well the model foretells."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.gradcomp import validation
from experiments.gradcomp.utility import ALWAYS, PAYS
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots, Lines, Scatter
from hpcjax.runs.reduce import of
from hpcjax.runs.tables import Runs, Table, Tier, by_model, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Agarwal et al., On the Utility of Gradient Compression, MLSys 2022"
MODELLED = (
    "Analytical: alpha and bandwidth of a ring; passes and encoding were measured on "
    "the device of the calibration file. fp16 is listed but never counted."
)


def by_bandwidth(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns, for each bandwidth, in how many setups compression pays."""
    import xarray as xr

    run = reduce.single(rows)
    counted = run.isel(setup=run["counted"].values.astype(bool))
    wins = counted["speedup"] > 1
    now = wins.sel(compute_speed=1.0)
    best = counted["speedup"].sel(compute_speed=1.0)
    labels = [f"{gbit:g} Gbit/s" for gbit in run["gbit_per_s"].values]
    table = xr.Dataset(
        {
            "setups": ("gbit_per_s", [counted.sizes["setup"]] * len(labels)),
            "wins": now.sum("setup"),
            "share": now.mean("setup"),
            "best": best.max("setup"),
            "faster": wins.isel(compute_speed=-1).mean("setup"),
            "shares": wins.mean("setup"),
            "sparse": _of(now, counted, "MSTop-k 10%"),
            "others": _others(now, counted),
            "threshold": run["threshold"],
        }
    )
    return table.rename(gbit_per_s="row").assign_coords(row=labels)


def _of(wins: "xr.DataArray", run: "xr.Dataset", label: str) -> "xr.DataArray":
    return wins.isel(setup=run["method"].values == label).sum("setup")


def _others(wins: "xr.DataArray", run: "xr.Dataset") -> "xr.DataArray":
    """Counts winners that are neither PowerSGD nor signSGD."""
    named = [
        str(label).startswith(("PowerSGD", "sign")) for label in run["method"].values
    ]
    return wins.isel(setup=~np.array(named)).sum("setup")


@reduce.Number
def _gained(table: "xr.Dataset") -> float:
    """Returns the most that faster compute adds to a share; if it takes, the most."""
    gains = (table["faster"] - table["share"]).values
    return float(gains.max() if gains.min() >= 0 else gains.min())


@reduce.Number
def _at_the_top(table: "xr.Dataset") -> float:
    """Counts the others at the highest bandwidth at which anything pays."""
    some = np.flatnonzero(table["wins"].values)
    return float(table["others"].values[some[-1]]) if len(some) else 0.0


UTILITY = Table(
    id="gradcomp/utility",
    title="Setups in which compressing gradients takes less time, by bandwidth",
    paper=f"{PAPER}: 6 of more than 200 setups on V100 at 10 Gbit/s [abstract]",
    caption=(
        f"{MODELLED} A setup is a model, a batch, a number of workers and a method. "
        f"The last column is the bandwidth from which on fewer than {PAYS:.0%} pay."
    ),
    shows=(
        "A model of training steps was asked where compressed gradients save time. The "
        "faster the network, the fewer setups should gain; faster computing moves that "
        "to the right."
    ),
    picture=Lines(
        "{} Gbit/s",
        ("share", "faster"),
        label="share of setups that gain",
        x_label="Gbit/s",
    ),
    columns={
        "setups": "setups",
        "wins": "pay",
        "share": "share",
        "best": "best speed-up",
        "faster": "share, 4 times the compute speed",
        "threshold": "Gbit/s for < 3 %",
    },
    reduce=by_bandwidth,
    tiers=by_model(
        minutes=1.0,
        runs={"all": Runs(config="gradcomp/utility")},
        claims={
            "bandwidth": of("shares")
            .then(lambda shares: np.diff(shares, axis=0).max())
            .at_most(0.0, "the share rises nowhere with the bandwidth")
            .fails({"400 Gbit/s": "0.1 Gbit/s"}),
            "compute": _gained.at_least(
                0.1, "share of setups that faster compute adds somewhere, lost nowhere"
            ).fails(columns={"faster": "share"}),
            "sparse": of("sparse")
            .sum()
            .at_most(0.0, "setups in which MSTop-k 10 % pays")
            .fails(columns={"sparse": "wins"}),
            "winners": _at_the_top.at_most(
                0.0,
                "winners at the highest bandwidth that has any which are "
                "neither PowerSGD nor signSGD",
            ).fails(columns={"others": "wins"}),
        },
    ),
)


def by_method(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns, for each method, where it ceases to pay and what changes that."""
    run = reduce.single(rows)
    first = run["speedup"].isel(gbit_per_s=0)
    now, fast = first.isel(compute_speed=0), first.isel(compute_speed=-1)
    found = {}
    for label in dict.fromkeys(run["method"].values.tolist()):
        own = run["method"].values == label
        edges = run["pays_below"].values[own]
        change = (now - fast).values[own & (fast.values > 1)]
        gained = [_gained_by_batch(run.isel(setup=own), sign) for sign in (1, -1)]
        found[label] = {
            "low": edges.min(),
            "high": edges.max(),
            "now": now[own].median(),
            "fast": fast[own].median(),
            "lost": change.max(initial=-1.0),
            "batch": gained[0],
            # The negative controls: had both the opposite effect.
            "slower": (-change).max(initial=-1.0),
            "smaller": gained[1],
        }
    return reduce.from_cells(found)


def _gained_by_batch(run: "xr.Dataset", sign: int) -> float:
    """Returns the most a speed-up above 1 rises to the next batch, or falls."""
    gains = run["speedup"].isel(gbit_per_s=0, compute_speed=0).values
    most = -np.inf
    for key in {*zip(run["model"].values, run["processes"].values, strict=True)}:
        own = (run["model"].values == key[0]) & (run["processes"].values == key[1])
        ordered = gains[own][np.argsort(run["batch"].values[own])]
        pairs = np.stack([ordered[:-1], ordered[1:]])
        rises = sign * (pairs[1] - pairs[0])[pairs[1] > 1]
        most = max(most, rises.max(initial=-np.inf))
    return float(max(most, -1.0))


SWEEPS = Table(
    id="gradcomp/sweeps",
    title="Where each method ceases to pay",
    paper=f"{PAPER}: sweeps of bandwidth, batch and compute speed",
    caption=(
        f"{MODELLED} Crossovers are those of the setup that ceases first and last, 0 "
        f"where it never pays, {ALWAYS:g} where it always does. Speed-ups are medians "
        "over setups at the lowest bandwidth."
    ),
    shows=(
        "For each compression the bandwidth was computed beyond which it no longer "
        "pays. What takes time to encode should lie left of the line."
    ),
    picture=Dots("high", sort=True, bound="crossover"),
    columns={
        "low": "first crossover, Gbit/s",
        "high": "last crossover, Gbit/s",
        "now": "speed-up",
        "fast": "speed-up, 4 times the compute speed",
    },
    reduce=by_method,
    tiers=by_model(
        minutes=1.0,
        runs={"all": Runs(config="gradcomp/utility")},
        claims={
            "crossover": of("high", "k ", "PowerSGD", "signSGD")
            .largest()
            .at_most(25.0, "last crossover of what takes time to encode, Gbit/s")
            .fails({"signSGD": "fp16"}),
            "batch": reduce.most("batch")
            .at_most(0.0, "what a speed-up above 1 gains by a larger batch, at most")
            .fails(columns={"batch": "smaller"}),
            "compute": reduce.most("lost")
            .at_most(0.0, "what four times the compute speed costs who then pays")
            .fails(columns={"lost": "slower"}),
        },
    ),
)


def ratios(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns the compression that hides an all-reduce, by link, model and batch."""
    run = reduce.single(rows)
    found = {}
    for gbit, model in itertools.product(LINKS, dict.fromkeys(run["model"].values)):
        own = run.sel(gbit_per_s=gbit).isel(setup=run["model"].values == model)
        for batch in dict.fromkeys(own["batch"].values):
            ratio = own["required_ratio"].values[own["batch"].values == batch].max()
            name = f"{model}, {batch} examples, {gbit:g} Gbit/s"
            found[name] = {"required_ratio": ratio}
    return reduce.from_cells(found)


# Gbit/s: the paper's, and a hundredth of it for cores about as much slower than a V100.
LINKS = (10.0, 0.1)
_SLOW = "resnet50, {} examples, 0.1 Gbit/s"


RATIOS = Table(
    id="gradcomp/required-ratio",
    title="How many times smaller a gradient must be for its all-reduce to be hidden",
    paper=f"{PAPER}: small, for 10 Gbit/s",
    recalled={"resnet50, 8 examples, 10 Gbit/s": "a single digit at 64 examples"},
    caption=f"{MODELLED} Of the most workers.",
    shows=(
        "The compression was computed that hides an all-reduce behind the backward "
        "pass. Left of the line a tenfold one is enough, with the larger batch."
    ),
    picture=Dots("required_ratio", bound="small", label="times smaller", log=True),
    columns={"required_ratio": "times"},
    reduce=ratios,
    tiers=by_model(
        minutes=1.0,
        runs={"all": Runs(config="gradcomp/utility")},
        claims={
            "small": reduce.cell("required_ratio", _SLOW.format(8))
            .at_most(10.0, "times smaller, the largest batch at 0.1 Gbit/s")
            .fails({_SLOW.format(8): _SLOW.format(4)})
        },
    ),
)


def encoding(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns milliseconds by method, for ResNet-50 and the most workers."""
    import xarray as xr

    run = reduce.single(rows).sel(model="resnet50").isel(processes=-1)
    table = xr.Dataset({"milliseconds": 1e3 * run["encode_decode"]})
    return table.rename(method="row")


@reduce.Number
def _slowest(table: "xr.Dataset") -> float:
    """Returns the least time of exact Top-k over the longest of all others."""
    times = table["milliseconds"]
    exact = [str(label).startswith("Top-k") for label in times["row"].values]
    return float(times[exact].min() / times[~np.array(exact)].max())


@reduce.Number
def _ranks(table: "xr.Dataset") -> float:
    times = table["milliseconds"].sel(row=[f"PowerSGD r={r}" for r in (4, 8, 16)])
    return float((times.values[1:] / times.values[:-1]).min())


ENCODING = Table(
    id="gradcomp/encoding",
    title="Milliseconds to encode and decode the gradients of ResNet-50",
    paper=f"{PAPER}, on V100",
    recalled={
        "PowerSGD r=4": "45",
        "PowerSGD r=8": "64",
        "PowerSGD r=16": "130",
        "Top-k 10%": "289",
        "Top-k 1%": "240",
        "signSGD": "16",
    },
    caption="Measured; what is gathered is decoded for as many workers as stand there.",
    benchmark=True,
    shows=(
        "Gradients of a ResNet-50 were encoded and decoded by each method. Shorter is "
        "faster: exact Top-k against the others is what is claimed."
    ),
    picture=Bars("milliseconds"),
    columns={"milliseconds": "ms"},
    reduce=encoding,
    tiers=on_cpu(
        minutes=10.0,
        runs={"all": Runs(config="gradcomp/calibration:cpu")},
        claims={
            "top_k": _slowest.at_least(
                1.0, "exact Top-k over the slowest of the others"
            ).fails({f"Top-k {share}%": "signSGD" for share in ("0.1", "1", "10")}),
            "ranks": _ranks.at_least(1.0, "PowerSGD of twice the rank over one").fails(
                {"PowerSGD r=16": "PowerSGD r=4"}
            ),
        },
    ),
)


def overlapped(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns medians of milliseconds, and the share of communication that is seen."""
    run = reduce.single(rows)
    found = {}
    for row, step in (("4 buckets, 2 processes", "both"), (AFTER, "afterwards")):
        parts = {"computing": "computing", "sending": "sending", "both": step}
        cells = {
            to: 1e3 * float(run[name].median("round")) for to, name in parts.items()
        }
        exposed = (run[step] - run["computing"]) / run["sending"]
        found[row] = {**cells, **reduce.interval(exposed, "exposed")}
    return reduce.from_cells(found)


AFTER = "sent afterwards"
OVERLAP = Table(
    id="gradcomp/overlap",
    title="Communication that a backward pass in segments does not hide",
    paper=f"{PAPER}: synchronous SGD overlaps its buckets; the floor here is a quarter",
    caption=(
        "Two processes, links as slow that all gradients take as long as the backward "
        "pass. Medians of 5 rounds; exposed is the step without its passes over "
        "sending alone."
    ),
    benchmark=True,
    shows=(
        "Two processes sent gradients while the backward pass went on, and after it. "
        "Left of the line most of the sending is hidden."
    ),
    picture=Dots("exposed", bound="exposed", label="of the communication exposed"),
    columns={
        "computing": "passes alone, ms",
        "sending": "sending alone, ms",
        "both": "step, ms",
        "exposed": "exposed",
    },
    reduce=overlapped,
    tiers=on_cpu(
        minutes=1.0,
        runs={"all": Runs(config="gradcomp/overlap")},
        claims={
            "exposed": reduce.cell("exposed", "4 buckets, 2 processes")
            .at_most(0.6, "share of the communication that a step is longer by")
            .fails({"4 buckets, 2 processes": AFTER})
        },
    ),
)


def validated(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns measured and predicted milliseconds, a row for each setup and method."""
    run = reduce.single(rows)
    table = 1e3 * run[["measured", "predicted"]]
    table["error"] = run["predicted"] / run["measured"] - 1
    for gain, seconds in (("gain", "measured"), ("foretold", "predicted")):
        dense = run[seconds].sel({"method": "dense"}, drop=True)
        table[gain] = dense / run[seconds]
    return table.stack(row=("processes", "mbit_per_s", "method")).pipe(_named)


def _named(table: "xr.Dataset") -> "xr.Dataset":
    labels = [f"{p} x {mbit:g} Mbit/s, {m}" for p, mbit, m in table["row"].values]
    parts = {
        name: ("row", table[name].values)
        for name in ("processes", "mbit_per_s", "method")
    }
    plain = table.drop_vars(["row", *parts])
    return plain.assign(parts).assign_coords(row=labels)


def crossings(table: "xr.Dataset", column: str) -> dict[tuple[int, str], float]:
    """Returns the Mbit/s at which each method ceases to pay.

    Between two links, along a line in logarithms of speed-up and bandwidth; the fastest
    link where it still pays there, the slowest one where it pays on none.
    """
    found = {}
    frame = table.to_dataframe()
    for key, own in frame.groupby(["processes", "method"]):
        ordered = own.sort_values("mbit_per_s")
        x, y = ordered["mbit_per_s"].values, np.log(ordered[column].values)
        edge = x[-1] if y[-1] > 0 else x[0]
        falls = np.flatnonzero((y[:-1] > 0) & (y[1:] <= 0))
        if y[-1] <= 0 and len(falls):
            at = falls[-1]
            place = y[at] / (y[at] - y[at + 1])
            edge = x[at] * (x[at + 1] / x[at]) ** place
        found[key] = float(edge)
    return found


@reduce.Number
def _crossing_error(table: "xr.Dataset") -> float:
    """Returns the largest ratio of measured and modelled crossovers, or its inverse.

    Of a crossover that only one of both sees, the ratio to the last link is the least
    that it can be; one that neither sees is not counted. NaN if there is none.
    """
    ours, foretold = (crossings(table, name) for name in ("gain", "foretold"))
    links = table["mbit_per_s"].values
    ends = links.min(), links.max()
    pairs = [(ours[key], foretold[key]) for key in ours]
    ratios = [a / b for a, b in pairs if a != b or a not in ends]
    return max((max(ratio, 1 / ratio) for ratio in ratios), default=float("nan"))


_ERROR = abs(of("predicted") / of("measured") - 1)
# A model that overlooks that there are more workers.
_OF_TWO = {
    f"4 x {mbit} Mbit/s, {method}": f"2 x {mbit} Mbit/s, {method}"
    for mbit in (50, 400, 3200)
    for method in validation.Config().methods
}
# A model that takes each link for an eighth of its rate.
_SLOWER = {
    f"{p} x {mbit} Mbit/s, {method}": f"{p} x {mbit // 8} Mbit/s, {method}"
    for p in (2, 4)
    for mbit in (400, 3200)
    for method in validation.Config().methods
}


def _validation(config: str, minutes: float) -> Tier:
    return Tier(
        minutes=minutes,
        runs={"all": Runs(config=config)},
        claims={
            "median": _ERROR.median()
            .at_most(0.15, "median error of what is predicted")
            .fails(_OF_TWO, only=("predicted",)),
            "worst": _ERROR.largest()
            .at_most(0.35, "largest error of what is predicted")
            .fails(_OF_TWO, only=("predicted",)),
            "crossover": _crossing_error.at_most(
                1.5, "measured over modelled crossover, or the inverse, at most"
            ).fails(_SLOWER, only=("foretold",)),
        },
    )


VALIDATION = Table(
    id="gradcomp/validation",
    title="Steps of 2 and 4 processes, predicted and measured",
    paper=f"{PAPER}: its model against measured iterations; figures unknown",
    caption=(
        "Training steps of processes of this machine over links of limited rate; 4 "
        "million parameters. Alpha, bandwidth, gamma, passes and encoding are measured "
        "apart, nothing is fitted to the steps. fp16 is sent after the backward pass "
        "here."
    ),
    benchmark=True,
    shows=(
        "Training steps over slow links were foretold by the model and then measured. "
        "On the diagonal the two agree."
    ),
    picture=Scatter(
        "predicted", "measured", labels=False, by=", ", log=True, log_x=True
    ),
    columns={
        "measured": "measured, ms",
        "predicted": "predicted, ms",
        "error": "error",
    },
    reduce=validated,
    tiers={"cpu": _validation("gradcomp/validation", 5.0)},
)
VALIDATION_FULL = dataclasses.replace(
    VALIDATION,
    id="gradcomp/validation-full",
    title="Steps of 2, 4 and 8 processes over five links, predicted and measured",
    tiers={"cpu": _validation("gradcomp/validation:full", 40.0)},
)
