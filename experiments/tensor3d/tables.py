"""Tables of Tensor3D: what every grid sends, and what two pieces of a batch hide."""

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots
from hpcjax.runs.reduce import cell
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

if TYPE_CHECKING:
    import xarray as xr

_OPTIMUS, _COLOSSAL = "Optimus, 2x2", "Colossal-AI 3D, 2x2x2"
_MARKED, _BROKEN = "x marked by each", "norms of own features"
_EARLY, _LATE, _IN_TURN = "dW while dx is summed", "dW first", "in turn"
RATIOS = ("0.5", "0.75", "1", "1.5", "2")
VOCABULARIES = ("512", "2048", "4096")


AXES = ("data", "depth", "row", "col")


def _list_grids(devices: int) -> list[tuple[int, ...]]:
    """Returns all grids of data, depth, row and col."""
    sizes = [each for each in range(1, devices + 1) if devices % each == 0]
    every = itertools.product(sizes, repeat=len(AXES))
    return [grid for grid in every if math.prod(grid) == devices]


def _on(grid: tuple[int, ...], words: str = "512", name: str = "base") -> Runs:
    """Returns the run on a grid, with a vocabulary of so many words."""
    own = {f"parallel.{axis}": str(size) for axis, size in zip(AXES, grid, strict=True)}
    del own["parallel.data"]
    sizes = {"dataset.vocabulary": words, "devices": str(math.prod(grid))}
    return Runs(config=f"tensor3d/grids:{name}", overrides={**own, **sizes})


def _name(grid: tuple[int, ...], words: str = "512") -> str:
    """Returns a row's name."""
    return f"{words} words, {math.prod(grid)} devices, {'x'.join(map(str, grid))}"


