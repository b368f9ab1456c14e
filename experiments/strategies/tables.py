"""Tables of parallel strategies: one model, spread over devices in different ways."""

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.tables import Runs, Table, on_cpu

DP, ZERO1, ZERO2, ZERO3 = WAYS = ("data parallel", "zero 1", "zero 2", "zero 3")
PEER, BROKEN = "annotated", "summed"
STATE, SENT = np.array([3, 1.25, 0.375, 0.375]), np.array([2, 2, 2, 3])
ALL_DP = dict.fromkeys(WAYS, DP)


def _run(**overrides: str) -> Runs:
    return Runs(config="strategies/zero", overrides=overrides)


def _zero(stage: int, **overrides: str) -> Runs:
    return _run(**{"parallel": "zero", "parallel.stage": str(stage)}, **overrides)


ZERO = Table(
    id="strategies/zero",
    title="ZeRO: a language model spread over 8 devices",
    paper=(
        "Rajbhandari et al., arXiv 1910.02054, 2020, §5 and §7: state falls with the "
        "devices; stages 1 and 2 send what data parallelism sends, stage 3 half more"
    ),
    caption=(
        "Six blocks of width 256, float32. Of the compiled step with AdamW on 8 "
        "simulated devices, in units of the parameters' bytes: what a device holds "
        "between steps, and besides during a step; what it sends by rings, over 7/8. "
        "Stage 2 holds parameters as stage 3 does, and gathers them once a step. "
        "depth: the most blocks of which a step fits into 1 GiB, by compiling alone. "
        "distance: of the farthest parameter from training on one device, 20 steps of "
        "SGD with momentum. annotated: one program of jit, told the shardings of "
        "parameters alone; it does not keep the old state until the new is known to be "
        "finite, as the loop does. summed: stage 3, gradients summed, not averaged."
    ),
    columns={
        "state": "state / Ψ",
        "temporaries": "temporaries / Ψ",
        "sent": "sent / (7/8 Ψ)",
        "depth": "largest depth",
        "distance": "distance from one device",
    },
    reduce=reduce.by_run,
    tiers=on_cpu(
        minutes=4.0,
        devices=8,
        runs={
            DP: _run(),
            ZERO1: _zero(1),
            ZERO2: _zero(2),
            ZERO3: _zero(3),
            PEER: _run(annotated="true"),
            BROKEN: _zero(3, summed="true"),
        },
        claims={
            "state": abs(reduce.of("state", *WAYS) / STATE - 1)
            .largest()
            .at_most(0.01, "farthest relative distance from 3, 1.25, 0.375, 0.375 Ψ")
            .fails(ALL_DP),
            "sent": abs(reduce.of("sent", *WAYS) / SENT - 1)
            .largest()
            .at_most(0.005, "farthest relative distance from 2, 2, 2, 3 times 7/8 Ψ")
            .fails(ALL_DP),
            "temporaries": reduce.over("temporaries", ZERO3, ZERO1)
            .at_most(0.5, "of stage 1's temporaries at stage 3")
            .fails({ZERO3: ZERO2}),
            "equal": reduce.most("distance", *WAYS)
            .at_most(1e-5, "farthest parameter from one device's after 20 steps")
            .fails({ZERO3: BROKEN}, only=("distance",)),
            "depth": reduce.over("depth", ZERO3, DP)
            .at_least(4.0, "times the depth of data parallelism in 1 GiB at stage 3")
            .fails({ZERO3: DP}),
        },
    ),
)
