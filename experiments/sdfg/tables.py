"""Tables of graphs that are rewritten: no rule changes a result; what tiles load."""

from typing import Any

from experiments.sdfg.movement import COUNTED
from experiments.sdfg.rules import CAUSES, CONTROLS, NAMES
from hpcjax.runs.pictures import Bars, Lines
from hpcjax.runs.reduce import cell, least, most, over
from hpcjax.runs.tables import Claim, Runs, Table, on_cpu

PAPER = "Ben-Nun et al., SC 2019"
_RULES = tuple(name for name in NAMES if name not in CONTROLS)
_FUSION, _TILING, _REDUCTION = CONTROLS


def _wrong(row: str, rule: str) -> Claim:
    return cell("wrong", row).at_least(30, f"wrong checks: {row}").fails({row: rule})


RULES = Table(
    id="sdfg/rules",
    title="Rules on drawn programs: applied, refused, wrong",
    paper=(
        f"{PAPER}, the list of transformations; that they keep what a program computes "
        "is stated there, and not measured"
    ),
    caption=(
        "500 drawn programs: arrays that maps share, later reads, steps, empty ranges, "
        "negative coefficients, reductions, nests, nested graphs. Each match of each "
        "rule is interpreted in three orders. Refused: by the first condition that "
        "failed. The last three rows lack a condition."
    ),
    shows=(
        "Rules that change programs were tried on drawn ones. Bars are how often "
        "each rule applied; what it made was checked against the program before."
    ),
    picture=Bars("applied", label="times applied", about=_RULES),
    columns={
        "applied": "applied",
        "refused": "refused",
        **{name: f"for: {cause}" for name, cause in CAUSES.items()},
        "checks": "checks",
        "wrong": "wrong",
        "wrong_share": "wrong, %",
    },
    along="rule",
    tiers=on_cpu(
        minutes=3.0,
        runs={"all": Runs(config="sdfg/rules")},
        claims={
            "wrong": most("wrong", *_RULES)
            .at_most(0, "wrong checks of any rule")
            .fails(
                {"MapFusion": _FUSION},
                {"MapTiling": _TILING},
                {"MapReduceFusion": _REDUCTION},
            ),
            "applied": least("applied", *_RULES)
            .at_least(30, "applications of the rule that applies least")
            .fails(columns={"applied": "wrong"}),
            "alias": cell("alias", "MapFusion")
            .at_least(30, "fusions refused for aliases")
            .fails({"MapFusion": _FUSION}),
            "aliases": cell("wrong_share", _FUSION)
            .at_least(10, "percent of checks wrong if aliases are allowed")
            .fails({_FUSION: "MapFusion"}),
            "cut": _wrong(_TILING, "MapTiling"),
            "initialised": _wrong(_REDUCTION, "MapReduceFusion"),
        },
    ),
)

TILING = Table(
    id="sdfg/tiling",
    title="Elements that tiles of a matrix product load",
    paper=(
        f"{PAPER}, §6: a matrix product is brought to 98.6 % of MKL by a chain of "
        "transformations, as recalled; here the chain's elements are counted"
    ),
    caption=(
        "Product of 64 x 64 matrices, tiled by MapTiling, MapInterchange, MapTiling in "
        "tiles of T. Elements of the subsets at the tiles' borders, which a local copy "
        "would load, and of C also store. By hand: 2N³/T + 2N². if whole: by a "
        "propagation that takes all of a matrix for a tile. Products of 16 x 16 are "
        "interpreted at every step."
    ),
    shows=(
        "A matrix product was cut into tiles, and what they load was counted. Larger "
        "tiles should load less, and the count should lie on the formula."
    ),
    picture=Lines(x="T={}", y=("loaded", "formula")),
    columns={
        "loaded": "loaded",
        "formula": "by hand",
        "whole": "if whole",
        "off": ("off", lambda run: abs(run["loaded"] - run["formula"])),
        "off_whole": ("off if whole", lambda run: abs(run["whole"] - run["formula"])),
        "apart": "largest difference",
    },
    along="tile",
    named="T={}".format,
    tiers=on_cpu(
        minutes=1.0,
        runs={"all": Runs(config="sdfg/tiling")},
        claims={
            "formula": most("off")
            .at_most(0, "elements between the count and the formula")
            .fails(columns={"off": "off_whole"}),
            "equal": most("apart")
            .at_most(0, "between the products of any step and numpy's")
            .fails(columns={"apart": "off_whole"}),
            "monotone": over("loaded", "T=16", "T=8")
            .at_most(0.6, "elements of tiles of 16 over those of tiles of 8")
            .fails({"T=16": "T=8"}),
        },
    ),
)


def _left(name: str) -> tuple[str, Any]:
    return f"{name} / listed", lambda run: run[name] / run["listed"]


