"""Ok-Topk's tables: words, balance, accuracy, throughput on a slow link, selection."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.oktopk.volume import Config
from hpcjax.core import parts
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots, Lines
from hpcjax.runs.tables import Claim, Runs, Table, grid, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "PPoPP 2022 (arXiv 2201.07598)"
SEEDS = (0, 1, 2)
EXCHANGES = ("top_k", "topk_dsa", "gtopk", "gaussian_k", "ok_topk")
MEMBERS = (4, 8, 16, 32, 64)
COMPILED = 8
DENSITY = 0.01
# The negative control: thresholds that let every entry pass.
ALL = "all entries"
_GIVEN = np.broadcast_to(np.float32(0), Config().numbers)


def _volume(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns words a member sends: by formula, of real entries, and of buffers."""
    return reduce.from_cells({name: _words(name, run) for name, run in rows.items()})


def _words(row: str, run: "xr.Dataset") -> reduce.Cells:
    name, _, members = row.partition(", P=")
    p, part = int(members), "ok_topk" if name == ALL else name
    exchange = parts.classes("exchange")[part](density=DENSITY).make()
    cells = {
        "least": exchange.words(_GIVEN, p, place=0.0),
        "most": exchange.words(_GIVEN, p, place=1.0),
        "mean": run["sent"].mean(),
        "largest": run["sent"].max(),
    }
    if "wire" in run:
        cells["wire"] = float(run["wire"].mean())
    entries = np.maximum(run["selected"], run["kept"])
    bound = 6 * entries * (p - 1) / p + 128 + 8 * p
    cells["bound"] = float((run["sent"] / bound).max())
    if part == "ok_topk":
        cells["asked"] = cells["mean"] / (6 * DENSITY * _GIVEN.size * (p - 1) / p)
    return cells


def _ratio_at(members: int) -> reduce.Number:
    """Returns the ratio of TopkA's words to Ok-Topk's."""
    return reduce.over("mean", f"top_k, P={members}", f"ok_topk, P={members}")


VOLUME = Table(
    id="oktopk/volume",
    title="Words that a member sends, k = 1 000 of n = 100 000",
    paper=f"{PAPER}, table 1: bandwidth terms by algorithm",
    caption=(
        "Normal gradients, 40 steps; a word is a value or an index. wire: buffers of "
        "the program compiled for 8 devices, padding and bookkeeping included. "
        "mean / 6 k: over 6 k (P-1)/P. largest / bound: over 6 max(c, g)(P-1)/P + 128 "
        "+ 8 P, with c entries selected and g kept in that step, the largest of all "
        "steps and members. all entries: Ok-Topk with k = n, judged as if k were 1 000."
    ),
    shows=(
        "Members of a group exchanged their largest gradients in five ways. Ok-Topk's "
        "line should stay flat as members join, where the others' rise."
    ),
    picture=Lines(
        "P={}",
        "largest",
        log=True,
        label="words that a member sends",
        x_label="members",
    ),
    columns={
        "least": "formula, least",
        "most": "formula, most",
        "mean": "sent, mean",
        "largest": "sent, largest",
        "wire": "wire",
        "asked": "mean / 6 k",
        "bound": "largest / bound",
    },
    reduce=_volume,
    tiers=on_cpu(
        minutes=5.0,
        devices=COMPILED,
        runs={
            **grid(
                "oktopk/volume:{0}",
                EXCHANGES,
                {
                    f"P={members}": {
                        "members": str(members),
                        "compiled": str(members == COMPILED).lower(),
                    }
                    for members in MEMBERS
                },
            ),
            f"{ALL}, P={COMPILED}": Runs(
                config="oktopk/volume:ok_topk",
                overrides={"members": str(COMPILED), "exchange.density": "1.0"},
            ),
        },
        claims={
            "asked": reduce.most("asked", "ok_topk")
            .at_most(1.0, "Ok-Topk's words, on average, over 6 k (P-1)/P, largest")
            .fails({f"ok_topk, P={COMPILED}": f"{ALL}, P={COMPILED}"}),
            "bounded": reduce.most("bound", "ok_topk")
            .at_most(1.0, "Ok-Topk's words over the bound of its entries, largest")
            .fails({f"ok_topk, P={p}": f"gtopk, P={p}" for p in MEMBERS}),
            "linear": (_ratio_at(64) / _ratio_at(4))
            .at_least(8.0, "TopkA's words over Ok-Topk's: growth from P = 4 to 64")
            .fails({f"ok_topk, P={p}": f"top_k, P={p}" for p in (4, 64)}),
        },
    ),
)

