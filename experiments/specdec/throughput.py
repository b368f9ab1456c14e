"""Speculative decoding as it runs, beside what its parts' times foretell."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from experiments.specdec import drafts, experiment
from experiments.specdec.drafts import DraftConfig
from experiments.specdec.experiment import TEMPERATURES
from hpcjax import cost, inference, perf, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Drafts of one target, and where they are measured.

    Attributes:
      first: a draft.
      second: another one.
      third: a third one.
      aheads: γ.
      prompts: continued one by one; as many others tell the acceptance beforehand.
      length: tokens of each.
      tokens: by so many they are continued.
      repetitions: rounds of the measurement.
      inner: passes of a part in one measurement.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "third.layers": "1",
        "aheads": "[1]",
        "prompts": "1",
        "length": "4",
        "tokens": "16",
        "repetitions": "2",
        "inner": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "measured": "draft sampling ahead: tokens a second behind the prompts",
        "tokens": "draft sampling ahead: of an iteration",
        "expected": "draft sampling ahead: the same by the acceptance on other prompts",
        "step": "draft sampling: seconds of a draft",
        "verify": "pass: seconds",
        "other": "sampling ahead: seconds",
        "plain": "sampling: tokens a second without a draft",
    }

    first: DraftConfig = DraftConfig(layers=2)
    second: DraftConfig = DraftConfig(layers=4)
    third: DraftConfig = DraftConfig(layers=8, heads=3, kv_heads=3, mlp_width=768)
    aheads: tuple[config.Size, ...] = (1, 2, 4, 6)
    prompts: config.Size = 2
    length: config.Size = 16
    tokens: config.Several = 32
    repetitions: config.Several = 7
    inner: config.Size = 16
    seed: config.Seed = 0

    @property
    def drafts(self) -> dict[str, DraftConfig]:
        """The drafts by layers and heads."""
        named = {}
        for each in (self.first, self.second, self.third):
            width = "" if each.heads is None else f", {each.heads} heads"
            named[f"{each.layers} layers{width}"] = each
        return named

    @property
    def passes(self) -> list[int]:
        """How many tokens are verified at once."""
        return sorted({1, *(ahead + 1 for ahead in self.aheads)})

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "draft": tuple(self.drafts),
            "sampling": tuple(TEMPERATURES),
            "ahead": self.aheads,
            "pass": self.passes,
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times whole runs and parts, interleaved, in this process."""
    from experiments.specdec import timing

    names, aheads = list(cfg.drafts), list(cfg.aheads)
    bench = Bench(cfg, ctx)
    thunks, inner = bench.parts()
    measured = perf.compare(
        {**thunks, **bench.wholes()}, "prompt", repetitions=cfg.repetitions, warmup=1
    )
    seconds = timing.medians(measured, inner)
    # The first token comes with the prompt.
    count = cfg.prompts * (cfg.tokens - 1)
    plain = [
        count / (seconds[f"plain, {sampling}"] - seconds["prompt"])
        for sampling in TEMPERATURES
    ]
    steps = [[seconds[f"draft, {n}, {s}"] for s in TEMPERATURES] for n in names]
    others = [[seconds[f"other, {s}, {a}"] for a in aheads] for s in TEMPERATURES]
    axes = ("draft", "sampling", "ahead")
    return runs.measured(
        {
            **{name: (axes, each) for name, each in bench.rates(seconds).items()},
            "step": (axes[:2], steps),
            "verify": ("pass", [seconds[f"verify, {m}"] for m in cfg.passes]),
            "other": (axes[1:], others),
            "plain": ("sampling", plain),
        },
        coords={
            "draft": names,
            "sampling": list(TEMPERATURES),
            "ahead": aheads,
            "pass": cfg.passes,
        },
    )


def times(run: "runs.Dataset", point: dict[str, Any]) -> "cost.DecodingTimes":
    """Returns the parts' seconds at a draft, a sampling and an ahead."""
    at = {name: point[name] for name in ("draft", "sampling")}
    return cost.DecodingTimes(
        draft=float(run["step"].sel(at)),
        verify={
            int(m): float(run["verify"].sel({"pass": m})) for m in run["pass"].values
        },
        other=float(run["other"].sel(sampling=point["sampling"], ahead=point["ahead"])),
    )


