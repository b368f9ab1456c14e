"""What a training step sends whose sums of activations are compressed."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import compress, runs
from hpcjax.core import checks
from hpcjax.runs import program

BLOCK = 2  # sums of a layer: behind attention, and behind the feed-forward part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A language model whose matrices are cut over `col`, with a codec."""

    axes: ClassVar[tuple[str, ...]] = ("data", "depth", "row", "col")

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(
            self.codec is not None, "there must be a codec", codec=self.codec
        )

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and what the codec says."""
        return {
            **super().figures,
            "sums gathers": ": bytes that a device sends for the sums with a codec, "
            "read from the step, and those of them that are gathered",
            "wire whole": ": what the codec says of them, and one that sends all",
            "half": ": what the codec sends over what a sum of float16 does",
        }


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the step beside that of a codec that sends all."""
    start = cfg.codec.start
    found = program.read(cfg, ctx)
    layers = cfg.model.depth - (cfg.model.depth // 2 if start is None else start)
    size = cfg.train.batch_size, cfg.dataset.context, cfg.model.width
    whole = compress.Identity(start=start)
    plain, every = (
        layers * BLOCK * codec.wire_bytes(size, "float32", cfg.parallel.col)
        for codec in (whole, cfg.codec)
    )
    other = dataclasses.replace(cfg, codec=whole, broken="")
    others = program.read(other, ctx)["sent"].sum() - plain
    sent = found["sent"].sum(-1)
    by_kind = sent[cfg.axes.index("col")]
    # The encoder is one for all devices: its gradient is summed.
    learnt = layers * BLOCK * getattr(cfg.codec, "d", 0) * cfg.model.width
    learnt *= 4 * 2 * (cfg.parallel.col - 1) / cfg.parallel.col
    half = [
        codec.wire_bytes(size, "float16", cfg.parallel.col)
        for codec in (cfg.codec, whole)
    ]
    return {
        **found,
        "sums": sent.sum() - others - learnt,
        "gathers": by_kind[program.KINDS.index("all-gather")],
        "wire": every,
        "whole": plain,
        "half": half[0] / half[1],
    }
