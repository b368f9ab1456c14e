"""GPTQ's tables: perplexity by bits, time of the solver, and time of the product."""

import math
from collections.abc import Mapping

import numpy as np
import xarray as xr

from experiments.gptq import decode_time
from experiments.gptq.kernel_time import BASELINES
from hpcjax import perf
from hpcjax.runs.tables import Claim, Runs, Table, Tier

SEEDS = (0, 1, 2)
BITS = (4, 3, 2)
# What a bar is set for: the model's own weights have 4 bits.
JUDGED = (3, 2)
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


def _quality(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns perplexities, means over the seeds, and what GPTQ makes of them."""
    mean = {name: float(row["perplexity"].mean()) for name, row in rows.items()}
    whole = mean["fp32"]
    table = {}
    for name, row in rows.items():
        cells = dict.fromkeys(
            ("perplexity_low", "perplexity_high", "closed", "gaps", "least", "typical"),
            math.nan,
        )
        cells["perplexity"] = mean[name]
        if row.sizes["seed"] > 1:
            cells["perplexity_low"] = float(row["perplexity"].min())
            cells["perplexity_high"] = float(row["perplexity"].max())
        if "GPTQ" in name:
            rounded = mean[_baseline(name)]
            cells["closed"] = (rounded - mean[name]) / (rounded - whole)
            cells["gaps"] = math.log(rounded / whole) / math.log(mean[name] / whole)
            ratio = row["rounded"] / row["objective"]
            cells["least"] = float(ratio.min())
            cells["typical"] = float(np.exp(np.log(ratio).mean()))
        table[name] = cells
    columns = {
        column: ("row", [cells[column] for cells in table.values()])
        for column in next(iter(table.values()))
    }
    return xr.Dataset(columns, coords={"row": list(table)})


def _judged(table: xr.Dataset, column: str) -> np.ndarray:
    """Returns a column's values in the rows of GPTQ that a bar is set for."""
    rows = [
        row
        for row in table["row"].values
        if "GPTQ" in row and row.startswith(tuple(f"{bits} " for bits in JUDGED))
    ]
    return table[column].sel(row=rows).values


def _act_order(table: xr.Dataset) -> float:
    """Returns the largest perplexity with act-order over that without."""
    of = table["perplexity"]
    return max(
        float(of.sel(row=f"{bits} bits, GPTQ, act-order"))
        / float(of.sel(row=f"{bits} bits, GPTQ"))
        for bits in JUDGED
    )


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
    columns={
        "perplexity": "perplexity",
        "closed": "share of RTN's gap closed",
        "gaps": "log gap, RTN / GPTQ",
        "least": "objective, least",
        "typical": "objective, geometric mean",
    },
    reduce=_quality,
    tiers={
        "cpu": Tier(
            minutes=20.0,
            runs=_runs(),
            claims={
                "closed": Claim(
                    relation="3 bits: GPTQ closes half of rounding's perplexity gap",
                    ours=lambda t: float(t["closed"].sel(row="3 bits, GPTQ")),
                    at_least=0.5,
                ),
                "gaps": Claim(
                    relation="2 bits: rounding's gap in log perplexity over GPTQ's",
                    ours=lambda t: float(t["gaps"].sel(row="2 bits, GPTQ")),
                    at_least=1.5,
                ),
                "act_order": Claim(
                    relation="3 and 2 bits: act-order is at most 5 % worse",
                    ours=_act_order,
                    at_most=1.05,
                ),
                "every_matrix": Claim(
                    relation="3 and 2 bits: GPTQ's objective is smaller, every matrix",
                    ours=lambda t: float(_judged(t, "least").min()),
                    at_least=1.0,
                ),
                "objective": Claim(
                    relation="3 and 2 bits: the same, geometric mean of each row",
                    ours=lambda t: float(_judged(t, "typical").min()),
                    at_least=1.5,
                ),
            },
        )
    },
)


