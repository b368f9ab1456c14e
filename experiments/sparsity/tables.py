"""The toolkit's tables: layers that collapse, pruning at once, methods on digits."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from experiments.sparsity.comparison import compare
from hpcjax.optim import sparsify
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines
from hpcjax.runs.reduce import Cells, Number, above, cell
from hpcjax.runs.tables import Runs, Table, by_model, grid, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Sparsity in Deep Learning, JMLR 2021"
SCORES = (
    *("random", "magnitude", "snip", "iterative_snip", "grasp"),
    *("one_round", "synflow"),
)


@reduce.by_row
def collapse(run: "xr.Dataset") -> Cells:
    """Returns what the thinnest layer keeps, and when one is empty."""
    kept = run["kept"]
    means = {f"layer_{at}": kept.isel(layer=at).mean() for at in range(3)}
    return {
        **means,
        **reduce.extent(kept.min("layer"), "thinnest"),
        **reduce.extent(run["empties"], "empties"),
    }


# The worst case of three seeds.
_SNIP_OVER_SYNFLOW: Number = cell("thinnest_high", "snip") / cell(
    "thinnest_low", "synflow"
)
COLLAPSE = Table(
    id="sparsity/collapse",
    title="Weights left to each layer of a perceptron at a density of 0.5 %",
    paper=f"{PAPER}: layers that collapse, no figure; SynFlow, NeurIPS 2020, figure 1",
    caption=(
        "Bias-free 64-100-100-10 with ReLU and He's initialisation, nothing trained; "
        "87 of 17,400 weights are kept, of all layers together. Batches are of 100 "
        "random inputs. Means of three seeds, [least, most]; a layer that scores would "
        "empty keeps one. one_round: SynFlow's score in one round; iterative_snip and "
        "synflow: 100 rounds. A layer empties: the largest density at which one has no "
        "weight; 0: none has, down to a weight for each layer."
    ),
    shows=(
        "A perceptron was pruned to 0.5 % by different scores. A dot far left in any "
        "panel is a layer that is cut off."
    ),
    picture=Dots(("layer_0", "layer_1", "layer_2"), log=True),
    columns={
        "layer_0": "first layer",
        "layer_1": "second",
        "layer_2": "last",
        "thinnest": "thinnest",
        "empties": "a layer empties at, %",
    },
    reduce=collapse,
    tiers=by_model(
        minutes=1.5,
        runs=grid("sparsity/collapse:{0}", SCORES, seeds=(0, 1, 2)),
        claims={
            "synflow": cell("thinnest_low", "synflow")
            .at_least(15.0, "weights of SynFlow's thinnest layer, least of the seeds")
            .fails({"synflow": "snip"}),
            "snip": _SNIP_OVER_SYNFLOW.at_most(
                2 / 3, "weights of SNIP's thinnest layer over SynFlow's, at the worst"
            ).fails({"snip": "synflow", "synflow": "snip"}),
        },
    ),
)


def one_shot(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns means over seeds, and in how many of them magnitude is beaten."""
    (run,) = rows.values()
    cells = {}
    for variant in run["variant"].values.tolist():
        own, base = (run.sel(variant=name) for name in (variant, "magnitude"))
        cells[variant] = {
            **reduce.extent(100 * (1 - own["kept"]), "sparsity"),
            **reduce.extent(own["loss"], "loss"),
            **reduce.extent(own["val_loss"], "val_loss"),
            **reduce.extent(own["accuracy"], "accuracy"),
            "lower": (own["loss"] < base["loss"]).sum(),
            "val_lower": (own["val_loss"] < base["val_loss"]).sum(),
        }
    return reduce.from_cells(cells)