MOVEMENT = Table(
    id="sdfg/movement",
    title="JAX functions as graphs: words and times, before and after fusion",
    paper=(
        f"{PAPER}: rewriting a program apart from its source gives tuned performance; "
        "here for functions that JAX traces"
    ),
    caption=(
        "Words over the largest argument's size: as a list of operators, as a graph "
        "with slices as subsets, with maps fused, with operators joined to kernels, "
        "and fused where each iteration still writes what lies within. Softmax of a "
        "sum with dropout, layer norm of a sum (4,096 x 1,024), two Jacobi sweeps "
        "(2,048 x 2,048), a step of an MLP, an attention. Milliseconds on a shared "
        "machine, least of 7 rounds: a program for each node, and JAX's jit."
    ),
    shows=(
        "Functions were read as graphs and rewritten. Bars are the words that are left "
        "of those that the operators move one by one."
    ),
    picture=Bars("left", label="words left / listed"),
    columns={
        **{n: n for n in ("listed", "simplified", "fused", "kernels", "kept")},
        "left": _left("fused"),
        "left_simplified": _left("simplified"),
        "left_kept": _left("kept"),
        **{n: n.replace("_", ", ") for n in ("off", "off_simplified", "off_kept")},
        "apart": "largest difference",
        "rounded": "if rounded",
        "apart_ms": "ms apart",
        "fused_ms": "ms fused",
        "jit_ms": "ms jit",
        "time": ("fused / apart", lambda run: run["fused_ms"] / run["apart_ms"]),
        "time_apart": ("apart / apart", lambda run: run["apart_ms"] / run["apart_ms"]),
    },
    along="program",
    tiers=on_cpu(
        minutes=4.0,
        runs={"all": Runs(config="sdfg/movement")},
        claims={
            "words": most("off", *COUNTED)
            .at_most(0, "words between the fused graph and the count by hand")
            .fails(columns={"off": "off_simplified"})
            .fails(columns={"off": "off_kept"}),
            "rows": most("left", "softmax", "norm")
            .at_most(0.7, "words of softmax and norm over those listed")
            .fails(columns={"left": "left_simplified"})
            .fails(columns={"left": "left_kept"}),
            "jacobi": cell("left", "jacobi")
            .at_most(0.25, "words of the sweeps over those listed")
            .fails(columns={"left": "left_simplified"})
            .fails(columns={"left": "left_kept"}),
            "equal": most("apart")
            .at_most(1e-6, "between a fused graph's results and JAX's")
            .fails(columns={"apart": "rounded"}),
            **{
                f"time, {row}": cell("time", row)
                .at_most(bound, f"time of the fused graph, node by node, {row}")
                .fails(columns={"time": "time_apart"})
                for row, bound in {"softmax": 0.75, "norm": 0.8, "jacobi": 0.4}.items()
            },
        },
    ),
)


_MODELS = {
    **{"mlp": "base", "resnet 8": "resnet", "unet": "unet", "causal_lm": "causal_lm"},
    **{name: name for name in ("cnn", "bert", "dlrm", "gnn")},
}
_FOUR = tuple(_MODELS)[:4]


def _share(operation: str, stage: str = "read") -> tuple[str, Any]:
    def share(run: Any) -> Any:
        words = run["words"].sel(stage=stage)
        return 100 * words.sel(operation=operation) / words.sum("operation")

    return f"{operation}, %", share


MODELS = Table(
    id="sdfg/models",
    title="Models as graphs: what is opaque, and what rules save",
    paper=f"{PAPER}: an intermediate representation of any program, with its movement",
    caption=(
        "Forward passes of eight examples, nothing computed. opaque, copies: of the "
        "words of the graph as it was read, those of operations whose subsets are not "
        "known (gathers, scatters), and of maps that only copy. if opaque: of the list "
        "of operators, the words of slices, pads, transposes, gathers and the like, "
        "which is what would be opaque if they were no subsets. fused: words after "
        "simplify and fuse_maps over those listed; kernels: the list by fuse."
    ),
    shows=(
        "Models were read as graphs of what they move. Bars are the percent of words "
        "in operations that the graph does not see into."
    ),
    picture=Bars("opaque", label="words in opaque operations, %"),
    columns={
        "opaque": _share("opaque"),
        "copies": _share("copy"),
        "moved": ("if opaque, %", lambda run: 100 * run["moved"]),
        "fused": (
            "fused / listed",
            lambda run: run["words"].sel(stage="fused").sum("operation"),
        ),
        "read": (
            "read / listed",
            lambda run: run["words"].sel(stage="read").sum("operation"),
        ),
        "kernels": "kernels / listed",
        "rules": "rules",
    },
    tiers=on_cpu(
        minutes=1.0,
        runs={row: Runs(config=f"sdfg/model:{name}") for row, name in _MODELS.items()},
        claims={
            "opaque": most("opaque", *_FOUR)
            .at_most(1, "percent of words that are opaque, of four models")
            .fails(columns={"opaque": "moved"}),
            "moved": least("moved", *_FOUR[1:])
            .at_least(1, "percent if slices were opaque, of three models")
            .fails(columns={"moved": "opaque"}),
            "saved": most("fused", *_FOUR)
            .at_most(0.95, "words after rules over those listed")
            .fails(columns={"fused": "read"}),
        },
    ),
)
