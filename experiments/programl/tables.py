"""The table of analyses that a network learns from programs."""

from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import Cells, Number, above, cell, of
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

WHOLE = "all edges"
REACH, DEPEND, LIVE, COMMON = (
    f"{task}, {WHOLE}"
    for task in ("reachability", "data dependence", "liveness", "subexpressions")
)
NO_CONTROL, NO_DATA = "reachability, no control", "data dependence, no data"
CDFG, TEXTS = "subexpressions, cdfg", "texts"
_ALL_CDFG = {CDFG: 0.009}
_PAPERS = {REACH: 0.998, DEPEND: 0.997, LIVE: 0.937, COMMON: 0.996, **_ALL_CDFG}


def scores(true: float, predicted: float, actual: float) -> Cells:
    """Returns F1, precision and recall of counts, and F1 of one who says always yes.

    Args:
      true: found and there, per vertex.
      predicted: found.
      actual: there.
    """
    return {
        "f1": 2 * true / (predicted + actual),
        "precision": true / predicted if predicted else 0.0,
        "recall": true / actual,
        "always": 2 * actual / (1 + actual),
    }


def dataflow(rows: reduce.Rows) -> "xr.Dataset":
    """Returns scores of the last validation, and what is known of texts."""
    found: dict[str, Cells] = {}
    for name, row in rows.items():
        run = reduce.first(row)
        if "known" in run:
            found[name] = {
                "known": run["known"],
                "opcodes": run["opcodes"],
                "milliseconds": 1e3 * run["seconds"],
            }
            continue
        names = ("val_true", "val_predicted", "val_actual")
        last = [float(run[each].values.ravel()[-1]) for each in names]
        found[name] = {**scores(*last), "published": _PAPERS.get(name, float("nan"))}
    return reduce.from_cells(found)


def _least(*numbers: Number) -> Number:
    return Number(lambda table: min(number(table) for number in numbers))


def _runs(variant: str) -> Runs:
    return Runs(config=f"programl/dataflow:{variant}")


DATAFLOW = Table(
    id="programl/dataflow",
    title="Compiler analyses learnt from LLVM-IR: F1 of the vertices found",
    paper="Cummins et al., ProGraML, ICML 2021, data flow: F1 on DDF-30",
    caption=(
        "999 programs of POJ-104, 3 : 1 : 1 by file, roots whose analysis takes at "
        "most 12 steps (reachability, data dependence) or 6, as many steps of the "
        "network; 300 steps of 16 graphs (data dependence: 900 of 8, with a recipe of "
        "its own, as the page says), test part. no control, no data: the same "
        "without the edges that decide; cdfg: instructions alone. always: F1 of one "
        "who labels every vertex. published: on 250,000 files and 30 steps. known: "
        "vertices of unseen files whose text is a word of the training files; "
        "opcodes: of instructions alone. ms: to make a file's graph."
    ),
    shows=(
        "A graph network learnt compiler analyses from programs, with all relations or "
        "without those that decide. Further right is better; 1 is a perfect answer."
    ),
    picture=Dots("f1"),
    columns={
        "f1": "F1",
        "precision": "precision",
        "recall": "recall",
        "always": "F1 of always yes",
        "published": "F1 published",
        "known": "texts known",
        "opcodes": "opcodes alone",
        "milliseconds": "ms a file",
    },
    reduce=dataflow,
    tiers=on_cpu(
        minutes=19.0,
        runs={
            REACH: _runs("reachability"),
            NO_CONTROL: _runs("reachability_blind"),
            DEPEND: _runs("data_dependence"),
            NO_DATA: _runs("data_dependence_blind"),
            COMMON: _runs("subexpressions"),
            CDFG: _runs("subexpressions_cdfg"),
            LIVE: _runs("liveness"),
            TEXTS: Runs(config="programl/texts"),
        },
        claims={
            "reachability": cell("f1", REACH)
            .at_least(0.95, "F1 of reachability")
            .fails({REACH: NO_CONTROL}),
            "data dependence": cell("f1", DEPEND)
            .at_least(0.90, "F1 of data dependence")
            .fails({DEPEND: NO_DATA}),
            "subexpressions": cell("f1", COMMON)
            .at_least(0.95, "F1 of common subexpressions")
            .fails(columns={"f1": "always"}),
            "edges decide": _least(
                above("f1", REACH, NO_CONTROL), above("f1", DEPEND, NO_DATA)
            )
            .at_least(0.15, "least loss of F1 without the edges that decide")
            .fails({NO_CONTROL: REACH}, {NO_DATA: DEPEND}),
            "more than always yes": (of("f1", WHOLE) - of("always", WHOLE))
            .least()
            .at_least(0.3, "least F1 of an analysis above that of always yes")
            .fails(columns={"f1": "always"}),
            "words are known": cell("known", TEXTS)
            .at_least(0.95, "share of unseen vertices whose text is known")
            .fails(columns={"known": "opcodes"}),
        },
    ),
)

GGNN, SHUFFLED = "ggnn", "ggnn, shuffled classes"
_LEFT_OUT = ("data", "positions", "backward")  # edges, or what is known of them
BAG, OPCODES = "bag of texts", "bag of opcodes"


def poj104(rows: reduce.Rows) -> "xr.Dataset":
    """Returns shares of the test files whose class is the first, or among five."""
    found: dict[str, Cells] = {}
    for name, row in rows.items():
        run = reduce.first(row)
        errors = (run[each] for each in ("val_error", "val_top5_error"))
        last = [1 - float(each.values.ravel()[-1]) for each in errors]
        found[name] = dict(zip(("top1", "top5"), last, strict=True))
    return reduce.from_cells(found)


POJ104 = Table(
    id="programl/poj104",
    title="What a program computes: share of unseen files whose class is found",
    paper="Cummins et al., ProGraML, ICML 2021, algorithm classification on POJ-104",
    caption=(
        "999 programs of POJ-104's 104 classes, of each about six to train on and two "
        "of test, on which all is measured; 500 steps of 16 graphs, T = 8. bags: "
        "scikit-learn's logistic regression of how often words are in a program, which "
        "knows no edge. no data, positions, backward: without edges of data, places of "
        "operands, edges both ways; one run each, of which nothing is claimed. "
        "shuffled: classes of the training files dealt out anew. The most frequent "
        "class has 0.02. Published, of the whole set, with about 250 files a class to "
        "train on: 0.966."
    ),
    shows=(
        "A graph network learnt which task a program solves, from six programs a task; "
        "so did regressions that know its words alone. Further right is better."
    ),
    picture=Dots(("top1", "top5")),
    columns={"top1": "class right", "top5": "among five"},
    reduce=poj104,
    tiers=on_cpu(
        minutes=18.0,
        runs={
            GGNN: Runs(config="programl/poj104:ggnn"),
            **{
                f"ggnn, no {what}": Runs(config=f"programl/poj104:no_{what}")
                for what in _LEFT_OUT
            },
            SHUFFLED: Runs(config="programl/poj104:shuffled"),
            BAG: Runs(config="programl/peers:texts"),
            OPCODES: Runs(config="programl/peers:opcodes"),
        },
        claims={
            "classes are learnt": cell("top1", GGNN)
            .at_least(0.20, "share of unseen files whose class the network finds")
            .fails({GGNN: SHUFFLED}),
            "of their programs": cell("top1", SHUFFLED)
            .at_most(0.05, "the same, of classes that were dealt out anew")
            .fails({SHUFFLED: GGNN}),
            "words tell much": cell("top1", BAG)
            .at_least(0.40, "share that regression of the words finds")
            .fails({BAG: SHUFFLED}),
        },
    ),
)
