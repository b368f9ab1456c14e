"""Parameters and FLOPs of language models, counted from shapes alone."""

import math

import jax

from hpcjax.core import trees
from hpcjax.core.model import Model
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.transformer_config import CausalLmConfig

# BERT's matrices that are applied to one position of a sequence only.
_FIRST_POSITION_ONLY = ("pooler", "order")
_EXPERT_MATRICES = ("experts/up", "experts/gate", "experts/down")


def num_params(model: Model) -> int:
    """Returns the number of a model's parameters; nothing is allocated.

    Examples:
      >>> from hpcjax import models
      >>> config, context, vocabulary = models.preset("gpt2-small")
      >>> num_params(config.make((context,), vocabulary))
      124439808
    """
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return trees.num_params(params)


def flops_per_token(
    config: CausalLmConfig | BertConfig, time: int, vocabulary: int
) -> int:
    """Returns 6 N + 12 · depth · width · time, the FLOPs of training on one token.

    N is the number of parameters in matrix products: those of the blocks and of the
    head, tied or not, and of mixtures of experts those that a token passes through.
    Embedding lookups, biases and norms do not count. A multiply-add is 2 FLOPs, and the
    backward pass costs twice the forward pass, hence 6. Attention forms QKᵀ and its
    product with V, 2 · 2 · time · width FLOPs a token and layer in the forward pass;
    all pairs count, also those that a causal mask hides. Recomputation does not count.

    Args:
      config: the model.
      time: tokens in a sequence.
      vocabulary: number of words.

    Examples:
      >>> from hpcjax import models
      >>> config, context, vocabulary = models.preset("gpt2-medium")
      >>> flops_per_token(config, context, vocabulary)
      2422708224
    """
    model = config.make((time,), vocabulary)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    flat = trees.flatten(params)
    matrices = sum(
        math.prod(leaf.shape)
        for path, leaf in flat.items()
        if path.endswith("kernel") and not path.startswith(_FIRST_POSITION_ONLY)
    )
    experts = config.options.experts if isinstance(config, CausalLmConfig) else None
    if experts is not None:
        # A token passes through top_k of the experts.
        held = sum(
            math.prod(flat[p].shape) for p in flat if p.endswith(_EXPERT_MATRICES)
        )
        matrices += held * experts.top_k // experts.count
    # A tied head multiplies by the embedding table, which is no kernel.
    if "head/kernel" not in flat and _predicts_words(config):
        matrices += math.prod(flat["embed/table"].shape)
    return 6 * matrices + 12 * config.depth * config.width * time


def _predicts_words(config: CausalLmConfig | BertConfig) -> bool:
    """Returns whether the model has a head over the vocabulary."""
    if isinstance(config, CausalLmConfig):
        return True
    return config.head in ("pretraining", "masked_lm")
