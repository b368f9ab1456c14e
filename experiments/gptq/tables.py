"""GPTQ's tables: perplexity by bits, time of the solver, and time of the product."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.gptq import decode_time
from experiments.gptq.kernel_time import BASELINES
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines
from hpcjax.runs.tables import Claim, Runs, Table, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

SEEDS = (0, 1, 2)
BITS = (4, 3, 2)
# What a bar is set for: the model's own weights have 4 bits.
JUDGED = ("3 bits, GPTQ", "2 bits, GPTQ")
_EVERY = [f"{row}{form}" for row in JUDGED for form in ("", ", act-order", ", g64")]
_GROUPS = {"grid.group_size": "64"}
_ORDER = {"gptq.act_order": "true"}


def _runs() -> dict[str, Runs]:
    """Returns the rows; what needs no calibration runs once."""
    found = {"fp32": Runs(config="gptq/smollm2:fp32")}
    for bits in BITS:
        own = {"grid.bits": str(bits)}
        rows = {
            "RTN": Runs(config="gptq/smollm2:rtn", overrides=own),
            "GPTQ": Runs(config="gptq/smollm2:gptq", seeds=SEEDS, overrides=own),
            "GPTQ, act-order": Runs(
                config="gptq/smollm2:gptq", seeds=SEEDS, overrides=own | _ORDER
            ),
            "RTN, g64": Runs(config="gptq/smollm2:rtn", overrides=own | _GROUPS),
            "GPTQ, g64": Runs(
                config="gptq/smollm2:gptq", seeds=SEEDS, overrides=own | _GROUPS
            ),
        }
        found |= {f"{bits} bits, {name}": runs for name, runs in rows.items()}
    return found


def _baseline(row: str) -> str:
    """Returns the row of rounding on the same grid."""
    bits, _, method = row.partition(", ")
    return f"{bits}, RTN, g64" if method.endswith("g64") else f"{bits}, RTN"


def _quality(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns perplexities, means over the seeds, and what GPTQ makes of them."""
    mean = {
        name: float(row["perplexity"].mean(skipna=False)) for name, row in rows.items()
    }
    whole = mean["fp32"]
    found = {}
    for name, row in rows.items():
        many = row.sizes["seed"] > 1
        cells = reduce.extent(row["perplexity"], "perplexity") if many else {}
        found[name] = {**cells, "perplexity": mean[name]}
        if "RTN" in name:  # The negative control: it gains nothing over itself.
            found[name] |= {"least": 1.0, "typical": 1.0}
        if "GPTQ" in name:
            rounded = mean[_baseline(name)]
            ratio = row["rounded"] / row["objective"]
            found[name] |= {
                "closed": (rounded - mean[name]) / (rounded - whole),
                "gaps": math.log(rounded / whole) / math.log(mean[name] / whole),
                "least": float(ratio.min()),
                "typical": float(np.exp(np.log(ratio).mean())),
            }
    return reduce.from_cells(found)


def _log_gap(row: str) -> reduce.Number:
    """Returns how far a row's log perplexity is above the whole model's."""
    return reduce.over("perplexity", row, "fp32").then(np.log)


@reduce.Number
def _act_order(table: "xr.Dataset") -> float:
    """Returns the largest perplexity with act-order over that without."""
    pairs = [reduce.over("perplexity", f"{row}, act-order", row) for row in JUDGED]
    return float(np.max([pair(table) for pair in pairs]))


