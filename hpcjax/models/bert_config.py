"""Config of BERT; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core.config import Decay, Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig
from hpcjax.models.transformer_config import check_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """BERT, with or without its two pre-training heads, see `models.bert`.

    Attributes:
      depth: number of blocks.
      width: features of a token.
      heads: query, key and value heads.
      mlp_width: features inside the feed-forward part; None means 4 · width.
      head: "pretraining" for both heads, "masked_lm" for that of the words, "pooler"
        for the encoder with its pooler, "none" for the encoder alone.
      remat: what the backward pass recomputes, as in `CausalLmConfig`.
      block: "plain", or "fused" with one operation for all that stands between two
        products, see `models.fused`.
      dropout: probability with which a training pass drops a number that the attention
        or the feed-forward part puts out.
      attention_dropout: likewise, of the attention's weights.
    """

    factory: ClassVar[str] = "hpcjax.models._bert:bert"
    stacks: ClassVar[tuple[str, ...]] = ("^blocks/",)
    smoke: ClassVar[Mapping[str, str]] = {"width": "8"}

    depth: Size = 2
    width: Size = 128
    heads: Size = 2
    mlp_width: Size | None = None
    head: Literal["pretraining", "masked_lm", "pooler", "none"] = "pretraining"
    remat: Literal["none", "full", "dots", "offload", "collectives"] = "none"
    block: Literal["plain", "fused"] = "plain"
    dropout: Decay = 0.0
    attention_dropout: Decay = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.width, self.heads)

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of what both heads put out."""
        heads = {"tokens": Numbers(rank=2), "order": Numbers(rank=1)}
        return objective.maps(Numbers(rank=2, tokens=True), heads)
