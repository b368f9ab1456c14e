"""A large target with random parameters, a draft of two layers, forced acceptance.

What is accepted is drawn beforehand with a given rate; everything else is done as ever:
draft steps, verification, the residual's draw, the caches.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.models.config import LLAMA, CausalLmConfig
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from hpcjax.inference import LanguageModel
    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
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

    target: CausalLmConfig = CausalLmConfig(
        depth=32, width=4096, heads=32, mlp_width=11008, options=LLAMA
    )
    layers: int = 2
    vocabulary: int = 32_000
    rates: tuple[float, ...] = (0.6, 0.7)
    most: int = 8
    length: int = 128
    tokens: int = 256
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    unrolled: bool = False
    repetitions: int = 20
    inner: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(1, layers=self.layers, most=self.most, inner=self.inner)
        checks.require_count(2, tokens=self.tokens, repetitions=self.repetitions)
        if not all(0 < rate < 1 for rate in self.rates):
            raise ConfigError(f"rates must be in (0, 1): got {self.rates}")


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Times parts first, chooses γ by them, then times whole runs; all in this process.

    Returns:
      Of each `rate`: `ahead`, γ; `foretold` and `measured` [rate, repetition], speed-up
      over plain decoding in the same round; `tokens` an iteration. And seconds: `plain`
      [repetition] a token, `step` of the draft, `verify` [pass], `other`.
    """
    import jax
    import numpy as np
    import xarray as xr

    from hpcjax import perf

    target, draft = models(cfg)
    parts = times(cfg, target, draft)
    chosen = {
        # At least one: plain decoding is the other side of the comparison.
        rate: max(1, perf.best_lookahead(parts, rate, cfg.most).ahead)
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
    return xr.Dataset(
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


def models(cfg: Config) -> "tuple[LanguageModel, LanguageModel]":
    """Draws target and draft."""
    import jax

    from hpcjax import core, inference

    policy = core.Policy(param=cfg.compute, compute=cfg.compute)
    found = []
    for number, config in enumerate(
        (cfg.target, dataclasses.replace(cfg.target, depth=cfg.layers))
    ):
        model = config.make((4096,), cfg.vocabulary, policy)
        params, _ = jax.jit(model.init)(jax.random.key(cfg.seed + number))
        found.append(inference.LanguageModel(model=model, params=params))
    return found[0], found[1]


def times(cfg: Config, target: "LanguageModel", draft: "LanguageModel") -> Any:
    """Returns the seconds of the parts, `perf.DecodingTimes`."""
    import jax

    from experiments.specdec import timing
    from hpcjax import inference, perf

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
    passes = sorted({*range(1, cfg.most + 2, 2), cfg.most + 1})
    thunks = {f"verify, {m}": functools.partial(step, target, tokens=m) for m in passes}
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
    return perf.DecodingTimes(
        draft=seconds["draft"],
        verify={m: seconds[f"verify, {m}"] for m in passes},
        other=seconds["other"],
    )


def accepted(cfg: Config, rate: float, ahead: int) -> "np.ndarray":
    """Returns which drafts count as accepted, `[1, iterations, ahead]`."""
    import numpy as np

    rng = np.random.Generator(np.random.Philox(cfg.seed))
    return rng.random((1, cfg.tokens, ahead)) < rate


class Calls:
    """Whole runs over one prompt."""

    def __init__(
        self, cfg: Config, target: "LanguageModel", draft: "LanguageModel"
    ) -> None:
        import jax
        import numpy as np

        from hpcjax import inference

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
        from hpcjax import inference

        return inference.generate(self.target, self.prompts, self.options, key=self.key)

    def speculate(self, rate: float, ahead: int) -> Any:
        """Continues it with the draft, whose tokens are accepted at `rate`."""
        import jax.numpy as jnp

        from hpcjax import inference

        return inference.speculate(
            self.target,
            self.draft,
            self.prompts,
            self.options,
            ahead=ahead,
            key=self.key,
            forced=jnp.asarray(accepted(self.cfg, rate, ahead)),
        )
