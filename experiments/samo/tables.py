"""SAMO's tables: what is held and sent, losses, and layouts of large machines."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Bars, Lines
from hpcjax.runs.reduce import of
from hpcjax.runs.tables import Runs, Table, by_model, grid, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Singh and Bhatele, IPDPS 2023"
SPARSITIES = ("0.0", "0.25", "0.5", "0.8", "0.9", "0.95")
FORMS = ("int32", "bitmap", "rematerialize")
DENSE, LEAST = "dense", "int32, p = 0.0"
COMPRESSED = tuple(f"{form}, p = {p}" for form in FORMS for p in SPARSITIES)


def _memory(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns MiB, and shares of the dense state's bytes."""
    table = reduce.by_run(rows)
    dense = table.sel(row=DENSE)
    for name in ("held", "formula", "paper", "gradients", "sent"):
        table[f"{name}_share"] = table[name] / dense[name]
        table[name] = table[name] / 2**20
    return table


_OFF = abs(of("held", *COMPRESSED) / of("formula", *COMPRESSED) - 1).largest()
_EVERYTHING = dict.fromkeys(COMPRESSED, DENSE)

MEMORY = Table(
    id="samo/memory",
    title="What the state of a pruned language model holds and sends",
    paper=f"{PAPER}, §III, figure 2: 66 % of 20 n saved at p = 0.8, 78 % at p = 0.9",
    caption=(
        "1.2 million parameters in six blocks and two tables; all matrices are pruned. "
        "bfloat16 with Adam. held: bytes of live arrays between steps. formula: 2 n + "
        "16 k with int32 positions, others dense; dense: 14 n. paper: its account, 2 n "
        "+ 24 k against 20 n, with gradients and temporary arrays. sent: operands of "
        "the all-reduces of a step on 8 simulated devices, in float32."
    ),
    shows=(
        "Optimizer state of a pruned model was kept without its zeros. Below the line "
        "it takes 0.28 of the dense state's bytes."
    ),
    picture=Lines(
        "p = {}",
        "held_share",
        bound="saves",
        label="held / dense",
        x_label="share of the weights pruned",
    ),
    columns={
        "held": "held, MiB",
        "formula": "formula, MiB",
        "held_share": "held / dense",
        "paper_share": "paper / dense",
        "gradients_share": "gradients / dense",
        "sent_share": "sent / dense",
    },
    reduce=_memory,
    tiers=on_cpu(
        minutes=1.5,
        devices=8,
        runs={
            **grid("samo/memory", {DENSE: {"form": DENSE}}),
            **grid(
                "samo/memory",
                {form: {"form": form} for form in FORMS},
                {f"p = {p}": {"sparsity": p} for p in SPARSITIES},
            ),
        },
        claims={
            "formula": _OFF.at_most(
                0.01, "held over the formula, farthest from 1"
            ).fails(_EVERYTHING, only=("held",)),
            "saves": reduce.cell("held_share", "int32, p = 0.9")
            .at_most(0.28, "of the dense state's bytes at p = 0.9; 3.6/14 by formula")
            .fails({"int32, p = 0.9": LEAST}),
            "paper": reduce.cell("paper_share", "int32, p = 0.9")
            .at_most(0.24, "of 20 n in the paper's account at p = 0.9; it has 0.22")
            .fails({"int32, p = 0.9": "int32, p = 0.8"}),
            "bitmap": reduce.over("held", "bitmap, p = 0.9", "int32, p = 0.9")
            .at_most(0.95, "of the bytes with int32 positions at p = 0.9")
            .fails({"bitmap, p = 0.9": "int32, p = 0.9"}),
            "rematerialize": reduce.over(
                "held", "rematerialize, p = 0.9", "int32, p = 0.9"
            )
            .at_most(0.6, "of the bytes with dense weights at p = 0.9; 1.8/3.6")
            .fails({"rematerialize, p = 0.9": "int32, p = 0.9"}),
            "sent": reduce.cell("sent_share", "int32, p = 0.9")
            .at_most(0.12, "of the bytes of dense all-reduces at p = 0.9")
            .fails({"int32, p = 0.9": LEAST}),
        },
    ),
)


