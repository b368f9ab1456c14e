"""The strategies: their names, and what they change of a training config."""

DP, ZERO1, ZERO2, ZERO3 = WAYS = ("data parallel", "zero 1", "zero 2", "zero 3")
BROKEN = "summed"
ONE, TENSOR, GRID = "one device", "tensor 1x4", "tensor 2x4"
GPIPE, F1B1, ZB = "GPipe", "1F1B", "ZB-H1"
THREE = "2 stages x 2 tensor x 2 data"
STASH, DOUBLE, SINGLE = "PipeDream", "PipeDream-2BW", "PipeDream, 1 stage"
# Rows whose names contain no other's: claims pick rows by parts of their names.
DP_64, TENSOR_64, SLOW = "dp, batch 64", "tensor, batch 64", "dp, lr 0.03"
OWN, DROPS = ", lr 0.03", "dropout"
LOCAL, WAGMA = "local SGD", "WAGMA"
# What computes the numbers of one device, and may be ranked.
SAME = (*WAYS, TENSOR, GRID, GPIPE, F1B1, ZB, THREE)
_TENSOR = {"parallel": "tensor3d", "parallel.col": "4"}
TOKENS = 32 * 8  # of a batch
_LARGE = {"train.batch_size": "64", "taken": "0"}


def _pipe(schedule: str, stages: int = 4, tensor: int = 1) -> dict[str, str]:
    told = {"schedule": schedule, "stages": stages, "tensor": tensor}
    told = {"micro_batches": 8, **told}
    return {"parallel": "pipeline"} | {f"parallel.{k}": str(v) for k, v in told.items()}


def _late(stages: int = 4, versions: str = "stash") -> dict[str, str]:
    told = {"backward.stages": str(stages), "backward.versions": versions}
    return {"backward": "pipedream", **told}


STRATEGIES: dict[str, dict[str, str]] = {
    DP: {},
    **{way: {"parallel": "zero", "parallel.stage": way[-1]} for way in WAYS[1:]},
    TENSOR: _TENSOR,
    GRID: {**_TENSOR, "parallel.row": "2"},
    GPIPE: _pipe("gpipe"),
    F1B1: _pipe("one_f_one_b"),
    ZB: _pipe("zero_bubble_h1"),
    THREE: _pipe("one_f_one_b", stages=2, tensor=2),
    "PowerSGD": {"exchange": "power_sgd"},
    "Ok-Topk": {"exchange": "ok_topk", "exchange.density": "0.05"},
    LOCAL: {"averaging": "local_sgd", "averaging.period": "4"},
    WAGMA: {"averaging": "wagma"},
    DROPS: {"model.options.dropout": "0.1"},
    SINGLE: _late(1),
    DP_64: _LARGE,
    TENSOR_64: _TENSOR | _LARGE,
}
# At the common rate, and at a lower one.
for _name, _own, _more in (
    (DP, SLOW, {}),
    (STASH, STASH + OWN, _late()),
    (DOUBLE, DOUBLE + OWN, _late(4, "double")),
):
    STRATEGIES |= {_name: _more, _own: {**_more, "optimizer.lr": "0.03"}}


def plan(name: str) -> dict[str, float]:
    """Returns what a schedule idles and keeps; a backward pass is twice as long."""
    from hpcjax import cost, sharding

    told = STRATEGIES.get(name, {})
    if told.get("parallel") != "pipeline":
        return {"bubble": 0.0}
    stages, count = (int(told[f"parallel.{k}"]) for k in ("stages", "micro_batches"))
    schedule = getattr(sharding, told["parallel.schedule"])(stages, count)
    line = cost.simulate(schedule, cost.StageCosts(t_f=1.0, t_b=2.0))
    held = sharding.tick_table(schedule).saved_buffers
    return {"bubble": 1 - 3 * count / line.makespan, "held": held}
