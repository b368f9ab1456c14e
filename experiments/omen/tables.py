"""Tables of OMEN: orders of a sum in time, what is conserved, and what is sent."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import cell, most, of, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Ziogas et al., two papers of SC 2019"
SEQUENTIAL, BATCHED, TILED = "eight loops", "batched loop", "tiled"
WINDOW, FISSIONED = "tiled, window materialised", "fissioned"
_ORDERS = {
    "sequential": SEQUENTIAL,
    "batched": BATCHED,
    "fissioned": FISSIONED,
    "tiled": TILED,
    "window": WINDOW,
}


def _times_faster(order: str) -> reduce.Cell:
    """Makes a cell: an order's seconds over a row's own, within a round."""
    return lambda run, rows: (rows[order]["seconds"] / run["seconds"]).median()


SCATTERING = Table(
    id="omen/scattering",
    title="OMEN: electrons' self-energy, one sum in five orders",
    paper=f"{PAPER}: on one node",
    recalled={"eight loops": "OMEN 965.45 s, NumPy 30,560", "tiled": "29.93 s"},
    caption=(
        "One of the four sums of a self-energy, Nk = Nq = 3, 64 energies, 8 "
        "frequencies, 32 atoms with 4 bonds, 4 orbitals, 3 directions, complex128, "
        "compiled. Three rounds, in turns; ratios within a round. eight loops: a "
        "product of 4x4 matrices after the other. batched loop: (k, E, q, ω) one after "
        "the other, all bonds and directions at once. tiled: atom by atom one product, "
        "whose parts are added. window materialised: the same with (k - q, E - ω) "
        "written out. Gflop: of the papers' formulas, of an iteration. Difference: "
        "largest from eight loops, over the largest entry."
    ),
    shows=(
        "The same sum of a transistor's simulation was computed in five orders. "
        "Further left is faster: the tiled order against the loops."
    ),
    picture=Dots("seconds", log=True),
    columns={
        "seconds": ("seconds", lambda run: run["seconds"].median()),
        "over_batched": ("times as fast as the batched loop", _times_faster("batched")),
        "over_sequential": ("as eight loops", _times_faster("sequential")),
        "gflop": "Gflop",
        "distance": "difference",
    },
    along="order",
    named=lambda order: _ORDERS[order],
    benchmark=True,
    tiers=on_cpu(
        minutes=2.0,
        runs={"all": Runs(config="omen/scattering")},
        claims={
            "batched": cell("over_batched", TILED)
            .at_least(6, "times as fast, tiled, as the batched loop")
            .fails({TILED: WINDOW}),
            "sequential": cell("over_sequential", TILED)
            .at_least(100, "times as fast, tiled, as eight loops")
            .fails({TILED: BATCHED}),
            "window": over("over_batched", TILED, WINDOW)
            .at_least(3, "times as fast, tiled, as with the window written out")
            .fails({TILED: FISSIONED}),
            "equal": most("distance")
            .at_most(1e-12, "of the largest entry between two orders, the most")
            .fails(columns={"distance": "over_batched"}),
            "operations": over("gflop", SEQUENTIAL, TILED)
            .at_least(1.77, "times the operations by the formulas, unless M G is kept")
            .fails({SEQUENTIAL: FISSIONED}),
        },
    ),
)

_ONE, _THREE, _FOUR = _RIGHT = ("1/1", "3/3", "4/2")
_BROKEN = {
    "< for > in absorption": "swapped",
    "D^ij for D^ji": "transposed",
    "one spin in P": "spin",
    "sign of Π_ab": "between",
}
_UNHEATED, _BALLISTIC = "no feedback", "ballistic"
_BOUNDS = {"imbalance": 1e-8, "lost": 1e-6, "flatness": 1e-6}


def _transport(name: str = "base") -> Runs:
    return Runs(config=f"omen/transport:{name}")


def _find_worst(run: "xr.Dataset") -> float:
    """Returns by how much a run's worst figure is above its bound."""
    worst = np.max([float(run[name]) / bound for name, bound in _BOUNDS.items()])
    # What has diverged has no number.
    return float(worst) if np.isfinite(worst) else np.inf


