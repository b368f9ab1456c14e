"""What a mixture of experts takes on a device: by its arrays, and by the formula."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import core, cost, runs, sharding
from hpcjax.core import config
from hpcjax.models import CausalLmConfig, ExpertsConfig, TransformerOptions

_EXPERTS = TransformerOptions(experts=ExpertsConfig(count=16, top_k=1, every=2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A mixture of experts in mixed precision; nothing is compiled.

    Attributes:
      model: the network.
      vocabulary: of its table.
      context: length of a sequence.
      tensor: devices that share a matrix.
      devices: of the machine; as many as experts share these out.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"devices": "32", "model.width": "64"}
    figures: ClassVar[Mapping[str, str]] = {
        "gib": ": of a device, for the arrays as they are cut",
        "alone": ": of a device, where none share a matrix",
        "formula": ": of a device, for so many parameters of a base",
        "gathered": ": the formula's, if each device had all experts",
        "base": ": parameters of the model without experts",
    }

    model: CausalLmConfig = CausalLmConfig(
        depth=32, width=4096, heads=32, options=_EXPERTS
    )
    vocabulary: config.Several = 51200
    context: config.Several = 2048
    tensor: config.Size = 1
    devices: config.Size = 128
    seed: config.Seed = 0


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Counts the arrays, and evaluates the formula."""
    import jax

    experts = getattr(cfg.model.options.experts, "count", 1)
    plain = dataclasses.replace(cfg.model.options, experts=None)
    base = dataclasses.replace(cfg.model, options=plain)
    mixture, without = (
        each.make((cfg.context,), cfg.vocabulary) for each in (cfg.model, base)
    )
    size = core.trees.num_params(jax.eval_shape(without.init, jax.random.key(0))[0])
    counted, alone = (
        cost.ted_memory(
            mixture,
            sharding.Layout.of(cfg.devices, tensor, experts),
            stacked=cfg.model.stacks,
        )
        for tensor in (cfg.tensor, 1)
    )
    formula, gathered = (
        cost.ted_memory_asymptotic(size, experts, cfg.tensor, expert, cfg.devices)
        for expert in (experts, 1)
    )
    found = {"gib": counted, "alone": alone, "formula": formula, "gathered": gathered}
    return {**{name: size / 2**30 for name, size in found.items()}, "base": size}
