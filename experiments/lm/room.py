"""What room in the cache costs a token, and what a long prompt needs of memory."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import inference, kernels, models, perf, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, and caches of several sizes that hold equally many tokens.

    Attributes:
      model: see `lm/generate`.
      batch: texts at once.
      used: tokens in the cache when the next one is read.
      rooms: tokens that the caches have room for; the first is compared with.
      prompt: tokens of the text whose reading is compiled, and not run.
      repetitions: rounds of the measurement.
      seed: of the tokens.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "random",
        "batch": "1",
        "used": "3",
        "rooms": "[8,16]",
        "prompt": "32",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a token",
        "temporaries": "candidate: bytes of a step over those of its cache",
        "prompt": "candidate: bytes of temporaries with which the prompt is read",
    }

    model: str = "smollm2"
    batch: config.Size = 4
    used: config.Size = 6
    rooms: tuple[config.Size, ...] = (64, 2048)
    prompt: config.Several = 8192
    repetitions: config.Several = 20
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": [
                f"{name}, {room}" for name in attentions() for room in self.rooms
            ],
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Reads the same token again and again, with each attention and each room."""
    loaded = inference.load_language_model(cfg.model, ctx.data_root).pretrained
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    candidates, temporaries, prompts = {}, [], []
    for name, attend in attentions().items():
        reading = prompt_bytes(speaker, cfg.prompt, attend)
        for room in cfg.rooms:
            step, share = stepping(cfg, speaker, room, attend)
            candidates[f"{name}, {room}"] = step
            temporaries.append(share)
            prompts.append(reading)
    baseline = next(iter(candidates))
    measured = perf.compare(candidates, baseline, repetitions=cfg.repetitions)
    return measured.assign(
        temporaries=("candidate", temporaries), prompt=("candidate", prompts)
    )


def attend_whole(
    memory: "models.KeysValues", shared: Any, heads: "models.Heads"
) -> "tuple[Any, models.KeysValues, Any]":
    """Attends as `models.attend_cached`, but reads all the room that there is."""
    import jax.numpy as jnp

    memory = models.write_heads(memory, heads)
    batch, _, count, _ = heads.query.shape
    every = jnp.broadcast_to(jnp.arange(count), (batch, count))
    groups = count // memory.keys.shape[-2]
    mixed = kernels.clustered_attention(
        heads.query,
        memory.keys,
        memory.values,
        every,
        heads.positions,
        key_heads=every // groups,
        layer=memory.layer,
        implementation="reference",
    )
    return mixed, memory, shared


def attentions() -> "dict[str, models.Attend]":
    """Returns the attention that decoding has, and the one it is compared with."""
    return {"blocks": models.attend_cached, "whole": attend_whole}


def read(
    speaker: "inference.LanguageModel",
    cache: "models.Cache",
    tokens: Any,
    attend: "models.Attend",
) -> "tuple[models.Cache, Any]":
    """Returns the cache as long as before, and the logits of the last token."""
    import jax.numpy as jnp

    last = jnp.full((len(tokens), 1), tokens.shape[1] - 1)
    x = models.Decoding(tokens=tokens, cache=cache, at=last, attend=attend)
    logits, after = speaker.decode(x)
    return inference.truncate_cache(after, cache.length), logits


def stepping(
    cfg: Config, speaker: "inference.LanguageModel", room: int, attend: "models.Attend"
) -> tuple[Callable[[], Any], float]:
    """Returns a thunk that reads a token, and its temporaries over the cache."""
    import jax
    import jax.numpy as jnp

    cache = models.empty_cache(speaker.model, cfg.batch, room)
    cache = inference.truncate_cache(cache, jnp.full(cfg.batch, cfg.used, jnp.int32))
    rng = np.random.default_rng(cfg.seed)
    tokens = jnp.asarray(rng.integers(3, 200, (cfg.batch, 1)), jnp.int32)
    program = (
        jax.jit(functools.partial(read, attend=attend), donate_argnums=1)
        .lower(speaker, cache, tokens)
        .compile()
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.runs))

    def step(cache: models.Cache, tokens: Any) -> tuple[models.Cache, Any]:
        return program(speaker, cache, tokens)

    share = perf.temporary_memory(program) / held
    return perf.stepper(step, cache, tokens), share


def prompt_bytes(
    speaker: "inference.LanguageModel", time: int, attend: "models.Attend"
) -> int:
    """Returns the bytes of temporaries with which a prompt is read, by compiling it."""
    import jax
    import jax.numpy as jnp

    cache = jax.eval_shape(lambda: models.empty_cache(speaker.model, 1, time))
    tokens = jax.ShapeDtypeStruct((1, time), jnp.int32)
    reading = jax.jit(functools.partial(read, attend=attend), donate_argnums=1)
    program = reading.lower(speaker, cache, tokens).compile()
    return perf.temporary_memory(program)