QUALITY = Table(
    id="gptq/quality",
    title="Perplexity of SmolLM2-135M with its first 6 blocks of 4, 3 and 2 bits",
    paper="ICLR 2023, section 4: perplexity of OPT and BLOOM at 4 and 3 bits",
    caption=(
        "SmolLM2-135M-Instruct, whose published weights lie on a 4-bit grid, groups of "
        "32 (GGUF Q4_1): 4 bits are nothing new to it, and no bar is set there. 6 "
        "blocks of 30 quantized, all 30 run; calibration 16 x 256 tokens of the King "
        "James Bible, evaluation 16 x 256 of other chapters. fp32: the published "
        "weights. GPTQ: true-sequential, damping 0.01, means over 3 seeds of the "
        "calibration and the least and most. RTN: rounding on the same grid. g64: a "
        "scale for 64 inputs instead of all. Last columns: tr(ΔᵀHΔ) of RTN over "
        "GPTQ's, over all 42 matrices and seeds."
    ),
    shows=(
        "A language model's first blocks were rounded to a few bits. Lower is better: "
        "GPTQ's perplexity should stay nearer to full precision's than plain "
        "rounding's, RTN's."
    ),
    picture=Lines(
        "{} bits", "perplexity", rows=("fp32", "RTN", "GPTQ"), x_label="bits a weight"
    ),
    columns={
        "perplexity": "perplexity",
        "closed": "share of RTN's gap closed",
        "gaps": "log gap, RTN / GPTQ",
        "least": "objective, least",
        "typical": "objective, geometric mean",
    },
    reduce=_quality,
    tiers=on_cpu(
        minutes=20.0,
        runs=_runs(),
        claims={
            "closed": (
                reduce.above("perplexity", "3 bits, RTN", "3 bits, GPTQ")
                / reduce.above("perplexity", "3 bits, RTN", "fp32")
            )
            .at_least(0.5, "3 bits: GPTQ closes half of rounding's perplexity gap")
            .fails({"3 bits, GPTQ": "3 bits, RTN"}),
            "gaps": (_log_gap("2 bits, RTN") / _log_gap("2 bits, GPTQ"))
            .at_least(1.5, "2 bits: rounding's gap in log perplexity over GPTQ's")
            .fails({"2 bits, GPTQ": "2 bits, RTN"}),
            "act_order": _act_order.at_most(
                1.05, "3 and 2 bits: act-order is at most 5 % worse"
            ).fails(
                {
                    f"{bits} bits, GPTQ, act-order": f"{bits} bits, RTN"
                    for bits in (3, 2)
                }
            ),
            "every_matrix": reduce.least("least", *_EVERY)
            .at_least(1.1, "3 and 2 bits: RTN's objective over GPTQ's, every matrix")
            .fails({JUDGED[0]: "3 bits, RTN"}),
            "objective": reduce.least("typical", *_EVERY)
            .at_least(1.5, "3 and 2 bits: the same, geometric mean of each row")
            .fails({JUDGED[0]: "3 bits, RTN"}),
        },
    ),
)


