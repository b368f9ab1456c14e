"""Language models' tables: how fast they write and learn."""

from collections.abc import Mapping

import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.tables import Runs, Table, on_cpu, on_gpu


def _decoding(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Puts a row for each batch and implementation."""
    parts = {}
    for batch, row in rows.items():
        run = reduce.first(row)
        table = reduce.ratios(run["seconds"], "transformers")
        rate = run["tokens"].item() / (table["milliseconds"] / 1e3)
        parts[batch] = table.assign(rate=rate, differing=run["differing"])
    return reduce.stack(parts, between="/")


DECODING = Table(
    id="lm/decoding",
    title="Tokens a second of SmolLM2-135M, against transformers",
    paper="no paper: a figure that users ask for",
    caption=(
        "float32, greedy, 16 random tokens of prompt and 32 written, the prompt's "
        "reading included; the same parameters, the same cores, in turns. scanned: "
        "one compiled layer; unrolled: each compiled by itself. differing: tokens that "
        "are not ours."
    ),
    benchmark=True,
    columns={
        "milliseconds": "ms a text",
        "rate": "tokens/s",
        "ratio": "time / transformers'",
        "differing": "differing",
    },
    reduce=_decoding,
    tiers=on_cpu(
        minutes=6.0,
        runs={
            "1": Runs(config="lm/decoding:one"),
            "8": Runs(config="lm/decoding:eight"),
        },
        claims={
            f"batch_{batch}": reduce.cell("ratio", f"{batch}/scanned").at_most(
                1.0, f"batch {batch}: not slower than transformers"
            )
            for batch in (1, 8)
        },
    ),
)

# The data sheet's bfloat16 operations a second of an H200.
DATA_SHEET = 989e12


def _training(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Puts a row for the step and each attention, and the profile's shares behind."""
    run = reduce.single(rows)
    seconds = run["seconds"].median("repetition").to_series().to_dict()
    peak = float(run["peak"]) / seconds["product"]
    step = seconds["step"]
    rate = float(run["flops"]) / step
    cells = {
        "GPT-2 medium": {
            "milliseconds": 1e3 * step,
            "rate": float(run["tokens"]) / step,
            "share": rate / peak,
            "sheet": rate / DATA_SHEET,
        },
        "product of matrices": {
            "milliseconds": 1e3 * seconds["product"],
            "sheet": peak / DATA_SHEET,
        },
    }
    for name, own in seconds.items():
        if name.startswith("attention"):
            cells[name] = {"milliseconds": 1e3 * own}
    for name, share in run["share"].to_series().items():
        cells[f"step: {name}"] = {"milliseconds": 1e3 * step * share, "time": share}
    return reduce.from_cells(cells)


TRAINING = Table(
    id="lm/training-speed",
    title="A training step of GPT-2 medium against the device's peak",
    paper="no paper: the bar that this project sets itself",
    caption=(
        "16 sequences of 1024 random tokens, bfloat16 products, float32 parameters and "
        "AdamW; operations by formula, 6 N + 12 depth width time a token. Peak: a "
        "bfloat16 product of 8192 x 8192 matrices in the same "
        "process; data sheet: 989 TFLOP/s. attention: causal, 4 x 16 heads of 64, 4096 "
        "tokens, forward and backward. step: kinds of operations, of a profile."
    ),
    benchmark=True,
    columns={
        "milliseconds": "ms",
        "rate": "tokens/s",
        "share": "of the peak",
        "sheet": "of the data sheet",
        "time": "of the step",
    },
    reduce=_training,
    tiers=on_gpu(
        minutes=2.0,
        runs={"all": Runs(config="lm/training_speed")},
        claims={
            "step": reduce.cell("share", "GPT-2 medium").at_least(
                0.35, "share of the measured peak that the step reaches"
            ),
            "attention": reduce.over(
                "milliseconds", "attention, xla", "attention, cudnn"
            ).at_least(1.5, "XLA's attention over cuDNN's, forward and backward"),
        },
    ),
)
