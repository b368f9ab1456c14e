"""Configs of decoding; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, Literal

from hpcjax.core.config import Config, Float32, Size, Within


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(Config):
    """How the next token is drawn from logits.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps this many of the most likely tokens; None keeps all.
      top_p: keeps the fewest most likely tokens whose probabilities add up to this.
    """

    temperature: Float32 = 1.0
    top_k: Size | None = None
    top_p: Annotated[float, Within("(0, 1]")] = 1.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, so that nothing is random."""
        return self.temperature == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation(Config):
    """How texts are continued.

    Attributes:
      max_new_tokens: largest number of tokens to add.
      sampler: how tokens are drawn.
      end: the tokens that end a text.
      unrolled: compiles every layer by itself, see `models.empty_cache`.
    """

    max_new_tokens: Size = 64
    sampler: Sampler = Sampler()
    end: tuple[int, ...] = ()
    unrolled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clustering(Config):
    """How CHAI clusters a request's heads, and what it keeps of the cache.

    Attributes:
      window: number of first tokens that are read with all heads; their attention maps
        decide the clusters.
      method: of clustering; "agglomerative" uses average linkage of cosine distances.
      representative: the head whose queries and keys a cluster uses, see
        `cluster_heads`.
      mode: how to cluster grouped-query attention, see `cost.ClusteredHeads`; None if
        and only if every query head has a key head of its own.
      share_values: makes a cluster also share the values of its representative, the
        ablation that the paper calls CHAI-QKV.
    """

    window: Size = 5
    method: Literal["kmeans", "agglomerative"] = "kmeans"
    representative: Literal["lowest", "medoid"] = "lowest"
    mode: Literal["within_group", "cross_group", "expand"] | None = None
    share_values: bool = False
