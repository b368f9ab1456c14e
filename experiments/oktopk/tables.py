"""Ok-Topk's tables: words, balance, accuracy, throughput on a slow link, selection."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from experiments.oktopk.volume import Config
from hpcjax import perf
from hpcjax.collectives.config import entries_wanted
from hpcjax.runs.tables import Claim, Runs, Table, Tier

PAPER = "PPoPP 2022 (arXiv 2201.07598)"
SEEDS = (0, 1, 2)
# Ours by the names that `perf.comm_volume` has for them.
FORMULAS = {
    "top_k": "topk_a",
    "topk_dsa": "topk_dsa",
    "gtopk": "gtopk",
    "gaussian_k": "gaussian_k",
    "ok_topk": "ok_topk",
}
MEMBERS = (4, 8, 16, 32, 64)
COMPILED = 8
_N, _K = Config().numbers, entries_wanted(0.01, Config().numbers)


def _row(name: str, members: int) -> str:
    return f"{name}, P={members}"


def _volume(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns words a member sends: by formula, of real entries, and of buffers."""
    columns: dict[str, list[float]] = {
        name: [] for name in ("least", "most", "mean", "largest", "wire", "bound")
    }
    for row, run in rows.items():
        name, _, members = row.partition(", P=")
        p = int(members)
        formula = perf.comm_volume(FORMULAS[name], _N, _K, p)
        entries = np.maximum(run["selected"], run["kept"])
        bound = 6 * entries * (p - 1) / p + 128 + 8 * p
        columns["least"].append(formula.least)
        columns["most"].append(formula.most)
        columns["mean"].append(float(run["sent"].mean()))
        columns["largest"].append(float(run["sent"].max()))
        columns["wire"].append(float(run.get("wire", np.array(np.nan)).mean()))
        own = float((run["sent"] / bound).max()) if name == "ok_topk" else np.nan
        columns["bound"].append(own)
    made = {name: ("row", np.array(column)) for name, column in columns.items()}
    return xr.Dataset(made, coords={"row": list(rows)})


def _growth(table: xr.Dataset) -> float:
    """Returns how the ratio of TopkA's words to Ok-Topk's grows from 4 to 64."""
    mean = table["mean"]

    def ratio(members: int) -> float:
        top_k, ok_topk = (_row(name, members) for name in ("top_k", "ok_topk"))
        return float(mean.sel(row=top_k) / mean.sel(row=ok_topk))

    return ratio(MEMBERS[-1]) / ratio(MEMBERS[0])


def _own(table: xr.Dataset) -> list[str]:
    return [row for row in table["row"].values.tolist() if row.startswith("ok_topk")]


VOLUME = Table(
    id="oktopk/volume",
    title="Words that a member sends, k = 1 000 of n = 100 000",
    paper=f"{PAPER}, table 1: bandwidth terms by algorithm",
    caption=(
        "Normal gradients, 40 steps; a word is a value or an index. wire: buffers of "
        "the program compiled for 8 devices, padding and bookkeeping included. "
        "largest / bound: over 6 max(c, g)(P-1)/P + 128 + 8 P, with c entries selected "
        "and g kept in that step, the largest of all steps and members."
    ),
    columns={
        "least": "formula, least",
        "most": "formula, most",
        "mean": "sent, mean",
        "largest": "sent, largest",
        "wire": "wire",
        "bound": "largest / bound",
    },
    reduce=_volume,
    tiers={
        "cpu": Tier(
            minutes=5.0,
            devices=COMPILED,
            runs={
                _row(name, members): Runs(
                    config=f"oktopk/volume:{name}",
                    overrides={
                        "members": str(members),
                        "compiled": str(members == COMPILED).lower(),
                    },
                )
                for name in FORMULAS
                for members in MEMBERS
            },
            claims={
                "bounded": Claim(
                    relation="Ok-Topk's words over the bound of its entries, largest",
                    ours=lambda table: float(table["bound"].sel(row=_own(table)).max()),
                    at_most=1.0,
                ),
                "linear": Claim(
                    relation="TopkA's words over Ok-Topk's: growth from P = 4 to 64",
                    ours=_growth,
                    at_least=8.0,
                ),
            },
        )
    },
)

PLACES = {
    "clustered": "at one place",
    "halves": "at two places",
    "gaussian": "anywhere",
}
CUTS = ("even", "mean", "pooled")


