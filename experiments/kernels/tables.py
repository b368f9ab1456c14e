"""The table of the kernels' machine code."""

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import cell, most, of
from hpcjax.runs.tables import Runs, Table, on_cpu

_CONFIG = "kernels/machine_code"
_ONE_ROW = {f"1 row, {bits} bits": {"bits": str(bits)} for bits in (2, 3, 4, 8)}
_WIDE = "float32 row, 4 bits"
_SEVERAL = "16 rows, 4 bits"
_PLAIN = "plain row, 4 bits"
_LARGE = "plain row, large tile"
_ALL = (*_ONE_ROW, _WIDE, _SEVERAL, "attention", "selection")


MACHINE_CODE = Table(
    id="kernels/machine-code",
    title="The GPU kernels' machine code for Hopper, per number that they handle",
    paper="no paper's table; the kernels are those of GPTQ, CHAI and Ok-Topk",
    caption=(
        "Compiled for sm_90a on a machine without a GPU, of operands as large as they "
        "are used; x, keys and values are bfloat16 where no dtype is named. "
        "Instructions and loads: of a thread's inner loop, or of all its code for "
        "selection, which has none, over the numbers of the large operand that the "
        "thread handles in it; a load takes up to 16 bytes. Read: elements read over "
        "elements there are, counted by interpreting the kernel. plain: weights are "
        "loaded and converted one by one, as one writes it first; large tile: by a "
        "program of 4,096 outputs. Instructions are "
        "no times: those come from a GPU, in gptq/kernel, chai/decode and "
        "oktopk/selection."
    ),
    shows=(
        "GPU kernels were compiled for Hopper without a GPU, and their instructions "
        "counted. Left of the line two weights are handled at once."
    ),
    picture=Dots(
        "instructions", rows=("row", "tile"), bound="two values at once", log=True
    ),
    columns={
        "instructions": "instructions a number",
        "loads": "loads a number",
        "conversions": "conversions of integers",
        "products": "kinds of tensor-core product",
        "saturating": "saturating products",
        "registers": "registers",
        "spilled": "bytes spilled",
        "loaded": "elements read, of those there are",
    },
    reduce=reduce.by_run,
    tiers=on_cpu(
        minutes=1.0,
        runs={
            **{
                row: Runs(config=_CONFIG, overrides=own)
                for row, own in _ONE_ROW.items()
            },
            _WIDE: Runs(config=_CONFIG, overrides={"dtype": "float32"}),
            _SEVERAL: Runs(config=f"{_CONFIG}:several_rows"),
            "attention": Runs(config=f"{_CONFIG}:attention"),
            "selection": Runs(config=f"{_CONFIG}:selection"),
            _PLAIN: Runs(config=f"{_CONFIG}:plain_row"),
            _LARGE: Runs(config=f"{_CONFIG}:plain_row", overrides={"tile": "4096"}),
        },
        claims={
            "two values at once": most("instructions", *_ONE_ROW)
            .at_most(1.9, "instructions a weight, one row of x, at the most")
            .fails({"1 row, 4 bits": _PLAIN}),
            "one value at once": cell("instructions", _WIDE)
            .at_most(4.0, "instructions a weight, one row of float32")
            .fails({_WIDE: _PLAIN}),
            "no conversions": most("conversions", *_ONE_ROW, _WIDE)
            .at_most(0, "conversions of integers, one row")
            .fails({"1 row, 4 bits": _PLAIN}),
            "tensor cores": (cell("products", _SEVERAL) - cell("saturating", _SEVERAL))
            .at_least(1, "kinds of tensor-core product less saturating ones, 16 rows")
            .fails({_SEVERAL: _PLAIN}),
            "no spills": most("spilled", *_ALL)
            .at_most(0, "bytes spilled by any kernel")
            .fails({"1 row, 4 bits": _LARGE}),
            "read once": abs(of("loaded", *_ALL) - 1)
            .largest()
            .at_most(0, "times that any large operand is read more or less than once")
            .fails({"1 row, 4 bits": _PLAIN}),
        },
    ),
)
