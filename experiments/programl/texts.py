"""What of unseen programs a vocabulary knows, and how long a graph takes to make."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.core.errors import DataFormatError

_TIMED = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Programs, of which some are known and others are not.

    Attributes:
      limit: how many files; None for all.
      seed: of the parts.
    """

    smoke: ClassVar[Mapping[str, str]] = {"limit": "6"}
    figures: ClassVar[Mapping[str, str]] = {
        "known": ": share of unseen files' vertices whose text is in the vocabulary",
        "opcodes": ": share of those that are instructions besides",
        "seconds": ": to make a graph, mean of some files",
    }

    limit: config.Size | None = None
    seed: config.Seed = 0


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Counts words of the training files, and times graphs of the others."""
    from hpcjax.data import program_source
    from hpcjax.ir import programs

    found = program_source.read_graphs("poj104", "ssa", cfg.limit, ctx.data_root)
    made = [*found.values()]
    train, *others = program_source.split_files(made, cfg.seed)
    unseen = [made[file] for part in others for file in part]
    words = programs.vocabulary(made[file] for file in train)
    known = np.concatenate([graph.numbers(words) < len(words) for graph in unseen])
    kinds = np.concatenate([graph.kinds for graph in unseen])
    texts = list(program_source.read_texts("poj104").values())[:_TIMED]
    start = time.perf_counter()
    for text in texts:
        with contextlib.suppress(DataFormatError):  # one that LLVM cannot read
            programs.from_llvm_ir(text.decode(errors="replace"))
    seconds = (time.perf_counter() - start) / len(texts)
    found = {
        "known": known.mean(),
        "opcodes": (known & (kinds == programs.INSTRUCTION)).mean(),
        "seconds": seconds,
    }
    return runs.measured({name: ((), value) for name, value in found.items()})
