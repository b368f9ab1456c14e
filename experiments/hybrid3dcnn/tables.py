"""The table of 3-D networks whose samples are cut in space: their sizes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.hybrid3dcnn.equal_tables import EQUAL  # noqa: F401 - its table
from experiments.hybrid3dcnn.width_tables import WIDTH  # noqa: F401 - its table
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

MIB, PARAMETERS, UNET_PARAMETERS = 2**20, 9_437_636, 19_070_560
# Of steps at widths 128, 256 and 512, and of the U-Net forward at 256.
GIGAFLOP = np.array([55.547, 443.784, 3550.27])
GIBIBYTES = np.array([0.8236, 6.5888, 52.710])
UNET_GIGAFLOP = 31264.0
PAPER, OTHER = "tpds", "v2"
COSMOFLOW = [f"CosmoFlow, {width}" for width in (32, 64, 128, 256, 512)]
LARGE, UNET, LATER = COSMOFLOW[2:], "U-Net, 256", "CosmoFlow v2, 256"
ONE, EIGHT, WHOLE = "1 block", "8 blocks", "8 whole samples"


def networks(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each network and width, and for each number of blocks."""
    cells: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        run = reduce.first(row)
        for width in run["width"].values:
            label = f"CosmoFlow, {width}" if name == PAPER else f"CosmoFlow v2, {width}"
            own = run.sel(width=width)
            names = "parameters", "gigaflop", "gibibytes"
            cells[label] = {each: own[each] for each in names}
        if name != PAPER:
            continue
        cells[UNET] = {
            "parameters": run["unet_parameters"],
            "gigaflop": run["unet_gigaflop"],
        }
        base = float(run["temporaries"].sel(blocks=1))
        memory = {
            "1 block" if number == 1 else f"{number} blocks": found
            for number, found in zip(
                run["blocks"].values, run["temporaries"], strict=True
            )
        }
        memory[WHOLE] = run["data_parallel"]
        for label, found in memory.items():
            cells[label] = {"mebibytes": found / MIB, "share": found / base}
    return reduce.from_cells(cells)


NETWORKS = Table(
    id="hybrid3dcnn/networks",
    title="3-D networks on samples in blocks: sizes, and memory of a device",
    paper=(
        "Oyama et al., IEEE TPDS 2020, its table of networks: 9.44 M parameters; "
        "55.55, 443.8, 3550 GFLOP and 0.824, 6.59, 52.7 GiB of a sample at widths "
        "128, 256, 512; and a device needs the less the more share a sample"
    ),
    caption=(
        "Counted from traces at full size, of which nothing is run. gigaflop: of the "
        "convolutions of a step, and of the U-Net forward. gibibytes: 4 bytes of each "
        "output of a convolution, of its activation function and of a pool, and of two "
        "copies of the sample, twice. mebibytes: XLA's temporaries of one CPU device, "
        "forward and backward through three convolutions of 16, 32 and 64 channels, "
        "each with a LeakyReLU and an average, of one sample of width 128 whose depth "
        "is cut in blocks; whole samples: of 8 devices each has one."
    ),
    columns={
        "parameters": "parameters",
        "gigaflop": "GFLOP",
        "gibibytes": "GiB / sample",
        "mebibytes": "MiB of temporaries",
        "share": "of one device's",
    },
    reduce=networks,
    shows=(
        "One sample of 128 points a side was cut in blocks over simulated devices. "
        "Bars are the memory that a device needs beside inputs and results, over "
        "that of one which has it whole; sharing out samples instead saves none."
    ),
    picture=Bars("share", label="of one device's temporaries"),
    tiers=on_cpu(
        minutes=5.0,
        devices=8,
        runs={
            PAPER: Runs(config="hybrid3dcnn/networks"),
            OTHER: Runs(config="hybrid3dcnn/networks:v2"),
        },
        claims={
            "parameters": abs(
                reduce.of("parameters", *COSMOFLOW, UNET)
                - np.array([PARAMETERS] * 5 + [UNET_PARAMETERS])
            )
            .largest()
            .at_most(0, "farthest count from 9,437,636 and 19,070,560")
            .fails({COSMOFLOW[3]: LATER}),
            "gigaflop": abs(
                reduce.of("gigaflop", *LARGE, UNET)
                / np.array([*GIGAFLOP, UNET_GIGAFLOP])
                - 1
            )
            .largest()
            .at_most(1e-3, "farthest ratio of operations to the paper's from 1")
            .fails({COSMOFLOW[3]: LATER}),
            "gibibytes": abs(reduce.of("gibibytes", *LARGE) / GIBIBYTES - 1)
            .largest()
            .at_most(1e-3, "farthest ratio of activation bytes to the paper's from 1")
            .fails({COSMOFLOW[3]: LATER}),
            "temporaries": reduce.cell("share", EIGHT)
            .at_most(0.15, "temporaries of 8 blocks over those of one")
            .fails({EIGHT: WHOLE}),
        },
    ),
)