_LIKE_MAGNITUDE = {"woodfisher": "magnitude"}
ONE_SHOT = Table(
    id="sparsity/one-shot",
    title="ResNet-8 on digits pruned at once, and tickets that start again",
    paper=f"{PAPER}: no figure is known; WoodFisher, NeurIPS 2020, its relation",
    caption=(
        "scikit-learn digits, width 8, 300 steps of 128 by SGD with momentum 0.9, rate "
        "0.1 on a cosine; nothing is tuned. The first convolution, the last layer, "
        "norms and biases are not pruned; sparsity is of the rest, the same in every "
        "layer. magnitude and woodfisher (1,000 examples, blocks of 64, damping 1e-5; "
        "damped: 1e-3) are not trained again, and norms keep the dense network's "
        "statistics. Tickets are found in four rounds; drawn again: the ticket's mask "
        "on other initial weights. Means of five seeds, [least, most]; 359 held-out "
        "images, of which one is 0.28 points."
    ),
    shows=(
        "A trained network was pruned at once, or started again with its mask. On the "
        "left lower loss is better, on the right higher accuracy."
    ),
    picture=Dots(("loss", "accuracy")),
    columns={
        "sparsity": "sparsity, %",
        "loss": "training loss",
        "val_loss": "held-out loss",
        "accuracy": "accuracy, %",
        "lower": "seeds in which the training loss is below magnitude's",
        "val_lower": "the held-out loss",
    },
    reduce=one_shot,
    tiers=on_cpu(
        minutes=5.0,
        runs={"digits": Runs(config="sparsity/one_shot", seeds=(0, 1, 2, 3, 4))},
        claims={
            "woodfisher": cell("lower", "woodfisher")
            .at_least(5.0, "of 5 seeds, WoodFisher's training loss below magnitude's")
            .fails(_LIKE_MAGNITUDE),
            "woodfisher, held out": cell("val_lower", "woodfisher")
            .at_least(5.0, "of 5 seeds, WoodFisher's held-out loss below magnitude's")
            .fails(_LIKE_MAGNITUDE),
            "rewinding": above("accuracy", "rewound", "drawn again")
            .at_least(-0.5, "rewound above its mask on other weights, points")
            .fails({"rewound": "untrained"}),
        },
    ),
)


@reduce.by_row
def support(run: "xr.Dataset") -> Cells:
    """Returns means over seeds."""
    return {
        **reduce.extent(100 * run["found"], "found"),
        **reduce.extent(run["error"], "error"),
    }


_GROWTH = {
    **{"static": "nothing", "SET": "random", "RigL": "gradient"},
    "RigL, smallest gradients": "smallest",
}
SUPPORT = Table(
    id="sparsity/support",
    title="Weights of a sparse linear teacher that a student finds, by how it grows",
    paper=f"{PAPER}: where weights grow matters; no figure is known",
    caption=(
        "200 inputs, 10 outputs, a tenth of the 2,000 weights is not zero, of the "
        "student as of the teacher; 3,000 steps of SGD, rate 0.1, on 64 new examples; "
        "masks change every 50 steps until three quarters of them. Means of three "
        "seeds, [least, most]. error: of all weights, over the teacher's norm."
    ),
    shows=(
        "A sparse student looked for the weights of its teacher. Right of the line it "
        "finds nearly all: growth by gradients should, at random should not."
    ),
    picture=Dots("found", bound="RigL"),
    columns={
        "found": "active weights that are the teacher's, %",
        "error": "error",
    },
    reduce=support,
    tiers=on_cpu(
        minutes=1.5,
        runs=grid(
            "sparsity/support",
            {row: {"grow": grow} for row, grow in _GROWTH.items()},
            seeds=(0, 1, 2),
        ),
        claims={
            "RigL": cell("found_low", "RigL")
            .at_least(95.0, "percent found by growth by gradients, least of the seeds")
            .fails({"RigL": "RigL, smallest gradients"}),
            "SET": above("found_low", "RigL", "SET")
            .at_least(20.0, "points by which growth by gradients finds more than SET")
            .fails({"RigL": "SET"}),
            "SET, half": abs(cell("found", "SET") - 60.0)
            .at_most(20.0, "points from 60 % found by growth at random")
            .fails({"SET": "static"}),
            "static": cell("found_high", "static")
            .at_most(20.0, "percent found by masks that stay, most of the seeds")
            .fails({"static": "SET"}),
        },
    ),
)

METHODS = {
    **{"one shot": "pruning:one_shot", "gradual": "pruning:gradual"},
    **{"static": "digits:static", "SET": "digits:set_", "RigL": "digits:rigl"},
    "straight-through": "views:straight_through",
}
OTHERS = {
    **{"random": "pruning:random", "saliency": "pruning:saliency"},
    **{"movement": "pruning:movement", "all layers": "pruning:together"},
    **{"AC/DC": "pruning:alternating", "SNFS": "digits:snfs", "DSR": "digits:dsr"},
    "learned scores": "views:movement",
}
# They become as sparse as their weights in the loss have them.
LEARNED = {
    "variational dropout": "views:variational_dropout",
    "soft threshold": "views:soft_threshold",
}
FEW, SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)


LEVELS = (80, 90, 95, 98)


