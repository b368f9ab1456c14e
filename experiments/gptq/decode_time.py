"""How fast a large model writes with packed weights, against bfloat16 ones."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax import core, inference, kernels, perf, runs
from hpcjax.core import config
from hpcjax.models import LLAMA, CausalLmConfig

if TYPE_CHECKING:
    import jax

BASELINE = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model with random weights, and how much it writes.

    Attributes:
      model: the network; LLaMA-7B.
      vocabulary: of the model.
      compute: dtype of the dense weights and of products.
      bits: of the packed weights of the blocks, one candidate each; embedding and head
        stay as they are.
      group_size: inputs that share a scale.
      prompt: tokens that are read first, of one text.
      tokens: written behind them.
      repetitions: rounds of the measurement.
      seed: of all numbers.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "2",
        "model.width": "32",
        "model.heads": "2",
        "model.mlp_width": "64",
        "vocabulary": "31",
        "compute": "float32",
        "group_size": "16",
        "prompt": "4",
        "tokens": "4",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a token behind the first",
        "bytes": "candidate: of the parameters that it has to read",
    }

    model: CausalLmConfig = CausalLmConfig(
        depth=32, width=4096, heads=32, mlp_width=11008, options=LLAMA
    )
    vocabulary: config.Size = 32000
    compute: str = "bfloat16"
    bits: tuple[Literal[2, 3, 4, 8], ...] = (4, 3)
    group_size: config.Size = 128
    prompt: config.Size = 16
    tokens: config.Several = 64
    repetitions: config.Several = 20
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": (BASELINE, *(f"{bits} bits" for bits in self.bits)),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Writes with each, in turns."""
    import jax
    import xarray as xr

    speakers = candidates(cfg)
    options = [
        inference.Continuation(
            max_new_tokens=tokens, sampler=inference.Sampler(temperature=0.0)
        )
        for tokens in (cfg.tokens, 1)
    ]
    prompts = inference.pad_prompts([list(range(1, cfg.prompt + 1))], least=1)
    key = jax.random.key(cfg.seed)
    thunks = {
        (name, each.max_new_tokens): lambda speaker=speaker, each=each: (
            inference.generate(speaker, prompts, each, key=key).tokens
        )
        for name, speaker in speakers.items()
        for each in options
    }
    measured = perf.compare(
        {f"{name}, {tokens}": call for (name, tokens), call in thunks.items()},
        f"{BASELINE}, {cfg.tokens}",
        repetitions=cfg.repetitions,
        warmup=1,
    )
    seconds = measured["seconds"]
    behind = [
        seconds.sel(candidate=f"{name}, {cfg.tokens}", drop=True)
        - seconds.sel(candidate=f"{name}, 1", drop=True)
        for name in speakers
    ]
    each = xr.concat(behind, dim="candidate") / (cfg.tokens - 1)
    return runs.measured(
        {
            "seconds": each.assign_coords(candidate=list(speakers)),
            "bytes": ("candidate", [read_bytes(one) for one in speakers.values()]),
        }
    )


def candidates(cfg: Config) -> "dict[str, inference.LanguageModel]":
    """Returns the model with dense and with packed blocks."""
    import jax

    from hpcjax.core import trees

    policy = core.Policy(param=cfg.compute, compute=cfg.compute)
    model = cfg.model.make((cfg.prompt + cfg.tokens,), cfg.vocabulary, policy)
    params, _ = jax.jit(model.init)(jax.random.key(cfg.seed))
    found = {BASELINE: inference.LanguageModel(params=params, model=model)}
    for bits in cfg.bits:
        key = core.derive(jax.random.key(cfg.seed), "bits", bits)
        flat = {
            path: random_matrices(core.derive(key, path), leaf.shape, cfg, bits)
            if path.startswith("blocks/") and path.endswith("/kernel")
            else leaf
            for path, leaf in trees.flatten(params).items()
        }
        packed = trees.unflatten(params, flat)
        found[f"{bits} bits"] = inference.LanguageModel(params=packed, model=model)
    return found


def random_matrices(
    key: "jax.Array", shape: tuple[int, ...], cfg: Config, bits: int
) -> "kernels.QuantizedMatrix":
    """Returns a stack of matrices of random integers, as large as drawn weights."""
    import jax
    import jax.numpy as jnp

    depth, inputs, outputs = shape
    size = math.gcd(cfg.group_size, inputs)
    groups = depth, inputs // size, outputs
    words = depth, kernels.packed_rows(inputs, bits), outputs
    spread = (2**bits - 1) / math.sqrt(12)
    return kernels.QuantizedMatrix(
        words=jax.random.bits(core.derive(key, "words"), words, jnp.uint32),
        scale=jnp.full(groups, 0.02 / spread, jnp.float16),
        zero=jnp.full(groups, 2 ** (bits - 1), jnp.float16),
        bits=bits,
        inputs=inputs,
        group_size=size,
    )


def read_bytes(speaker: "inference.LanguageModel") -> int:
    """Returns the bytes of parameters that one token has to read: all but one table."""
    import jax

    params: Any = speaker.params
    leaves = jax.tree.leaves({**params, "embed": None})
    return sum(leaf.nbytes for leaf in leaves)
