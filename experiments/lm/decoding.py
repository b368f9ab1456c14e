"""How fast a model writes, against `transformers` on the same cores."""

import dataclasses
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcjax.core.errors import ConfigError
from hpcjax.inference.config import Continuation, Sampler
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from hpcjax.models.pretrained import Pretrained
    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model and how much it writes, always the most likely token.

    Attributes:
      model: see `lm/generate`.
      batch: texts at once.
      prompt: tokens of each, drawn at random.
      tokens: written behind each.
      repetitions: rounds of the measurement.
      peer: whether `transformers` is measured too.
      seed: of the prompts.
    """

    model: str = "smollm2"
    batch: int = 1
    prompt: int = 16
    tokens: int = 32
    repetitions: int = 20
    peer: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("batch", "prompt", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1: got {name}={getattr(self, name)}"
                )


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Writes with both, in turns.

    Returns:
      `seconds` [candidate, repetition] of a whole text: scanned and unrolled layers,
      and the peer; `differing`, tokens of the peer's texts that are not ours.
    """
    import jax
    import numpy as np

    from hpcjax import inference, perf
    from hpcjax.runs.language_models import load_language_model

    loaded = load_language_model(cfg.model, ctx.data_root).pretrained
    rng = np.random.default_rng(cfg.seed)
    shape = (cfg.batch, cfg.prompt)
    tokens = rng.integers(3, loaded.vocabulary, shape).astype(np.int32)
    prompts = inference.Prompts(
        jax.numpy.asarray(tokens), jax.numpy.full(cfg.batch, cfg.prompt)
    )
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)

    def ours(unrolled: bool) -> Callable[[], Any]:
        options = Continuation(
            max_new_tokens=cfg.tokens,
            sampler=Sampler(temperature=0.0),
            unrolled=unrolled,
        )
        key = jax.random.key(0)
        return lambda: inference.generate(speaker, prompts, options, key=key).tokens

    candidates = {"scanned": ours(False), "unrolled": ours(True)}
    differing = 0
    if cfg.peer:
        candidates["transformers"] = peer(loaded, tokens, cfg.tokens)
        told = np.asarray(candidates["scanned"]())
        differing = int(np.sum(candidates["transformers"]() != told))
    baseline = "transformers" if cfg.peer else "unrolled"
    measured = perf.compare(candidates, baseline, repetitions=cfg.repetitions, warmup=1)
    return measured.assign(differing=differing, tokens=cfg.batch * cfg.tokens)


def peer(
    loaded: "Pretrained", prompts: "np.ndarray", tokens: int
) -> "Callable[[], np.ndarray]":
    """Returns a call of `transformers`' greedy generation with the same parameters.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the peer needs torch and transformers: pip install 'hpcjax[dev]', or "
            "peer=false"
        ) from error
    from hpcjax.models import pretrained

    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(folder, loaded)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).train(False)
    given = torch.from_numpy(prompts).long()

    def call() -> "np.ndarray":
        with torch.inference_mode():
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return made[:, given.shape[1] :].numpy()

    return call
