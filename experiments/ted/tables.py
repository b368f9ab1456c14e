"""Tables of DeepSpeed-TED: what is sent, what fits, and what would fit."""

from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Lines
from hpcjax.runs.reduce import cell
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PLAIN, DTD, CAC, BOTH = "plain", "DTD", "CAC", "DTD and CAC"
WIDE, WIDE_PLAIN, BROKEN = "T=4, DTD and CAC", "T=4, CAC", "slopes scattered"
RIGHT = (PLAIN, DTD, CAC, BOTH, WIDE, WIDE_PLAIN)


def _sent(name: str, tensor: str = "2") -> Runs:
    overrides = {"parallel.tensor": tensor}
    return Runs(config=f"ted/communication:{name}", overrides=overrides)


def _in_block(figure: str, **kinds: str) -> reduce.Cell:
    """Makes a cell: the sum of a block's collectives, `axis="kind"`."""
    return lambda run: sum(
        run[figure].sel(axis=axis, kind=kind, part="loop")
        for axis, kind in kinds.items()
    )


def _over_formula(run: "xr.Dataset") -> "xr.DataArray":
    """Returns words over the formula's, without the router's means over the batch."""
    tokens = run["block"].sel(axis="expert", kind="all-to-all")
    return (run["block"].sel(axis="col").sum() + tokens) / 4 / run["formula"]


_BOTH = {"col": "all-reduce", "expert": "all-to-all"}


def _share_of(row: str, of: str, share: float) -> reduce.Number:
    """Reads how far a row's bytes of all-to-alls are from a share of another's."""
    return abs(reduce.over("all_to_all", row, of) - share)


COMMUNICATION = Table(
    id="ted/communication",
    title="DeepSpeed-TED: what a block with experts sends in a step",
    paper=(
        "Singh et al., ICS 2023: dropping duplicate tokens (DTD) and checkpointing "
        "that knows of communication (CAC) make training of a 6.7 B base with 16 "
        "experts on 128 GPUs 26 % faster (abstract), which no run here repeats"
    ),
    caption=(
        "Three blocks of width 64, each with 4 experts, 128 characters a step, on 8 "
        "simulated devices: T=2 with equal tokens, 2 that share out the experts, 2 "
        "with copies of them; T=4: 4, 2 and 1. Blocks are recomputed in the backward "
        "pass. Of a block and a device: bytes of its all-to-alls; collectives, arrays "
        "that all-reduces over T and all-to-alls take, in what JAX asks for and in "
        "what XLA compiled; gathers among devices with equal tokens; words sent by "
        "rings over those of the formula. distance: relative, of the loss after 100 "
        "steps from one device's. slopes scattered: those of gathered tokens are "
        "summed over devices with equal tokens, as a plain all-gather does."
    ),
    shows=(
        "A block with experts was compiled with tensor parallelism, and what it sends "
        "was counted. Dropping tokens that others have, DTD, should halve the bytes."
    ),
    picture=Bars("all_to_all"),
    columns={
        "all_to_all": ("all-to-all, bytes", _in_block("operands", expert="all-to-all")),
        "lowered": ("collectives, asked for", _in_block("asked", **_BOTH)),
        "compiled": ("collectives, compiled", _in_block("arrays", **_BOTH)),
        "gathers": ("gathers", _in_block("arrays", col="all-gather")),
        "ratio": ("words / formula", _over_formula),
        "loss": "loss",
        "distance": "distance from one device",
    },
    tiers=on_cpu(
        minutes=5.0,
        devices=8,
        runs={
            PLAIN: _sent("plain"),
            DTD: _sent("full"),
            CAC: _sent("duplicates"),
            BOTH: _sent("base"),
            WIDE_PLAIN: _sent("duplicates", "4"),
            WIDE: _sent("base", "4"),
            BROKEN: _sent("scattered"),
        },
        claims={
            "half the bytes": _share_of(BOTH, CAC, 1 / 2)
            .at_most(0, "from 1/2 of the all-to-alls' bytes, for T=2")
            .fails({BOTH: CAC}),
            "a quarter of the bytes": _share_of(WIDE, WIDE_PLAIN, 1 / 4)
            .at_most(0, "from 1/4 of the all-to-alls' bytes, for T=4")
            .fails({WIDE: WIDE_PLAIN}),
            "asked for": cell("lowered", CAC)
            .at_most(8, "collectives of a block that JAX asks for; the paper: 8 of 12")
            .fails({CAC: PLAIN}),
            "compiled": cell("compiled", CAC)
            .at_most(8, "collectives of a block that XLA compiled; the paper: 8 of 12")
            .fails({CAC: PLAIN}),
            "recomputed": cell("compiled", PLAIN)
            .at_least(12, "collectives of a block that is recomputed whole")
            .fails({PLAIN: CAC}),
            "gathers": cell("gathers", BOTH)
            .at_most(4, "gathers of a block, two in each direction, none again")
            .fails({BOTH: DTD}),
            "to the word": abs(reduce.of("ratio", *RIGHT) - 1)
            .largest()
            .at_most(0, "farthest ratio of a row's words to the formula's from 1")
            .fails({BOTH: BROKEN}),
            "losses": reduce.most("distance", *RIGHT)
            .at_most(1e-4, "of the loss of one device, the farthest after 100 steps")
            .fails({BOTH: BROKEN}),
        },
    ),
)