def _solver(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns the times of each stage over PyTorch's, and the largest loss ratio."""
    run = reduce.single(rows)
    stages = {
        str(stage): reduce.ratios(run["seconds"].sel(stage=stage, drop=True), "torch")
        for stage in run["stage"].values
    }
    off = {name: abs(run[name] - 1).max() for name in ("loss", "rounded")}
    return reduce.stack(stages).assign(off)


def _faster(stage: str, what: str) -> Claim:
    claim = reduce.cell("ratio", f"{stage}, hpcjax").at_most(
        0.5, f"our time over PyTorch's, {what}"
    )
    return claim.fails({f"{stage}, hpcjax": f"{stage}, torch"})


SOLVER = Table(
    id="gptq/solver-time",
    title="Time of GPTQ on one block, PyTorch on the CPU and ours",
    paper="no paper: the bar that this project sets itself",
    caption=(
        "A block of SmolLM2's shapes (576x576, 576x192, 576x1536, 1536x576), random "
        "weights, 16 x 256 tokens, 3 bits, a grid for each output. PyTorch: the "
        "published algorithm written anew, lazy blocks of 128, one Hessian and factor "
        "for what has the same inputs, as many threads as cores. Compiled; rounds in "
        "turns in one process. block: Hessians, matrices and the pass that feeds the "
        "next block, of ours also packing, and the loss of rounding. matrices: from "
        "given Hessians."
    ),
    benchmark=True,
    shows=(
        "GPTQ's rounding was timed in PyTorch and here, on the same cores. Left of the "
        "line it takes half of PyTorch's time."
    ),
    picture=Dots("ratio", by=", ", bound="block", label="time / PyTorch's"),
    columns={
        "milliseconds": "ms",
        "ratio": "over PyTorch's",
        "loss": "largest difference of the loss",
        "rounded": "of rounding's",
    },
    reduce=_solver,
    tiers=on_cpu(
        minutes=3.0,
        runs={"all": Runs(config="gptq/solver_time")},
        claims={
            "block": _faster("block", "a whole block"),
            "matrices": _faster("matrices", "its matrices alone"),
            "loss": reduce.most("loss")
            .at_most(0.01, "the loss of every matrix is the same to 1 %")
            .fails(columns={"loss": "rounded"}),
        },
    ),
)

# Of an H200. A baseline that does not reach its share of it is taken as if it did.
BANDWIDTH, REACHED = 4.3e12, 0.7


def _kernel(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns times, and the faster bfloat16 product's over each."""
    import xarray as xr

    run = reduce.single(rows)
    median = run["seconds"].median("repetition")
    dense = [name for name in BASELINES if name in median["candidate"].values]
    limit = float(run["bytes"].sel(candidate=BASELINES[0])) / BANDWIDTH / REACHED
    base = run["seconds"].sel(candidate=dense).min("candidate").clip(max=limit)
    rate = run["bytes"] / median
    own = [f"{bits} bits" for bits in run["bits"].values]
    errors = {
        name: run[name]
        .rename(bits="candidate")
        .assign_coords(candidate=own)
        .reindex_like(median)
        for name in ("error", "mixed")
    }
    ratio = (base / run["seconds"]).median("repetition")
    return xr.Dataset(
        {
            "microseconds": 1e6 * median,
            "ratio": ratio,
            "share": rate / rate.sel(candidate="copy", drop=True),
            **errors,
        }
    ).rename(candidate="row")


def _speed(bits: int) -> Claim:
    claim = reduce.cell("ratio", f"{bits} bits").at_least(
        3.0, f"{bits} bits: times as fast as the faster product in bfloat16"
    )
    return claim.fails({f"{bits} bits": BASELINES[0]})


KERNEL = Table(
    id="gptq/kernel",
    title="Time of one token's product with 49152x12288 weights of 4 and 3 bits",
    paper="ICLR 2023, section 5: a product of quantized weights with one vector",
    caption=(
        "Groups of 128, scales and x in float16; 20 products in one program, two "
        "matrices in turns. Against the fastest of three products in bfloat16, or, "
        "where none reaches 70 % of 4.3 TB/s, against that. share: bytes a second, "
        "over those of a copy of the dense matrix. error: relative to ‖w‖‖x‖."
    ),
    benchmark=True,
    columns={
        "microseconds": "µs",
        "ratio": "bfloat16 / this",
        "share": "of a copy's bandwidth",
        "error": "error",
    },
    reduce=_kernel,
    tiers=on_gpu(
        minutes=1.0,
        runs={"all": Runs(config="gptq/kernel_time")},
        claims={
            "four": _speed(4),
            "three": _speed(3),
            "error": reduce.most("error", "bits")
            .at_most(1e-3, "errors relative to ‖w‖‖x‖, the largest")
            .fails(columns={"error": "mixed"}),
        },
    ),
)


def _decode(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns tokens a second, and the seconds of bfloat16 over each."""
    import xarray as xr

    run = reduce.single(rows)
    seconds = run["seconds"]
    ratio = seconds.sel(candidate=decode_time.BASELINE, drop=True) / seconds
    median = seconds.median("repetition")
    return xr.Dataset(
        {
            "milliseconds": 1e3 * median,
            "tokens": 1 / median,
            "ratio": ratio.median("repetition"),
            "rate": run["bytes"] / median / 1e9,
        }
    ).rename(candidate="row")


DECODE = Table(
    id="gptq/decode",
    title="Tokens a second of LLaMA-7B's shape with 4 and 3 bits a weight",
    paper="ICLR 2023, section 5: generation with fewer bits is faster",
    caption=(
        "Random weights, one text, 16 tokens read and 64 written, greedily; a token "
        "behind the first. The blocks' matrices are packed in groups of 128, embedding "
        "and head are bfloat16. GB/s: parameters that a token has to read."
    ),
    benchmark=True,
    columns={
        "milliseconds": "ms a token",
        "tokens": "tokens/s",
        "ratio": "bfloat16 / this",
        "rate": "GB/s",
    },
    reduce=_decode,
    tiers=on_gpu(
        minutes=3.0,
        runs={"all": Runs(config="gptq/decode_time")},
        claims={
            "four": reduce.cell("ratio", "4 bits")
            .at_least(2.0, "4 bits: time of bfloat16 over that of packed weights")
            .fails({"4 bits": decode_time.BASELINE}),
        },
    ),
)
