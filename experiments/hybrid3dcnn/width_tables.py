"""The table of errors of networks on boxes of several widths."""

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.runs import packing, reduce
from hpcjax.runs.tables import Runs, Table, Trivial, on_cpu

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

WIDTHS, SEEDS, STEPS = (4, 8, 16), (0, 1, 2), {"steps": "1500"}
NETWORK, RIDGE = ({w: f"{name}, {w}" for w in WIDTHS} for name in ("network", "ridge"))
MEAN, OTHERS = "mean of the universes", "network, 8, others' numbers"
HEADINGS = {"matter": "Omega_m", "sigma8": "sigma_8", "tilt": "n_s", "hubble": "h"}


def width(rows: reduce.Rows) -> "xr.Dataset":
    """Returns rows of networks and peers, errors, and falls in standard errors."""
    cells: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        both = {name: ""}
        if name in NETWORK.values():
            both[name.replace("network", "ridge")] = "ridge_"
        for label, kind in both.items():
            means = {n: row[f"{kind}{n}"].mean("parameter") for n in _ERRORS}
            cells[label] = {
                key: value
                for n, each in means.items()
                for key, value in reduce.extent(each, n).items()
            }
            cells[label]["part"] = means["averaged"].mean() / row["mean"].mean()
            for parameter in row["parameter"].values:
                own = row[f"{kind}averaged"].sel(parameter=parameter)
                cells[label][f"{parameter}"] = own.mean()
    whole = rows[NETWORK[16]]
    mean = reduce.first(whole)["mean"]
    cells[MEAN] = {n: float(mean.mean()) for n in _ERRORS} | {"part": 1.0}
    cells[MEAN] |= {str(p): mean.sel(parameter=p) for p in whole["parameter"].values}
    for name, narrow in (
        *((NETWORK[wide], NETWORK[wide // 2]) for wide in WIDTHS[1:]),
        (OTHERS, NETWORK[4]),
    ):
        cells[name]["fall"] = _fall(rows[narrow], rows[name])
    table = reduce.from_cells(cells)
    shown = reduce.first(whole)["cells"].expand_dims(row=[MEAN])
    field = shown.reindex(row=table["row"].values).reset_coords(drop=True)
    return table.assign(cells=packing.pack(field))


_ERRORS = "averaged", "single"


def _fall(narrow: "xr.Dataset", wide: "xr.Dataset") -> float:
    """Returns how far the averaged error falls, over the standard error of that."""
    low, high = (each["averaged"].mean("parameter").values for each in (wide, narrow))
    spread = sum(
        np.var(each, ddof=1) / len(each) for each in (low, high) if len(each) > 1
    )
    return float((high.mean() - low.mean()) / np.sqrt(spread))


def draw(table: "xr.Dataset") -> "Figure":
    """Draws errors against the width, and a slice of a universe with its box of 8."""
    from matplotlib.patches import Rectangle

    from hpcjax.runs import curves, panels

    figure, ((left, right),) = panels.open_figure(3.2, columns=2)
    lines = [(NETWORK, each) for each in _ERRORS] + [(RIDGE, "averaged")]
    for number, (names, column) in enumerate(lines):
        own = table.sel(row=list(names.values()))
        name, colour = f"{names[4][:-3]}, {column}", curves.COLOURS[number]
        left.plot(WIDTHS, own[column], "os^"[number] + "-", color=colour, label=name)
        ends = own[f"{column}_low"], own[f"{column}_high"]
        left.fill_between(WIDTHS, *ends, color=colour, alpha=0.2, linewidth=0)
    level = float(table["averaged"].sel(row=MEAN))
    left.axhline(level, color="black", linestyle="--", label=MEAN)
    left.set(xscale="log", xlabel="cells along a box", ylabel="squared error", ylim=0)
    left.set_xticks(WIDTHS, [str(each) for each in WIDTHS], minor=False)
    left.minorticks_off()
    left.legend(fontsize=panels.SMALL)
    image = right.imshow(table["cells"].sel(row=MEAN), cmap="viridis", origin="lower")
    right.add_patch(Rectangle((-0.5, -0.5), 8, 8, fill=False, edgecolor="white"))
    right.set(xlabel="cells of 8 Mpc/h, and a box of 8", ylabel="cells")
    figure.colorbar(image, ax=right, label="ln(1 + particles)")
    return figure


WIDTH = Table(
    id="hybrid3dcnn/width",
    title="What larger boxes of a universe tell of it",
    paper=(
        "Oyama et al., IEEE TPDS 2020: training on whole samples of 512³ instead of "
        "boxes of 128³ improves prediction by an order of magnitude"
    ),
    caption=(
        "2,000 simulated universes of 16³ cells of 8 Mpc/h, 500 held out; four numbers "
        "from -1 to 1. A network of pairs of convolution and mean until 2³ is trained "
        "on boxes of 4, 8 or 16 cells, 1,500 steps of 16 universes' cells. Errors are "
        "means of squares, of three seeds [least, largest]; averaged: of the mean "
        "prediction of a universe's boxes. fall: from half the width, in standard "
        "errors. ridge: on variance, skewness, band powers. others' numbers: each box "
        "has those of another, fall from 4."
    ),
    shows=(
        "Networks told four parameters of simulated universes from boxes of them. "
        "Wider boxes should err less; the dashed line is the error of the mean. Right: "
        "a slice through a universe, and in white a box of 8."
    ),
    picture=draw,
    columns={
        "averaged": "error, averaged",
        "single": "of single boxes",
        "part": "averaged / mean's",
        "fall": "fall / its error",
        **HEADINGS,
    },
    reduce=width,
    tiers=on_cpu(
        minutes=10.0,
        runs={
            name: Runs(
                config="hybrid3dcnn/width",
                overrides={"width": str(each), **STEPS},
                seeds=SEEDS,
            )
            for each, name in NETWORK.items()
        }
        | {
            OTHERS: Runs(
                config="hybrid3dcnn/width:shuffled", overrides={"width": "8", **STEPS}
            )
        },
        trivial=Trivial(rows=(MEAN,), by="averaged", peers=tuple(RIDGE.values())),
        claims={
            "to 8": reduce.cell("fall", NETWORK[8])
            .at_least(1.0, "fall of the averaged error from 4 to 8, in standard errors")
            .fails({NETWORK[8]: OTHERS}),
            "to 16": reduce.cell("fall", NETWORK[16])
            .at_least(1.0, "fall of the averaged error from 8 to 16, likewise")
            .fails({NETWORK[16]: OTHERS}),
            "single": reduce.over("single", NETWORK[16], NETWORK[4])
            .at_most(0.8, "error of the single box of 16 over that of 4")
            .fails({NETWORK[16]: OTHERS}),
            "mean": reduce.most("part", *NETWORK.values())
            .at_most(0.8, "largest averaged error over that of predicting the mean")
            .fails({NETWORK[4]: OTHERS}),
            "others": abs(reduce.cell("part", OTHERS) - 1)
            .at_most(0.02, "distance to the mean's error with others' numbers")
            .fails({OTHERS: NETWORK[4]}),
        },
    ),
)
