"""Tables of compressed activations: bytes of sums, and what they cost in accuracy."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.mpcompress.time_tables import TIME  # noqa: F401 - a table of it
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import above, cell
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

EIGHT, FOUR, TWO = "8 bits", "4 bits", "2 bits"
LEARNT, TOP, RANDOM = "autoencoder, 3 of 64", "Top-k", "Random-k"
ALL, ALL_LAYERS = "without", "2 bits, all layers"
PRETENDED = "decoded, then summed"
_STAGES = ", between stages"
STAGED = tuple(name + _STAGES for name in (EIGHT, LEARNT, TOP, RANDOM))
PASSED = PRETENDED + _STAGES
CODECS = (EIGHT, FOUR, TWO, LEARNT, TOP, RANDOM, ALL_LAYERS)


def _on(name: str = "", of: str = "sums", **overrides: str) -> Runs:
    own = {f"codec.{key}": text for key, text in overrides.items()}
    return Runs(config=f"mpcompress/{of}{name}", overrides=own)


_VARIANTS = "", ":autoencoder", ":topk", ":randomk", ":pretended"
_BOUNDARY = {
    row: _on(name, "boundaries")
    for row, name in zip((*STAGED, PASSED), _VARIANTS, strict=True)
}


BYTES = Table(
    id="mpcompress/bytes",
    title="Compressed activations: bytes that a device sends to sum them",
    paper=(
        "Bian et al., MLSys 2024: codecs of activations in tensor parallelism; by "
        "gathers of four devices 8 bits are as much as the sum of float16, which "
        "follows from its form"
    ),
    caption=(
        "Four layers of width 64 on 4 simulated devices, 256 tokens, float32; sums of "
        "the last two layers, of all layers in one row, read from the compiled step. "
        "bytes: a device's in a step; codec: over what the codec says of itself; "
        "float32: over an all-reduce; float16: the codec's over one of float16, "
        "computed. Top-k and Random-k send the autoencoder's bytes. decoded, then "
        "summed: 8 bits, between stages the autoencoder, the control. Between two "
        "stages, by 1F1B of two micro-batches: up, down: what is permuted, over what "
        "the codec or its slope takes in all ticks."
    ),
    shows=(
        "What devices send to sum activations was compressed, and counted in the "
        "compiled program. Further left sends less; a codec that only pretends to, the "
        "control, sends all."
    ),
    picture=Dots("part", label="bytes / those of an all-reduce of float32", log=True),
    columns={
        "sums": "bytes",
        "ratio": ("codec", lambda run: run["sums"] / run["wire"]),
        "part": ("float32", lambda run: run["sums"] / run["whole"]),
        "gathered": ("gathered", lambda run: run["gathers"] / run["wire"]),
        "half": "float16",
        "up": ("up", lambda run: run["up"] / run["wire"]),
        "down": ("down", lambda run: run["down"] / run["slopes"]),
    },
    tiers=on_cpu(
        minutes=8.0,
        devices=4,
        runs={
            ALL: _on(":whole"),
            EIGHT: _on(),
            FOUR: _on(bits="4"),
            TWO: _on(bits="2"),
            LEARNT: _on(":autoencoder"),
            TOP: _on(":topk"),
            RANDOM: _on(":randomk"),
            ALL_LAYERS: _on(bits="2", start="0"),
            PRETENDED: _on(":pretended"),
            **_BOUNDARY,
        },
        claims={
            "to the byte": abs(reduce.of("ratio", *CODECS) - 1)
            .largest()
            .at_most(0.01, "of what the codec says, the farthest")
            .fails({EIGHT: PRETENDED}),
            "gathered": reduce.least("gathered", EIGHT, FOUR, TWO, TOP, RANDOM)
            .at_least(0.99, "of a codec's bytes that are gathered as codes, at least")
            .fails({EIGHT: PRETENDED}),
            "2 bits": cell("part", TWO)
            .at_most(0.13, "of an all-reduce's bytes by 2 bits on 4 devices")
            .fails({TWO: EIGHT}),
            "8 bits": abs(cell("half", EIGHT) - 1)
            .at_most(0.01, "between a gather of 8 bits and a sum of float16 at t = 4")
            .fails({EIGHT: FOUR}),
            "up": abs(reduce.of("up", *STAGED) - 1)
            .largest()
            .at_most(0.01, "of a code of all ticks that stages permute, the farthest")
            .fails({STAGED[1]: PASSED}),
            "down": abs(reduce.of("down", *STAGED) - 1)
            .largest()
            .at_most(0.01, "of a code's slope that comes back, the farthest")
            .fails({STAGED[1]: PASSED}),
        },
    ),
)

SEEDS = (0, 1, 2)
BEFORE, PLAIN = "pre-trained", "without"
UNIGRAM, BIGRAM = "table of characters", "table of pairs"
HALF, EVERY = ", last half", ", all layers"
LEFT = "no branches in the last half"
AUTO, THROUGH = "autoencoder", "Top-k, slope of all"
_HALF = {
    EIGHT: "eight",
    TWO: "two",
    AUTO: "autoencoder",
    "wide autoencoder": "wide",
    TOP: "topk",
    THROUGH: "through",
    RANDOM: "randomk",
}
_EVERY = (EIGHT, AUTO, TOP, RANDOM)
_SHOWN = (TWO, "wide autoencoder", RANDOM)  # of one seed
_LOSSY = AUTO, TOP


def _tune(name: str, variant: str, start: str = "none") -> Runs:
    own = {} if start == "none" else {"codec.start": start}
    seeds = SEEDS[:1] if name in _SHOWN else SEEDS
    config = f"mpcompress/layers:{variant}"
    return Runs(config=config, seeds=seeds, overrides=own, after=BEFORE)


def _error(run: "xr.Dataset") -> float:
    return 100 * float(np.ravel(run["val_error"])[-1])


LAYERS = Table(
    id="mpcompress/layers",
    title="Compressed activations: in which layers a language model forgives them",
    paper=(
        "Bian et al., MLSys 2024: by default the last half of the layers is "
        "compressed; figures are not known here"
    ),
    caption=(
        "Characters of the King James Bible in windows of 64. Four layers of width 64 "
        "on 2 simulated devices, pre-trained for 1,500 steps without a codec, then "
        "tuned for 200 at a third of the rate with one in the sums of the last two "
        "layers or of all, in validation too. The autoencoder sends 3 numbers of 64, "
        "the wide one 6; Top-k and Random-k its bytes, 1 of 43 of a batch's numbers "
        "with their places. Their slope is that of what they send, once that of all "
        "numbers; quantizers' pass through. error: % of validation's characters; rise: "
        "points above what was tuned without a codec, of the same seed. Mean and range "
        "of three seeds; 2 bits, the wide autoencoder and Random-k have one."
    ),
    shows=(
        "A small language model was tuned with what its devices send compressed, in "
        "the last half of its layers or in all. Further left has lost less; what is no "
        "better than the network without these branches sends nothing that helps."
    ),
    picture=Dots("rise", by=", ", rows=(HALF, EVERY, LEFT)),
    columns={
        "error": ("error, %", _error),
        "rise": ("points", lambda run, rows: _error(run) - _error(rows[PLAIN])),
    },
    over=reduce.extent,
    tiers=on_cpu(
        minutes=25.0,
        devices=2,
        runs={
            UNIGRAM: Runs(config="mpcompress/counted:unigram"),
            BIGRAM: Runs(config="mpcompress/counted"),
            BEFORE: Runs(config="mpcompress/layers", seeds=SEEDS),
            PLAIN: _tune(PLAIN, "tuned"),
            **{name + HALF: _tune(name, variant) for name, variant in _HALF.items()},
            **{name + EVERY: _tune(name, _HALF[name], "0") for name in _EVERY},
            LEFT: _tune(LEFT, "left_out"),
        },
        claims={
            "learnt": (reduce.least("error", UNIGRAM, BIGRAM) - cell("error", PLAIN))
            .at_least(10, "points below the better table of counts")
            .fails({PLAIN: BIGRAM}),
            "last half": abs(
                reduce.of("rise", *(name + HALF for name in _HALF if name != THROUGH))
            )
            .largest()
            .at_most(1, "points from no codec, the farthest in the last half")
            .fails({TOP + HALF: TOP + EVERY}),
            "all layers": (
                reduce.of("rise", *(name + EVERY for name in _LOSSY))
                - reduce.of("rise", *(name + HALF for name in _LOSSY))
            )
            .least()
            .at_least(5, "points that all layers cost more, autoencoder and Top-k")
            .fails({AUTO + EVERY: EIGHT + EVERY}),
            "8 bits": abs(cell("rise", EIGHT + EVERY))
            .at_most(1, "points from no codec of 8 bits in all layers")
            .fails({EIGHT + EVERY: TOP + EVERY}),
            "slope": above("rise", THROUGH + HALF, TOP + HALF)
            .at_least(10, "points that Top-k loses by a slope of what is not sent")
            .fails({THROUGH + HALF: TOP + HALF}),
            "left out": abs(above("rise", AUTO + HALF, LEFT))
            .at_most(1, "points between the autoencoder and no branches at all")
            .fails({AUTO + HALF: EIGHT + HALF}),
        },
    ),
)

WIDE, MANY = "wide autoencoder", "Top-k, as many numbers"
_BETWEEN = {
    EIGHT: "eight",
    FOUR: "four",
    TWO: "two",
    AUTO: "autoencoder",
    WIDE: "wide",
    TOP: "topk",
    MANY: "ratio",
    RANDOM: "randomk",
}
_SINGLE = TWO, MANY  # of one seed


def _stages(name: str, variant: str = "", after: str = BEFORE) -> Runs:
    seeds = range(1 if name in _SINGLE else 5)
    config = f"mpcompress/stages{variant and ':'}{variant}"
    return Runs(config=config, seeds=(*seeds,), after=after)


def _grid(variant: str, **parallel: str) -> Runs:
    own = {f"parallel.{key}": text for key, text in parallel.items()}
    config = f"mpcompress/stages:{variant}"
    return Runs(config=config, seeds=SEEDS, overrides=own, after=BEFORE)


def _count(variant: str = "") -> Runs:
    # Of the same validation.
    own = {"dataset.validation": "0.01"}
    return Runs(config=f"mpcompress/counted{variant}", overrides=own)


def _errors(values: "xr.DataArray", column: str) -> dict[str, float]:
    """Returns the mean, and what is two standard errors of it below and above."""
    mean, count = float(values.mean(skipna=False)), values.size
    wide = (
        2 * float(values.std(ddof=1, skipna=False)) / count**0.5 if count > 1 else 0.0
    )
    return {column: mean, f"{column}_low": mean - wide, f"{column}_high": mean + wide}


_COLUMNS = {
    "error": ("error, %", _error),
    "rise": ("points", lambda run, rows: _error(run) - _error(rows[PLAIN])),
    "apart": ("from Top-k", lambda run, rows: _error(run) - _error(rows[TOP])),
}

# Of two stages, and of two stages of two devices each.
_IN_BOTH = {
    "learnt": (reduce.least("error", UNIGRAM, BIGRAM) - cell("error", PLAIN))
    .at_least(10, "points below the better table of counts")
    .fails({PLAIN: BIGRAM}),
    "autoencoder": cell("apart_high", AUTO)
    .at_most(-0.5, "points above Top-k of its bytes, and two standard errors")
    .fails({AUTO: TOP}),
    "A2": cell("rise", WIDE)
    .at_most(2, "points that the wide autoencoder is above no codec")
    .fails({WIDE: TOP}),
}

ACCURACY = Table(
    id="mpcompress/accuracy",
    title="Compressed activations: what codecs between two stages cost in accuracy",
    paper=(
        "Bian et al., MLSys 2024: quantizers of 8 and 4 bits and autoencoders are as "
        "accurate as no codec, Top-k of their bytes clearly worse, Random-k much "
        "worse; figures are not known here"
    ),
    caption=(
        "Characters of the King James Bible in windows of 64. Four layers of width 64, "
        "pre-trained for 900 steps without a codec, then tuned for 100 at a third of "
        "the rate in two stages by 1F1B, whose micro-batches are encoded between "
        "them, in validation too. The autoencoder sends 3 numbers of 64, the wide one "
        "6; Top-k and Random-k its bytes, 1 of 43 numbers, or as many numbers. error: "
        "% of validation's characters; rise: points above no codec, apart: above "
        "Top-k, of the same seed. Means of five seeds and two standard errors to both "
        "sides; 2 bits and Top-k of as many numbers have one."
    ),
    shows=(
        "A small language model was tuned in two stages that send each other codes. "
        "Further left has lost less to its codec."
    ),
    picture=Dots("rise"),
    columns=_COLUMNS,
    over=_errors,
    tiers=on_cpu(
        minutes=20.0,
        devices=2,
        runs={
            UNIGRAM: _count(":unigram"),
            BIGRAM: _count(),
            BEFORE: _stages(BEFORE, after=""),
            PLAIN: _stages(PLAIN, "tuned"),
            **{name: _stages(name, variant) for name, variant in _BETWEEN.items()},
        },
        claims={
            **_IN_BOTH,
            "quantized": abs(reduce.of("rise", EIGHT, FOUR))
            .largest()
            .at_most(1, "points from no codec, the farther of 8 and 4 bits")
            .fails({FOUR: TOP}),
            "Random-k": cell("apart_low", RANDOM)
            .at_least(0.5, "points above Top-k, less two standard errors")
            .fails({RANDOM: TOP}),
            "chance": above("error", UNIGRAM, RANDOM)
            .at_most(10, "points that Random-k is below the table of characters")
            .fails({RANDOM: PLAIN}),
        },
    ),
)

WHOLE = "without stages"
_GRID = {PLAIN: "tuned"} | {name: _BETWEEN[name] for name in (FOUR, AUTO, WIDE, TOP)}

GRID = Table(
    id="mpcompress/grid",
    title="Compressed activations: codecs within and between stages of two devices",
    paper=(
        "Bian et al., MLSys 2024: two devices in each of two stages, both sums and "
        "what passes between the stages compressed; figures are not known here"
    ),
    caption=(
        "The network of mpcompress/accuracy, tuned in two stages of two devices each, "
        "which encode what they send to sum activations of the last two layers, and "
        "what passes between the stages. without stages: on four devices of which "
        "each has all layers. error: % of validation's characters; rise: points above "
        "two stages of two devices without a codec, apart: above Top-k, of the same "
        "seed. Means of three seeds and two standard errors to both sides."
    ),
    shows=(
        "A small language model was tuned in two stages of two devices, with codecs "
        "both in a stage and between them. Further left has lost less to its codec."
    ),
    picture=Dots("rise"),
    columns=_COLUMNS,
    over=_errors,
    tiers=on_cpu(
        minutes=15.0,
        devices=4,
        runs={
            UNIGRAM: _count(":unigram"),
            BIGRAM: _count(),
            BEFORE: Runs(config="mpcompress/stages", seeds=SEEDS),
            WHOLE: _grid("whole"),
            **{name: _grid(variant, tensor="2") for name, variant in _GRID.items()},
        },
        claims={
            **_IN_BOTH,
            "grid": abs(cell("rise", WHOLE))
            .at_most(0.2, "points between two stages of two devices and no stages")
            .fails({WHOLE: WIDE}),
            "quantized": abs(cell("rise", FOUR))
            .at_most(1, "points from no codec of 4 bits in both places")
            .fails({FOUR: TOP}),
        },
    ),
)
