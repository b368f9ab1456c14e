"""Continues a text with a language model."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import inference, runs
from hpcjax.core import checks, config
from hpcjax.core.errors import ConfigError
from hpcjax.inference import Continuation, Sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, a text, and how it goes on.

    Attributes:
      model: "smollm2", the path of a GGUF file or of a folder with its tokenizer, or
        "random", a tiny model of bytes that nobody has trained.
      prompt: the text to continue, or with `chat` a question to answer.
      prompt_file: a file in UTF-8 whose text takes the place of `prompt`.
      chat: whether the prompt is written as the model's chat template asks.
      max_new_tokens: at most; an end token of the model, or the end of the context that
        it was trained with, ends earlier.
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
    figures: ClassVar[Mapping[str, str]] = {
        "text tokens": "sample: what was written, and its length",
        "tokens_per_second": ": of all samples together, with reading the prompt",
        "first_seconds": ": to the first token of each",
        "compile_seconds": ": before",
    }

    model: str = "smollm2"
    prompt: str = "In the beginning God created the heaven and the earth."
    prompt_file: str | None = None
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

    def read_prompt(self) -> str:
        """Returns the text to continue.

        Raises:
          ConfigError: the file is not there, is empty, or is not UTF-8.
        """
        if self.prompt_file is None:
            return self.prompt
        try:
            text = pathlib.Path(self.prompt_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt_file={self.prompt_file!r}: {error}") from error
        checks.require(bool(text), "a prompt is needed", prompt_file=self.prompt_file)
        return text

    def options(
        self, end: tuple[int, ...] = (), room: int | None = None
    ) -> Continuation:
        """Returns how the text is continued, by at most `room` tokens."""
        most = self.max_new_tokens if room is None else min(room, self.max_new_tokens)
        return Continuation(max_new_tokens=most, sampler=self.sampler, end=end)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"sample": range(self.samples)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compiles, continues the text, and says how fast."""
    import jax

    speaking = inference.load_language_model(cfg.model, ctx.data_root)
    loaded, tokenizer = speaking.pretrained, speaking.tokenizer
    text = cfg.read_prompt()
    prompt = tokenizer.encode(speaking.ask(text) if cfg.chat else text)
    room = loaded.context - len(prompt)
    if room < 1:
        raise ConfigError(
            f"the model was trained with {loaded.context} tokens of context: got a "
            f"prompt of {len(prompt)}"
        )
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    prompts = inference.pad_prompts([prompt] * cfg.samples)
    options = cfg.options(speaking.ends, room)
    began = time.perf_counter()
    write = inference.compile_stream(speaker, prompts, options)
    compiled = time.perf_counter()
    shown = _Shown(tokenizer, options.end, cfg.samples)
    # One text is shown as it comes; several would run into each other.
    say = ctx.say if cfg.samples == 1 else _say_nothing
    say("" if cfg.chat else text, end="")
    first = 0.0
    for token in write(jax.random.key(cfg.seed)):
        first = first or time.perf_counter() - compiled
        say(shown.add(token), end="")
    seconds = time.perf_counter() - compiled
    say(shown.rest())
    texts, lengths = shown.texts(), shown.lengths()
    if cfg.samples > 1:
        for each in texts:
            ctx.say(each if cfg.chat else text + each)
    if room < cfg.max_new_tokens and lengths.max() == room:
        ctx.say(f"(the model's context of {loaded.context} tokens ends here)")
    rate = float(lengths.sum()) / seconds
    ctx.say(
        f"({lengths.sum()} tokens at {rate:.1f} tokens/s behind {len(prompt)} of the "
        f"prompt, the first after {first:.2f} s; compiled in {compiled - began:.1f} s)"
    )
    ctx.record(1, tokens_per_second=rate)
    # A record holds no NUL; U+2400 is the picture of one.
    kept = [each.replace("\0", "\u2400") for each in texts]
    return runs.measured(
        {
            "text": ("sample", kept),
            "tokens": ("sample", lengths),
            "tokens_per_second": rate,
            "first_seconds": first,
            "compile_seconds": compiled - began,
        }
    )


class _Shown:
    """The texts so far, and what of the first one has been shown."""

    def __init__(self, tokenizer: Any, end: tuple[int, ...], samples: int) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.tokens: list[list[int]] = [[] for _ in range(samples)]
        self.done, self.length = [False] * samples, 0

    def add(self, token: np.ndarray) -> str:
        """Adds a token to every text; returns what is new of the first one."""
        for row, word in enumerate(token.tolist()):
            if not self.done[row]:
                self.tokens[row].append(word)
                self.done[row] = word in self.end
        text = self.texts()[0]
        # The bytes of a character may be several tokens.
        return "" if text.endswith("\ufffd") else self._show(text)

    def rest(self) -> str:
        """Returns what has not been shown yet of the first text."""
        return self._show(self.texts()[0])

    def _show(self, text: str) -> str:
        new, self.length = text[self.length :], max(self.length, len(text))
        return new

    def lengths(self) -> np.ndarray:
        """Returns how many tokens each text has, the one that ends it included."""
        return np.array([len(row) for row in self.tokens])

    def texts(self) -> list[str]:
        """Returns the texts, without the tokens that end them."""
        found = []
        for row in self.tokens:
            words = np.array(row[:-1] if row and row[-1] in self.end else row, np.int32)
            # A model may have more words than its tokenizer; they stand for nothing.
            found.append(self.tokenizer.decode(words[words < len(self.tokenizer)]))
        return found


def _say_nothing(text: str, end: str = "\n") -> None:
    """Takes the place of `say`."""
