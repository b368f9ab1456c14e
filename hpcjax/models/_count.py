"""How large a language model is, by shapes alone."""

import math

import jax

from hpcjax.core import trees
from hpcjax.core.model import Model
from hpcjax.models.config import BertConfig, CausalLmConfig

# BERT's matrices that see one place of a sequence, not each.
_ONCE = ("pooler", "order")
_OF_EXPERTS = ("experts/up", "experts/gate", "experts/down")


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
    """Returns 6 N + 12 · depth · width · time, the operations of one training step.

    N counts the parameters of matrix products: the blocks' and the head's once, whether
    tied or not, of experts those a token goes through; no tables, biases and norms.
    Attention counts every pair of places, also those a causal mask hides; recomputation
    does not count.

    Args:
      config: the model.
      time: tokens in a sequence.
      vocabulary: words the head knows.

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
        if path.endswith("kernel") and not path.startswith(_ONCE)
    )
    experts = config.options.experts if isinstance(config, CausalLmConfig) else None
    if experts is not None:
        held = sum(math.prod(flat[p].shape) for p in flat if p.endswith(_OF_EXPERTS))
        matrices += held * experts.top_k // experts.count
    if "head/kernel" not in flat and _gives_words(config):
        matrices += math.prod(flat["embed/table"].shape)
    return 6 * matrices + 12 * config.depth * config.width * time


def _gives_words(config: CausalLmConfig | BertConfig) -> bool:
    if isinstance(config, CausalLmConfig):
        return True
    return config.head in ("pretraining", "masked_lm")
