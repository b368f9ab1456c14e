"""What devices hold and send that share out the kernels."""

from hpcjax.runs import reduce
from hpcjax.runs.tables import Runs, Table, on_cpu

DP, OURS, BROKEN = "data parallel", "kernels", "doubled"


KERNELS = Table(
    id="kernels_only/spread",
    title="State and bytes of four devices that share out the kernels",
    paper="none: a toy",
    columns={
        "state": ("state / Ψ", lambda run: run["state"] / run["psi"]),
        "sent": ("sent / Ψ", lambda run: run["sent"].sum() / run["psi"]),
        "apart": "distance from one device",
    },
    tiers=on_cpu(
        minutes=0.2,
        devices=4,
        runs={
            DP: Runs(config="kernels_only/mlp", overrides={"parallel": "none"}),
            OURS: Runs(config="kernels_only/mlp"),
            BROKEN: Runs(config="kernels_only/mlp:doubled"),
        },
        claims={
            "state": reduce.over("state", OURS, DP)
            .at_most(0.4, "of the state of data parallelism")
            .fails({OURS: DP}),
            "equal": reduce.cell("apart", OURS)
            .at_most(1e-5, "the farthest parameter from one device's, 3 steps")
            .fails({OURS: BROKEN}),
        },
    ),
)
