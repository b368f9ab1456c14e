"""The table of samples that are cut in space: what is sent, and what is learned."""

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.runs import packing, reduce
from hpcjax.runs.pictures import Map
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

SIDES = "depth", "height", "width"
LAYOUTS = {"8": (8, 1, 1), "4 x 2": (4, 2, 1), "2 x 2 x 2": (2, 2, 2)}
CUBE, CORNERLESS = "2 x 2 x 2", "K5 without corners"
IMAGES = {"4": ("4", "1"), "2 x 2": ("2", "2")}
UNET, RESNET, PEER = "U-Net", "ResNet-18", "annotated"
WINDOWS = [
    f"K{k} s{s}, {name}" for name in LAYOUTS for k in (1, 3, 5, 7) for s in (1, 2)
]
NETWORKS = [f"{net}, {name}" for net in (UNET, RESNET) for name in IMAGES]
FEW = ("K1 s1, 8", "K1 s2, 8", "K3 s1, 8", "K3 s2, 8")


def _windows(name: str, blocks: tuple[int, ...], **more: str) -> Runs:
    cut = {f"parallel.{s}": str(n) for s, n in zip(SIDES, blocks, strict=True)}
    return Runs(config=f"spatial/windows{name}", overrides={**cut, **more})


def _network(name: str, height: str, width: str) -> Runs:
    cut = {"parallel.height": height, "parallel.width": width}
    return Runs(config=f"spatial/{name}", overrides=cut)


def _ratio(sent: Any, rule: Any) -> float:
    """Returns bytes over those of the rule; 1 where both are none."""
    return float(sent / rule) if rule else 1.0 if sent == 0 else np.inf


def halos(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each window and layout, and for each network."""
    import xarray as xr

    cells: dict[str, dict[str, Any]] = {}
    planes = {}
    for name, row in rows.items():
        run = reduce.first(row)
        if "apart" in run:
            sent = run["operands"].sel(kind="collective-permute").sum()
            counts = run["arrays"].sum(["axis", "part"])
            cells[name] = {
                "bytes": _ratio(sent, run["rule"]),
                "permutes": counts.sel(kind="collective-permute"),
                "gathers": counts.sel(kind="all-gather"),
                "distance": run["apart"],
            }
            continue
        if name in LAYOUTS:
            planes[name] = run["origin"].values
        for kernel in run["kernel"].values:
            for stride in run["stride"].values:
                own = run.sel(kernel=kernel, stride=stride)
                label = f"K{kernel} s{stride}, {name}" if name in LAYOUTS else name
                cells[label] = {
                    "bytes": _ratio(own["sent"], own["rule"]),
                    "forward": own["permutes"].sel({"pass": "forward"}),
                    "permutes": own["permutes"].sum(),
                    "distance": own["distance"],
                }
    own = xr.DataArray(
        list(planes.values()),
        {"row": [f"K5 s1, {name}" for name in planes]},
        ("row", "y", "x"),
    )
    table = reduce.from_cells(cells)
    return table.assign(origin=packing.pack(own.reindex(row=table["row"])))


HALOS = Table(
    id="spatial/halos",
    title="Samples cut in space: halos on 8 devices, and what is learned",
    paper=(
        "Oyama et al., IEEE TPDS 2020, and Dryden et al., IPDPS 2019: a device sends "
        "the halos of its block, twice a layer, and computes what one device does"
    ),
    caption=(
        "Convolutions of a cube of 16 points a side, padded by half a kernel, in 8, 4 "
        "x 2 and 2 x 2 x 2 blocks; and steps of a U-Net on phantoms and of ResNet-18 "
        "on noise of 32 x 32, of 2 groups of 4 devices. bytes: of permutations, over "
        "(lo + hi) * area * channels * 4, of the forward pass of a convolution, and of "
        "both passes of a network. permutes: of both passes. gathers: ResNet's blocks "
        "do not divide its last stage, before which they are gathered. distance: of "
        "outputs and slopes from one device's, relative to the largest; of a network "
        "the farthest parameter after 4 steps of SGD with momentum. annotated: the "
        "compiler cuts the U-Net in 4, told the sharding of samples alone."
    ),
    columns={
        "bytes": "bytes / rule",
        "forward": "permutes forward",
        "permutes": "permutes",
        "gathers": "all-gathers",
        "distance": "distance from one device",
    },
    reduce=halos,
    shows=(
        "Samples were cut in space over eight devices, which exchange their borders. "
        "Colours are the devices whose cells the first block sees: its own, 0, the "
        "borders of neighbours, and -1 outside the cube, which is zeros."
    ),
    picture=Map(
        "origin", rows=tuple(f"K5 s1, {name}" for name in LAYOUTS), label="device"
    ),
    tiers=on_cpu(
        minutes=5.0,
        devices=8,
        runs={
            **{name: _windows("", blocks) for name, blocks in LAYOUTS.items()},
            CORNERLESS: _windows(
                ":cornerless", LAYOUTS[CUBE], kernels="[5]", strides="[1]"
            ),
            **{
                f"{UNET}, {name}": _network("networks", *cut)
                for name, cut in IMAGES.items()
            },
            **{
                f"{RESNET}, {name}": _network("resnet", *cut)
                for name, cut in IMAGES.items()
            },
            PEER: _network("networks:annotated", *IMAGES["4"]),
        },
        claims={
            "bytes": abs(reduce.of("bytes", *WINDOWS, *NETWORKS) - 1)
            .largest()
            .at_most(0, "farthest ratio of permuted bytes to the rule's from 1")
            .fails({NETWORKS[0]: PEER}, only=("bytes",)),
            "permutes": abs(reduce.of("forward", *FEW) - np.array([0, 0, 2, 1]))
            .largest()
            .at_most(0, "permutations forward from none of K1, two of K3, one of s2")
            .fails({FEW[3]: FEW[2]}),
            "gathers": reduce.most("gathers", UNET)
            .at_most(0, "all-gathers of a U-Net's step")
            .fails({NETWORKS[0]: NETWORKS[2]}),
            "distance": reduce.most("distance", *WINDOWS, *NETWORKS)
            .at_most(1e-5, "farthest from one device's, of windows and networks")
            .fails({f"K5 s1, {CUBE}": CORNERLESS}, only=("distance",)),
        },
    ),
)