class Bench:
    """What is timed; models, prompts and their acceptance."""

    def __init__(self, cfg: Config, ctx: "runs.Context") -> None:
        self.cfg = cfg
        root = ctx.data_root
        target = inference.load_language_model(cfg.first.target, root).pretrained
        self.target = _speaker(target)
        self.vocabulary = target.vocabulary
        self.drafts = {
            name: _speaker(drafts.draft(each, target, root)[0])
            for name, each in cfg.drafts.items()
        }
        prompts = functools.partial(
            drafts.prompts,
            cfg.first,
            root,
            count=cfg.prompts,
            length=cfg.length,
        )
        tokens, lengths = self.prompts = prompts()
        others = prompts(seed=1)
        self.singles = [
            inference.Prompts(tokens[row : row + 1], lengths[row : row + 1])
            for row in range(cfg.prompts)
        ]
        most = max(cfg.aheads)
        self.counts = {
            (name, sampling): experiment.counts(
                self.target, draft, others, cfg.tokens, most, temperature, cfg.seed
            )
            for name, draft in self.drafts.items()
            for sampling, temperature in TEMPERATURES.items()
        }

    def points(self) -> Any:
        """Yields the place in an array, and draft, sampling and γ."""
        axes = (self.drafts, TEMPERATURES, self.cfg.aheads)
        for found in itertools.product(*(enumerate(axis) for axis in axes)):
            places, values = zip(*found, strict=True)
            yield places, values

    def rates(self, seconds: dict[str, float]) -> "dict[str, np.ndarray]":
        """Returns what each whole run shows, `[draft, sampling, ahead]`."""
        shape = (len(self.drafts), len(TEMPERATURES), len(self.cfg.aheads))
        found = {key: np.empty(shape) for key in ("measured", "tokens", "expected")}
        for at, (name, sampling, ahead) in self.points():
            made = self.made(name, sampling, ahead)
            emitted = sum(int(each.lengths.sum()) for each in made)
            iterations = sum(int(each.iterations.sum()) for each in made)
            reading = seconds["prompt"] + seconds[f"prompt, {name}"]
            own = seconds[self.key(name, sampling, ahead)] - reading
            counts = self.counts[name, sampling]
            found["measured"][at] = emitted / own
            found["tokens"][at] = emitted / iterations
            found["expected"][at] = cost.tokens_of_counts(counts, ahead)
        return found

    def key(self, name: str, sampling: str, ahead: int) -> str:
        """Returns the name of a whole run."""
        return f"{name}, {sampling}, {ahead}"

    def parts(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Returns thunks of the parts, and how many passes each makes."""
        import jax

        from experiments.specdec import timing

        cfg, key = self.cfg, jax.random.key(self.cfg.seed)
        known = cfg.length + cfg.tokens // 2
        step = functools.partial(
            timing.steps,
            key=key,
            known=known,
            size=self.prompts.tokens.shape[1] + cfg.tokens + max(cfg.aheads),
            count=cfg.inner,
        )
        greedy = inference.Sampler(temperature=0.0)
        thunks: dict[str, Any] = {}
        for m in cfg.passes:
            thunks[f"verify, {m}"] = functools.partial(
                step, self.target, tokens=m, sampler=greedy
            )
        for sampling, temperature in TEMPERATURES.items():
            sampler = inference.Sampler(temperature=temperature)
            for name, draft in self.drafts.items():
                thunks[f"draft, {name}, {sampling}"] = functools.partial(
                    step, draft, tokens=1, sampler=sampler
                )
            for ahead in cfg.aheads:
                thunks[f"other, {sampling}, {ahead}"] = functools.partial(
                    timing.judgements,
                    key,
                    ahead=ahead,
                    vocabulary=self.vocabulary,
                    count=cfg.inner,
                    temperature=temperature,
                )
        return thunks, dict.fromkeys(thunks, cfg.inner)

    def wholes(self) -> dict[str, Any]:
        """Returns thunks that continue all prompts, and those that only read them."""
        found: dict[str, Any] = {"prompt": functools.partial(self._read, self.target)}
        for name, draft in self.drafts.items():
            found[f"prompt, {name}"] = functools.partial(self._read, draft)
        for sampling in TEMPERATURES:
            found[f"plain, {sampling}"] = functools.partial(self._plain, sampling)
        for _, (name, sampling, ahead) in self.points():
            found[self.key(name, sampling, ahead)] = functools.partial(
                self.made, name, sampling, ahead
            )
        return found

    def made(
        self, name: str, sampling: str, ahead: int
    ) -> "list[inference.Speculated]":
        """Continues each prompt with a draft."""
        import jax

        return [
            inference.speculate(
                self.target,
                self.drafts[name],
                prompt,
                self._options(sampling),
                ahead=ahead,
                key=jax.random.key(self.cfg.seed),
            )
            for prompt in self.singles
        ]

    def _plain(self, sampling: str) -> Any:
        import jax

        options, key = self._options(sampling), jax.random.key(self.cfg.seed)
        return [
            inference.generate(self.target, prompt, options, key=key)
            for prompt in self.singles
        ]

    def _read(self, speaker: "inference.LanguageModel") -> Any:
        from experiments.specdec import timing

        return [timing.read(speaker, prompt) for prompt in self.singles]

    def _options(self, sampling: str) -> "inference.Continuation":
        return inference.Continuation(
            max_new_tokens=self.cfg.tokens,
            sampler=inference.Sampler(temperature=TEMPERATURES[sampling]),
        )


def _speaker(loaded: Any) -> "inference.LanguageModel":
    return inference.LanguageModel(model=loaded.model, params=loaded.params)
