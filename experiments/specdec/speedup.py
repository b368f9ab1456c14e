"""A large target with random parameters, a draft of two layers, forced acceptance.

What is accepted is drawn beforehand with a given rate; everything else is done as ever:
draft steps, verification, the residual's draw, the caches.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import core, cost, inference, perf, runs
from hpcjax.core import config
from hpcjax.models import LLAMA, CausalLmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A target, its draft's depth, and how much is accepted.

    Attributes:
      target: the target; LLaMA-7B's shape.
      layers: of the draft, which is as wide.
      vocabulary: words.
      rates: how often a draft token is accepted.
      most: largest γ that is thought of.
      length: tokens of the prompt.
      tokens: by so many it is continued.
      compute: dtype of parameters and products.
      unrolled: compiles each layer by itself.
      repetitions: rounds of the measurement.
      inner: passes of a part in one measurement.
      seed: of parameters, draws and acceptance.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "target.depth": "3",
        "target.width": "16",
        "target.heads": "2",
        "target.mlp_width": "24",
        "vocabulary": "31",
        "most": "3",
        "length": "4",
        "tokens": "16",
        "compute": "float32",
        "repetitions": "2",
        "inner": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "ahead": "rate: tokens that are drafted",
        "foretold": "rate: speed-up over plain decoding",
        "measured": "rate repetition: the same, in one round",
        "tokens": "rate: of an iteration",
        "plain": "repetition: seconds a token",
        "step other": ": seconds, of the draft and else",
        "verify": "pass: seconds",
    }

    target: CausalLmConfig = CausalLmConfig(
        depth=32, width=4096, heads=32, mlp_width=11008, options=LLAMA
    )
    layers: config.Size = 2
    vocabulary: int = 32_000
    rates: tuple[config.Share, ...] = (0.6, 0.7)
    most: config.Size = 8
    length: int = 128
    tokens: config.Several = 256
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    unrolled: bool = False
    repetitions: config.Several = 20
    inner: config.Size = 16
    seed: config.Seed = 0

    @property
    def passes(self) -> list[int]:
        """How many tokens are verified at once, as far as it is timed."""
        return sorted({*range(1, self.most + 2, 2), self.most + 1})

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"rate": self.rates, "repetition": self.repetitions, "pass": self.passes}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times parts first, chooses γ by them, then times whole runs in this process."""
    import jax

    target, draft = models(cfg)
    parts = times(cfg, target, draft)
    chosen = {
        # At least one: plain decoding is the other side of the comparison.
        rate: max(1, cost.best_lookahead(parts, rate, cfg.most).ahead)
        for rate in cfg.rates
    }
    calls = Calls(cfg, target, draft)
    thunks: dict[str, Any] = {"plain": calls.plain, "read": calls.read}
    for rate, ahead in chosen.items():
        thunks[str(rate)] = functools.partial(calls.speculate, rate, ahead)
    measured = perf.compare(thunks, "plain", repetitions=cfg.repetitions, warmup=2)
    seconds = measured["seconds"]
    reading = seconds.sel(candidate="read", drop=True).median()
    # The first token comes with the prompt.
    whole = seconds.sel(candidate="plain", drop=True) - reading
    plain = whole / (cfg.tokens - 1)
    columns: dict[str, list] = {"foretold": [], "measured": [], "tokens": []}
    for rate, ahead in chosen.items():
        made = jax.device_get(calls.speculate(rate, ahead))
        emitted = cfg.tokens / int(made.iterations[0])
        columns["tokens"].append(emitted)
        columns["foretold"].append(parts.speedup(emitted, ahead))
        # Prompts are read by both models, by the draft in a small part of the time.
        own = seconds.sel(candidate=str(rate)) - reading
        columns["measured"].append((plain * cfg.tokens / own).values)
    return runs.measured(
        {
            "ahead": ("rate", list(chosen.values())),
            "foretold": ("rate", columns["foretold"]),
            "tokens": ("rate", columns["tokens"]),
            "measured": (("rate", "repetition"), np.array(columns["measured"])),
            "plain": plain,
            "step": parts.draft,
            "verify": ("pass", list(parts.verify.values())),
            "other": parts.other,
        },
        coords={"rate": list(chosen), "pass": list(parts.verify)},
    )