def _sparse(method: str, level: int) -> Runs:
    seeds = SEEDS if level == 95 and method in METHODS else FEW
    share = {"sparsity.distribution.sparsity": str(level / 100)}
    config = f"sparsity/{(METHODS | OTHERS)[method]}"
    return Runs(config=config, overrides=share, seeds=seeds)


def _top_kast(level: int) -> Runs:
    trained = str((2 * level - 100) / 100)
    shares = {"sparsity.forward": str(level / 100), "sparsity.backward": trained}
    return Runs(config="sparsity/views:top_kast", overrides=shares, seeds=FEW)


def _dense(seeds: tuple[int, ...] = FEW, **overrides: str) -> Runs:
    changes = {key.replace("_", ".", 1): text for key, text in overrides.items()}
    return Runs(config="sparsity/digits:dense", overrides=changes, seeds=seeds)


DIGITS = Table(
    id="sparsity/digits",
    shows=(
        "A network was pruned to four levels by different rules. Above zero a rule is "
        "better than masks that never change."
    ),
    picture=Lines(
        "{} %",
        "over_static",
        rows=("SET, ", "RigL, ", "gradual, ", "straight", "SNFS", "DSR", "Top-KAST"),
        label="points above static masks",
        x_label="weights pruned, %",
    ),
    title="Accuracy of ResNet-8 on digits by how its weights are pruned",
    paper=(
        f"{PAPER}, reproduces ImageNet's, figures not known; RigL, ICML 2020, and "
        "Zhu and Gupta, 2017: the relations"
    ),
    caption=(
        "scikit-learn digits, width 8, 300 steps of 128 by SGD with momentum 0.9, rate "
        "0.1 on a cosine, tuned for no row (soft threshold: with a weight decay of "
        "5e-3). The first convolution and the last layer, norms and biases are dense; "
        "ERK, or all layers together, over the rest, of "
        "which sparsity is. Masks of RigL, SET, SNFS and DSR move every 20 steps, "
        "gradual ones change ten times until step 210; one shot: in the last step. "
        "Straight-through, learned scores and Top-KAST (in every layer alike, twice "
        "as many weights are trained as seen) have theirs from the first step; rows "
        "without a level become as sparse as their weight in the loss has them. "
        "Dense in 60 and 15 steps: about the operations of a sparse network of 80 and "
        "95 %. Means of 3 seeds, of 5 where something is claimed, [least, most]; "
        "differences by seed, in points, p by a one-sided paired t-test. E: accuracy "
        "for 1,000 parameters; E_h: 1/(1 - accuracy). Slack: the largest compression "
        "of the method within 0, 0.5 and 1 point of dense, of those made here. 359 "
        "held-out images, of which one is 0.28 points."
    ),
    columns={
        "accuracy": "accuracy, %",
        "sparsity": "sparsity, %",
        "over_static": "above static",
        "over_static_chance": "p",
        "over_set": "above SET",
        "over_one_shot": "above one shot",
        "efficiency": "E",
        "hard_efficiency": "E_h",
        "slack_0": "slack 0",
        "slack_half": "0.5",
        "slack_1": "1",
    },
    reduce=compare,
    tiers=on_cpu(
        minutes=35.0,
        runs={
            "dense": _dense(SEEDS),
            "dense, 60 steps": _dense(train_steps="60"),
            "dense, 15 steps": _dense(train_steps="15"),
            "2:4": Runs(config="sparsity/pruning:two_of_four", seeds=FEW),
            **{
                f"{method}, {level} %": _sparse(method, level)
                for method in METHODS | OTHERS
                for level in LEVELS
            },
            **{f"Top-KAST, {level} %": _top_kast(level) for level in LEVELS},
            **{m: Runs(config=f"sparsity/{c}", seeds=FEW) for m, c in LEARNED.items()},
        },
        claims={
            "RigL": cell("over_static_chance", "RigL, 95 %")
            .at_most(0.05, "p that RigL is no better than static masks, 95 %")
            .fails({"RigL, 95 %": "static, 95 %"}),
            "SET": cell("over_static_chance", "SET, 95 %")
            .at_most(0.05, "p that SET is no better than static masks, 95 %")
            .fails({"SET, 95 %": "static, 95 %"}),
            "RigL and SET": cell("over_set", "RigL, 95 %")
            .at_least(-0.5, "points by which RigL is above SET, 95 %")
            .fails({"RigL, 95 %": "one shot, 95 %"}),
            "gradual": cell("over_one_shot", "gradual, 95 %")
            .at_least(2.0, "points by which gradual is above one shot, 95 %")
            .fails({"gradual, 95 %": "one shot, 95 %"}),
            "straight-through": cell("over_one_shot", "straight-through, 95 %")
            .at_least(2.0, "points by which straight-through is above one shot, 95 %")
            .fails({"straight-through, 95 %": "one shot, 95 %"}),
        },
    ),
)


