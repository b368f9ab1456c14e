"""Small roots with papers of their own, for tests that need configs on disk."""

import pathlib
import textwrap

EXPERIMENT = '''
import dataclasses
from typing import ClassVar, Literal

@dataclasses.dataclass(frozen=True, kw_only=True)
class AConfig:
    """A.

    Attributes:
      lr: rate.
    """
    lr: float = 0.1

@dataclasses.dataclass(frozen=True, kw_only=True)
class BConfig:
    """B.

    Attributes:
      momentum: decay.
    """
    momentum: float = 0.9

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run.

    Attributes:
      optimizer: which.
      steps: how long.
      seed: of all.
    """
    resumable: ClassVar[tuple[str, ...]] = ("steps",)

    optimizer: AConfig | BConfig = AConfig()
    steps: int = 3
    seed: int = 0

def run(cfg, ctx):
    raise NotImplementedError
'''
CONFIG = '''
"""Two ways to do it.

Expect: nothing.
"""
import dataclasses
from experiments.{paper}.experiment import BConfig, Config

first = Config()
second = dataclasses.replace(first, optimizer=BConfig())
_hidden = Config(seed=9)
base = second
smoke = {{"steps": "1"}}
needs = ("a data set",)
'''

# What runs, asks for the folder of data sets, and is judged.
RUNNING = """
from hpcjax import runs

def run(cfg, ctx):
    ctx.data_root.mkdir(parents=True, exist_ok=True)
    (ctx.data_root / "asked").touch()
    ctx.directory.metrics().write({"step": cfg.steps, "loss": 0.5})
    return runs.measured({"answer": ("step", [42.0] * cfg.steps)})
"""
TABLE = """
from hpcjax.runs.tables import Claim, Runs, Table, Tier

def reduce(rows):
    return next(iter(rows.values())).isel(seed=0).sum().expand_dims(row=list(rows))

def table(name, least, benchmark):
    tier = Tier(
        runs={"only": Runs(config="mine/first:first")},
        claims={"enough": Claim(
            relation="more", ours=lambda t: t.answer.item(), at_least=least)},
        minutes=0.1,
    )
    tiers = {"cpu": tier, "model": tier}
    return Table(id=f"mine/{name}", title="Answers", paper="none", tiers=tiers,
                 reduce=reduce, columns={"answer": "the answer"}, benchmark=benchmark)

HOLDS = table("holds", 100.0, False)
FAILS = table("fails", 1000.0, True)
"""


def write(root: pathlib.Path, name: str, text: str) -> pathlib.Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())
    return path


def make(
    root: pathlib.Path, paper: str = "mine", config: str = "first"
) -> pathlib.Path:
    """Writes one paper with one config below `root`."""
    write(root, f"experiments/{paper}/experiment.py", EXPERIMENT)
    write(root, f"configs/{paper}/{config}.py", CONFIG.format(paper=paper))
    return root


def make_running(root: pathlib.Path) -> pathlib.Path:
    """Writes a paper whose config runs, with a table that holds and one that fails."""
    make(root)
    path = root / "experiments/mine/experiment.py"
    text = path.read_text()
    path.write_text(text[: text.index("def run")] + RUNNING)
    (root / "experiments/mine/tables.py").write_text(TABLE)
    return root
