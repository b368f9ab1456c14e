"""Tables of what an encoder layer moves, by counting, and of its layouts."""

from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots, Scatter
from hpcjax.runs.tables import Claim, Runs, Table, by_model, grid, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Ivanov et al., MLSys 2021"
_LISTS = {name: {"softmax": name} for name in ("joint", "apart")}
_KERNELS = {
    "unfused": {},
    "fused": {"kernels": "paper"},
    "fused, masks drawn again": {"kernels": "paper", "masks": "recomputed"},
}


def _movement(rows: reduce.Rows) -> "xr.Dataset":
    """Returns Mi words, and percent saved of the same list's without fusion."""
    cells = {}
    for name, row in rows.items():
        run, base = (
            reduce.first(row),
            reduce.first(rows[f"{name.partition(', ')[0]}, unfused"]),
        )
        cells[name] = {
            "forward": run["forward"],
            "backward": run["total"] - run["forward"],
            "total": run["total"],
            "saved": 100 * (1 - run["total"] / base["total"]),
        }
    return reduce.from_cells(cells)


def _saved(row: str, percent: float) -> dict[str, Claim]:
    off = abs(reduce.cell("saved", row) - percent)
    unfused = f"{row.partition(', ')[0]}, unfused"
    return {
        row: off.at_most(
            0.05, f"{row}: distance of the saved words from {percent} %"
        ).fails({row: unfused})
    }


MOVEMENT = Table(
    id="data_movement/movement",
    title="Words that an encoder layer of BERT-large moves, fused and not",
    paper=(
        f"{PAPER}, abstract: up to 22.91 % less; the list of operators that this is "
        "counted on is not known, and none is fitted to it"
    ),
    caption=(
        "Mi words (2^20) of forward and backward pass, 8 sequences of 512 tokens, 16 "
        "heads, width 1024; biases and parameters of norms are not counted. joint: the "
        "softmax and its dropout are one operator of the unfused list; apart: two. "
        "masks drawn again: dropout masks are made from a counter where they are used."
    ),
    shows=(
        "Words that a transformer layer reads and writes were counted, operator by "
        "operator and fused. The shorter bars are the fused layer's."
    ),
    picture=Bars("total", by=", ", label="words moved, forward and backward, Mi"),
    columns={
        "forward": "forward",
        "backward": "backward",
        "total": "both",
        "saved": "saved, %",
    },
    reduce=_movement,
    tiers=by_model(
        minutes=0.2,
        runs=grid("data_movement/movement", _LISTS, _KERNELS),
        claims={
            **_saved("joint, fused", 14.1),
            **_saved("joint, fused, masks drawn again", 23.8),
            **_saved("apart, fused", 20.7),
            **_saved("apart, fused, masks drawn again", 29.6),
        },
    ),
)


