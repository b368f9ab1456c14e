"""Jorge's tables: steps to SGD's target, cost of a step, ablation, quickstart."""

from collections.abc import Mapping

import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.tables import Claim, Runs, Table, grid, on_cpu, on_gpu
from hpcjax.runs.targets import time_to_target, time_to_targets

PAPER = (
    "arXiv 2310.12298: time to target and maximum accuracy of SGD, Shampoo and Jorge"
)
SEEDS = (0, 1, 2, 3, 4)
COLUMNS = {
    "best": "best validation loss",
    "steps": "steps to target",
    "ratio": "steps / SGD's",
    "seconds": "training s to target",
    "compile_seconds": "compile s",
}

_FIRST_LOOK = {
    "train.steps": "80",
    "train.eval_every": "2",
    "optimizer.lr": "0.05",
    "optimizer.schedule": "constant",
}


def _to_three_percent(rows: reduce.Rows) -> xr.Dataset:
    return time_to_target(rows, "sgd", metric="val_error", target=0.03)


QUICKSTART = Table(
    id="jorge/quickstart",
    title="Jorge against SGD, AdamW and Shampoo on digits: steps to 3 % error",
    paper=PAPER,
    caption=(
        "scikit-learn digits in place of ImageNet, ResNet-8, the same rate and "
        "schedule for SGD, Shampoo and Jorge: a first look. Against a tuned SGD: "
        "jorge/steps."
    ),
    columns={**COLUMNS, "best": "best validation error"},
    reduce=_to_three_percent,
    tiers=on_cpu(
        minutes=1.0,
        runs={
            "sgd": Runs(
                config="jorge/digits:sgd", overrides=_FIRST_LOOK, seeds=(0, 1, 2)
            ),
            "adamw": Runs(
                config="jorge/digits:adamw",
                overrides={**_FIRST_LOOK, "optimizer.lr": "0.003"},
            ),
            "shampoo": Runs(
                config="jorge/digits:shampoo",
                overrides={**_FIRST_LOOK, "optimizer.roots_every": "10"},
            ),
            "jorge": Runs(
                config="jorge/digits:jorge", overrides=_FIRST_LOOK, seeds=(0, 1, 2)
            ),
        },
        claims={
            "fewer_steps": reduce.cell("ratio", "jorge").at_most(
                0.95, "Jorge needs fewer steps than SGD (median of 3 seeds)"
            )
        },
    ),
)


_RATES = {
    "digits": ("0.03", "0.1", "0.3", "1.0"),
    "fashion": ("0.03", "0.1", "0.3", "1.0"),
    "text": ("0.01", "0.03", "0.1", "0.3"),
}


def _against_tuned_sgd(task: str, rates: tuple[str, ...]) -> dict[str, Runs]:
    """Returns a task's rows: SGD tuned over 12 trials, the others with SGD's rate."""
    tuned = {
        "optimizer.lr": rates,
        "optimizer.schedule": ("constant", "cosine", "stepdecay"),
    }
    same_rate = {"like": f"{task}/sgd", "takes": ("optimizer.lr",), "seeds": SEEDS}
    step_decay = {"optimizer.schedule": "stepdecay"}
    return {
        f"{task}/sgd": Runs(config=f"jorge/{task}:sgd", seeds=SEEDS, tune=tuned),
        f"{task}/sgd-step": Runs(
            config=f"jorge/{task}:sgd", overrides=step_decay, **same_rate
        ),
        f"{task}/shampoo": Runs(
            config=f"jorge/{task}:shampoo", overrides=step_decay, **same_rate
        ),
        f"{task}/jorge": Runs(config=f"jorge/{task}:jorge", **same_rate),
    }


_TASKS_WON = reduce.of("ratio", "/jorge").then(lambda ratio: (ratio <= 0.85).sum())


def _to_sgds_best(rows: reduce.Rows) -> xr.Dataset:
    return time_to_targets(rows, dict.fromkeys(_RATES, "sgd"))