CONSERVATION = Table(
    id="omen/conservation",
    title="OMEN: what a junction conserves, and what mistakes do not",
    paper=f"{PAPER}: electrons and phonons in one loop; no such figures",
    caption=(
        "A random junction of 4 atoms, 2 orbitals, 2 directions, 110 energies, 5 "
        "frequencies, bias 0.3, kT 0.025; Nk/Nq momenta, and on 1/1 four mistakes. "
        "Imbalance: |I_L + I_R| / |I_L|. energy lost: share of the electrons' energy "
        "that phonons do not carry away. not flat: how far coherent and assisted "
        "current differ along the device. worst / bound: of these over 1e-8, 1e-6 and "
        "1e-6. Iterations until self-energies change by 1e-10, at most 200. no "
        "feedback: phonons stay as leads have them. ballistic: nothing scatters, none "
        "is lost, and the share of it is one of rounding."
    ),
    shows=(
        "A simulated junction was checked for what physics conserves, with and without "
        "planted mistakes. Left of 1 is within the bound; mistakes must lie right of "
        "it."
    ),
    picture=Dots("worst", log=True, label="what is lost / its bound"),
    columns={
        "imbalance": "imbalance",
        "lost": "energy lost",
        "flatness": "not flat",
        "worst": ("worst / bound", _find_worst),
        "iterations": "iterations",
        "converged": "converged",
        "current": ("current", lambda run: run["current"].sel(contact="left")),
    },
    tiers=on_cpu(
        minutes=1.5,
        runs={
            _ONE: _transport(),
            _THREE: _transport("three"),
            _FOUR: _transport("four"),
            **{row: _transport(name) for row, name in _BROKEN.items()},
            _UNHEATED: _transport("equilibrium"),
            _BALLISTIC: _transport("ballistic"),
        },
        claims={
            "current": most("imbalance", *_RIGHT)
            .at_most(1e-8, "of the current that is lost, the most of three")
            .fails({_ONE: "D^ij for D^ji"}),
            "energy": most("lost", *_RIGHT)
            .at_most(1e-6, "of the electrons' energy that is lost, the most of three")
            .fails({_ONE: "one spin in P"}),
            "flat": most("flatness", *_RIGHT)
            .at_most(1e-6, "of the current by which cuts differ, the most of three")
            .fails({_ONE: "< for > in absorption"}),
            "mistakes": of("worst", *_BROKEN)
            .least()
            .at_least(
                100, "times its bound is what a mistake breaks, the least of four"
            )
            .fails(dict.fromkeys(_BROKEN, _ONE)),
            "in balance": most("imbalance", _UNHEATED, _BALLISTIC)
            .at_most(1e-8, "of the current is lost where phonons are not heated")
            .fails({_UNHEATED: "D^ij for D^ji"}),
            "heat": cell("lost", _UNHEATED)
            .at_least(0.999, "of the electrons' energy is lost without feedback")
            .fails({_UNHEATED: _ONE}),
            "scattering": over("current", _ONE, _BALLISTIC)
            .at_most(0.9, "of the ballistic current flows with scattering")
            .fails({_ONE: _BALLISTIC}),
        },
    ),
)

# TiB and Pflop of the papers' tables as they are recalled.
_WEAK = {
    "original": (32.11, 89.18, 174.80, 288.95, 431.65),
    "tiles": (0.54, 1.22, 2.17, 3.38, 4.86),
}
_STRONG = {
    "original": (108.24, 117.75, 136.76, 174.80, 212.84),
    "tiles": (0.95, 1.13, 1.48, 2.17, 2.87),
}
_FLOPS = {
    "original": (24.41, 67.80, 132.89, 219.67, 328.15),
    "tiles": (12.38, 34.19, 66.85, 110.36, 164.71),
}
_BEST = (0.653, 0.940, 1.363, 2.17, 2.87)
_ALONE = "energies alone, P of 448"
_PROGRAM = "program, "


def _distance(
    own: "xr.DataArray", recalled: Mapping[str, tuple[float, ...]], at: int
) -> float:
    """Returns the larger difference of both schemes from what is recalled."""
    return max(abs(float(own.sel(scheme=s)) - recalled[s][at]) for s in recalled)


def _side_by_side(own: "xr.DataArray") -> dict[str, "xr.DataArray"]:
    original, tiles = (own.sel(scheme=s) for s in ("original", "tiles"))
    return {"original": original, "tiles": tiles, "fewer": original / tiles}


