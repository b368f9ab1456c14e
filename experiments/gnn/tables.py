"""Tables of graph networks: what their layers cost."""

from typing import TYPE_CHECKING

from experiments.gnn.work_depth import (
    BY_EDGE,
    DENSE,
    LOCAL,
    LOGS,
    NAMES,
    NO_RETURN,
    ONCE,
    ONE_BY_ONE,
    OWN,
    TERMS,
    UNMOVED,
)
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars
from hpcjax.runs.reduce import above, cell, least, most
from hpcjax.runs.tables import Runs, Table, by_model

if TYPE_CHECKING:
    import xarray as xr

_PROJECTED = [name for name in OWN if name != "edge_conv"]


def work_depth(rows: reduce.Rows) -> "xr.Dataset":
    """Returns the fitted coefficients, and how far fits are off, by layer."""
    run = reduce.single(rows)
    found = {}
    for name in NAMES:
        own = run.sel(model=name)
        found[name] = {
            **{term: own["work"].sel(term=term).round(3) for term in TERMS},
            "off": (100 * own["work_off"]).round(3),
            **{f"steps {log}": own["depth"].sel(log=log).round(3) for log in LOGS},
            "steps": own["depth_off"].round(3),
            "backward": own["backward"],
            "compiled": own["compiled"],
        }
    for name in run["start"].values:
        found.setdefault(str(name), {})["distance"] = run["distance"].sel(start=name)
    return reduce.from_cells(found)


WORK_DEPTH = Table(
    id="gnn/work-depth",
    title="Work and depth of graph layers, counted from their programs",
    paper=(
        "Besta and Hoefler, TPAMI 2023, its table of work and depth: O(mk + nk²) and "
        "O(log k + log d) of layers that project vertices first, O(mk²) of edge-conv"
    ),
    caption=(
        "n vertices, m edges, width k in and out, largest degree d; 30 shapes. A "
        "program's operators are counted, two operations for a multiplication and "
        "addition, one for an element that is gathered or added at its place. Work is "
        "fitted by coefficients that are not negative, depth by logarithms to base 2; "
        "worst: of the fits, the farthest. with gradients: work over a forward "
        "pass's; XLA's: over the operations of one compiled shape, which counts no "
        "gather and the body of a loop once. sgc: two hops; one head, one kernel, one "
        "stack; appnp: 10 steps. matrices: products with a sparse adjacency, two "
        "operations for an entry. from PPNP: over 0.9^t, at most."
    ),
    shows=(
        "The operations of layers of graph networks were counted in their programs. "
        "Long bars of mk² and nk² grow with the square of the width: those of mk² for "
        "every edge."
    ),
    picture=Bars(("mk", "mk²", "nk", "nk²"), label="operations", stacked=True),
    columns={
        "mk": "mk",
        "mk²": "mk²",
        "nk": "nk",
        "nk²": "nk²",
        "off": "worst, %",
        "steps log k": "log k",
        "steps log d": "log d",
        "steps log n": "log n",
        "steps": "worst, steps",
        "backward": "with gradients",
        "compiled": "XLA's",
        "distance": "from PPNP",
        "m": "m",
        "n": "n",
        "steps 1": "depth else",
    },
    reduce=work_depth,
    tiers=by_model(
        minutes=4.0,
        runs={"layers": Runs(config="gnn/work_depth")},
        claims={
            "work": most("off", *OWN)
            .at_most(1.0, "percent of the work that the formulas' terms miss, the most")
            .fails({"gcn": DENSE}),
            "vertices": most("mk²", *_PROJECTED)
            .at_most(0.01, "mk² of layers that project vertices first, the most")
            .fails({"gat": BY_EDGE}, {"gat": "edge_conv"}),
            "products": least("nk²", *_PROJECTED)
            .at_least(1.99, "nk² of layers that project vertices first, the least")
            .fails({"gat": BY_EDGE}, {"gat": "edge_conv"}),
            "movement": least("mk", *LOCAL)
            .at_least(1.99, "mk of layers in local form, the least")
            .fails({"sage": UNMOVED}),
            "loops": cell("mk", "appnp")
            .at_least(19.9, "mk of ten steps, two each")
            .fails({"appnp": ONCE}),
            "appnp": cell("distance", "appnp")
            .at_most(1.001, "distance of APPNP from PPNP over 0.9^t, the most")
            .fails({"appnp": NO_RETURN}),
            "edges": cell("mk²", "edge_conv")
            .at_least(1.0, "mk² of the layer whose products are of edges")
            .fails({"edge_conv": "gat"}),
            "depth": most("steps", *OWN)
            .at_most(1.0, "steps that logarithms miss, the most")
            .fails({"gcn": ONE_BY_ONE}),
            "softmax": abs(above("steps log d", "gat", "sage") - 2)
            .at_most(0.01, "from the two log d that a softmax takes beside a mean")
            .fails({"gat": "gcn"}),
        },
    ),
)
