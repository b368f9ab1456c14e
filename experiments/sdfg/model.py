"""Which operations of a model, or of its training step, move the words."""

import dataclasses
import json
import operator
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax import ir, runs
from hpcjax.core import config
from hpcjax.data import DigitsConfig
from hpcjax.models import MlpConfig
from hpcjax.runs import training
from hpcjax.train.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("read", "simplified", "fused")
OPERATIONS = ("map", "copy", "reduce", "product", "opaque")
# Products that are no einsum.
_PRODUCTS = ("einsum", "dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model as a graph; nothing of it is computed.

    Attributes:
      dataset: whose batches it takes.
      model: the network.
      what: its forward pass, or a step: the objective's gradient, and SGD's update.
      batch_size: examples.
      seed: not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"batch_size": "2"}
    figures: ClassVar[Mapping[str, str]] = {
        "words": "stage operation: that the graph moves, over those listed",
        "words_listed": ": of its list of operators",
        "kernels": ": of the list as kernels that also join reductions, over those",
        "moved": ": of the list's slices, pads, transposes, gathers, over those",
        "rules": ": that were applied",
    }

    dataset: training.DatasetPart = DigitsConfig()
    model: training.ModelPart = MlpConfig()
    what: Literal["forward", "step"] = "forward"
    batch_size: config.Size = 8
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training()

    def training(self) -> training.TrainingConfig:
        """Returns the run of which it is a step."""
        return training.TrainingConfig(
            dataset=self.dataset,
            model=self.model,
            train=TrainConfig(steps=1, batch_size=self.batch_size),
        )

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"stage": STAGES, "operation": OPERATIONS}


@runs.analytical
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Counts words; leaves `history.json` and `words.png`."""
    from experiments.sdfg import functions
    from hpcjax.runs import curves

    task = training.task(cfg.training(), ctx.data_root)
    first = ir.from_jax(*functions.of_task(task, cfg.what, cfg.batch_size))
    simple = first.rewrite(ir.simplify)
    programs = first, simple, simple.rewrite(ir.fuse_maps)
    words = {
        name: program.words() for name, program in zip(STAGES, programs, strict=True)
    }
    kept = {"words": words, "history": programs[-1].graph.history}
    text = json.dumps(kept, indent=1, default=operator.index)
    place = pathlib.Path(ctx.directory.path)
    (place / "history.json").write_text(text + "\n")
    curves.save(draw(words), place / "words.png")
    flow = first.dataflow()
    groups = {str(n): group for n, group in enumerate(ir.fusion_groups(flow))}
    listed = ir.movement(flow)
    return {
        "words": [_sorted(words[stage], listed) for stage in STAGES],
        "words_listed": listed,
        "kernels": ir.movement(ir.fuse(flow, groups)) / listed,
        "moved": flow.by_kind()["movement"].words / listed,
        "rules": max(len(programs[-1].graph.history) - 1, 0),
    }


def _sorted(words: Mapping[str, int], listed: int) -> list[float]:
    """Returns the words of each of the operations over those listed."""
    total = dict.fromkeys(OPERATIONS, 0)
    for name, count in words.items():
        total["product" if name in _PRODUCTS else name.split()[0]] += count
    return [count / listed for count in total.values()]


def draw(words: Mapping[str, Mapping[str, int]]) -> "Figure":
    """Draws the words of all operations, as read and fused."""
    from hpcjax.runs import panels

    names = [*reversed({**words["read"], **words["fused"]})]
    figure, ((axes,),) = panels.open_figure(0.4 * len(names) + 1.5)
    for shift, stage in ((0.2, "read"), (-0.2, "fused")):
        counts = [words[stage].get(name, 0) for name in names]
        axes.barh([n + shift for n in range(len(names))], counts, 0.4, label=stage)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("words")
    axes.legend()
    return figure