STEPS = Table(
    id="jorge/steps",
    title="Steps to the tuned SGD's validation loss, Jorge's settings derived from it",
    paper=PAPER,
    caption=(
        "digits, 10,000 images of Fashion-MNIST and a character language model of the "
        "King James Bible stand in for ImageNet and COCO. SGD: best of 12 trials (4 "
        "rates, 3 schedules). Jorge: jorge_from_sgd of that rate, step decay, untuned. "
        "sgd-step and shampoo: the same rate and Jorge's schedule."
    ),
    columns={**COLUMNS, "target": "target loss"},
    reduce=_to_sgds_best,
    tiers=on_cpu(
        minutes=60.0,
        runs={
            name: runs
            for task, rates in _RATES.items()
            for name, runs in _against_tuned_sgd(task, rates).items()
        },
        claims={
            "fewer_steps": _TASKS_WON.at_least(
                2.0, "tasks of three on which Jorge needs ≤ 0.85 of SGD's steps"
            )
        },
    ),
)


def _costs(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Ratios of steps to SGD's, and of single preconditioners to the eigh root's."""
    run = reduce.single(rows)
    factors = reduce.stack(
        {"factor": reduce.ratios(run["factor"], "eigh")}, between=": "
    )
    return xr.concat([reduce.ratios(run["step"], "sgd"), factors], dim="row")


def _factor(times: float) -> Claim:
    return reduce.Number(
        lambda table: 1 / reduce.cell("ratio", "factor: jorge")(table)
    ).at_least(
        times, f"updating a 1024x1024 factor is > {times:g} times as fast as by eigh"
    )


STEP_COST = Table(
    id="jorge/step-cost",
    title="Time of a step and of one preconditioner's update",
    paper="arXiv 2310.12298: time per iteration of SGD, AdamW, Jorge and Shampoo",
    caption=(
        "Second-order steps at an interval of k = 50: stale + (fresh - stale)/50, both "
        "measured. cpu: ResNet-20, 32x32, batch 128; gpu: ResNet-50, 224x224, batch "
        "256, bfloat16 products. Ratios of the same round, to SGD and to the eigh root."
    ),
    benchmark=True,
    columns={"milliseconds": "ms", "ratio": "ratio"},
    reduce=_costs,
    tiers=on_cpu(
        minutes=6.0,
        runs={"all": Runs(config="jorge/step_cost:cpu")},
        claims={
            "below_shampoo": reduce.over(
                "ratio", "jorge, k = 1", "shampoo-eigh, k = 1"
            ).at_most(1.0, "a step that updates costs less than Shampoo's (eigh)"),
            "factor": _factor(1.0),
        },
    )
    | on_gpu(
        minutes=5.0,
        runs={"all": Runs(config="jorge/step_cost:gpu")},
        claims={
            "close_to_sgd": reduce.cell("ratio", "jorge").at_most(
                1.10, "Jorge's step costs at most 1.10 of SGD's"
            ),
            "factor": _factor(5.0),
        },
    ),
)

_ABLATED = {
    "jorge": {},
    "order 1": {"optimizer.order": "1"},
    "order 3": {"optimizer.order": "3"},
    "beta2 0.999": {"optimizer.beta2": "0.999"},
    "k 10": {"optimizer.update_every": "10"},
    "k 50": {"optimizer.update_every": "50"},
    "k 200": {"optimizer.update_every": "200"},
    "symmetrized": {"optimizer.symmetrize": "true"},
    "start at eps": {"optimizer.init": "eps"},
    "no grafting": {"optimizer.graft": "none"},
}


def _to_sgd(rows: reduce.Rows) -> xr.Dataset:
    return time_to_target(rows, "sgd")


ABLATION = Table(
    id="jorge/ablation",
    title="Order, dynamic β2, interval k, symmetrizing, start and grafting on digits",
    paper="the reviewers of arXiv 2310.12298 asked for the effect of k",
    caption=(
        "digits, ResNet-8, 300 steps, rate 0.1, three seeds; target: what SGD with the "
        "same rate and schedule reaches under every seed."
    ),
    columns=COLUMNS,
    reduce=_to_sgd,
    tiers=on_cpu(
        minutes=8.0,
        runs={
            "sgd": Runs(
                config="jorge/ablation:sgd",
                overrides={"optimizer.schedule": "stepdecay"},
                seeds=(0, 1, 2),
            ),
            **grid("jorge/ablation:jorge", _ABLATED, seeds=(0, 1, 2)),
        },
        claims={
            "grafting": reduce.over("ratio", "no grafting", "jorge").at_least(
                1.0, "without grafting the target takes more steps"
            )
        },
    ),
)
