"""The table of codes between processes, and of the model with their costs."""

from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars
from hpcjax.runs.reduce import cell
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

SLOW, FAST = ", 100 Mbit/s", ", 10 Gbit/s"
WITHOUT, ALL, LEARNT = "without", "identity", "autoencoder"
EIGHT, FOUR, TOP, PRETENDED = "8 bits", "4 bits", "Top-k", "decoded, then sent"
CODES = (WITHOUT, ALL, LEARNT, EIGHT, FOUR, TOP)
SENT = tuple(name + link for link in (SLOW, FAST) for name in CODES)
NARROW, WIDE, DEEP = (
    f"model: width {width}, {stages} stages"
    for width, stages in ((256, 4), (2048, 4), (2048, 32))
)
PARTS = {"compute": "compute", "encode": "encode", "decode": "decode", "link": "wait"}


def time(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each codec on each link, and for each width of the model."""
    run = reduce.single(rows)
    found: dict[str, dict[str, float]] = {}
    # No link is in these; what disturbed one of the two is not in the least.
    alone = {name: run[name].min("link") for name in ("passes", "encode", "decode")}
    for link in (SLOW, FAST):
        own = run.assign(alone).sel(link=link.removeprefix(", "))
        for code in own["code"].values.tolist():
            found[code + link] = _of_code(own.sel(code=code), own.sel(code=WITHOUT))
    model = run["speedup"].sel(link=SLOW.removeprefix(", "))
    for way, grows in (("4 stages", False), ("stages by width", True)):
        for width in model["width"].values.tolist():
            stages = 4 * width // 256 if grows else 4
            gain = 100 * (float(model.sel(way=way, width=width)) - 1)
            found[f"model: width {width}, {stages} stages"] = {"gain": gain}
    return reduce.from_cells(found)


def _of_code(run: "xr.Dataset", base: "xr.Dataset") -> dict[str, float]:
    """Returns a codec's cells, times of a micro-batch in ms."""
    count = int(run["micro_batches"])
    ratio = float((run["seconds"] / base["seconds"]).median())
    step, passes, encode, decode = (
        1e3 * float(each)
        for each in (
            run["seconds"].median() / count,
            *(run[name] for name in ("passes", "encode", "decode")),
        )
    )
    saved = 1e3 * float(run["saved"])
    return {
        **{"step": step, "ratio": ratio, "encode": encode, "decode": decode},
        "compute": passes - encode - decode,
        "link": max(step - passes, 0.0),
        **{name: float(run[name]) for name in ("up", "down")},
        **({"worth": encode / saved} if saved > 0 else {}),
    }


@reduce.Number
def _off(table: "xr.Dataset") -> float:
    """Reads how far the bytes of any codec are from what it says."""
    both = reduce.rows_of(table, *SENT)
    return float(np.max([abs(both[way].values - 1) for way in ("up", "down")]))


TIME = Table(
    id="mpcompress/time",
    title="Compressed activations: steps of two processes on slow and fast links",
    paper=(
        "Bian et al., MLSys 2024: with NVLink nothing helps; without it only "
        "autoencoders, up to 17.8 % end to end, and some quantization do, Top-k loses "
        "by its encoding"
    ),
    caption=(
        "Two processes on one core, a layer each; 4 micro-batches of 512 x 1024 in "
        "float32, all in flight; links that let out so much. time: of a step over that "
        "without a codec, median of 7 turns; ms of a micro-batch: step, and passes, "
        "encode and decode alone, the least of both links. wait: what a step has "
        "beyond its passes. up, down: bytes of arrays over what the codec says; cost: "
        "encode over what the link saves. Top-k sends the bytes of the autoencoder, 50 "
        "of 1,024. model: gain of a twentieth in a transformer of 32 layers, by the "
        "costs that the slow link's rows measure."
    ),
    shows=(
        "Two processes sent each other compressed activations and slopes. On the slow "
        "link codes should save time, on the fast one nothing should."
    ),
    picture=Bars(
        ("compute", "encode", "decode", "link"),
        stacked=True,
        rows=("bit/s",),
        label="ms of a micro-batch",
    ),
    columns={
        "ratio": "time",
        "step": "step, ms",
        **PARTS,
        "up": "up",
        "down": "down",
        "worth": "cost",
        "gain": "gain, %",
    },
    reduce=time,
    tiers=on_cpu(
        minutes=5.0,
        runs={"codes": Runs(config="mpcompress/time")},
        claims={
            "slow link": cell("ratio", LEARNT + SLOW)
            .at_most(0.5, "of a step's time by the autoencoder at 100 Mbit/s")
            .fails({LEARNT + SLOW: ALL + SLOW}),
            "fast link": cell("ratio", LEARNT + FAST)
            .at_least(0.95, "of a step's time by the autoencoder at 10 Gbit/s")
            .fails({LEARNT + FAST: LEARNT + SLOW}),
            "Top-k": cell("worth", TOP + FAST)
            .at_least(1, "times what the link saves Top-k encodes, at 10 Gbit/s")
            .fails({TOP + FAST: TOP + SLOW}),
            "to the byte": _off.at_most(
                0, "of the bytes that a codec says, up or down, the farthest"
            ).fails({EIGHT + SLOW: PRETENDED + SLOW}),
            "identity": abs(reduce.of("ratio", ALL + SLOW, ALL + FAST) - 1)
            .largest()
            .at_most(0.1, "of a step's time through a codec that sends all, off 1")
            .fails({ALL + SLOW: LEARNT + SLOW}),
            "by width": reduce.over("gain", WIDE, NARROW)
            .at_most(0.5, "of the gain at width 256 remains at 2048, stages as many")
            .fails({WIDE: DEEP}),
        },
    ),
)