PLACES = {
    "clustered": "at one place",
    "halves": "at two places",
    "gaussian": "anywhere",
}
CUTS = ("even", "mean", "pooled")


@reduce.by_row
def _balance(run: "xr.Dataset") -> reduce.Cells:
    """Returns the most that a member gets in a step over what all get on average."""
    counts = run[["summed", "received"]]
    worst = (counts.max("member") / counts.mean("member")).max()
    return {column: float(worst[column]) for column in ("summed", "received")}


def _ratio(place: str, cuts: str) -> Claim:
    claim = reduce.over("summed", f"{place}, even", f"{place}, {cuts}").at_least(
        1.5, f"large entries {place}: even regions' imbalance over {cuts} cuts'"
    )
    return claim.fails({f"{place}, {cuts}": f"{place}, even"})


BALANCE = Table(
    id="oktopk/balance",
    title="Entries that a member adds up: the most over the average, 8 members",
    paper=f"{PAPER}, figure on load balance: with and without space repartition",
    caption=(
        "Three steps, the worst counts; the first one chooses the regions. Large "
        "entries lie in a twentieth of the vector, the same for all members, or in "
        "the first one for half of them and in the last one for the others."
    ),
    shows=(
        "Large entries were put in one place or two, and the work of adding them up "
        "was cut. At 1 all members add up the same."
    ),
    picture=Bars("summed", by=", ", label="entries added up, most / mean"),
    columns={"summed": "added up, most / mean", "received": "all words received"},
    reduce=_balance,
    tiers=on_cpu(
        minutes=1.0,
        runs=grid(
            "oktopk/volume:balance",
            {label: {"inputs": place} for place, label in PLACES.items()},
            {cuts: {"exchange.repartition": cuts} for cuts in CUTS},
        ),
        claims={
            "one_place": _ratio(PLACES["clustered"], "mean"),
            "two_places": _ratio(PLACES["halves"], "pooled"),
        },
    ),
)

# The negative control: what is not sent is lost.
FORGETS = "ok_topk, no residuals"
METHODS = ("dense", "top_k", "gtopk", "gaussian_k", "ok_topk")
WARM_UP = 96  # 64 dense steps and one period of exact thresholds


