"""How tokens are chosen; importing this module imports no JAX."""

import dataclasses
from typing import Literal

from hpcjax.core import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the next token is drawn from logits.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: how many of the most likely tokens are left; None for all.
      top_p: the most likely tokens are left that have this probability together.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        checks.require_float32(temperature=self.temperature)
        if self.top_k is not None:
            checks.require_count(1, top_k=self.top_k)
        checks.require(0 < self.top_p <= 1, "top_p must be in (0, 1]", top_p=self.top_p)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """How texts are continued.

    Attributes:
      max_new_tokens: at most.
      sampler: how tokens are drawn.
      end: the token that ends a text; None for no such.
      unrolled: compiles each layer by itself, see `models.empty_cache`.
    """

    max_new_tokens: int = 64
    sampler: Sampler = Sampler()
    end: int | None = None
    unrolled: bool = False

    def __post_init__(self) -> None:
        checks.require_count(1, max_new_tokens=self.max_new_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clustering:
    """How CHAI clusters a request's heads and what it keeps of its cache.

    Attributes:
      window: tokens that are read with all heads, by which these are clustered.
      method: how; agglomerative with average linkage of cosine distances.
      representative: the head that speaks for a cluster.
      mode: what is done where heads share keys, see `perf.ClusteredHeads`; needed if
        and only if some do.
      share_values: lets a cluster also share its representative's values, the ablation
        that the paper calls CHAI-QKV.
    """

    window: int = 5
    method: Literal["kmeans", "agglomerative"] = "kmeans"
    representative: Literal["lowest", "medoid"] = "lowest"
    mode: Literal["within_group", "cross_group", "expand"] | None = None
    share_values: bool = False

    def __post_init__(self) -> None:
        checks.require_count(1, window=self.window)
        checks.require_choice("method", self.method, ("kmeans", "agglomerative"))
        known = ("lowest", "medoid")
        checks.require_choice("representative", self.representative, known)
        if self.mode is not None:
            known = ("within_group", "cross_group", "expand")
            checks.require_choice("mode", self.mode, known)