def _balance(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns the most that a member gets in a step over what all get on average."""

    def worst(run: xr.Dataset, name: str) -> float:
        return float((run[name].max("member") / run[name].mean("member")).max())

    made = {
        name: ("row", [worst(run, name) for run in rows.values()])
        for name in ("summed", "received")
    }
    return xr.Dataset(made, coords={"row": list(rows)})


def _ratio(place: str, cuts: str) -> Claim:
    def ours(table: xr.Dataset) -> float:
        imbalance = table["summed"]
        even, own = (float(imbalance.sel(row=f"{place}, {c}")) for c in ("even", cuts))
        return even / own

    return Claim(
        relation=f"large entries {place}: even regions' imbalance over {cuts} cuts'",
        ours=ours,
        at_least=1.5,
    )


BALANCE = Table(
    id="oktopk/balance",
    title="Entries that a member adds up: the most over the average, 8 members",
    paper=f"{PAPER}, figure on load balance: with and without space repartition",
    caption=(
        "Three steps, the worst counts; the first one chooses the regions. Large "
        "entries lie in a twentieth of the vector, the same for all members, or in "
        "the first one for half of them and in the last one for the others."
    ),
    columns={"summed": "added up, most / mean", "received": "all words received"},
    reduce=_balance,
    tiers={
        "cpu": Tier(
            minutes=1.0,
            runs={
                f"{label}, {cuts}": Runs(
                    config="oktopk/volume:balance",
                    overrides={"inputs": place, "exchange.repartition": cuts},
                )
                for place, label in PLACES.items()
                for cuts in CUTS
            },
            claims={
                "one_place": _ratio(PLACES["clustered"], "mean"),
                "two_places": _ratio(PLACES["halves"], "pooled"),
            },
        )
    },
)

METHODS = ("dense", "top_k", "gtopk", "gaussian_k", "ok_topk")
WARM_UP = 96  # 64 dense steps and one period of exact thresholds


def _accuracy(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns accuracies by seed, and how far selections are from k after warm-up."""
    final = {row: 100 * (1 - run["val_error"][..., -1]) for row, run in rows.items()}
    # It selects exactly k, once it is not dense any more.
    k = float(rows["top_k"]["selected_entries"][..., -1].max())
    columns: dict[str, list[float]] = {
        f"seed_{seed}": [float(values.sel(seed=seed)) for values in final.values()]
        for seed in rows["dense"]["seed"].values
    }
    columns["mean"] = [float(values.mean()) for values in final.values()]
    columns["lost"] = [columns["mean"][0] - mean for mean in columns["mean"]]
    for name in ("selected", "kept"):
        columns[name] = [
            _off(run[f"{name}_entries"], k)
            if row in ("gaussian_k", "ok_topk")
            else np.nan
            for row, run in rows.items()
        ]
    made = {name: ("row", np.array(column)) for name, column in columns.items()}
    return xr.Dataset(made, coords={"row": list(rows)})


def _off(counts: xr.DataArray, k: float) -> float:
    """Returns the mean of |count - k| / k after warm-up."""
    late = counts.where(counts["step"] > WARM_UP, drop=True)
    return float(abs(late / k - 1).mean())


def _of_ok_topk(column: str, relation: str, bound: float) -> Claim:
    return Claim(
        relation=relation,
        ours=lambda table: float(table[column].sel(row="ok_topk")),
        at_most=bound,
    )


def _accuracy_table(
    name: str, config: str, data: str, seeds: tuple[int, ...], minutes: float
) -> Table:
    return Table(
        id=f"oktopk/{name}",
        title=f"Accuracy on {data} with 2 % of the gradient exchanged, 8 devices",
        paper=f"{PAPER}: convergence of VGG-16 on CIFAR-10, and selection accuracy",
        caption=(
            f"{data} in place of CIFAR-10, VGG-16 with an eighth of the width, 8 "
            "simulated devices of 16 images; all but dense begin with 64 dense steps, "
            "as in the paper. Off k: mean of |count - k| / k "
            f"after step {WARM_UP}, of what a member selects on average and of what "
            "all keep; TopkA and gTopk are exact."
        ),
        columns={
            "mean": "accuracy, %",
            **{f"seed_{seed}": f"seed {seed}" for seed in seeds},
            "lost": "below dense, points",
            "selected": "selected, off k",
            "kept": "kept, off k",
        },
        reduce=_accuracy,
        tiers={
            "cpu": Tier(
                minutes=minutes,
                devices=8,
                runs={
                    method: Runs(config=f"{config}:{method}", seeds=seeds)
                    for method in METHODS
                },
                claims={
                    "accuracy": _of_ok_topk("lost", "Ok-Topk: points below dense", 1.0),
                    "selected": _of_ok_topk(
                        "selected", "Ok-Topk: selected, off k", 0.15
                    ),
                    "kept": _of_ok_topk("kept", "Ok-Topk: kept by all, off k", 0.15),
                },
            )
        },
    )


ACCURACY = _accuracy_table(
    "accuracy", "oktopk/digits", "scikit-learn digits at 32x32", SEEDS, 12.0
)
FASHION = _accuracy_table(
    "fashion", "oktopk/fashion", "Fashion-MNIST padded to 32x32", SEEDS[:1], 10.0
)


def _text(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns validation losses, means over seeds, and their ratio to dense."""
    final = {row: float(run["val_loss"][..., -1].mean()) for row, run in rows.items()}
    losses = np.array(list(final.values()))
    made = {"loss": ("row", losses), "ratio": ("row", losses / final["dense"])}
    return xr.Dataset(made, coords={"row": list(rows)})


TEXT = Table(
    id="oktopk/text",
    title="Validation loss of a small language model, 2 % of the gradient exchanged",
    paper=f"{PAPER}: BERT's loss",
    caption=(
        "Characters of the King James Bible in place of Wikipedia, two blocks of width "
        "64, Adam, 400 steps, 8 simulated devices of 4 sequences; mean of three seeds."
    ),
    columns={"loss": "validation loss", "ratio": "over dense"},
    reduce=_text,
    tiers={
        "cpu": Tier(
            minutes=10.0,
            devices=8,
            runs={
                name: Runs(config=f"oktopk/text:{name}", seeds=SEEDS)
                for name in METHODS
            },
            claims={
                "ratio": _of_ok_topk("ratio", "Ok-Topk: loss over dense", 1.05),
            },
        )
    },
)


def _throughput(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns times of a step, over Ok-Topk's, and the words sent."""
    run = rows["all"].isel(seed=0, drop=True).rename(exchange="row")
    seconds = run["seconds"].mean("step")
    total = seconds.sel(phase="total", drop=True)
    talking = seconds.sel(phase="communicating", drop=True)
    return xr.Dataset(
        {
            "milliseconds": 1e3 * total,
            "communicating": 1e3 * talking,
            "computing": 1e3 * (total - talking),
            "over": total / total.sel(row="ok_topk", drop=True),
            "over_talking": talking / talking.sel(row="ok_topk", drop=True),
            "words": run["words"].mean("step"),
        }
    )


def _faster(row: str, column: str, bound: float) -> Claim:
    part = " in messages" if column == "over_talking" else ""
    return Claim(
        relation=f"{row}: its time{part} over Ok-Topk's",
        ours=lambda table: float(table[column].sel(row=row)),
        at_least=bound,
    )


THROUGHPUT = Table(
    id="oktopk/throughput",
    title="Exchange of 4 million numbers between 4 processes at 100 Mbit/s",
    paper=f"{PAPER}: weak scaling; BERT on 256 GPUs 3.29x to 12.95x [abstract]",
    caption=(
        "From the gradient to the update, selection included, mean of the steps; a "
        "process may send 100 Mbit/s in all. 1 % is kept, of gradients and residuals "
        "as large as after 64 steps; Ok-Topk's 64 steps hold two with exact thresholds "
        "and one with new regions."
    ),
    benchmark=True,
    columns={
        "milliseconds": "ms a step",
        "communicating": "in messages, ms",
        "computing": "rest, ms",
        "over": "over Ok-Topk's",
        "over_talking": "messages over Ok-Topk's",
        "words": "words sent",
    },
    reduce=_throughput,
    tiers={
        "cpu": Tier(
            minutes=1.5,
            runs={"all": Runs(config="oktopk/link")},
            claims={
                "dense": _faster("dense", "over", 5.0),
                "top_k": _faster("top_k", "over", 1.3),
                "messages": _faster("top_k", "over_talking", 1.3),
            },
        )
    },
)


def _selection(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns times, and how many times as fast as `lax.top_k` each is."""
    made = []
    for name, row in rows.items():
        seconds = row["seconds"].isel(seed=0, drop=True)
        median = seconds.median("repetition")
        labels = [f"{name}, {each}" for each in seconds["candidate"].values]
        ratio = (seconds.sel(candidate="lax.top_k") / seconds).median("repetition")
        table = {"milliseconds": 1e3 * median, "faster": ratio}
        copy = median.sel(candidate="copy", drop=True)
        table["copies"] = median / copy
        made.append(xr.Dataset(table).assign_coords(candidate=labels))
    return xr.concat(made, "candidate").rename(candidate="row")


def _pass_faster(name: str) -> Claim:
    return Claim(
        relation=f"{name}: times as fast as lax.top_k, a threshold pass",
        ours=lambda table: float(table["faster"].sel(row=f"{name}, threshold")),
        at_least=5.0,
    )


SELECTION = Table(
    id="oktopk/selection",
    title="Finding the largest entries: a threshold pass against lax.top_k",
    paper=f"{PAPER}: exact selection costs more than it saves",
    caption=(
        "Normal numbers, as many as gradients of VGG-16 and BERT have. exact: the k-th "
        "magnitude by 31 counts, then one pass; threshold: the pass alone."
    ),
    benchmark=True,
    columns={
        "milliseconds": "ms",
        "faster": "lax.top_k / this",
        "copies": "over a copy's",
    },
    reduce=_selection,
    tiers={
        "gpu": Tier(
            minutes=2.0,
            runs={
                "VGG-16": Runs(config="oktopk/selection:vgg"),
                "BERT": Runs(config="oktopk/selection:bert"),
            },
            claims={name: _pass_faster(name) for name in ("VGG-16", "BERT")},
        ),
        "cpu": Tier(
            minutes=3.0,
            runs={"VGG-16": Runs(config="oktopk/selection:vgg")},
            claims={"VGG-16": _pass_faster("VGG-16")},
        ),
    },
)
