"""Continues a text with a language model."""

import dataclasses
import time
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from hpcjax import inference, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError
from hpcjax.inference import Continuation, Sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, a text, and how it goes on.

    Attributes:
      model: "smollm2", the path of a GGUF file or of a folder with its tokenizer, or
        "random", a tiny model of bytes that nobody has trained.
      prompt: the text to continue, or with `chat` a question to answer.
      chat: whether the prompt is written as the model's chat template asks.
      max_new_tokens: at most; the model's end token, or the end of the context that it
        was trained with, ends earlier.
      sampler: how tokens are drawn; temperature 0 takes the most likely.
      samples: continuations, each drawn by itself.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "random",
        "max_new_tokens": "4",
        "prompt": "ab",
        "chat": "false",
    }

    model: str = "smollm2"
    prompt: str = "In the beginning God created the heaven and the earth."
    chat: bool = False
    max_new_tokens: int = 48
    sampler: Sampler = Sampler(temperature=0.7, top_p=0.9)
    samples: int = 1
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt or self.samples < 1:
            raise ConfigError(
                "a prompt and at least one sample are needed: got "
                f"prompt={self.prompt!r}, samples={self.samples}"
            )
        self.options()

    def options(self, end: int | None = None, room: int | None = None) -> Continuation:
        """Returns how the text is continued, by at most `room` tokens."""
        most = self.max_new_tokens if room is None else min(room, self.max_new_tokens)
        return Continuation(max_new_tokens=most, sampler=self.sampler, end=end)


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    return runs.outline(
        {
            **dict.fromkeys(("text", "tokens"), "sample"),
            **dict.fromkeys(("tokens_per_second", "compile_seconds"), ""),
        },
        sample=range(cfg.samples),
    )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compiles, continues the text, and says how fast.

    Returns:
      `text` and `tokens` [sample], how many were made; `tokens_per_second`, of all
      samples together, the prompt's reading included; `compile_seconds`.
    """
    import jax

    speaking = inference.load_language_model(cfg.model, ctx.data_root)
    loaded, tokenizer = speaking.pretrained, speaking.tokenizer
    prompt = tokenizer.encode(speaking.ask(cfg.prompt) if cfg.chat else cfg.prompt)
    room = loaded.context - len(prompt)
    if room < 1:
        raise ConfigError(
            f"the model was trained with {loaded.context} tokens of context: got a "
            f"prompt of {len(prompt)}"
        )
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    prompts = inference.pad_prompts([prompt] * cfg.samples)
    options = cfg.options(getattr(tokenizer, "eos", None), room)
    began = time.perf_counter()
    write = inference.compile_generation(speaker, prompts, options)
    compiled = time.perf_counter()
    made = write(jax.random.key(cfg.seed))
    lengths = np.asarray(made.lengths)
    seconds = time.perf_counter() - compiled
    texts = []
    for row, length in zip(np.asarray(made.tokens), lengths, strict=True):
        # A text is shown without the token that ends it.
        ended = options.end is not None and row[length - 1] == options.end
        words = row[: length - ended]
        # A model may have more words than its tokenizer; they stand for nothing.
        texts.append(tokenizer.decode(words[words < len(tokenizer)]))
    for text in texts:
        ctx.say(text if cfg.chat else cfg.prompt + text)
    if room < cfg.max_new_tokens and lengths.max() == room:
        ctx.say(f"(the model's context of {loaded.context} tokens ends here)")
    rate = float(lengths.sum()) / seconds
    ctx.say(
        f"({lengths.sum()} tokens at {rate:.1f} tokens/s, behind {len(prompt)} of the "
        f"prompt; compiled in {compiled - began:.1f} s)"
    )
    ctx.record(1, tokens_per_second=rate)
    # A record holds no NUL; U+2400 is the picture of one.
    kept = [text.replace("\0", "\u2400") for text in texts]
    return runs.measured(
        {
            "text": ("sample", kept),
            "tokens": ("sample", lengths),
            "tokens_per_second": rate,
            "compile_seconds": compiled - began,
        }
    )