def _solver(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns PyTorch's time over ours for each stage, and the largest loss ratio."""
    run = rows["all"].isel(seed=0, drop=True)
    loss = float(np.max(np.abs(run["loss"] - 1)))
    made = []
    for stage in run["stage"].values:
        seconds = run["seconds"].sel(stage=stage, drop=True).to_dataset(name="seconds")
        found = perf.ratio_table(seconds.assign_attrs(baseline="hpcjax"))
        torch = found.sel(row="torch", drop=True)
        ours = found["milliseconds"].sel(row="hpcjax", drop=True)
        made.append(torch.assign(ours=ours, loss=loss))
    return xr.concat(made, dim="row").assign_coords(row=list(run["stage"].values))


def _faster(stage: str, what: str) -> Claim:
    return Claim(
        relation=f"PyTorch's time over ours, {what}",
        ours=lambda table: float(table["ratio"].sel(row=stage)),
        at_least=2.0,
    )


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
    columns={
        "milliseconds": "PyTorch, ms",
        "ours": "hpcjax, ms",
        "ratio": "PyTorch / hpcjax",
        "loss": "largest difference of the loss",
    },
    reduce=_solver,
    tiers={
        "cpu": Tier(
            minutes=3.0,
            runs={"all": Runs(config="gptq/solver_time")},
            claims={
                "block": _faster("block", "a whole block"),
                "matrices": _faster("matrices", "its matrices alone"),
                "loss": Claim(
                    relation="the loss of every matrix is the same to 1 %",
                    ours=lambda table: float(table["loss"].max()),
                    at_most=0.01,
                ),
            },
        )
    },
)

# Of an H200. A baseline that does not reach its share of it is taken as if it did.
BANDWIDTH, REACHED = 4.3e12, 0.7


def _kernel(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns times, and the faster bfloat16 product's over each."""
    run = rows["all"].isel(seed=0, drop=True)
    median = run["seconds"].median("repetition")
    dense = [name for name in BASELINES if name in median["candidate"].values]
    limit = float(run["bytes"].sel(candidate=BASELINES[0])) / BANDWIDTH / REACHED
    base = run["seconds"].sel(candidate=dense).min("candidate").clip(max=limit)
    rate = run["bytes"] / median
    error = xr.full_like(median, math.nan)
    for bits in run["bits"].values:
        error.loc[f"{bits} bits"] = run["error"].sel(bits=bits, drop=True)
    ratio = (base / run["seconds"]).median("repetition")
    return xr.Dataset(
        {
            "microseconds": 1e6 * median,
            "ratio": ratio,
            "share": rate / rate.sel(candidate="copy", drop=True),
            "error": error,
        }
    ).rename(candidate="row")


def _speed(bits: int) -> Claim:
    return Claim(
        relation=f"{bits} bits: times as fast as the faster product in bfloat16",
        ours=lambda table: float(table["ratio"].sel(row=f"{bits} bits")),
        at_least=3.0,
    )


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
    tiers={
        "gpu": Tier(
            minutes=1.0,
            runs={"all": Runs(config="gptq/kernel_time")},
            claims={
                "four": _speed(4),
                "three": _speed(3),
                "error": Claim(
                    relation="errors relative to ‖w‖‖x‖, the largest",
                    ours=lambda table: float(table["error"].max()),
                    at_most=1e-3,
                ),
            },
        )
    },
)


def _decode(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns tokens a second, and the seconds of bfloat16 over each."""
    run = rows["all"].isel(seed=0, drop=True)
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
    tiers={
        "gpu": Tier(
            minutes=3.0,
            runs={"all": Runs(config="gptq/decode_time")},
            claims={
                "four": Claim(
                    relation="4 bits: time of bfloat16 over that of packed weights",
                    ours=lambda table: float(table["ratio"].sel(row="4 bits")),
                    at_least=2.0,
                ),
            },
        )
    },
)
