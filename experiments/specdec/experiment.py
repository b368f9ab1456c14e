"""A draft for a target: its training, and how often what it drafts is accepted."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.specdec import drafts
from experiments.specdec.drafts import DraftConfig
from hpcjax import cost, inference, runs
from hpcjax.core import config

TEMPERATURES = {"greedy": 0.0, "T = 1": 1.0}
PARTS = ("layers", "others")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A draft and the texts it is tried on.

    Attributes:
      draft: how it is made.
      ahead: γ, the places that acceptance is measured at.
      prompts: held-out texts that are continued, all at once.
      length: tokens of each.
      tokens: by so many they are continued.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "ahead": "2",
        "prompts": "2",
        "length": "4",
        "tokens": "4",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "loss": "step: of the draft's training",
        "accepted": "sampling place: share of the iterations that came there",
        "emitted": "sampling: tokens an iteration",
        "parameters": "part: of the draft",
    }

    draft: DraftConfig = DraftConfig()
    ahead: config.Size = 6
    prompts: config.Size = 8
    length: config.Size = 32
    tokens: config.Size = 48
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "step": self.draft.steps,
            "sampling": tuple(TEMPERATURES),
            "place": range(1, self.ahead + 1),
            "part": PARTS,
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Makes the draft, or reads it, and lets it draft."""
    from hpcjax.core import trees

    target = inference.load_language_model(cfg.draft.target, ctx.data_root).pretrained
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
    return runs.measured(
        {
            "loss": ("step", losses),
            "accepted": (("sampling", "place"), [shares(c) for c in found.values()]),
            "emitted": ("sampling", [cost.tokens_of_counts(c) for c in found.values()]),
            "parameters": ("part", [blocks, whole - blocks]),
        },
        coords={
            "sampling": list(found),
            "place": range(1, cfg.ahead + 1),
            "part": list(PARTS),
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
) -> np.ndarray:
    """Returns how many iterations accepted 0, 1, … γ drafts, as `speculate` does."""
    import jax

    options = inference.Continuation(
        max_new_tokens=tokens, sampler=inference.Sampler(temperature=temperature)
    )
    made = inference.speculate(
        target, draft, prompts, options, ahead=ahead, key=jax.random.key(seed)
    )
    return np.asarray(made.counts)


def shares(counts: np.ndarray) -> np.ndarray:
    """Returns a_i, of the iterations that came to place i the share that accepted.

    Where none came it is 0: nothing is known there, and nothing promised.

    Examples:
      >>> import numpy as np
      >>> shares(np.array([1, 1, 2])).round(3).tolist()
      [0.75, 0.667]
    """
    came = counts[::-1].cumsum()[::-1].astype(np.float64)
    return np.divide(
        came[1:], came[:-1], out=np.zeros(len(came) - 1), where=came[:-1] > 0
    )
