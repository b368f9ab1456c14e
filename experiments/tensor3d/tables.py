"""Tables of Tensor3D: what every grid sends, and what two pieces of a batch hide."""

import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots
from hpcjax.runs.reduce import cell
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

_COUNTS = (4, 8, 16)
_OPTIMUS, _COLOSSAL = "Optimus, 2x2", "Colossal-AI 3D, 2x2x2"
_MARKED, _EQUAL, _BROKEN = "x marked by each", "training", "training, broken norms"
_EARLY, _LATE, _IN_TURN = "dW while dx is summed", "dW first", "in turn"
RATIOS = ("0.5", "0.75", "1", "1.5", "2")
_NONE = float("nan")


def grids(rows: reduce.Rows) -> xr.Dataset:
    """Returns a row for each grid, one for each peer, and one for training."""
    cells: dict[str, dict[str, float]] = {}
    for name, run in rows.items():
        only = reduce.first(run)
        if "axis" in run.dims:
            cells |= _grid_cells(name, only)
        elif "grid" in run.dims:
            cells[name] = {"distance": float(only["distance"].max())}
        else:
            cells[name] = {
                "words": float(only["words"]),
                "ratio": float(only["words"] / only["formula"]),
                "ours": float(only["ours"] / only["words"]),
                "worst": float(only["worst"] / only["words"]),
                "distance": float(only["distance"]),
            }
    columns = dict.fromkeys(column for each in cells.values() for column in each)
    return reduce.from_cells(
        {
            name: {column: each.get(column, _NONE) for column in columns}
            for name, each in cells.items()
        }
    )


def _grid_cells(name: str, run: xr.Dataset) -> dict[str, dict[str, float]]:
    """Returns a row for each grid of a number of devices."""
    words = run["words"].sum("axis")
    expected = (run["formula"] + run["moments"]).sum("axis")
    least = float(words.min())
    return {
        f"{name}, {grid}": {
            "words": float(words.sel(grid=grid)),
            "ratio": float(words.sel(grid=grid) / expected.sel(grid=grid)),
            "megatron": float(words.sel(grid=grid) / run["megatron"]),
            "least": float(words.sel(grid=grid) == least),
            "chosen": float(run["chosen"].sel(grid=grid)),
        }
        for grid in run["grid"].values.tolist()
    }


def _of_grids(column: str) -> reduce.Number:
    """Reads a column of the grids that are not broken."""
    return reduce.of(column, *(f"{count} devices, " for count in _COUNTS))


