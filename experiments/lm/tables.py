"""Language models' tables: how fast they write and learn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines
from hpcjax.runs.tables import Runs, Table, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr


def _decoding(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
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
        "reading included; the same parameters, the same two cores or one to which the "
        "process is pinned, in turns. scanned: "
        "one compiled layer; unrolled: each compiled by itself. differing: tokens that "
        "are not ours."
    ),
    benchmark=True,
    shows=(
        "A language model wrote tokens here and in the transformers library. Left of "
        "the line it takes less than 0.9 of transformers' time."
    ),
    picture=Dots("ratio", by="/", bound="batch_1", label="time / transformers'"),
    columns={
        "milliseconds": "ms a text",
        "rate": "tokens/s",
        "ratio": "time / transformers'",
        "differing": "differing",
    },
    reduce=_decoding,
    tiers=on_cpu(
        minutes=12.0,
        runs={
            "1": Runs(config="lm/decoding:one"),
            "8": Runs(config="lm/decoding:eight"),
            "1, one core": Runs(config="lm/decoding:one_core"),
            "8, one core": Runs(config="lm/decoding:eight_one_core"),
        },
        claims={
            name: reduce.cell("ratio", f"{row}/scanned")
            .at_most(0.9, f"batch {row}: time over that of transformers")
            .fails({f"{row}/scanned": f"{row}/transformers"})
            for name, row in (
                ("batch_1", "1"),
                ("batch_8", "8"),
                ("batch_1_one_core", "1, one core"),
                ("batch_8_one_core", "8, one core"),
            )
        },
    ),
)


def _compiling(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Puts a row for each depth and program; times also over the least depth's."""
    run = reduce.single(rows)
    least = run["seconds"].isel(depth=0, drop=True)
    table = run.assign(seconds=run["seconds"], ratio=run["seconds"] / least)
    parts = {
        f"{depth} blocks": table.sel(depth=depth, drop=True)
        for depth in run["depth"].values
    }
    return reduce.stack(parts, "program")


_GRADIENT = "48 blocks, gradient"
COMPILING = Table(
    id="lm/compile-time",
    title="Seconds to trace and compile a language model, by depth",
    paper="no paper: the bar that this project sets itself",
    caption=(
        "Width 64, 64 tokens, least of three, no cache of programs. token: a decoding "
        "step; layer by layer: each block compiled by itself, the negative control."
    ),
    benchmark=True,
    shows=(
        "A language model was compiled at two depths, with its blocks scanned or one "
        "by one. A scanned program's line should be flat."
    ),
    picture=Lines("{} blocks", "seconds", x_label="blocks", label="seconds to compile"),
    columns={
        "seconds": "seconds",
        "ratio": "over 4 blocks'",
        "instructions": "instructions",
    },
    reduce=_compiling,
    tiers=on_cpu(
        minutes=3.0,
        runs={"all": Runs(config="lm/compile_time")},
        claims={
            "gradient": reduce.cell("ratio", _GRADIENT)
            .at_most(2.0, "seconds for a gradient of 48 blocks over 4 blocks'")
            .fails({_GRADIENT: "48 blocks, token, layer by layer"}),
            "instructions": reduce.over("instructions", _GRADIENT, "4 blocks, gradient")
            .at_most(1.1, "instructions of 48 blocks over those of 4")
            .fails({_GRADIENT: "48 blocks, token, layer by layer"}),
        },
    ),
)


def _room(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Puts a row for each attention and room; times over the least room's."""
    run = reduce.single(rows)
    table = reduce.ratios(run["seconds"], "blocks, 64")
    shares = run[["temporaries", "prompt"]].rename(candidate="row")
    return table.assign(temporaries=shares["temporaries"], prompt=shares["prompt"])


ROOM = Table(
    id="lm/room",
    title="What unused room in the cache costs a token of SmolLM2-135M",
    paper="no paper: the bar that this project sets itself",
    caption=(
        "float32, four texts, 6 tokens in the cache, and room for 64 or 2,048. blocks: "
        "the cache is written where it is, and read as far as it is filled; whole: "
        "written so too, but attention reads all of it, with all scores at once, the "
        "negative control. temporaries: of a step's program, over the cache's bytes. "
        "prompt: bytes of temporaries of the program that reads 8,192 tokens."
    ),
    benchmark=True,
    shows=(
        "A token was computed with a cache that is full, and with much room unused. "
        "Left of the line unused room costs no more than a tenth."
    ),
    picture=Dots(("ratio", "temporaries"), bound="time"),
    columns={
        "milliseconds": "ms a token",
        "ratio": "time / room 64",
        "temporaries": "temporaries / cache",
        "prompt": "prompt of 8,192, bytes",
    },
    reduce=_room,
    tiers=on_cpu(
        minutes=2.0,
        runs={"all": Runs(config="lm/room")},
        claims={
            "time": reduce.cell("ratio", "blocks, 2048")
            .at_most(1.1, "time with room for 2,048 over that with room for 64")
            .fails({"blocks, 2048": "whole, 2048"}),
            "temporaries": reduce.cell("temporaries", "blocks, 2048")
            .at_most(0.2, "temporaries of a step over the cache, room for 2,048")
            .fails({"blocks, 2048": "blocks, 64"}),
            "prompt": reduce.cell("prompt", "blocks, 2048")
            .at_most(1.5 * 2**30, "bytes of temporaries that 8,192 tokens need")
            .fails({"blocks, 2048": "whole, 2048"}),
        },
    ),
)

# The data sheet's bfloat16 operations a second of an H200.
DATA_SHEET = 989e12


def _training(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
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
        "128 tokens": {
            "milliseconds": 1e3 * seconds["short step"],
            "share": float(run["short_flops"]) / seconds["short step"] / peak,
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
        "tokens, forward and backward. step: kinds of operations, of a profile. 128 "
        "tokens: a step that has too few, the negative control."
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
            "step": reduce.cell("share", "GPT-2 medium")
            .at_least(0.35, "share of the measured peak that the step reaches")
            .fails({"GPT-2 medium": "128 tokens"}),
            "attention": reduce.over(
                "milliseconds", "attention, xla", "attention, cudnn"
            )
            .at_least(1.5, "XLA's attention over cuDNN's, forward and backward")
            .fails({"attention, xla": "attention, cudnn"}),
        },
    ),
)