def volumes(rows: reduce.Rows) -> "xr.Dataset":
    """Returns rows of both scalings, of tiles of energies alone, and of programs."""
    run = reduce.single(rows)
    cells: dict[str, reduce.Cells] = {}
    for at, momenta in enumerate(run["momenta"].values.tolist()):
        weak, flops = (run[name].sel(momenta=momenta) for name in ("weak", "flops"))
        relative = {
            s: tuple(each / float(flops.sel(scheme=s)) for each in values)
            for s, values in _FLOPS.items()
        }
        cells[f"Nk={momenta}"] = {
            **_side_by_side(weak),
            "apart": _distance(weak, _WEAK, at),
            "pflop": flops.sel(scheme="original"),
            "pflop_tiles": flops.sel(scheme="tiles"),
            "flops_apart": 100 * _distance(flops / flops, relative, at),
        }
    for at, processes in enumerate(run["processes"].values.tolist()):
        own = run.sel(processes=processes)
        cells[f"P={processes}"] = {
            **_side_by_side(own["strong"]),
            "apart": _distance(own["strong"], _STRONG, at),
            "best": own["best"],
            "best_te": own["best_te"],
            "best_apart": abs(float(own["best"]) - _BEST[at]),
        }
    best = run["best"].sel(processes=448)
    cells[_ALONE] = {"tiles": run["alone"], "above": run["alone"] / best}
    cells["P=448"] = {**cells["P=448"], "above": cells["P=448"]["tiles"] / best}
    for scheme in run["scheme"].values.tolist():
        own = run.sel(scheme=scheme)
        cells[_PROGRAM + scheme] = {
            "sent": own["sent"],
            "needed": own["sent"] / own["needed"],
            "formula": own["sent"] / own["formula"],
        }
    return reduce.from_cells(cells)


VOLUMES = Table(
    id="omen/volumes",
    title="OMEN: what scattering sends, in the original scheme and in tiles",
    paper=f"{PAPER}, the tables of communication and of operations",
    recalled={
        f"{name}={number}": f"{original:g} and {tiles:g} TiB"
        for name, numbers, known in (
            ("Nk", (3, 5, 7, 9, 11), _WEAK),
            ("P", (224, 448, 896, 1792, 2688), _STRONG),
        )
        for number, original, tiles in zip(numbers, *known.values(), strict=True)
    },
    caption=(
        "By the formulas, TiB of all processes for 4,864 atoms: Nk=Nq, 256 Nk "
        "processes; and Nk=7 on P processes, TE=7 tiles of energies. apart: from what "
        "is recalled. best: of all TE x TA = P. program: bytes that 8 simulated "
        "devices send, read from the compiled self-energy of electrons, 64 energies, 8 "
        "frequencies, 16 atoms of a ring, TE=4, TA=2. needed: counted, the formula "
        "less what is not sent. Original: of 32 Nk NE Nq Nω Na Norb² for each sign "
        "of ω, energies that a device has itself or that are beyond the grid; of D's "
        "part, with P - 1 for P, the half of Π. Tiles: of the half that comes in, the "
        "device's own NE/P energies of its atoms, windows beyond the grid, 1/P of D, "
        "and D of neighbours, for D_ab is made up before it is sent; the other half is "
        "Σ alone, of a tile without window and neighbours."
    ),
    shows=(
        "Bytes that a transistor's simulation sends were counted, in the original "
        "scheme and in tiles. Right of the line tiles send less than an 80th, as is "
        "claimed of P=1792."
    ),
    picture=Dots("fewer", rows=("=",), bound="fewer"),
    columns={
        "original": "original, TiB",
        "tiles": "tiles, TiB",
        "fewer": "times fewer",
        "apart": "apart, TiB",
        "pflop": "original, Pflop",
        "pflop_tiles": "tiles, Pflop",
        "flops_apart": "apart, %",
        "best": "best tiles, TiB",
        "best_te": "best TE",
        "best_apart": "best apart, TiB",
        "above": "times the best",
        "sent": "sent, bytes",
        "needed": "sent / needed",
        "formula": "sent / formula",
    },
    reduce=volumes,
    tiers=on_cpu(
        minutes=0.5,
        devices=8,
        runs={"all": Runs(config="omen/volumes")},
        claims={
            "volumes": most("apart", "Nk=", "P=")
            .at_most(0.01, "TiB from the papers' tables, the farthest")
            .fails(columns={"apart": "tiles"}),
            "operations": most("flops_apart", "Nk=")
            .at_most(0.05, "percent from the papers' operations, the farthest")
            .fails(columns={"flops_apart": "tiles"}),
            "search": most("best_apart", "P=")
            .at_most(0.01, "TiB from the specified best tiles, the farthest")
            .fails(columns={"best_apart": "tiles"}),
            "fewer": cell("fewer", "P=1792")
            .at_least(80, "times fewer bytes with tiles, Nk=7 on 1,792 processes")
            .fails({"P=1792": "P=2688"}),
            "both ways": cell("above", _ALONE)
            .at_least(10, "times the best tiles' bytes with tiles of energies alone")
            .fails({_ALONE: "P=448"}),
            "programs": abs(of("needed", _PROGRAM) - 1)
            .largest()
            .at_most(
                0.02, "farthest ratio of a program's bytes to those counted from 1"
            )
            .fails(columns={"needed": "formula"}),
        },
    ),
)
