"""A draft for a target: its training, and how often what it drafts is accepted."""

import dataclasses
from typing import TYPE_CHECKING

from experiments.specdec import drafts
from experiments.specdec.drafts import DraftConfig
from hpcjax.core import checks
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from hpcjax import inference
    from hpcjax.runs.context import Context

TEMPERATURES = {"greedy": 0.0, "T = 1": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A draft and the texts it is tried on.

    Attributes:
      draft: how it is made.
      ahead: γ, the places that acceptance is measured at.
      prompts: held-out texts that are continued, all at once.
      length: tokens of each.
      tokens: by so many they are continued.
      seed: of the draws.
    """

    draft: DraftConfig = DraftConfig()
    ahead: int = 6
    prompts: int = 8
    length: int = 32
    tokens: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(1, ahead=self.ahead, prompts=self.prompts)
        checks.require_count(1, length=self.length, tokens=self.tokens)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Makes the draft, or reads it, and lets it draft.

    Returns:
      `loss` [step] of its training; `accepted` [sampling, place], of the iterations
      that came to a place the share that accepted there; `emitted` [sampling], tokens
      an iteration; `parameters` [part] of the draft.
    """
    import xarray as xr

    from hpcjax import inference, perf
    from hpcjax.core import trees
    from hpcjax.runs.language_models import load_language_model

    target = load_language_model(cfg.draft.target, ctx.data_root).pretrained
    draft, losses = drafts.draft(cfg.draft, target, ctx.data_root)
    prompts = drafts.prompts(
        cfg.draft, ctx.data_root, count=cfg.prompts, length=cfg.length
    )
    large, small = (
        inference.LanguageModel(model=each.model, params=each.params)
        for each in (target, draft)
    )
    found = {
        name: counts(
            large, small, prompts, cfg.tokens, cfg.ahead, temperature, cfg.seed
        )
        for name, temperature in TEMPERATURES.items()
    }
    blocks = trees.num_params(draft.params["blocks"])
    whole = trees.num_params(draft.params)
    return xr.Dataset(
        {
            "loss": ("step", losses),
            "accepted": (("sampling", "place"), [shares(c) for c in found.values()]),
            "emitted": ("sampling", [perf.tokens_of_counts(c) for c in found.values()]),
            "parameters": ("part", [blocks, whole - blocks]),
        },
        coords={
            "sampling": list(found),
            "place": range(1, cfg.ahead + 1),
            "part": ["layers", "others"],
        },
    )


def counts(
    target: "inference.LanguageModel",
    draft: "inference.LanguageModel",
    prompts: "inference.Prompts",
    tokens: int,
    ahead: int,
    temperature: float,
    seed: int,
) -> "np.ndarray":
    """Returns how many iterations accepted 0, 1, … γ drafts, as `speculate` does."""
    import jax
    import numpy as np

    from hpcjax import inference

    options = inference.Continuation(
        max_new_tokens=tokens, sampler=inference.Sampler(temperature=temperature)
    )
    made = inference.speculate(
        target, draft, prompts, options, ahead=ahead, key=jax.random.key(seed)
    )
    return np.asarray(made.counts)


def shares(counts: "np.ndarray") -> "np.ndarray":
    """Returns a_i, of the iterations that came to place i the share that accepted.

    Where none came it is 0: nothing is known there, and nothing promised.

    Examples:
      >>> import numpy as np
      >>> shares(np.array([1, 1, 2])).round(3).tolist()
      [0.75, 0.667]
    """
    import numpy as np

    came = counts[::-1].cumsum()[::-1].astype(np.float64)
    return np.divide(
        came[1:], came[:-1], out=np.zeros(len(came) - 1), where=came[:-1] > 0
    )


def expected_tokens(shares: "np.ndarray", ahead: int) -> float:
    """Returns 1 + Σⱼ Πᵢ≤ⱼ aᵢ for γ = `ahead`, tokens an iteration.

    Examples:
      >>> import numpy as np
      >>> expected_tokens(np.array([0.5, 0.5, 0.5]), 2)
      1.75
    """
    import numpy as np

    return float(1 + np.cumprod(shares[:ahead]).sum())
