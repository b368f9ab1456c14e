"""Every table is made of drawn runs: its rows, its columns, a number for each claim."""

import zlib

import numpy as np
import pytest

from experiments.gradcomp import validation
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY
from tests.experiments import rows

TABLES = discover.find_tables(REPOSITORY)
MODES = ("sync", "majority", "solo")
ALGORITHMS = (
    *("allreduce", "local_sgd", "dpsgd", "adpsgd"),
    *("sgp", "eager", "waiting", "wagma"),
)
METHODS = (
    *("PowerSGD r=4", "PowerSGD r=8", "PowerSGD r=16", "signSGD"),
    *("MSTop-k 10%", "Top-k 1%", "fp16"),
)
OPTIMIZERS = (
    *("sgd", "adamw", "jorge", "jorge, k = 1"),
    *("shampoo-eigh", "shampoo-eigh, k = 1", "shampoo-newton, k = 1"),
)
EXCHANGES, DRAFTS = (
    ("dense", "top_k", "ok_topk"),
    ("2 layers", "4 layers", "8 layers, 3 heads"),
)
# Setups of gradient compression, and drafts: two models, two batches, all methods.
SETUPS = [
    (model, batch, 64, method)
    for model in ("resnet50", "bert")
    for batch in (4, 8)
    for method in METHODS
]
DIMS = {
    "step": range(1, 201),
    "eval_step": range(10, 201, 10),
    "repetition": range(3),
    "mode": MODES,
    "algorithm": ALGORITHMS,
    "path": ("up", "down"),
    "layer": range(30),
    "count": range(1, 10),
    "place": range(40),
    "role": range(1, 9),
    "process": range(4),
    "member": range(4),
    "exchange": EXCHANGES,
    "phase": ("total", "communicating"),
    "quantity": ("a", "g", "preconditioned", "change", "raw", "one_more"),
    "bytes": (64, 16_384, 4_194_304),
    "gbit_per_s": (0.1, 10.0, 400.0),
    "compute_speed": (1.0, 2.0, 4.0),
    "round": range(5),
    "run": range(5),
    "sampling": ("greedy", "T = 1"),
    "draft": DRAFTS,
    "ahead": (1, 2, 4, 6),
    "pass": (1, 2, 3, 5, 7),
    "rate": (0.6, 0.7),
    "operation": ("gemm", "fusion"),
}


def of(dims, *names, **coords):
    """Returns the columns of a run that share dimensions, and the labels of these."""
    return dict.fromkeys(names, dims), coords


def merge(*parts):
    columns = {name: dims for own, _ in parts for name, dims in own.items()}
    return columns, {dim: names for _, own in parts for dim, names in own.items()}


