"""How fast a model writes, against `transformers` on the same cores."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import hostcomm, inference, perf, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError
from hpcjax.inference import Continuation, Sampler

if TYPE_CHECKING:
    from hpcjax.models.pretrained import Pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model and how much it writes, always the most likely token.

    Attributes:
      model: see `lm/generate`.
      batch: texts at once.
      prompt: tokens of each, drawn at random.
      tokens: written behind each.
      repetitions: rounds of the measurement.
      peer: whether `transformers` is measured too.
      one_core: whether both have one core instead of all, in a process of their own.
      seed: of the prompts.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "random",
        "prompt": "4",
        "tokens": "4",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a whole text",
        "differing": ": tokens of the peer's texts that are not ours",
        "tokens": ": of a text",
    }

    model: str = "smollm2"
    batch: config.Size = 1
    prompt: config.Size = 16
    tokens: config.Size = 32
    repetitions: int = 20
    peer: bool = True
    one_core: bool = False
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": (
                "scanned",
                "unrolled",
                *(["transformers"] if self.peer else []),
            ),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Writes with both, in turns."""
    given = [str(ctx.data_root)]
    if cfg.one_core:
        cores = hostcomm.free_cores(1)
        (found,) = runs.in_processes(measure, cfg, 1, given=given, cores=cores)
    else:
        found = measure(None, cfg, *given)
    names, seconds, differing = found
    return runs.measured(
        {
            "seconds": (("candidate", "repetition"), seconds),
            "differing": differing,
            "tokens": cfg.batch * cfg.tokens,
        },
        coords={"candidate": names},
    )


def measure(
    transport: "hostcomm.Transport | None", cfg: Config, data_root: str
) -> list[Any]:
    """Returns candidates, their seconds, and how many of the peer's tokens differ.

    The process is this one, or one of its own, which then has a transport.
    """
    import jax

    root = pathlib.Path(data_root)
    loaded = inference.load_language_model(cfg.model, root).pretrained
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
    seconds = measured["seconds"]
    return [seconds["candidate"].values.tolist(), seconds.values, differing]


def peer(
    loaded: "Pretrained", prompts: np.ndarray, tokens: int
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
            "the peer needs torch and transformers: pip install 'hpcjax[oracles]', or "
            "peer=false"
        ) from error
    from hpcjax.models import pretrained

    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(folder, loaded)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).train(False)
    given = torch.from_numpy(prompts).long()

    def call() -> np.ndarray:
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