_ALL = {
    _name(grid, words): _on(grid, words, "trained" if words == "512" else "base")
    for words in VOCABULARIES
    for grid in _list_grids(8)
} | {_name(grid): _on(grid) for grid in _list_grids(16) if grid[:2] == (1, 1)}
_WIDE, _BEST, _TALL = (_name((1, 1, row, 16 // row)) for row in (1, 2, 8))
_MEGATRON_8, _TWO_BY_4 = _GRIDS_8 = (1, 1, 1, 8), (1, 1, 2, 4)
_FLAT, _TWO = map(_name, _GRIDS_8)
_OURS = [f"{words} words" for words in VOCABULARIES]


def _count_excess(table: "xr.Dataset") -> float:
    """Returns the most that a chosen grid sends, over the least of all grids."""
    found = []
    for words in VOCABULARIES:
        rows = reduce.rows_of(table, f"{words} words, 8 devices")
        sent = rows["words"].values
        found.append(sent[rows["whole"].values.argmax()] / sent.min())
    return float(np.max(found))


GRIDS = Table(
    id="tensor3d/grids",
    title="Tensor3D: words that a device sends for a language model",
    paper=(
        "Singh et al., arXiv 2305.13525, 2023: G_c - 1 + 3 (G_r - 1) for a block, "
        "least at G_c = √(3 G); a U-Net of 28 billion parameters trains in nearly 60 % "
        "less time than with Megatron-LM (abstract), which no run here repeats"
    ),
    caption=(
        "Two blocks of width 64 with 16 heads and a tied head, 64 tokens: data x depth "
        "x rows x columns of the grid; 1x1x1xG is Megatron's. Words that a device "
        "sends in a step of training, by rings, read from the compiled program of "
        "simulated devices, and those of one turn of its loops, a block. Formula: "
        "`cost.comm_volume`; planned: `cost.best_grid` puts this grid first, for the "
        "whole model or for its blocks' matrices alone. distance: parameters' after "
        "three steps. x marked by each: query, key and value take x by themselves, on "
        "1x1x1x8. norms of own features: moments are not summed, on 1x1x2x4. Peers: a "
        "pair of layers, 64 to 192 to 64 features, 32 rows; Tensor3D's words over "
        "theirs, on the best and the worst grid of as many devices."
    ),
    shows=(
        "A language model was spread over grids of devices, and what each sends was "
        "counted. Further left sends less: the planner chooses the leftmost grid of "
        "eight devices for each vocabulary."
    ),
    picture=Dots("words", rows=("1x1x",), log=True),
    columns={
        "words": ("words", lambda run: run["sent"].sum() / 4),
        "ratio": (
            "words / formula",
            lambda run: run["sent"].sum() / 4 / run["formula"],
        ),
        "block": ("a block's", lambda run: run["block"].sum() / 4),
        "further": (
            "less the formula's",
            lambda run: run["block"].sum() / 4 - run["turn"],
        ),
        "whole": "planned",
        "matrices": "by blocks alone",
        "ours": ("ours / theirs", lambda run: 4 * run["ours"] / run["sent"]),
        "worst": ("worst grid / theirs", lambda run: 4 * run["worst"] / run["sent"]),
        "apart": "distance from one device",
    },
    tiers=on_cpu(
        minutes=11.0,
        devices=16,
        runs={
            **_ALL,
            _MARKED: _on(_MEGATRON_8, name="marked"),
            _BROKEN: _on(_TWO_BY_4, name="broken"),
            _OPTIMUS: Runs(config="tensor3d/products"),
            _COLOSSAL: Runs(config="tensor3d/products:cube"),
        },
        claims={
            "to the word": abs(reduce.of("further", *_OURS))
            .largest()
            .at_most(0.1, "words by which a block's differ from the formula's, at most")
            .fails({_FLAT: _MARKED}),
            "planner": reduce.Number(_count_excess)
            .at_most(1.0, "of the least of all 20 grids, for three vocabularies")
            .fails(columns={"whole": "matrices"}),
            "Megatron": reduce.over("block", _BEST, _WIDE)
            .at_most(0.70, "of Megatron's words for a block on the best grid of 16")
            .fails({_BEST: _TALL}),
            "peers": reduce.most("ours", _OPTIMUS, _COLOSSAL)
            .at_most(0.5, "of the words of Optimus and of Colossal-AI 3D, at the most")
            .fails(columns={"ours": "worst"}),
            "equal": reduce.most("apart", "512 words, 8 devices")
            .at_most(1e-5, "farthest parameter from one device's, on all grids of 8")
            .fails({_TWO: _BROKEN}),
        },
    ),
)


def _at(ratio: str) -> reduce.Cell:
    """Makes a cell: what is exposed where products take so much longer than sums."""
    return lambda run: run["exposed"].sel(ratio=float(ratio))


def _distance(row: str, paper: tuple[float, ...]) -> reduce.Number:
    """Reads how far a row is from the figures, at the most."""

    def read(table: "xr.Dataset") -> float:
        ours = [float(table[f"at_{ratio}"].sel(row=row)) for ratio in RATIOS]
        return float(np.abs(np.subtract(ours, paper)).max())

    return reduce.Number(read)


OVERLAP = Table(
    id="tensor3d/overlap",
    title="Tensor3D: exposed communication of two pieces over one's",
    paper=(
        "Singh et al., arXiv 2305.13525, 2023, section 5: two independent halves of a "
        "batch hide each other's all-reduces; no figure of it is known"
    ),
    caption=(
        "24 equal layers on a device with a queue of products and one of all-reduces, "
        "without latency; columns: time of the products over that of the all-reduces. "
        "The floor at 0.5 is the link, which is never idle. in turn: a piece begins "
        "when the one before is summed."
    ),
    shows=(
        "A batch was cut in two pieces, so that one computes while the other sends. "
        "Shorter leaves less sending exposed, from slow links to fast ones."
    ),
    picture=Bars(
        ("at_0.5", "at_0.75", "at_1", "at_1.5", "at_2"), label="exposed / one piece's"
    ),
    columns={f"at_{ratio}": (f"at {ratio}", _at(ratio)) for ratio in RATIOS},
    tiers=by_model(
        minutes=0.2,
        runs={
            _LATE: Runs(config="tensor3d/overlap"),
            _EARLY: Runs(config="tensor3d/overlap:early"),
            _IN_TURN: Runs(config="tensor3d/overlap:in_turn"),
        },
        claims={
            "dW first": _distance(_LATE, (0.50, 0.26, 0.17, 0.0, 0.0))
            .at_most(0.02, "from 0.50, 0.26, 0.17, 0, 0 of one piece's")
            .fails({_LATE: _IN_TURN}),
            "dW while dx is summed": _distance(_EARLY, (0.60, 0.34, 0.25, 0.0, 0.0))
            .at_most(0.02, "from 0.60, 0.34, 0.25, 0, 0 of one piece's")
            .fails({_EARLY: _IN_TURN}),
        },
    ),
)


_LARGE = {
    "5 B, 32": {"width": "4096", "devices": "32"},
    "10 B, 64": {"width": "5760", "devices": "64"},
    "20 B, 128": {"width": "8192", "devices": "128"},
    "40 B, 256": {"width": "11520", "devices": "256"},
}


def _parts(axis: str) -> reduce.Cell:
    """Makes a cell: the grid's size along an axis."""
    return lambda run: run["grid"].sel(axis=axis)


_TENSOR, _MEGATRON = "40 B, 256, Tensor3D", "40 B, 256, Megatron"
WEAK_SCALING = Table(
    id="tensor3d/weak-scaling",
    title="Tensor3D: the planner's grids for models of 5 to 40 billion parameters",
    paper=(
        "Singh et al., arXiv 2305.13525, 2023: GPTs of 5 to 40 billion parameters on "
        "32 to 256 GPUs; their sizes are recalled"
    ),
    caption=(
        "24 blocks of width 4096, 5760, 8192 and 11520, 1,024 sequences of 2,048 "
        "tokens, devices of 40 GB, 16 bytes of each parameter. Words that a device "
        "sends in a step by the cost model, on the best grid of each kind that fits: "
        "one row (Megatron), rows and columns, and depth too. Nothing is measured."
    ),
    shows=(
        "The planner chose grids for larger and larger models. Left of the line a "
        "device sends at most 0.7 of Megatron's words."
    ),
    picture=Dots(
        "part",
        by=" B, ",
        bound="fewer words",
        label="words a device sends / Megatron's",
    ),
    columns={
        "words": "words",
        "part": "of Megatron's",
        "parts_data": ("data", _parts("data")),
        "parts_depth": ("depth", _parts("depth")),
        "parts_row": ("rows", _parts("row")),
        "parts_col": ("columns", _parts("col")),
    },
    along="scheme",
    tiers=by_model(
        minutes=0.2,
        runs={
            name: Runs(config="tensor3d/plan", overrides=own)
            for name, own in _LARGE.items()
        },
        claims={
            "fewer words": cell("part", _TENSOR)
            .at_most(0.70, "of Megatron's words for 40 billion parameters on 256")
            .fails({_TENSOR: _MEGATRON}),
            "Megatron is a grid": cell("part", "5 B, 32, Tensor3D")
            .at_least(1.0, "of Megatron's words where two devices share a model")
            .fails({"5 B, 32, Tensor3D": _TENSOR}),
        },
    ),
)