def _peak(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns bytes a weight, and the share of the dense step's."""
    table = reduce.by_run(rows)
    return table.assign(share=table["peak"] / table["peak"].sel(row=DENSE))


PEAK = Table(
    id="samo/peak",
    title="Most memory of a compiled training step, bytes a weight",
    paper=f"{PAPER}, §III-C: dense gradients of one layer at a time",
    caption=(
        "24 matrices of 1024x1024 in a rematerialised scan, 64 rows, Adam in float32, "
        "state donated: arguments, results and temporary arrays of the program for a "
        "CPU. gathered after: a control, which gathers once all dense gradients exist."
    ),
    shows=(
        "Training steps of a pruned model were compiled, and their largest memory read "
        "off. Lines should fall as more weights are pruned, below the dense one."
    ),
    picture=Lines(
        "p = {}", "peak", label="bytes a weight", x_label="share of the weights pruned"
    ),
    columns={"peak": "bytes a weight", "share": "of dense"},
    reduce=_peak,
    tiers=on_cpu(
        minutes=0.5,
        runs={
            **grid("samo/peak", {DENSE: {"form": DENSE}}),
            **grid(
                "samo/peak",
                {form: {"form": form} for form in ("int32", "bitmap")},
                {f"p = {p}": {"sparsity": p} for p in ("0.5", "0.8", "0.9", "0.95")},
            ),
            **grid("samo/peak", {"gathered after, p = 0.9": {"form": "after"}}),
        },
        claims={
            form: reduce.cell("share", f"{form}, p = 0.9")
            .at_most(0.45, f"of the dense step's memory at p = 0.9, {form}")
            .fails({f"{form}, p = 0.9": "gathered after, p = 0.9"})
            for form in ("int32", "bitmap")
        },
    ),
)


@reduce.along("form")
def _quality(row: "xr.Dataset", form: str) -> reduce.Cells:
    """Returns the validation loss of a form, and the distance of its losses."""
    own, masked = row.sel(form=form), row.sel(form="masked")
    apart = abs(own["loss"] - masked["loss"]).max(skipna=False)
    excess = own["val_loss"] / row["val_loss"].sel(form="dense") - 1
    return {
        **reduce.extent(own["val_loss"], "val_loss"),
        **reduce.extent(100 * excess, "excess"),
        "apart": float(apart),
    }


_PRUNED = ("p = 0.5", "p = 0.8", "p = 0.9")
_SAMO = tuple(f"{p}, samo" for p in _PRUNED)
_RANDOM = tuple(f"{p}, random" for p in _PRUNED)
_UNWRITTEN = {f"{p}, samo": f"{p}, unwritten" for p in _PRUNED}
QUALITY = Table(
    id="samo/quality",
    title="Training a pruned character model, compressed and masked",
    paper=(
        f"{PAPER}, figure 4: validation perplexity of pruned GPT-3 XL and 2.7B with "
        "SAMO matches that of dense training in as many iterations"
    ),
    caption=(
        "Two blocks of width 64 on the Python language reference, float32, AdamW. The "
        "largest values of the blocks' matrices after 40 dense steps are kept; then "
        "360 steps in every form from the same place. masked: dense arrays times the "
        "mask. random: as many values at random places. unwritten: what the optimizer "
        "computes reaches no weight. Means of two seeds, [lowest, highest]."
    ),
    shows=(
        "A character model was trained with most weights pruned. The compressed "
        "model's line should lie on the masked one's, and below the dashed line."
    ),
    picture=Lines(
        "p = {}",
        "excess",
        rows=("masked", "samo", "random"),
        bound="quality",
        label="loss above dense, %",
        x_label="share of the weights pruned",
    ),
    columns={
        "val_loss": "validation loss",
        "excess": "above dense, %",
        "apart": "farthest from masked's loss",
    },
    reduce=_quality,
    tiers=on_cpu(
        minutes=9.0,
        runs={
            p: Runs(
                config="samo/training",
                overrides={"sparsity": p.removeprefix("p = ")},
                seeds=(0, 1),
            )
            for p in _PRUNED
        },
        trivial=Trivial(rows=_RANDOM, by="val_loss"),
        claims={
            "identical": reduce.most("apart", *_SAMO)
            .at_most(1e-4, "farthest loss of a step from that of masked training")
            .fails(_UNWRITTEN),
            "written": reduce.over("val_loss", "p = 0.9, samo", "p = 0.9, masked")
            .at_most(1.001, "of masked training's validation loss at p = 0.9")
            .fails(_UNWRITTEN),
            "quality": reduce.cell("excess", "p = 0.9, samo")
            .at_most(8.0, "percent above dense training's validation loss at p = 0.9")
            .fails(_UNWRITTEN, {"p = 0.9, samo": "p = 0.9, random"}),
        },
    ),
)

DEVICES = {
    "1.3B": (64, 128, 256, 512),
    "2.7B": (64, 128, 256, 512),
    "6.7B": (128, 256, 512, 1024),
    "13B": (256, 512, 1024, 2048),
}
_SMALL, _LARGE, _WHOLE = "2.7B, G = 128", "2.7B, G = 512", "2.7B, G = 512, dense sums"
_PERCENT = ("speedup", "transmission", "bubble", "collective", "gather")


def _layouts(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns percents of a dense step, and of the devices' peak."""
    table = reduce.by_run(rows)
    percents = [*_PERCENT, "dense_peak", "samo_peak"]
    return table.assign({name: 100 * table[name] for name in percents})


def _layout(model: str, devices: int, variant: str = "samo") -> Runs:
    overrides = {"model": model, "devices": str(devices)}
    return Runs(config=f"samo/layout:{variant}", overrides=overrides)


@reduce.Number
def _growth(table: "xr.Dataset") -> float:
    """Returns the least growth of the speed-up from one number of devices to the next.

    In points, of all models.
    """
    steps = [
        np.diff([table["speedup"].sel(row=f"{model}, G = {count}") for count in counts])
        for model, counts in DEVICES.items()
    ]
    return float(np.min(steps))


def _saved(column: str, row: str) -> reduce.Number:
    return reduce.cell(column, row) * -1.0


@reduce.Number
def _transmission_first(table: "xr.Dataset") -> float:
    """Returns what is saved of transmission over the larger of the other savings."""
    small = table.sel(row=_SMALL)
    others = np.minimum(small["bubble"], small["collective"])
    return float(small["transmission"] / others)


LAYOUTS = Table(
    id="samo/layouts",
    title="Stages and steps of GPT-3's sizes on V100s of 16 GB, p = 0.9",
    paper=(
        f"{PAPER}, table II and figure 8. Faster than AxoNN by 10-47 % (1.3B), 10-34 % "
        "(2.7B), 11-23 % (6.7B), 19-26 % (13B). 2.7B, of AxoNN's step: transmission "
        "-18, bubble -9, collective -6, gather +12 % on 128 devices; -4, -15, -21 and "
        "+8 % on 512. 13B, of peak: 43.3 and 53.4 % on 256 devices"
    ),
    caption=(
        "Formulas of bubble, four messages a micro-batch, ring all-reduce; stages: the "
        "fewest that hold the paper's account of the state. Assumed: products at 45 % "
        "of peak, 4 GB of workspace, six GPUs that share a node's 12.5 GB/s. Fitted: "
        "12 % for gathering on 128 devices. dense sums: a control, whose all-reduces "
        "are not compressed. Changes are of the dense step."
    ),
    shows=(
        "A model of GPT-3's steps was asked what compressed state saves on many "
        "devices. Left of zero is time saved, by its cause; right of it is time added."
    ),
    picture=Bars(
        ("transmission", "bubble", "collective", "gather"),
        stacked=True,
        label="change of a step's time, %",
    ),
    columns={
        "dense_stages": "stages, dense",
        "samo_stages": "stages, SAMO",
        "speedup": "faster by, %",
        "transmission": "transmission, %",
        "bubble": "bubble, %",
        "collective": "collective, %",
        "gather": "gather, %",
        "dense_peak": "dense, % of peak",
        "samo_peak": "SAMO, % of peak",
    },
    reduce=_layouts,
    tiers=by_model(
        minutes=0.3,
        runs={
            **{
                f"{model}, G = {count}": _layout(model, count)
                for model, counts in DEVICES.items()
                for count in counts
            },
            _WHOLE: _layout("2.7B", 512, "dense_sums"),
        },
        claims={
            "grows": _growth.at_least(
                0.0, "points by which the speed-up grows with the devices, least"
            ).fails({"13B, G = 2048": "13B, G = 256"}),
            "transmission first": _transmission_first.at_least(
                1.0, "saved transmission over the next largest, 128 devices"
            ).fails({_SMALL: _LARGE}),
            "then sums and bubbles": (
                (_saved("bubble", _LARGE) - reduce.cell("collective", _LARGE))
                / _saved("transmission", _LARGE)
            )
            .at_least(3.0, "saved bubble and sums over transmission, 512 devices")
            .fails({_LARGE: _SMALL}),
            "sums": _saved("collective", _LARGE)
            .at_least(0.0, "percent of a step saved of sums on 512 devices")
            .fails({_LARGE: _WHOLE}),
        },
    ),
)
