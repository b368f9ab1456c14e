"""Graphs of programs, of whose vertices a compiler's analysis is learned; no JAX."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, NotNegative, Seed, Size
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import ALGORITHMS, PROGRAMS
from hpcjax.data.source import Dataset

Edges = Literal["all", "no_control", "no_data", "cdfg"]
_INSTRUCTIONS_ALONE = ("reachability", "dominance", "subexpressions", "algorithm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramsConfig(Config):
    """Programs labelled by what they compute, or vertices by an analysis with a root.

    An example is the disjoint union of `block` graphs, so that `train.batch_size`
    counts unions; devices have unions of their own. Three fifths of the files are
    trained on, one is for validation and one for test; files with equal graphs are in
    one part. At most ten roots of a graph are drawn. With task=algorithm a file is one
    example, of the class that is the folder of its source; classes are split alike, and
    each has a file to train on. The model needs readout=graph.

    Attributes:
      source: "poj104", 1,000 solutions of 104 tasks in LLVM-IR (installed with the
        project); or a folder of files `.ll`.
      task: the analysis; or "algorithm".
      steps: most steps that the analysis of an example takes.
      shuffled: whether classes of files to train on are dealt out anew among these, so
        that there is nothing to learn.
      edges: all relations; all but one; or "cdfg", the peer's graph of instructions.
      variables: vertices of variables, see `ir.programs.from_llvm_ir`.
      block: graphs of an example.
      limit: how many files; None for all.
      split_seed: of the parts and the roots.
      holdout: the part that is held out.
      spare: see `SampledGraphConfig`.
    """

    objective: ClassVar[Objective] = PROGRAMS
    smoke: ClassVar[Mapping[str, str]] = {
        **{"limit": "12", "block": "2", "steps": "60", "spare": "3.0"},
        # Of so few files only two have one class.
        "holdout": "validation",
    }

    source: str = "poj104"
    task: Literal[
        "reachability",
        "dominance",
        "data_dependence",
        "liveness",
        "subexpressions",
        "algorithm",
    ] = "reachability"
    steps: Size = 12
    shuffled: bool = False
    edges: Edges = "all"
    variables: Literal["ssa", "per_use"] = "ssa"
    block: Size = 16
    limit: Size | None = None
    split_seed: Seed = 0
    holdout: Literal["validation", "test"] = "validation"
    spare: NotNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"edges=cdfg has instructions alone, which are {_INSTRUCTIONS_ALONE}"
        good = self.edges != "cdfg" or self.task in _INSTRUCTIONS_ALONE
        checks.require(good, rule, task=self.task)
        whole = self.task == "algorithm"
        rule = "shuffled is of the classes that task=algorithm has"
        checks.require(whole or not self.shuffled, rule, task=self.task)
        if whole:
            object.__setattr__(self, "objective", ALGORITHMS)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the unions; graphs are made once, and kept below `root`.

        Raises:
          ConfigError: llvmlite is not installed, or fewer than `block` examples to
            train on, or none that is held out.
          DataMissing: there is no such folder, or no file in it.
          DataFormatError: a damaged archive or cache, or no file that LLVM can read.
        """
        from hpcjax.data.block_source import BlockSampler, BlockSource
        from hpcjax.data.program_source import (
            UnionMaker,
            make_examples,
            read_classes,
            read_graphs,
        )

        whole = self.task == "algorithm"
        made = read_graphs(self.source, self.variables, self.limit, root)
        classes = read_classes(self.source, made) if whole else None
        found = make_examples(self, [*made.values()], classes)
        rule = "task=algorithm needs two classes, the folders of files' sources"
        good = not whole or len(found.classes) > 1
        checks.require(good, rule, classes=found.classes)
        parts = found.parts
        train, held_out = parts[0], parts[2 if self.holdout == "test" else 1]
        rule = "there must be as many examples to train on as block, and one held out"
        good = len(train) >= self.block and len(held_out) > 0
        sizes = {"block": self.block, "train": len(train), "held_out": len(held_out)}
        checks.require(good, rule, **sizes)
        maker: Any = UnionMaker(self.block, whole=whole)
        join = maker.joining(found.graphs)
        sampler: Any = BlockSampler(maker, join, train, self.spare)
        return Dataset(
            train=sampler,
            validation=BlockSource(maker, join, held_out),
            inputs=(self.block,),
            outputs=len(found.classes) if whole else 2,
            objective=self.objective,
            tables=(len(found.words) + 1,),
        )