def _operators(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each operator of a list."""
    runs = {name: reduce.first(row) for name, row in rows.items()}
    parts = {
        name: run[["operator_flops", "read", "written"]] for name, run in runs.items()
    }
    table = reduce.stack(parts, "operator")
    table["intensity"] = (
        1024 * table["operator_flops"] / (table["read"] + table["written"])
    )
    return table


_MAPS = tuple(
    f"unfused, {name}"
    for name in ("softmax", "norm 1", "ReLU", "softmax dX", "norm 1 dX", "out dbias")
)

OPERATORS = Table(
    id="data_movement/operators",
    title="Operations and words of every operator of an encoder layer",
    paper=f"{PAPER}, appendix: the operators of the encoder layer",
    caption=(
        "Gi operations (2^30), Mi words (2^20); sizes as in data_movement/movement. "
        "Names behind fused are the paper's kernels. Operations of what is no "
        "contraction: one for each addition, product, comparison or function."
    ),
    shows=(
        "Every operator of a transformer layer is a point, by its operations and by "
        "how many of them fall on a word. Those below the line are bound by memory."
    ),
    picture=Scatter(
        "operator_flops", "intensity", labels=False, by=", ", bound="bound by memory"
    ),
    columns={
        "operator_flops": "operations, Gi",
        "read": "read, Mi",
        "written": "written, Mi",
        "intensity": "operations a word",
    },
    reduce=_operators,
    tiers=by_model(
        minutes=0.2,
        runs={
            "unfused": Runs(config="data_movement/movement"),
            "fused": Runs(
                config="data_movement/movement", overrides={"kernels": "paper"}
            ),
        },
        claims={
            "bound by memory": reduce.most("intensity", *_MAPS)
            .at_most(4.0, "operations a word of what is no contraction, most")
            .fails({"unfused, softmax": "unfused, lin1"}),
        },
    ),
)

_SELECTED = {"both passes": {}, "forward": {"passes": "forward"}}
LAYOUTS = Table(
    id="data_movement/layouts",
    title="Layouts of all tensors of a fused encoder layer: exact, and by paths",
    paper=f"{PAPER}, §6: within 4 % of the fastest configuration of each operator",
    caption=(
        "Times are predicted by a roofline of a V100's published peaks; that an "
        "operand to transpose costs 5 % and that strided tensors move at half the "
        "bandwidth are assumptions. fp_first and bp_first: shortest paths through one "
        "pass, then the other with what is bound; inf: nothing fits what was bound."
    ),
    shows=(
        "Memory layouts of a layer's tensors were chosen for all kernels at once. Near "
        "1 the choice costs hardly more than each kernel's own best; what misses the "
        "bound is at the edge."
    ),
    picture=Dots("over_fastest", bound="close"),
    columns={
        "seconds": "ms",
        "over_fastest": "over the fastest",
        "worst": "worst kernel",
        "gap": "gap to the bound",
    },
    reduce=lambda rows: reduce.by_run(rows).assign(
        seconds=lambda table: 1e3 * table["seconds"]
    ),
    tiers=by_model(
        minutes=1.0,
        runs=grid(
            "data_movement/layouts",
            _SELECTED,
            {name: {"method": name} for name in ("exact", "fp_first", "bp_first")},
        ),
        claims={
            "proved": reduce.cell("gap", "both passes, exact")
            .at_most(1e-9, "gap of the exact selection of both passes to its bound")
            .fails({"both passes, exact": "both passes, fp_first"}),
            "close": reduce.cell("over_fastest", "both passes, exact")
            .at_most(1.05, "time over that of each kernel's fastest layouts")
            .fails({"both passes, exact": "both passes, fp_first"}),
        },
    ),
)

COMPILED = Table(
    id="data_movement/compiled",
    title="The plain layer's primitives, fused by the rules, and XLA's program",
    paper=f"{PAPER}, §4: operators and movement are read from the program",
    caption=(
        "A float32 layer in plain JAX, forward and backward, 2 sequences of 128 "
        "tokens, 4 heads, width 256. primitives: each an operator. fused: by the rules "
        "of `ir.fusion_groups`. xla: its own analysis of the program compiled for this "
        "CPU, whose fusions may read a tensor more than once. Operations are over "
        "those of the contractions in the paper's list."
    ),
    shows=(
        "The same layer was counted as primitives, fused by the rules, and as XLA "
        "compiles it. Shorter is fewer words; XLA's is no claim."
    ),
    picture=Bars("words"),
    columns={
        "words": "words, Mi",
        "flops": "operations / contractions'",
        "transposes": "transposes and copies",
    },
    reduce=reduce.by_run,
    tiers=by_model(
        minutes=0.5,
        runs=grid(
            "data_movement/compiled",
            {name: {"count": name} for name in ("primitives", "fused", "xla")},
        ),
        claims={
            "fused": reduce.over("words", "fused", "primitives")
            .at_most(0.7, "words of the fused graph over those of the primitives")
            .fails({"fused": "primitives"}),
        },
    ),
)

_STORED, _AGAIN = "kernels, masks stored", "kernels, masks drawn again"
_COUNTED = {
    "operator by operator": {"execution": "list"},
    _STORED: {},
    _AGAIN: {"masks": "recomputed"},
    "paper's list, masks stored": {"execution": "fused list"},
    "paper's list, masks drawn again": {
        "execution": "fused list",
        "masks": "recomputed",
    },
    "x read twice, masks stored": {"execution": "kernels, x twice"},
    "x read twice, masks drawn again": {
        "execution": "kernels, x twice",
        "masks": "recomputed",
    },
}


def _total(run: "xr.Dataset") -> "xr.DataArray":
    return run["contraction"] + run["statistical"] + run["elementwise"]


def _counted(row: str, bound: float, twice: str) -> Claim:
    """A claim on the words of kernels over those of the unfused list."""
    return (
        reduce.cell("ratio", row)
        .at_most(bound, f"{row}: words over those of the unfused list")
        .fails({row: twice}, {row: "operator by operator"})
    )


KERNELS = Table(
    id="data_movement/kernels",
    title="Words that an encoder layer of our kernels reads and writes, as it runs",
    paper=f"{PAPER}, abstract: up to 22.91 % less, on a list that is not known",
    caption=(
        "Ki words (2^10), forward and backward, 2 sequences of 64 tokens, 4 heads, "
        "width 32: each tensor is 1/1024 of BERT-large's with 8 x 512 tokens. Kernels "
        "are interpreted and what they load and store is counted; contractions, the "
        "biases of attention and two sums of gradients are counted by their operands. "
        "small: operands below 1 Ki words, such as biases, which each program reads, "
        "and partial sums of columns; they are in no other column. x read twice: the "
        "norm reads its input a second time."
    ),
    shows=(
        "Words that a transformer layer reads and writes were counted while its "
        "kernels ran, by class of operator. Shorter bars move less: our kernels less "
        "than the paper's list of fused operators."
    ),
    picture=Bars(
        ("contraction", "statistical", "elementwise"),
        stacked=True,
        label="words moved, forward and backward, Ki",
    ),
    columns={
        "contraction": "contractions",
        "statistical": "softmax and norms",
        "elementwise": "elementwise",
        "total": ("all", _total),
        "ratio": (
            "of unfused",
            lambda run, rows: _total(run) / _total(rows["operator by operator"]),
        ),
        "small": "small",
        "most": "reads or writes of a tensor, most",
    },
    tiers=on_cpu(
        minutes=6.0,
        runs=grid("data_movement/counted", _COUNTED),
        claims={
            "stored": _counted(_STORED, 0.842, "x read twice, masks stored"),
            "drawn again": _counted(_AGAIN, 0.745, "x read twice, masks drawn again"),
            "once": reduce.most("most", _STORED, _AGAIN)
            .at_most(
                1.0, "times that a tensor of 1 Ki words or more is read or written"
            )
            .fails({_AGAIN: "x read twice, masks drawn again"}),
        },
    ),
)

_RATES = {"0": {}, "0.1": dict.fromkeys(("dropout", "attention_dropout"), "0.1")}
_BLOCKS = ("plain", "fused")


def _options(block: str, rate: str) -> dict[str, str]:
    named = {"block": block} | _RATES[rate]
    return {f"model.options.{name}": value for name, value in named.items()}


def _losses(rows: reduce.Rows) -> "xr.Dataset":
    """Returns medians over seeds, and the largest distance from the plain block."""
    cells = {}
    for name, row in rows.items():
        last = row["loss"].isel(step=-1)
        rate = name.split(", ")[1]
        apart = abs(last - rows[f"plain, {rate}"]["loss"].isel(step=-1))
        cells[name] = {
            "first": float(row["loss"].isel(step=0).median(skipna=False)),
            "last": float(last.median(skipna=False)),
            "validation": float(
                row["val_loss"].isel(eval_step=-1).median(skipna=False)
            ),
            "apart": float(apart.max(skipna=False)),
        }
    return reduce.from_cells(cells)


def _same(rate: str) -> Claim:
    return (
        reduce.cell("apart", f"fused, {rate}")
        .at_most(1e-3, f"nats from the plain block's last loss, dropout {rate}, most")
        .fails({f"fused, {rate}": "fused, 0.1, other masks"})
    )


DROPOUT = Table(
    id="data_movement/dropout",
    title="A Transformer with dropout trained in plain and in fused blocks",
    paper=f"{PAPER}: the fused layer computes what the frameworks' layers do",
    caption=(
        "Characters of Python's reference, 2 post-norm blocks of width 64, 100 steps "
        "of AdamW, batches of 8 windows of 32; medians of 3 seeds. The frequencies of "
        "single characters are worth 3.24 nats. Dropout of what "
        "attention and feed-forward part put out, and of the attention's weights. "
        "apart: largest distance, over seeds, of the last step's loss from that of the "
        "plain block. other masks: the gradient draws those of another seed."
    ),
    shows=(
        "The same small language model was trained with plain and with fused blocks. "
        "Equal bars are what fusion must leave; a gradient with other masks than the "
        "forward pass learns otherwise."
    ),
    picture=Bars("last", by=", ", label="loss of the last step, nats"),
    columns={
        "first": "first loss",
        "last": "last loss",
        "validation": "validation",
        "apart": "apart",
    },
    reduce=_losses,
    tiers=on_cpu(
        minutes=4.0,
        runs={
            **{
                f"{block}, {rate}": Runs(
                    config="data_movement/dropout",
                    overrides=_options(block, rate),
                    seeds=(0, 1, 2),
                )
                for block in _BLOCKS
                for rate in _RATES
            },
            "fused, 0.1, other masks": Runs(
                config="data_movement/dropout:broken",
                overrides=_options("fused", "0.1"),
                seeds=(0, 1, 2),
            ),
        },
        claims={
            **{f"same, {rate}": _same(rate) for rate in _RATES},
            "learned": reduce.most("last", "plain, 0", "plain, 0.1")
            .at_most(3.1, "last loss of the plain block, nats, most")
            .fails({"plain, 0": "fused, 0.1, other masks"})
            .fails(columns={"last": "first"}),
        },
    ),
)


def _times(rows: reduce.Rows) -> "xr.Dataset":
    """Returns medians, shares of a copy's bandwidth, and ratios to the slower peer."""
    import numpy as np
    import xarray as xr

    run = reduce.single(rows)
    median = run["seconds"].median("repetition")

    def ratio(name: str, *others: str) -> float:
        best = min(float(median.sel(candidate=other)) for other in others)
        return best / float(median.sel(candidate=name))

    rate = run["bytes"] / median
    ratios = {
        "block, kernels": ("block, XLA", "block, dot_product_attention"),
        "block, XLA": ("block, XLA",),
        "norm, one program": ("norm, four programs",),
        "norm, four programs": ("norm, four programs",),
    }
    names = run["candidate"].values.tolist()
    found = [ratio(n, *ratios[n]) if n in ratios else np.nan for n in names]
    share = (rate / rate.sel(candidate="copy", drop=True)).where(run["bytes"] > 0)
    return xr.Dataset(
        {
            "milliseconds": 1e3 * median,
            "share": share,
            "ratio": ("candidate", found),
        }
    ).rename(candidate="row")


ENCODER = Table(
    id="data_movement/encoder",
    title="Time of fused operations and of a fused layer on a GPU",
    paper=f"{PAPER}, abstract: 1.30 times as fast as frameworks on a V100",
    caption=(
        "bfloat16, dropout 0.1, masks drawn again. Operations: forward and backward "
        "pass of 131072 rows of 1024, 256 MiB an array; share: bytes a second that "
        "they have to move, over those of a copy. norm: BDRLN forward in one program "
        "against bias, dropout, residual and norm in four. block: both passes of a "
        "layer of BERT-large, 96 x 512 tokens, against the faster of XLA's program "
        "and one with `jax.nn.dot_product_attention`, which drops no weights."
    ),
    benchmark=True,
    columns={
        "milliseconds": "ms",
        "share": "of a copy's bandwidth",
        "ratio": "peer / this",
    },
    reduce=_times,
    tiers=on_gpu(
        minutes=3.0,
        runs={"all": Runs(config="data_movement/encoder")},
        claims={
            "bandwidth": reduce.least("share", "softmax", "BDRLN", "BAD")
            .at_least(0.75, "of a copy's bandwidth, the least of the operations")
            .fails({"BDRLN": "norm, four programs"}),
            "norm": reduce.cell("ratio", "norm, one program")
            .at_least(1.7, "times as fast as four programs")
            .fails({"norm, one program": "norm, four programs"}),
            "block": reduce.cell("ratio", "block, kernels")
            .at_least(1.02, "times as fast as the faster of XLA's blocks")
            .fails({"block, kernels": "block, XLA"}),
        },
    ),
)
