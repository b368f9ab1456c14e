"""Continues a text with a language model."""

import dataclasses
import time

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
      prompt: the text to continue.
      max_new_tokens: at most; the model's end token ends earlier.
      sampler: how tokens are drawn; temperature 0 takes the most likely.
      samples: continuations, each drawn by itself.
      seed: of the draws.
    """

    model: str = "smollm2"
    prompt: str = "In the beginning God created the heaven and the earth."
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

    def options(self, end: int | None = None) -> Continuation:
        """Returns how the text is continued."""
        return Continuation(
            max_new_tokens=self.max_new_tokens, sampler=self.sampler, end=end
        )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Continues the text, twice, so that the second time is without compiling.

    Returns:
      `text` and `tokens` [sample], how many were made; `tokens_per_second`, of all
      samples together, the prompt's reading included.
    """
    import jax

    speaking = inference.load_language_model(cfg.model, ctx.data_root)
    loaded, tokenizer = speaking
    prompt = tokenizer.encode(cfg.prompt)
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    prompts = inference.pad_prompts([prompt] * cfg.samples)
    options = cfg.options(getattr(tokenizer, "eos", None))
    for _ in range(2):
        began = time.perf_counter()
        made = inference.generate(
            speaker, prompts, options, key=jax.random.key(cfg.seed)
        )
        lengths = np.asarray(made.lengths)
        seconds = time.perf_counter() - began
    texts = [
        tokenizer.decode(np.asarray(row[:length]))
        for row, length in zip(made.tokens, lengths, strict=True)
    ]
    for text in texts:
        ctx.say(cfg.prompt + text)
    rate = float(lengths.sum()) / seconds
    ctx.record(1, tokens_per_second=rate)
    # A record holds no NUL; U+2400 is the picture of one.
    kept = [text.replace("\0", "\u2400") for text in texts]
    columns = {"text": ("sample", kept), "tokens": ("sample", lengths)}
    return runs.measured({**columns, "tokens_per_second": rate})