TIMED = "candidate repetition"
TRAINED = merge(
    of("eval_step", "val_loss", "val_error", "eval_seconds"),
    of("step", "loss", "selected_entries", "kept_entries"),
    of("", "compile_seconds", "share", "step_time", "accuracy", "alone"),
)
FIGURES = ("reduced", "broadcast", "decomposition_broadcast", "factors_reduced")
CHECKED = "unchecked", "checked", "unchecked, larger batch", "check alone"
DECODED = "candidate", ("bfloat16", "4 bits", "3 bits")
RUNS = {
    "chai/quality": merge(
        of("place", "loss"),
        of("", "perplexity", "accuracy", "normalized", "share", "bytes"),
        of("", "dense", "native", "read", "formula"),
    ),
    "chai/memory": of("", "bytes", "formula", "share", "dense", "native", "used"),
    "chai/elbow": merge(of("layer count", "error"), of("layer", "threshold", "knee")),
    "chai/decode": merge(
        of(TIMED, "seconds", candidate=("clusters", "kernel, k = H", "xla", "cudnn")),
        of("candidate", "bytes"),
        of("", "error", "mixed"),
    ),
    "chai/latency": of(
        f"prompt what {TIMED}",
        "seconds",
        prompt=(256, 8192),
        what=("first", "all"),
        candidate=("all heads", "clusters", "k = H"),
    ),
    "data_movement/movement": of("", "forward", "total"),
    "data_movement/operators": of(
        "operator",
        *("operator_flops", "read", "written"),
        operator=(
            *("softmax", "norm 1", "ReLU", "softmax dX", "norm 1 dX", "out dbias"),
            "lin1",
        ),
    ),
    "data_movement/layouts": of("", "seconds", "over_fastest", "worst", "gap"),
    "data_movement/compiled": of("", "words", "flops", "transposes"),
    "eager/latency": merge(of("mode bytes", "latency", "fresh"), of("bytes", "ping")),
    "eager/hyperplane": merge(
        of("mode step", "loss", "seconds"), of("mode", "total", "staleness")
    ),
    "eager": merge(
        of("repetition mode", "total", "others", "fresh", "staleness", "contributors"),
        of("mode", "foretold"),
        of("", "round", "ping", "pong"),
    ),
    "gptq/quality": merge(of("", "perplexity"), of("path", "rounded", "objective")),
    "gptq/solver-time": merge(
        of(f"stage {TIMED}", "seconds", stage=("block", "matrices")),
        of("path", "loss", "rounded", candidate=("torch", "hpcjax")),
    ),
    "gptq/kernel": merge(
        of(TIMED, "seconds"),
        of("candidate", "bytes", candidate=("4 bits", "3 bits", "copy")),
        of("bits", "error", "mixed", bits=(4, 3)),
    ),
    "gptq/decode": merge(
        of(TIMED, "seconds"), of("candidate", "bytes", candidate=DECODED[1])
    ),
    "gradcomp/encoding": of(
        "model processes method",
        "encode_decode",
        model=("bert", "resnet50"),
        processes=(8, 64),
        method=(*METHODS, "Top-k 0.1%", "Top-k 10%"),
    ),
    "gradcomp/overlap": of("round", "computing", "sending", "both", "afterwards"),
    "gradcomp/validation": of(
        "processes mbit_per_s method",
        *("measured", "predicted"),
        processes=(2, 4),
        mbit_per_s=(50.0, 400.0, 3200.0),
        method=validation.Config().methods,
    ),
    "gradcomp": merge(
        of("setup gbit_per_s compute_speed", "speedup", setup=range(len(SETUPS))),
        of("setup gbit_per_s", "required_ratio"),
        of("setup", "pays_below"),
        of("", "threshold"),
        (
            {
                "counted": ("setup", [setup[-1] != "fp16" for setup in SETUPS]),
                **{
                    name: ("setup", list(values))
                    for name, values in zip(
                        ("model", "batch", "processes", "method"),
                        zip(*SETUPS, strict=True),
                        strict=True,
                    )
                },
            },
            {},
        ),
    ),
    "jorge/step-cost": merge(
        of("row repetition", "step", row=OPTIMIZERS),
        of("method repetition", "factor", method=("jorge", "eigh", "newton")),
    ),
    "jorge": TRAINED,
    "kaisa/kfac-jax": merge(
        of("quantity", "difference"),
        of(TIMED, "seconds", candidate=("kfac-jax", "hpcjax", "hpcjax, checked")),
    ),
    "kaisa/step-cost": of(
        "row repetition",
        "seconds",
        row=("sgd", "kfac", "kfac, all at every step", "precondition", "factors"),
    ),
    "kaisa/memory": of("", "factors", "decompositions", "imbalance"),
    "kaisa/bytes": of("", *FIGURES, *(f"{figure}_formula" for figure in FIGURES)),
    "kaisa": TRAINED,
    "lm/compile-time": of(
        "depth program",
        *("seconds", "instructions"),
        depth=(4, 48),
        program=("gradient", "token", "token, layer by layer"),
    ),
    "lm/decoding": merge(
        of(TIMED, "seconds", candidate=("scanned", "unrolled", "transformers")),
        of("", "differing", "tokens"),
    ),
    "lm/room": merge(
        of(
            TIMED,
            "seconds",
            candidate=("blocks, 64", "blocks, 2048", "whole, 64", "whole, 2048"),
        ),
        of("candidate", "temporaries", "prompt"),
    ),
    "lm/training-speed": merge(
        of(TIMED, "seconds"),
        of("operation", "share"),
        of("", "tokens", "flops", "short_flops", "peak"),
        of(
            "",
            candidate=(
                *("step", "short step", "product"),
                *("attention, xla", "attention, cudnn"),
            ),
        ),
    ),
    "loop/overhead": of(
        TIMED, "seconds", candidate=("bare", "loop", "bare, larger batch")
    ),
    "loop/safety": merge(
        of("step repetition", "check", step=CHECKED),
        of("loop repetition", "save", loop=("steps", "saving")),
    ),
    "oktopk/volume": of("step member", "sent", "selected", "kept", "wire"),
    "oktopk/balance": of("step member", "summed", "received"),
    "oktopk/throughput": merge(
        of("exchange phase step", "seconds"), of("exchange step", "words")
    ),
    "oktopk/selection": of(
        TIMED, "seconds", candidate=("lax.top_k", "exact", "threshold", "copy")
    ),
    "oktopk": TRAINED,
}


