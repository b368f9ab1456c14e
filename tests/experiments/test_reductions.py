"""Every table is made of drawn runs: its rows, its columns, a number for each claim."""

import zlib

import numpy as np
import pytest

from experiments.samo.training import FORMS
from experiments.sparsity.one_shot import VARIANTS as PRUNED
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY
from tests.experiments import rows

TABLES = discover.find_tables(REPOSITORY)
ALGORITHMS = (
    *("allreduce", "local_sgd", "dpsgd", "adpsgd"),
    *("sgp", "eager", "waiting", "wagma"),
)
DRAFTS = ("2 layers", "4 layers", "8 layers, 3 heads")
POINTS = [(d, w, False) for d in (2, 4, 8, 16) for w in (64, 128, 256)]
POINTS += [(2, 256, True), (4, 192, True), (8, 128, True), (16, 64, True)]
DIMS = {
    "step": range(1, 201),
    "eval_step": range(10, 201, 10),
    "repetition": range(3),
    "algorithm": ALGORITHMS,
    "role": range(1, 9),
    "process": range(4),
    "run": range(5),
    "sampling": ("greedy", "T = 1"),
    "draft": DRAFTS,
    "ahead": (1, 2, 4, 6),
    "pass": (1, 2, 3, 5, 7),
    "rate": (0.6, 0.7),
}


def of(dims, *names, **coords):
    """Returns the columns of a run that share dimensions, and the labels of these."""
    return dict.fromkeys(names, dims), coords


def merge(*parts):
    columns = {name: dims for own, _ in parts for name, dims in own.items()}
    return columns, {dim: names for _, own in parts for dim, names in own.items()}


TRAINED = merge(
    of("eval_step", "val_loss", "val_error", "eval_seconds"),
    of("step", "loss", "selected_entries", "kept_entries"),
    of("", "compile_seconds", "share", "step_time", "accuracy", "alone"),
)
RUNS = {
    "pipefisher/two-processes": merge(
        of("row run", *("utilization", "seconds", "cpu", "units")),
        of("", "period", "planned", row=("without", "filled")),
    ),
    "pipefisher/training": TRAINED,
    "pipefisher": of(
        *("", "utilization", "ratio", "overhead", "filled", "period"),
        *("unplaced", "memory", "t_step", "t_pipe"),
    ),
    "samo/memory": of("", "held", "formula", "paper", "gradients", "sent"),
    "samo/layouts": of(
        *("", "dense_stages", "samo_stages", "dense_peak", "samo_peak", "speedup"),
        *("transmission", "bubble", "collective", "gather"),
    ),
    "samo/training": merge(
        of("form step", "loss", form=FORMS), of("form", "val_loss"), of("", "drawn")
    ),
    "sparsity/collapse": merge(of("layer", "kept", layer=range(3)), of("", "empties")),
    "sparsity/digits": merge(
        of("", "sparsity"),
        # Between 0 and 1, and above the number that is kept, whatever the seed.
        ({"accuracy": ("", 0.9), "kept": ("", 900), "size": ("", 1000)}, {}),
    ),
    "sparsity/one-shot": of(
        "variant", "loss", "val_loss", "accuracy", "kept", variant=PRUNED
    ),
    "spb/quality": TRAINED,
    "spb/resources": of("role", "flops", "exact", "memory", "sent", "sent_zeros"),
    "spb/processes": of("process", "flops", "memory", "sent"),
    "specdec/model": merge(
        of("draft sampling ahead", "measured", "tokens", "expected"),
        of("draft sampling", "step"),
        of("sampling ahead", "other"),
        of("pass", "verify"),
        of("sampling", "plain"),
    ),
    "specdec/depth-width": merge(
        of("point repetition", "seconds", point=range(len(POINTS))),
        of("point", "layer_bytes", "head_bytes"),
        (
            {
                name: ("point", list(values))
                for name, values in zip(
                    ("depth", "width", "line"), zip(*POINTS, strict=True), strict=True
                )
            },
            {},
        ),
    ),
    "specdec/speedup": merge(
        of("rate", "ahead", "tokens", "foretold"),
        of("rate repetition", "measured"),
        of("repetition", "plain"),
    ),
    "ssn": TRAINED,
    "wagma/throughput": merge(
        of("repetition algorithm", "total"),
        of("repetition", "late", "staleness"),
        of("", "copy"),
    ),
    "wagma/drift": merge(
        of("step", "error"), of("", "partial", "late", "staleness", "total")
    ),
    "wagma/scaling": merge(
        of("repetition algorithm", "total"), of("algorithm", "words")
    ),
    "wagma": TRAINED,
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