def models(cfg: Config) -> "tuple[inference.LanguageModel, inference.LanguageModel]":
    """Draws target and draft."""
    import jax

    policy = core.Policy(param=cfg.compute, compute=cfg.compute)
    found = []
    for number, chosen in enumerate(
        (cfg.target, dataclasses.replace(cfg.target, depth=cfg.layers))
    ):
        model = chosen.make((4096,), cfg.vocabulary, policy)
        params, _ = jax.jit(model.init)(jax.random.key(cfg.seed + number))
        found.append(inference.LanguageModel(model=model, params=params))
    return found[0], found[1]


def times(
    cfg: Config, target: "inference.LanguageModel", draft: "inference.LanguageModel"
) -> Any:
    """Returns the seconds of the parts, `cost.DecodingTimes`."""
    import jax

    from experiments.specdec import timing

    sampler, key = inference.Sampler(), jax.random.key(cfg.seed)
    step = functools.partial(
        timing.steps,
        key=key,
        known=cfg.length + cfg.tokens // 2,
        size=cfg.length + cfg.tokens + cfg.most,
        count=cfg.inner,
        sampler=sampler,
        unrolled=cfg.unrolled,
    )
    thunks = {
        f"verify, {m}": functools.partial(step, target, tokens=m) for m in cfg.passes
    }
    thunks["draft"] = functools.partial(step, draft, tokens=1)
    thunks["other"] = functools.partial(
        timing.judgements,
        key,
        ahead=cfg.most // 2 or 1,
        vocabulary=cfg.vocabulary,
        count=cfg.inner,
        temperature=1.0,
    )
    measured = perf.compare(thunks, "draft", repetitions=cfg.repetitions, warmup=2)
    seconds = timing.medians(measured, dict.fromkeys(thunks, cfg.inner))
    return cost.DecodingTimes(
        draft=seconds["draft"],
        verify={m: seconds[f"verify, {m}"] for m in cfg.passes},
        other=seconds["other"],
    )


def accepted(cfg: Config, rate: float, ahead: int) -> np.ndarray:
    """Returns which drafts count as accepted, `[1, iterations, ahead]`."""
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    return rng.random((1, cfg.tokens, ahead)) < rate


class Calls:
    """Whole runs over one prompt."""

    def __init__(
        self,
        cfg: Config,
        target: "inference.LanguageModel",
        draft: "inference.LanguageModel",
    ) -> None:
        import jax

        self.cfg, self.target, self.draft = cfg, target, draft
        rng = np.random.Generator(np.random.Philox(cfg.seed + 1))
        row = rng.integers(0, cfg.vocabulary, cfg.length)
        self.prompts = inference.pad_prompts([row], least=1)
        self.options = inference.Continuation(
            max_new_tokens=cfg.tokens, unrolled=cfg.unrolled
        )
        self.key = jax.random.key(cfg.seed)

    def read(self) -> Any:
        """Reads the prompt."""
        from experiments.specdec import timing

        return timing.read(self.target, self.prompts)

    def plain(self) -> Any:
        """Continues it without a draft."""
        return inference.generate(self.target, self.prompts, self.options, key=self.key)

    def speculate(self, rate: float, ahead: int) -> Any:
        """Continues it with the draft, whose tokens are accepted at `rate`."""
        import jax.numpy as jnp

        return inference.speculate(
            self.target,
            self.draft,
            self.prompts,
            self.options,
            ahead=ahead,
            key=self.key,
            forced=jnp.asarray(accepted(self.cfg, rate, ahead)),
        )
