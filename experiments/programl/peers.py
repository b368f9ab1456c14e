"""Programs classified by how often their words are in them: no edge is known."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from hpcjax import runs
from hpcjax.core import checks, config
from hpcjax.data import ProgramsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A logistic regression, scikit-learn's.

    Attributes:
      words: "texts" of all vertices, or "opcodes" of instructions alone.
      inverse_penalty: C of the regression, of counts c as log(1 + c), standardized.
      dataset: programs with classes.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"dataset.limit": "12", "dataset.holdout": "validation"},
    }
    figures: ClassVar[Mapping[str, str]] = {
        "val_error val_top5_error": ": shares of held-out programs",
    }

    words: Literal["texts", "opcodes"] = "texts"
    inverse_penalty: config.Positive = 1.0
    dataset: ProgramsConfig = ProgramsConfig(task="algorithm", holdout="test")
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.dataset
        good = own.task == "algorithm" and not own.shuffled
        rule = "peers learn task=algorithm, of classes as they are"
        checks.require(good, rule, task=own.task, shuffled=own.shuffled)


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Learns from the files of the first part, and predicts those held out."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from hpcjax.data import program_source
    from hpcjax.ir.programs import INSTRUCTION, vocabulary

    own = cfg.dataset
    read = own.source, own.variables, own.limit
    made = program_source.read_graphs(*read, ctx.data_root)
    classes = program_source.read_classes(own.source, made)
    graphs, labels = [*made.values()], np.array(classes)
    files = program_source.split_files(graphs, own.split_seed, classes)
    train, held_out = files[0], files[2 if own.holdout == "test" else 1]
    words = vocabulary(graphs[file] for file in train)
    counts = []
    for graph in graphs:
        kept = (graph.kinds == INSTRUCTION) | (cfg.words == "texts")
        numbers = graph.numbers(words)[kept]
        counts.append(np.bincount(numbers, minlength=len(words) + 1))
    x = np.log1p(counts)
    regression = LogisticRegression(C=cfg.inverse_penalty, max_iter=2000)
    model = make_pipeline(StandardScaler(), regression).fit(x[train], labels[train])
    order = model.classes_[np.argsort(-model.decision_function(x[held_out]), axis=1)]
    right = order == labels[held_out][:, None]
    found = {"val_error": 1 - right[:, 0].mean()}
    found["val_top5_error"] = 1 - right[:, :5].any(1).mean()
    return runs.measured({name: ((), value) for name, value in found.items()})
