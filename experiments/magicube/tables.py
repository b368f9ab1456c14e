"""Tables of Magicube: exact products, machine code, and attention in few bits."""

from typing import TYPE_CHECKING

from experiments.magicube.attention import MODES, NO_ATTENTION, PUBLISHED, TRIVIAL
from experiments.magicube.products import PAIRS
from experiments.magicube.spmm_time import BCOO, BCSR, DENSE
from hpcjax.runs import reduce
from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Bars, Dots
from hpcjax.runs.reduce import above, cell, most
from hpcjax.runs.tables import Runs, Table, grid, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

_KINDS = {
    "random": {"kind": "random"},
    "magnitude": {"kind": "magnitude"},
    "one full row": {"kind": "long"},
}
_ZEROS = {f"{share} % zeros": {"zeros": f"0.{share}"} for share in ("50", "90", "98")}


def products(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each pair of precisions, over all patterns."""
    import xarray as xr

    joined = xr.concat([reduce.first(row) for row in rows.values()], dim="pattern")
    whole = joined["bytes"].sum("pattern")
    cells = {}
    for pair in joined["pair"].values.tolist():
        own = joined.sel(pair=pair)
        cells[pair] = {
            "wrong": float(own["wrong"].sum()),
            "saturated": float(own["saturated"].sum()),
            "bytes": float(whole.sel(pair=pair) / whole.sel(pair="L8-R8")),
            "padding": float(joined["padding"].max()),
        }
    return reduce.from_cells(cells)


PRODUCTS = Table(
    id="magicube/products",
    title="Products of sparse integers: exact modulo 2³², and the bytes they read",
    paper=(
        "Li, Osawa and Hoefler, SC 2022, sections 4.1 and 4.4: the format, and "
        "precisions that are made of limbs"
    ),
    caption=(
        "Nine patterns of 32 x 600 vectors of eight rows: 50, 90 and 98 % zeros; at "
        "random, by magnitude, and with one row that is full. Numbers of all bits, "
        "both ends among them; 64 columns. Wrong: entries that differ from the "
        "product in 64 bits modulo 2³². If it saturated: those that would if sums "
        "stopped at the ends of 32 bits, as in the published code. Bytes: of indices, "
        "values and gathered rows, over those of L8-R8. Padding: vectors over those "
        "that are real, the pattern that has most."
    ),
    shows=(
        "Sparse integer matrices of several widths were multiplied. Shorter is fewer "
        "bytes: L4-R4 should read half of L8-R8's."
    ),
    picture=Bars("bytes", label="bytes read / L8-R8's", bound="bytes"),
    columns={
        "wrong": "wrong",
        "saturated": "if it saturated",
        "bytes": "bytes / L8-R8's",
        "padding": "padding",
    },
    reduce=products,
    tiers=on_cpu(
        minutes=1.0,
        runs=grid("magicube/products", _KINDS, _ZEROS),
        claims={
            "exact": most("wrong")
            .at_most(0, "wrong entries of all pairs and patterns")
            .fails(columns={"wrong": "saturated"}),
            "bytes": cell("bytes", "L4-R4")
            .at_most(0.53, "of L8-R8's bytes in L4-R4")
            .fails({"L4-R4": "L8-R4"}),
        },
    ),
)


_CODE = "magicube/machine_code"
_PLAIN = "L8-R8, not swapped"
_SPMM = {
    f"SpMM, L{left}-R{right}, V={vector}": Runs(
        config=_CODE,
        overrides={"pair": f"[{left},{right}]", "vector": str(vector)},
    )
    for left, right in PAIRS
    for vector in (2, 8)
}
_SDDMM = {
    f"SDDMM, L{bits}-R{bits}": Runs(
        config=f"{_CODE}:sddmm", overrides={"pair": f"[{bits},{bits}]"}
    )
    for bits in (16, 8, 4)
}
_KERNELS = (*_SPMM, *_SDDMM)

MACHINE_CODE = Table(
    id="magicube/machine-code",
    title="The sparse kernels' machine code for Hopper",
    paper="Li, Osawa and Hoefler, SC 2022, section 4.2; there for Ampere",
    caption=(
        "Compiled for sm_90a on a machine without a GPU, 256 columns. Limbs are "
        "widened to bfloat16, whose products are exact in float32 over as many "
        "vectors as their bits allow; int8 products of mma.sync saturate. not "
        "swapped: tiles times gathered rows in int8, as the formula has it. "
        "Instructions are no times."
    ),
    shows=(
        "Sparse kernels were compiled for Hopper without a GPU. Bars are the registers "
        "a thread takes; the filled kernel is claimed to use the tensor cores."
    ),
    picture=Bars("registers", label="registers a thread"),
    columns={
        "wgmma": "kinds of wgmma",
        "saturating": "saturating products",
        "registers": "registers",
        "spilled": "bytes spilled",
        "shared": "bytes of shared memory",
    },
    reduce=reduce.by_run,
    tiers=on_cpu(
        minutes=1.0,
        runs={**_SPMM, **_SDDMM, _PLAIN: Runs(config=f"{_CODE}:plain")},
        claims={
            "wgmma": reduce.least("wgmma", *_SPMM)
            .at_least(1, "kinds of wgmma in any SpMM")
            .fails({"SpMM, L8-R8, V=8": _PLAIN}),
            "no saturation": most("saturating", *_KERNELS)
            .at_most(0, "saturating products in any kernel")
            .fails({"SpMM, L8-R8, V=8": _PLAIN}),
        },
    ),
)


def attention(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each mode, mean and range over seeds."""
    (run,) = rows.values()
    return reduce.from_cells(
        {
            mode: reduce.extent(run["accuracy"].sel(mode=mode), "accuracy")
            for mode in (*MODES, *TRIVIAL)
        }
    )


ATTENTION = Table(
    id="magicube/attention",
    title="Sparse attention in few bits: accuracy on digits read pixel by pixel",
    paper=(
        "Li, Osawa and Hoefler, SC 2022, the accuracy of a sparse Transformer on "
        "texts of 4,096 bytes: 8-8 comparable with half precision; no figure is "
        "recalled"
    ),
    caption=(
        "8x8 digits as 64 tokens, two pre-norm blocks of width 64 with two heads, 400 "
        "steps; attention to 10 % of the keys, eight queries alike, the same in all "
        "heads. Trained in floats; x-y: probabilities in x bits and queries, keys and "
        "values in y, without training. Test accuracy in percent, mean and range over "
        "seeds. published scales: fixed units of 1/36 and 1/32, and truncation. no "
        "attention: trained with its output zero; logistic regression: of the pixels."
    ),
    shows=(
        "A network with sparse attention read digits pixel by pixel, in floats and in "
        "few bits. Few bits should lie on the floats' dot; no attention at all is the "
        "control."
    ),
    picture=Dots("accuracy"),
    columns={"accuracy": "accuracy, %"},
    reduce=attention,
    tiers=on_cpu(
        minutes=5.0,
        runs={"digits": Runs(config="magicube/attention", seeds=(0, 1))},
        trivial=Trivial(
            rows=TRIVIAL, by="accuracy", largest=True, peers=("dense", "float")
        ),
        claims={
            bits: above("accuracy", "float", bits)
            .at_most(most_lost, f"points of floats above {bits}")
            .fails({bits: PUBLISHED}, {bits: NO_ATTENTION})
            for bits, most_lost in (("8-8", 1.0), ("16-8", 0.5), ("4-4", 1.0))
        },
    ),
)


def spmm(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each product."""
    import xarray as xr

    run = reduce.single(rows)
    seconds = run["seconds"]
    ratio = seconds.sel(candidate=DENSE, drop=True) / seconds
    median = seconds.median("repetition")
    sparse = median.sel(candidate=[BCOO, BCSR]).min("candidate")
    return xr.Dataset(
        {
            "microseconds": 1e6 * median,
            "ratio": ratio.median("repetition"),
            "sparse": sparse / median,
            "wrong": run["wrong"].rename(pair="candidate").reindex_like(median),
        }
    ).rename(candidate="row")


SPMM = Table(
    id="magicube/spmm",
    title="Time of a product with 2048x2048 sparse integers, 90 % zeros, 512 columns",
    paper=(
        "Li, Osawa and Hoefler, SC 2022, section 5: faster than dense products in "
        "half precision, and than other sparse ones"
    ),
    caption=(
        "Vectors of eight rows at random places; 20 products in one program, in "
        "turns. wrong: entries that differ from the product in 64 bits modulo 2³²."
    ),
    benchmark=True,
    columns={
        "microseconds": "µs",
        "ratio": "dense bfloat16 / this",
        "sparse": "faster of BCOO and BCSR / this",
        "wrong": "wrong",
    },
    reduce=spmm,
    tiers=on_gpu(
        minutes=1.0,
        runs={"all": Runs(config="magicube/spmm_time")},
        claims={
            "dense": cell("ratio", "L8-R8")
            .at_least(1.0, "time of dense bfloat16 over L8-R8's")
            .fails({"L8-R8": BCOO}),
            "sparse": cell("sparse", "L8-R8")
            .at_least(1.4, "time of the faster of BCOO and BCSR over L8-R8's")
            .fails({"L8-R8": BCOO}),
        },
    ),
)
