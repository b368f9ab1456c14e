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