_T1, _T2, _T4, _T8 = _SIZES = ("T=1", "T=2", "T=4", "T=8")
_HALF, _MANY = "halves", ", 1024"


def _times(figure: str, row: str) -> reduce.Cell:
    """Makes a cell: a figure over another row's."""
    return lambda run, rows: run[figure] / rows[row][figure]


def _fits(tensor: str = "1", expert: str = "4") -> Runs:
    overrides = {"parallel.tensor": tensor, "parallel.expert": expert}
    return Runs(config="ted/memory", overrides=overrides)


MEMORY = Table(
    id="ted/memory",
    title="DeepSpeed-TED: the largest base of a mixture of experts in 4 GiB",
    paper=(
        "Singh et al., ICS 2023: base models 4 to 8 times larger than with expert and "
        "data parallelism alone, as of DeepSpeed-MoE (abstract)"
    ),
    caption=(
        "Blocks of width 1024, every second one with 4 experts, which X=4 devices "
        "share out, AdamW in float32 on 32 simulated devices. blocks: the most of "
        "which a step fits into 4 GiB of each, by compiling alone; base: parameters of "
        "that model without experts. T=1 is DeepSpeed-MoE's scheme. held: bytes that a "
        "device holds of 4 blocks between steps, arguments of the compiled step; "
        "formula: `cost.ted_memory`; experts gathered: that, if each device had all "
        "experts. halves: X=2, T=2."
    ),
    shows=(
        "The largest model in 4 GiB a device was looked for. Longer is larger: tensor "
        "parallelism of T=4 should carry about three times the base."
    ),
    picture=Bars("larger", bound="four"),
    columns={
        "depth": "blocks",
        "base": "base",
        "larger": ("base / T=1's", _times("base", _T1)),
        "state": "held",
        "ratio": ("held / formula", lambda run: run["state"] / run["formula"]),
        "gathered": (
            "experts gathered",
            lambda run: run["state"] / run["gathered"],
        ),
    },
    tiers=on_cpu(
        minutes=4.0,
        devices=32,
        runs={
            _T1: _fits(),
            _T2: _fits("2"),
            _T4: _fits("4"),
            _HALF: _fits("2", "2"),
        },
        claims={
            "two": cell("larger", _T2)
            .at_least(1.7, "times the base of T=1 with T=2; the formula: 1.9")
            .fails({_T2: _T1}),
            "four": cell("larger", _T4)
            .at_least(3.0, "times the base of T=1 with T=4; the formula: 3.4")
            .fails({_T4: _T2}),
            "formula": abs(reduce.of("ratio", _T1, _T2, _T4, _HALF) - 1)
            .largest()
            .at_most(0.01, "farthest ratio of the bytes to the formula's from 1")
            .fails(columns={"ratio": "gathered"}),
        },
    ),
)