_FAR = {
    **{"one shot": "one_shot", "random": "random", "gradual": "gradual"},
    **{"straight-through": "straight_through", "static": "static", "SET": "set_"},
    "RigL": "rigl",
}


def _perceptron(variant: str, level: int | None = None) -> Runs:
    share = "sparsity.distribution.sparsity"
    overrides = {} if level is None else {share: str(level / 100)}
    config = f"sparsity/perceptron:{variant}"
    return Runs(config=config, overrides=overrides, seeds=FEW)


def far_from_dense(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns `compare`'s table, with errors and operations over dense ones."""
    table = compare(rows)
    pairs = zip(table["row"].values, table["sparsity"].values, strict=True)
    operations = [_operations(str(row), 1 - sparsity / 100) for row, sparsity in pairs]
    error = 100 - table["accuracy"]
    return table.assign(error=error, operations=("row", operations))


def _operations(row: str, left: float) -> float:
    """Returns them by formula, where a network is as sparse in all steps, else NaN."""
    method = row.partition(",")[0]
    if method in ("static", "SET"):
        return left
    grows = method == "RigL"
    return sparsify.training_flops(left, 1.0, every=25) / 3 if grows else math.nan


_STATIC, _RIGL, _SET = "static, 98 %", "RigL, 98 %", "SET, 98 %"
METHODS_FAR = Table(
    id="sparsity/methods",
    title="A perceptron on digits of which a fiftieth of the weights is left",
    paper=f"{PAPER}: relations; RigL, ICML 2020, and Zhu and Gupta, 2017",
    caption=(
        "64-300-100-10, 1,004 of 50,200 weights at 98 %; ERK; 600 steps of 64 by Adam, "
        "rate 3e-3 on a cosine, tuned for no row. Masks of RigL and SET move every 25 "
        "steps until step 450, gradual ones change 16 times until step 435; one shot "
        "and random: in the last step. narrow: a dense 64-12-12-10, 1,032 weights. "
        "Means of three seeds, [least, most]; differences by seed, in points. "
        "operations: of training, over dense ones, by formula; nothing is faster here. "
        "359 held-out images, of which one is 0.28 points."
    ),
    shows=(
        "A perceptron on digits kept a fiftieth of its weights, by different rules. "
        "Further right is better: compare RigL, SET and masks that stay."
    ),
    picture=Dots("accuracy", sort=True),
    columns={
        "accuracy": "accuracy, %",
        "error": "error, %",
        "sparsity": "sparsity, %",
        "operations": "operations / dense",
        "over_static": "above static",
        "over_set": "above SET",
        "over_one_shot": "above one shot",
    },
    reduce=far_from_dense,
    tiers=on_cpu(
        minutes=6.0,
        runs={
            "dense": _perceptron("dense"),
            "narrow": _perceptron("narrow"),
            "2:4": _perceptron("two_of_four"),
            **{f"{name}, 98 %": _perceptron(at, 98) for name, at in _FAR.items()},
            **{
                f"{name}, 90 %": _perceptron(_FAR[name], 90)
                for name in ("gradual", "static", "SET", "RigL")
            },
        },
        claims={
            "RigL": cell("over_static", _RIGL)
            .at_least(4.0, "points by which RigL is above static masks")
            .fails({_RIGL: _STATIC}),
            "SET": cell("over_static", _SET)
            .at_least(3.0, "points by which SET is above static masks")
            .fails({_SET: _STATIC}),
            "RigL and SET": cell("over_set", _RIGL)
            .at_least(-0.5, "points by which RigL is above SET")
            .fails({_RIGL: _STATIC}),
            "gradual": cell("over_one_shot", "gradual, 98 %")
            .at_least(30.0, "points by which gradual is above one shot")
            .fails({"gradual, 98 %": "one shot, 98 %"}),
            "narrow": above("accuracy", _RIGL, "narrow")
            .at_least(-1.0, "points by which RigL is above a narrow dense network")
            .fails({_RIGL: _STATIC}),
        },
    ),
)