def _accuracy(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns accuracies by seed, and how far selections are from k after warm-up."""
    final = {row: 100 * (1 - run["val_error"][..., -1]) for row, run in rows.items()}
    # It selects exactly k, once it is not dense any more.
    k = float(rows["top_k"]["selected_entries"][..., -1].max())
    table = {}
    for row, accuracy in final.items():
        table[row] = {
            **{f"seed_{own.seed:d}": float(own) for own in accuracy},
            "mean": accuracy.mean(skipna=False),
            "lost": final["dense"].mean(skipna=False) - accuracy.mean(skipna=False),
        }
        if row in ("gaussian_k", "ok_topk"):
            for name in ("selected", "kept"):
                table[row][name] = _off(rows[row][f"{name}_entries"], k)
    return reduce.from_cells(table)


def _rows(config: str, seeds: tuple[int, ...]) -> dict[str, Runs]:
    """Returns the methods' rows, and the negative control's."""
    forgets = Runs(
        config=f"{config}:ok_topk",
        overrides={"exchange.error_feedback": "false"},
        seeds=seeds,
    )
    return {**grid(config + ":{0}", METHODS, seeds=seeds), FORGETS: forgets}


def _off(counts: "xr.DataArray", k: float) -> float:
    """Returns the mean of |count - k| / k after warm-up."""
    late = counts.where(counts["step"] > WARM_UP, drop=True)
    return float(abs(late / k - 1).mean(skipna=False))


@reduce.Number
def _most_off(table: "xr.Dataset") -> float:
    """Returns how far Ok-Topk's selections are from k, or what all keep is."""
    own = table.sel(row="ok_topk")
    return float(np.maximum(own["selected"], own["kept"]))


def _of_ok_topk(column: str, relation: str, bound: float) -> Claim:
    return reduce.cell(column, "ok_topk").at_most(bound, relation)


def _accuracy_table(
    name: str,
    config: str,
    data: str,
    *,
    how: str,
    seeds: tuple[int, ...],
    minutes: float,
) -> Table:
    return Table(
        id=f"oktopk/{name}",
        title=f"Accuracy on {data} with 2 % of the gradient exchanged, 8 devices",
        paper=f"{PAPER}: convergence of VGG-16 on CIFAR-10, and selection accuracy",
        caption=(
            f"{data} in place of CIFAR-10, 8 simulated devices of 16 images; {how}. "
            f"Off k: mean of |count - k| / k after step {WARM_UP}, of what a member "
            "selects on average and of what all keep; TopkA and gTopk are exact."
        ),
        shows=(
            "Two per cent of the gradient were exchanged while a network learnt its "
            "images. Left of the line accuracy is within a point of exchanging all."
        ),
        picture=Dots("lost", bound="accuracy"),
        columns={
            "mean": "accuracy, %",
            **{f"seed_{seed}": f"seed {seed}" for seed in seeds},
            "lost": "below dense, points",
            "selected": "selected, off k",
            "kept": "kept, off k",
        },
        reduce=_accuracy,
        tiers=on_cpu(
            minutes=minutes,
            devices=8,
            runs=_rows(config, seeds),
            claims={
                "accuracy": _of_ok_topk(
                    "lost", "Ok-Topk: points below dense", 1.0
                ).fails({"ok_topk": FORGETS}),
                "entries": _most_off.at_most(
                    0.15, "Ok-Topk: entries selected, and kept by all, off k"
                ).fails({"ok_topk": "gaussian_k"}),
            },
        ),
    )


ACCURACY = _accuracy_table(
    "accuracy",
    "oktopk/digits",
    "scikit-learn digits",
    how="a perceptron of one hidden layer of 64, 4,810 numbers, 600 steps",
    seeds=SEEDS,
    minutes=4.0,
)
FASHION = _accuracy_table(
    "fashion",
    "oktopk/fashion",
    "Fashion-MNIST padded to 32x32",
    how=(
        "VGG-16 with an eighth of the width, 480 steps; all but dense begin with 64 "
        "dense steps, as in the paper"
    ),
    seeds=SEEDS[:1],
    minutes=10.0,
)


def _text(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns validation losses, means over seeds, and their ratio to dense."""
    final = {
        row: float(run["val_loss"][..., -1].mean(skipna=False))
        for row, run in rows.items()
    }
    table = reduce.from_cells({row: {"loss": loss} for row, loss in final.items()})
    return table.assign(ratio=table["loss"] / final["dense"])


TEXT = Table(
    id="oktopk/text",
    title="Validation loss of a small language model, 2 % of the gradient exchanged",
    paper=f"{PAPER}: BERT's loss",
    caption=(
        "Characters of the King James Bible in place of Wikipedia, two blocks of width "
        "64, Adam, 400 steps, 8 simulated devices of 4 sequences; mean of three seeds."
    ),
    shows=(
        "A language model was trained while only 2 % of the gradient was exchanged. "
        "Left of the line its loss is within 5 % of exchanging all."
    ),
    picture=Dots("ratio", bound="ratio", label="validation loss / dense"),
    columns={"loss": "validation loss", "ratio": "over dense"},
    reduce=_text,
    tiers=on_cpu(
        minutes=10.0,
        devices=8,
        runs=_rows("oktopk/text", SEEDS),
        claims={
            "ratio": _of_ok_topk("ratio", "Ok-Topk: loss over dense", 1.05).fails(
                {"ok_topk": FORGETS}
            ),
        },
    ),
)


def _throughput(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns times of a step, over Ok-Topk's, and the words sent."""
    import xarray as xr

    run = reduce.single(rows).rename(exchange="row")
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
    claim = reduce.cell(column, row).at_least(
        bound, f"{row}: its time{part} over Ok-Topk's"
    )
    return claim.fails({row: "ok_topk"})


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
    shows=(
        "Four processes exchanged four million numbers over a slow link. Shorter is "
        "faster: Ok-Topk against the dense exchange and plain Top-k."
    ),
    picture=Bars(("communicating", "computing"), stacked=True, label="ms a step"),
    columns={
        "milliseconds": "ms a step",
        "communicating": "in messages, ms",
        "computing": "rest, ms",
        "over": "over Ok-Topk's",
        "over_talking": "messages over Ok-Topk's",
        "words": "words sent",
    },
    reduce=_throughput,
    tiers=on_cpu(
        minutes=1.5,
        runs={"all": Runs(config="oktopk/link")},
        claims={
            "dense": _faster("dense", "over", 5.0),
            "top_k": _faster("top_k", "over", 1.3),
            "messages": _faster("top_k", "over_talking", 1.3),
        },
    ),
)


def _selection(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns times, and how many times as fast as `lax.top_k` each is."""
    import xarray as xr

    made = {}
    for name, row in rows.items():
        seconds = reduce.first(row)["seconds"]
        median = seconds.median("repetition")
        ratio = seconds.sel(candidate="lax.top_k") / seconds
        made[name] = xr.Dataset(
            {
                "milliseconds": 1e3 * median,
                "faster": ratio.median("repetition"),
                "copies": median / median.sel(candidate="copy", drop=True),
            }
        )
    return reduce.stack(made, "candidate")


def _pass_faster(name: str) -> Claim:
    claim = reduce.cell("faster", f"{name}, threshold").at_least(
        5.0, f"{name}: times as fast as lax.top_k, a threshold pass"
    )
    return claim.fails({f"{name}, threshold": f"{name}, lax.top_k"})


SELECTION = Table(
    id="oktopk/selection",
    title="Finding the largest entries: a threshold pass against lax.top_k",
    paper=f"{PAPER}: exact selection costs more than it saves",
    caption=(
        "Normal numbers, as many as gradients of VGG-16 and BERT have. exact: the k-th "
        "magnitude by 31 counts, then one pass; threshold: the pass alone."
    ),
    benchmark=True,
    shows=(
        "The largest entries of gradients were found by a threshold and by sorting. "
        "Further left is faster; a copy is the least any pass can take."
    ),
    picture=Dots("milliseconds", log=True),
    columns={
        "milliseconds": "ms",
        "faster": "lax.top_k / this",
        "copies": "over a copy's",
    },
    reduce=_selection,
    tiers=on_gpu(
        minutes=2.0,
        runs={
            "VGG-16": Runs(config="oktopk/selection:vgg"),
            "BERT": Runs(config="oktopk/selection:bert"),
        },
        claims={name: _pass_faster(name) for name in ("VGG-16", "BERT")},
    )
    | on_cpu(
        minutes=3.0,
        runs={"VGG-16": Runs(config="oktopk/selection:vgg")},
        claims={"VGG-16": _pass_faster("VGG-16")},
    ),
)
