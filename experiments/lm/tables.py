"""Language models' tables: how fast they write."""

from collections.abc import Mapping

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
