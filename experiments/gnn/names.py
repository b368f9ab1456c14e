"""Names of the layers and controls that are counted, and of the fits' terms."""

TERMS = ("mk", "mk²", "nk", "nk²", "m", "n")
LOGS = ("log k", "log d", "log n", "1")
BY_EDGE, DENSE = "gat, projected by edge", "sum by a dense matrix"
ONE_BY_ONE = "gcn, feature by feature"
UNMOVED = "sage, movement free"
ONCE = "appnp, its loop counted once"
NO_RETURN = "appnp without return"
POOLED = "sage, pooled by edge"
CONTROLS = BY_EDGE, DENSE, ONE_BY_ONE, UNMOVED, ONCE
# Of t hops and so on, t being drawn: which terms grow with it.
HOPS, STEPS = "sgc, t hops", "appnp, t steps"
WIDER = LAYERS, KERNELS, HEADS = "gcn, t layers", "monet, t kernels", "gat, t heads"
REPEATED = (HOPS, STEPS, *WIDER)
# Of `graphs.gnn_layer`, which needs JAX.
BOTH = (
    *("gcn", "sage", "sgc", "commnet", "gin", "vanilla_attention", "agnn", "gat"),
    "monet",
)
LOCAL = (*BOTH, "g_gcn", "edge_conv")
ALONE = ("chebnet", "ppnp", "appnp", "arma", "s2gc")
MATRICES = ", matrices"
GLOBAL = (*(f"{name}{MATRICES}" for name in BOTH), *ALONE)
OWN = (*LOCAL, POOLED, *GLOBAL, *REPEATED)
NAMES = (*OWN, *CONTROLS)
# Of `model.layer`; the last sees no edge, and is the control.
KINDS = (
    *("gcn", "sage", "gat", "gin", "commnet", "agnn", "monet", "vanilla_attention"),
    *("g_gcn", "edge_conv", "sgc", "mlp"),
)
WAYS = "data", "vertex", "features", "stale"
MOVED = ("gather", "scatter-add", "scatter-max")