GRIDS = Table(
    id="tensor3d/grids",
    title="Tensor3D: words that a device sends for a transformer's block",
    paper=(
        "Singh et al., arXiv 2305.13525, 2023: G_c - 1 + 3 (G_r - 1) for a block, "
        "least at G_c = √(3 G); a U-Net of 28 billion parameters trains in nearly 60 % "
        "less time than with Megatron-LM (abstract), which no run here repeats"
    ),
    caption=(
        "A block of width 64 with 16 heads, 32 tokens, all devices in one model: rows "
        "x columns of the grid; 1xG is Megatron's. Words that a device sends in a step "
        "of training for a block, by rings, read from compiled programs of simulated "
        "devices: what the third block adds to two. Formula: the model's words and "
        "those of the norms' moments. x marked by each: query, key and value take x "
        "by themselves, on 4 devices. training: on all grids of 8 devices, data and "
        "depth too, three steps; "
        "broken norms: on 2 devices, whose moments are of a device's own features. "
        "Peers: a pair of layers, 64 to 192 to 64 features, 32 rows; Tensor3D's words "
        "over theirs, on the best and the worst grid of as many devices."
    ),
    picture=Dots("megatron", rows=("devices",), by=", ", bound="Megatron"),
    columns={
        "words": "words",
        "ratio": "words / formula",
        "megatron": "words / Megatron's",
        "least": "least",
        "chosen": "chosen",
        "ours": "ours / theirs",
        "worst": "worst grid / theirs",
        "distance": "distance from one device",
    },
    reduce=grids,
    tiers=on_cpu(
        minutes=5.0,
        devices=16,
        runs={
            **{
                f"{count} devices": Runs(
                    config="tensor3d/grids", overrides={"devices": str(count)}
                )
                for count in _COUNTS
            },
            _MARKED: Runs(config="tensor3d/grids:marked", overrides={"devices": "4"}),
            _OPTIMUS: Runs(config="tensor3d/products"),
            _COLOSSAL: Runs(config="tensor3d/products:cube"),
            _EQUAL: Runs(config="tensor3d/equal"),
            _BROKEN: Runs(config="tensor3d/equal:broken"),
        },
        claims={
            "to the word": abs(_of_grids("ratio") - 1)
            .largest()
            .at_most(0, "farthest ratio of a grid's words to the formula's from 1")
            .fails({"4 devices, 1x4": f"{_MARKED}, 1x4"}),
            "planner": abs(_of_grids("chosen") - _of_grids("least"))
            .largest()
            .at_most(0, "grids that are chosen and not least, or the other way round")
            .fails({"16 devices, 2x8": "16 devices, 8x2"}, only=("chosen",)),
            "Megatron": cell("megatron", "16 devices, 2x8")
            .at_most(0.70, "of Megatron's words on the best grid of 16")
            .fails({"16 devices, 2x8": "16 devices, 1x16"}),
            "peers": reduce.most("ours", _OPTIMUS, _COLOSSAL)
            .at_most(0.5, "of the words of Optimus and of Colossal-AI 3D, at the most")
            .fails(columns={"ours": "worst"}),
            "equal": cell("distance", _EQUAL)
            .at_most(1e-5, "farthest parameter from one device's, on all grids of 8")
            .fails({_EQUAL: _BROKEN}),
        },
    ),
)


def overlap(rows: reduce.Rows) -> xr.Dataset:
    """Returns a column for each ratio of computation to communication."""
    return reduce.from_cells(
        {
            name: {
                f"at_{ratio}": float(run["exposed"].sel(ratio=float(ratio)).squeeze())
                for ratio in RATIOS
            }
            for name, run in rows.items()
        }
    )


def _distance(row: str, paper: tuple[float, ...]) -> reduce.Number:
    """Reads how far a row is from the figures, at the most."""

    def read(table: xr.Dataset) -> float:
        ours = [float(table[f"at_{ratio}"].sel(row=row)) for ratio in RATIOS]
        return max(abs(a - b) for a, b in zip(ours, paper, strict=True))

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
    picture=Bars(
        ("at_0.5", "at_0.75", "at_1", "at_1.5", "at_2"), label="exposed / one piece's"
    ),
    columns={f"at_{ratio}": f"at {ratio}" for ratio in RATIOS},
    reduce=overlap,
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


def weak_scaling(rows: reduce.Rows) -> xr.Dataset:
    """Returns a row for each model and scheme."""
    cells = {}
    for name, run in rows.items():
        only = reduce.first(run)
        base = float(only["words"].sel(scheme="Megatron"))
        for scheme in only["scheme"].values.tolist():
            own = only.sel(scheme=scheme)
            words = float(own["words"])
            grid = {
                f"parts_{axis}": float(own["grid"].sel(axis=axis))
                for axis in own["axis"].values
            }
            cells[f"{name}, {scheme}"] = {"words": words, "part": words / base} | grid
    return reduce.from_cells(cells)


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
    picture=Dots(
        "part",
        by=" B, ",
        bound="fewer words",
        label="words a device sends / Megatron's",
    ),
    columns={
        "words": "words",
        "part": "of Megatron's",
        "parts_data": "data",
        "parts_depth": "depth",
        "parts_row": "rows",
        "parts_col": "columns",
    },
    reduce=weak_scaling,
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