def drawn_by_hand(table_id, tier):
    """Returns rows of a tier, drawn anew for each table, the same every time."""
    draws = np.random.default_rng(zlib.crc32(table_id.encode()))
    paper = table_id.partition("/")[0]
    known = (name for name in RUNS if table_id.startswith(name) and "/" in name)
    columns, own = RUNS[max(known, key=len, default=paper)]
    coords = {**DIMS, **own}
    used = {
        d for dims in columns.values() if isinstance(dims, str) for d in dims.split()
    }
    if table_id == "gptq/kernel":
        from experiments.gptq.kernel_time import BASELINES

        coords["candidate"] = (*BASELINES, *coords["candidate"])
    coords = {dim: list(names) for dim, names in coords.items() if dim in used}
    return {
        name: rows.run(coords, seeds=runs.seeds, draws=draws, **columns)
        for name, runs in TABLES[table_id].tier(tier).runs.items()
    }


def drawn(table_id, tier):
    """Returns rows of a tier, drawn anew for each table, the same every time."""
    draws = np.random.default_rng(zlib.crc32(table_id.encode()))
    try:
        for runs in TABLES[table_id].tier(tier).runs.values():
            discover.outline_of(
                discover.load(runs.config, runs.overrides, REPOSITORY).config
            )
    except Exception as error:
        if "must define outline" not in str(error):
            raise
        return drawn_by_hand(table_id, tier)
    return {
        name: draw(runs, draws)
        for name, runs in TABLES[table_id].tier(tier).runs.items()
    }


def draw(runs, draws):
    """Returns results of a row's config under each of its seeds."""
    loaded = discover.load(runs.config, runs.overrides, REPOSITORY)
    columns, labels = discover.outline_of(loaded.config)
    labels = {
        dim: range(given) if isinstance(given, int) else given
        for dim, given in labels.items()
    }
    return rows.run(labels, seeds=runs.seeds, draws=draws, **columns)


@pytest.mark.parametrize(
    ("table_id", "tier"),
    [(table_id, tier) for table_id, table in TABLES.items() for tier in table.tiers],
)
def test_a_table_is_made_of_any_runs(table_id, tier):
    table = TABLES[table_id]
    made = table.reduce(drawn(table_id, tier))
    assert set(table.columns) <= set(made.data_vars)
    assert made.indexes["row"].is_unique
    for name in table.columns:
        assert made[name].dims in [("row",), ()]
        if f"{name}_low" in made:
            assert (made[f"{name}_low"] <= made[f"{name}_high"]).any()
    for verdict in judge(table.tier(tier), made):
        assert not np.isnan(verdict.ours), verdict
        assert verdict.broken is None or not np.isnan(verdict.broken), verdict