PLAN = Table(
    id="ted/plan",
    title="DeepSpeed-TED: a 6.7 B base with 16 experts by its arrays",
    paper=(
        "Singh et al., ICS 2023: 40 B parameters, a base of 6.7 B with 16 experts, on "
        "128 V100; base models 4 to 8 times larger (abstract)"
    ),
    caption=(
        "32 blocks of width 4096, every second one with 16 experts, 51,200 words, in "
        "mixed precision: 4 bytes of each parameter held, and 12 spread over copies. "
        "GiB of each of 128 and of 1,024 devices for its arrays, as X=16 and T cut "
        "them, and over the paper's formula for a base of so many parameters, or for "
        "one whose experts each device has; GiB of T=1 over these, by which a base may "
        "be larger. Nothing is measured."
    ),
    shows=(
        "The arrays of a 6.7 billion parameter base with experts were planned on many "
        "devices. Longer is larger: T=8 should pass the line."
    ),
    picture=Bars("larger", bound="larger"),
    columns={
        "gib": "GiB",
        "ratio": ("GiB / formula", lambda run: run["gib"] / run["formula"]),
        "gathered": (
            "experts gathered",
            lambda run: run["gib"] / run["gathered"],
        ),
        "larger": ("T=1's / GiB", lambda run: run["alone"] / run["gib"]),
    },
    tiers=by_model(
        minutes=0.2,
        runs={
            f"{name}{end}": Runs(
                config="ted/plan", overrides={"tensor": name[2:], "devices": devices}
            )
            for name in _SIZES
            for end, devices in (("", "128"), (_MANY, "1024"))
        },
        claims={
            "formula": abs(reduce.of("ratio") - 1)
            .largest()
            .at_most(
                0.01, "farthest ratio of the arrays' bytes to the formula's from 1"
            )
            .fails(columns={"ratio": "gathered"}),
            "larger": cell("larger", _T8 + _MANY)
            .at_least(4.0, "times the base of T=1 with T=8 on 1024; the paper: 4 to 8")
            .fails({_T8 + _MANY: _T1 + _MANY}),
        },
    ),
)

PASSES, FUSED, CLIPPED = "three programs", "one program", "one program, clipped"
SMALL, LARGE = "tiles of 100,000", "tiles of 1,000,000"
# Millions of parameters: a step of the few is taken.
FEW, MANY = 10, 100
_WAYS = {
    PASSES: {"way": "passes"},
    FUSED: {"way": "fused"},
    CLIPPED: {"way": "clipped"},
    SMALL: {"way": "tiled", "tile": "100000"},
    LARGE: {"way": "tiled"},
}


def _of(name: str, millions: int) -> str:
    return f"{name}, n={millions} M"


def _step(name: str, millions: int) -> Runs:
    size = {"size": f"{millions}000000", "taken": str(millions == FEW).lower()}
    return Runs(config="ted/optimizer", overrides={**_WAYS[name], **size})


_TILED = [_of(name, millions) for name in (SMALL, LARGE) for millions in (FEW, MANY)]

OPTIMIZER = Table(
    id="ted/optimizer",
    title="DeepSpeed-TED: what an update in tiles needs besides the state",
    paper=(
        "Singh et al., ICS 2023: without tiles the optimizer casts all gradients to "
        "float32 first, with tiles of 1.8 million it needs 4 bytes of each entry of "
        "one (recalled)"
    ),
    caption=(
        "Adam of n million parameters in one array, float16 weights and gradients, "
        "float32 parameters and moments. Most bytes besides these, of a parameter and "
        "of an entry of a tile (where there is none, of 1,000,000): arrays alive "
        "between programs, and results and temporaries of a compiled program. Of 100 "
        "million no step is taken, and arrays are counted by their shapes. three "
        "programs: one casts the gradients, one clips their norm, one takes the step. "
        "one program: casts and takes it; clipped: does all three. Tiles do not clip."
    ),
    shows=(
        "Adam's update was dispatched in passes, as one program, and tile by tile. In "
        "tiles it should need next to nothing more, however large the model; in "
        "passes, 4 bytes of each parameter."
    ),
    picture=Lines("n={} M", "each", x_label="millions of parameters"),
    columns={
        "each": "bytes / parameter",
        "tiles": "bytes / tile",
        "temporaries": "temporaries / tile",
    },
    tiers=on_cpu(
        minutes=1.0,
        runs={
            _of(name, millions): _step(name, millions)
            for name in _WAYS
            for millions in (FEW, MANY)
        },
        claims={
            "tiles": reduce.most("tiles", *_TILED)
            .at_most(20, "bytes an entry of a tile besides the state, at all sizes")
            .fails(
                {_of(LARGE, MANY): _of(PASSES, MANY)},
                {_of(LARGE, MANY): _of(CLIPPED, MANY)},
            ),
            "temporaries": reduce.most("temporaries", *_TILED)
            .at_most(4, "bytes an entry that a tile's programs need; the paper: 4")
            .fails({_of(LARGE, FEW): _of(CLIPPED, FEW)}),
            "spike": cell("each", _of(PASSES, FEW))
            .at_least(3.9, "bytes of each parameter where programs are dispatched")
            .fails({_of(PASSES, FEW): _of(FUSED, FEW)}),
        },
    ),
)
