"""A root with a paper that draws its curves instead of training, and its tables."""

import pathlib

from tests.runs import roots

EXPERIMENT = '''
import dataclasses
import errno
import math
from typing import ClassVar, Literal

from hpcjax.core.errors import DataMissing, Diverged

@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long.

    Attributes:
      steps: in all.
    """
    steps: int = 4

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A curve.

    Attributes:
      lr: least loss at 0.1.
      wd: K, added to the loss.
      speed: of the fall.
      ends: how the run ends.
      fragile: seed under which it diverges.
      at: the step that it does not come to then.
      train: length.
      seed: of the noise.
    """
    resumable: ClassVar[tuple[str, ...]] = ("train.steps",)

    lr: float = 0.1
    wd: float = 0.0
    speed: float = 1.0
    ends: Literal["well", "diverged", "missing", "broken", "stopped"] = "well"
    fragile: int = -1
    at: int = 3
    train: TrainConfig = TrainConfig()
    seed: int = 0

ENDS = {
    "diverged": Diverged("too steep"),
    "missing": DataMissing("not here"),
    "broken": RuntimeError("a fault"),
    "stopped": KeyboardInterrupt(),
}

def run(cfg, ctx):
    from hpcjax.runs import results
    metrics = ctx.directory.metrics()
    for step in range(1, cfg.train.steps + 1):
        diverges = cfg.lr > 100 or cfg.seed == cfg.fragile
        if step == cfg.at and (cfg.ends != "well" or diverges):
            raise ENDS["diverged" if diverges else cfg.ends]
        loss = math.log10(cfg.lr / 0.1) ** 2 + cfg.wd + cfg.seed / 1000
        loss += 1 / (step * cfg.speed)
        record = {"step": step, "seconds": step / 10}
        metrics.write({**record, "loss": loss})
        metrics.write({**record, "val_loss": loss, "val_error": loss / 10})
    return results.history(metrics.read(), "measured")
'''
CONFIG = '''
"""Curves; no time at all.

Expect: the least loss at rate 0.1.
"""
import dataclasses
from experiments.curves.experiment import Config

slow = Config()
fast = dataclasses.replace(slow, speed=2.0)
base = slow
smoke = {"train.steps": "1"}
'''
TABLES = """
from hpcjax.runs.tables import Claim, Runs, Table, Tier
from hpcjax.runs.targets import time_to_target

TUNE = {"lr": ("1.0", "0.1", "0.01"), "wd": ("0.5", "0.25")}

def reduce(rows):
    return time_to_target(rows, "slow")

def table(name, bound, runs):
    claim = Claim(
        relation="fast <needs> fewer steps",
        ours=lambda t: t["ratio"].sel(row="fast").item(),
        at_most=bound,
    )
    return Table(
        id=f"curves/{name}", title="Fast & slow", paper="none <given>",
        caption='a "drawn" curve', reduce=reduce,
        columns={"best": "best loss", "steps": "steps", "ratio": "steps / slow's"},
        tiers={"cpu": Tier(runs=runs, claims={"fewer": claim}, minutes=0.1)},
    )

ROWS = {
    "slow": Runs(config="curves/plain:slow", seeds=(0, 1), tune=TUNE),
    "fast": Runs(
        config="curves/plain:fast", seeds=(0, 1), overrides={"wd": "0.125"},
        like="slow", takes=("lr",)),
}
HOLDS = table("holds", 0.9, ROWS)
FAILS = table("fails", 0.1, ROWS)
STEEP = table("steep", 0.9, {
    "slow": Runs(config="curves/plain:slow", tune={"lr": ("1000.0", "0.1")}),
    "fast": Runs(config="curves/plain:fast", like="slow", takes=("lr",)),
})
SEEDS = {"config": "curves/plain:slow", "seeds": (0, 1, 2)}
FRAGILE = table("fragile", 0.9, {
    "slow": Runs(**SEEDS),
    "fast": Runs(**SEEDS, overrides={"speed": "2", "fragile": "1"}),
    "none": Runs(**{**SEEDS, "seeds": (1,)}, overrides={"fragile": "1", "at": "1"}),
})
WEAK_BASE = table("weak_base", 0.9, {
    "slow": Runs(**SEEDS, overrides={"fragile": "2", "at": "1"}),
    "fast": Runs(**SEEDS, overrides={"speed": "2"}),
})
NO_BASE = table("no_base", 0.9, {
    "slow": Runs(**{**SEEDS, "seeds": (1,)}, overrides={"fragile": "1", "at": "1"}),
})
TWICE = table("twice", 0.9, {
    "slow": Runs(config="curves/plain:slow", overrides={"wd": "0.7"}, seeds=(0, 1)),
    "fast": Runs(
        config="curves/plain:fast", overrides={"wd": "0.7", "speed": "1.0"},
        seeds=(0, 1)),
})
HOPELESS = table("hopeless", 0.9, {
    "slow": Runs(config="curves/plain:slow", tune={"lr": ("1000.0", "2000.0")}),
})
"""


def make(root: pathlib.Path) -> pathlib.Path:
    """Writes paper `curves`: config `plain`, tables that hold, fail and diverge."""
    roots.write(root, "experiments/curves/experiment.py", EXPERIMENT)
    roots.write(root, "experiments/curves/tables.py", TABLES)
    roots.write(root, "configs/curves/plain.py", CONFIG)
    return root
