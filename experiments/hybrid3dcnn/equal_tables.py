"""The table of networks in blocks beside the same on one device."""

from typing import TYPE_CHECKING, Any

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

SIDES = "depth", "height", "width"
COLUMN, ROWS, CUBE = "1 x 8 x 1 x 1", "2 x 4 x 1 x 1", "1 x 2 x 2 x 2"
LAYOUTS = {COLUMN: (8, 1, 1), ROWS: (4, 1, 1), CUBE: (2, 2, 2)}
COSMOFLOW = [f"CosmoFlow 64, {name}" for name in LAYOUTS]
UNET = [f"U-Net 32, {name}" for name in (ROWS, CUBE)]
LARGE, THIN = f"U-Net 64, {COLUMN}", f"U-Net 32, {COLUMN}"
OWN, CORNERLESS = f"{UNET[1]}, own statistics", f"{COSMOFLOW[2]}, no corners"
COMPARED = *COSMOFLOW, *UNET, LARGE


def equal(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each network and layout."""
    cells: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        names = ("told",) if name == THIN else ("loss", "gradient", "told")
        cells[name] = {each: reduce.first(row)[each] for each in names}
    return reduce.from_cells(cells)


def _runs(label: str, variant: str = "base", **more: str) -> Runs:
    blocks = LAYOUTS[label.split(", ")[1]]
    cut = {f"parallel.{s}": str(n) for s, n in zip(SIDES, blocks, strict=True)}
    return Runs(config=f"hybrid3dcnn/equal:{variant}", overrides={**cut, **more})


EQUAL = Table(
    id="hybrid3dcnn/equal",
    title="CosmoFlow and the 3-D U-Net in blocks learn what one device learns",
    paper=(
        "Oyama et al., IEEE TPDS 2020: with halos, and norms over all devices, samples "
        "in blocks give what whole ones give"
    ),
    caption=(
        "Five steps of SGD with momentum on 8 devices, groups of samples by depth by "
        "height by width, beside one device's. CosmoFlow: universes of 64 cells, a "
        "quarter of the channels, float32. U-Net: phantoms of 32 points, an eighth, "
        "and of 64, a sixteenth; in float64, for rounding decides on which side of "
        "zero a ReLU's input is. loss: largest difference, relative. gradient: "
        "likewise at step 1, over the largest of its array. told: an error names the "
        "layer that cannot be cut. Controls: norms of a block's statistics, halos "
        "without corners."
    ),
    columns={
        "loss": "difference of losses",
        "gradient": "of gradients",
        "told": "error names the layer",
    },
    reduce=equal,
    shows=(
        "Two networks trained for five steps on samples in blocks over eight devices, "
        "and on one. Dots are the largest difference of the first step's gradients; "
        "with norms or halos that miss something of the neighbours, it is large."
    ),
    picture=Dots("gradient", label="difference of gradients", log=True),
    tiers=on_cpu(
        minutes=10.0,
        devices=8,
        runs={
            **{name: _runs(name) for name in COSMOFLOW},
            **{name: _runs(name, "unet") for name in UNET},
            LARGE: _runs(
                *(LARGE, "unet"),
                **{"dataset.depth": "64", "dataset.size": "64", "batch": "1"},
                **{"model.width_divisor": "16", "dataset.patients": "8"},
            ),
            THIN: _runs(THIN, "unet", refused="pool_2"),
            OWN: _runs(OWN, "unet", broken="statistics", steps="1"),
            CORNERLESS: _runs(CORNERLESS, broken="corners", steps="1"),
        },
        claims={
            "loss": reduce.most("loss", *COMPARED)
            .at_most(1e-5, "largest difference of a loss from one device's, relative")
            .fails({UNET[1]: OWN}, only=("loss",)),
            "gradient": reduce.most("gradient", *COMPARED)
            .at_most(1e-4, "of a gradient of step 1, over the largest of its array")
            .fails({UNET[1]: OWN}, {COSMOFLOW[2]: CORNERLESS}, only=("gradient",)),
            "told": reduce.cell("told", THIN)
            .at_least(1, "whether an error names the layer that 8 blocks cannot cut")
            .fails({THIN: UNET[0]}),
        },
    ),
)
