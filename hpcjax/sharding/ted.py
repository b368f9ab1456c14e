"""DeepSpeed-TED: tensor, expert and data parallelism of one mixture of experts.

One order of devices serves both kinds of parameters. Experts are split over `expert`
and copied over `data`; everything else is copied over both, which share out the batch.
Both kinds are cut over `col`, whose devices have equal tokens.
"""

import functools
import logging
import math
import re
from typing import Any, NamedTuple

import jax

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import DATA_AXIS, Batch, Parallel
from hpcjax.core.model import Model
from hpcjax.core.patterns import check_stacked
from hpcjax.core.shards import Specs
from hpcjax.sharding.cuts import cut_decoder, cut_further
from hpcjax.sharding.mesh import EXPERT_AXIS
from hpcjax.sharding.tensor3d import COL_AXIS
from hpcjax.sharding.zero import split_model

log = logging.getLogger(__name__)

_TENSOR = dict.fromkeys(("heads", "kv", "ff", "vocab"), COL_AXIS)
RULES = {**_TENSOR, "expert": EXPERT_AXIS}
# Of experts with fewer inner features on a device, products are too thin for a GPU.
_THIN = 256


class Layout(NamedTuple):
    """Sizes of a mesh, the last axis of the nearest neighbours.

    Attributes:
      data: devices that share out the batch and hold copies of experts.
      expert: that share out the batch and the experts.
      col: that have equal tokens and parts of features.
    """

    data: int = 1
    expert: int = 1
    col: int = 1

    @classmethod
    def of(cls, devices: int, tensor: int, expert: int) -> "Layout":
        """Returns the layout of all devices.

        Raises:
          ConfigError: sizes below 1, or that do not divide the devices.

        Examples:
          >>> Layout.of(8, tensor=2, expert=2)
          Layout(data=2, expert=2, col=2)
        """
        checks.require_count(1, devices=devices, tensor=tensor, expert=expert)
        rule = "tensor * expert must divide the devices"
        good = devices % (tensor * expert) == 0
        checks.require(good, rule, devices=devices, tensor=tensor, expert=expert)
        return cls(devices // (tensor * expert), expert, tensor)


def check_tokens(batch: Batch, layout: Layout) -> None:
    """Raises ConfigError for fewer tokens of a device than devices that share them."""
    tokens = math.prod(batch["x"].shape[:2]) // (layout.data * layout.expert)
    rule = "a device must have at least as many tokens as share out what it sends"
    checks.require(tokens >= layout.col, rule, tokens=tokens, tensor=layout.col)


def spread_experts(
    model: Model,
    layout: Layout,
    *,
    zero: bool = True,
    drop_duplicates: bool = True,
    stacked: tuple[str, ...] = (),
) -> Parallel:
    """Returns how a mixture of experts is spread over devices.

    The gradient of an expert that a device has is already the sum over `expert`, from
    where its tokens came: it is summed over `data` alone, and divided by the devices of
    both, as the mean over all tokens is. `optim.update_shards` does so of all that is
    cut along an axis of the batch.

    Args:
      model: a language model with experts.
      layout: the devices.
      zero: whether the optimizer's state is spread over the devices of the batch.
      drop_duplicates: whether devices with equal tokens share out what they send.
      stacked: regexes of parameters whose first axis is a stack of layers.

    Raises:
      ConfigError: a model without experts, or sizes that the layout does not divide.

    References:
      Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize
      Mixture-of-Experts Training, ICS 2023, sections 3 to 5.
    """
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    check_stacked(stacked, trees.flatten(shapes))
    held = cut_experts(model, shapes, layout)
    stepped = held
    for axis in (DATA_AXIS, EXPERT_AXIS) if zero else ():
        stepped = cut_further(shapes, stepped, layout._asdict(), axis, stacked)

    def mesh_shape(count: int) -> dict[str, int]:
        devices = math.prod(layout)
        rule = f"the model was spread over {devices} devices"
        checks.require(count == devices, rule, devices=count)
        return layout._asdict()

    split = functools.partial(
        split_model,
        held=held,
        stacked=stacked,
        parted=(EXPERT_AXIS, COL_AXIS),
        once=drop_duplicates,
    )
    axes = (DATA_AXIS, EXPERT_AXIS)
    return Parallel(mesh_shape, held, stepped, split, axes=axes)


def cut_experts(model: Model, shapes: Any, layout: Layout) -> Specs:
    """Returns how each parameter is cut between steps.

    A vocabulary that the devices do not divide is on all of them.

    Args:
      model: as for `spread_experts`.
      shapes: of its parameters.
      layout: the devices.

    Raises:
      ConfigError: as `spread_experts`.
    """
    leaves = trees.flatten(shapes)
    experts = [path for path in leaves if re.search(r"(^|/)experts/(up|gate)$", path)]
    if model.decoder is None or not experts:
        raise ConfigError(
            "parallel=ted takes language models with experts: set "
            "model.options.experts=experts"
        )
    width = leaves[experts[0]].shape[-1] // layout.col
    if layout.col > 1 and width < _THIN:
        log.warning("an expert has %d inner features on a device: thin products", width)
    rules = RULES if layout.col > 1 else {"expert": EXPERT_AXIS}
    if model.decoder.vocabulary % layout.col:
        log.info("the vocabulary is on all of %d devices", layout.col)
        rules = {meaning: rules[meaning] for meaning in rules if meaning != "vocab"}
    names = {COL_AXIS: "tensor"}
    return cut_decoder(model.decoder, shapes, rules, layout._asdict(), names)
