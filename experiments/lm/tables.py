"""Language models' tables: how fast they write and learn."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from hpcjax import perf
from hpcjax.runs.tables import Claim, Runs, Table, Tier


def _decoding(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Puts a row for each batch and implementation."""
    parts = []
    for batch, found in rows.items():
        run = found.isel(seed=0, drop=True)
        table = perf.ratio_table(run[["seconds"]].assign_attrs(baseline="transformers"))
        rate = run["tokens"].item() / (table["milliseconds"] / 1e3)
        names = [f"{batch}/{row}" for row in table["row"].values]
        parts.append(
            table.assign(rate=rate, differing=run["differing"]).assign_coords(row=names)
        )
    return xr.concat(parts, dim="row", data_vars="all")


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
    tiers={
        "cpu": Tier(
            minutes=6.0,
            runs={
                "1": Runs(config="lm/decoding:one"),
                "8": Runs(config="lm/decoding:eight"),
            },
            claims={
                f"batch_{batch}": Claim(
                    relation=f"batch {batch}: not slower than transformers",
                    ours=lambda table, batch=batch: (
                        table["ratio"].sel(row=f"{batch}/scanned").item()
                    ),
                    at_most=1.0,
                )
                for batch in (1, 8)
            },
        )
    },
)

# The data sheet's bfloat16 operations a second of an H200.
DATA_SHEET = 989e12


def _training(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Puts a row for the step and each attention, and the profile's shares behind."""
    run = rows["all"].isel(seed=0, drop=True)
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
    columns = ("milliseconds", "rate", "share", "sheet", "time")
    return xr.Dataset(
        {
            column: ("row", [row.get(column, np.nan) for row in cells.values()])
            for column in columns
        },
        coords={"row": list(cells)},
    )


def _attention(table: xr.Dataset) -> float:
    of = table["milliseconds"]
    return float(of.sel(row="attention, xla") / of.sel(row="attention, cudnn"))


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
    tiers={
        "gpu": Tier(
            minutes=2.0,
            runs={"all": Runs(config="lm/training_speed")},
            claims={
                "step": Claim(
                    relation="share of the measured peak that the step reaches",
                    ours=lambda t: float(t["share"].sel(row="GPT-2 medium")),
                    at_least=0.35,
                ),
                "attention": Claim(
                    relation="XLA's attention over cuDNN's, forward and backward",
                    ours=_attention,
                    at_least=1.5,
                ),
            },
        )
    },
)
