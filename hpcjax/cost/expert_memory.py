"""What a mixture of experts holds on a device and sends, under three parallelisms."""

from typing import Literal

import jax
from jax.sharding import PartitionSpec

from hpcjax.core import checks, trees
from hpcjax.core.model import Model
from hpcjax.sharding.cuts import count_parts
from hpcjax.sharding.mesh import EXPERT_AXIS
from hpcjax.sharding.ted import Layout, spread_experts
from hpcjax.sharding.tensor3d import COL_AXIS

Recompute = Literal["none", "full", "collectives"]
# Bytes of each parameter in mixed precision: of weights and gradients in half
# precision, and of what the optimizer has in float32, weights and two moments.
HELD, STEPPED = 4, 12


def ted_memory_asymptotic(
    base: float,
    experts: int,
    tensor: int,
    expert: int,
    devices: int,
    *,
    held: float = HELD,
    stepped: float = STEPPED,
) -> float:
    """Returns bytes of a device for parameters, gradients and the optimizer's state.

    Of a base of N parameters, of which the feed-forward part in every second block is
    replaced by E experts of its size, (2/3) N are in no expert and (E/3) N in experts:
    a feed-forward part has 2/3 of a block. With T, X of G devices

        M = h (2/3 N / T + E/3 N / (T X)) + s (2/3 + E/3) N / G

    since the optimizer's state of either kind is spread over all devices that differ in
    what they have of it, or are copies. With X = E and the default bytes that is
    4 N / T + 4 (E + 2) N / G.

    Args:
      base: N.
      experts: E.
      tensor: T, devices that share a matrix.
      expert: X, devices that share out the experts.
      devices: G.
      held: h, bytes of what each device holds of its part.
      stepped: s, bytes of what is spread over copies as well.

    Raises:
      ConfigError: sizes that do not divide.

    References:
      Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach, ICS 2023, §3.

    Examples:
      >>> round(ted_memory_asymptotic(6.7e9, 16, 4, 16, 128) / 2**30, 2)
      9.75
    """
    Layout.of(devices, tensor, expert)
    rule = "expert must divide experts"
    checks.require(experts % expert == 0, rule, experts=experts, expert=expert)
    dense, mixed = 2 / 3 * base, experts / 3 * base
    own = dense / tensor + mixed / (tensor * expert)
    return held * own + stepped * (dense + mixed) / devices


def largest_base(
    memory: float, experts: int, tensor: int, expert: int, devices: int, **sizes: float
) -> float:
    """Returns the most parameters of a base that fit, by `ted_memory_asymptotic`.

    Examples:
      >>> one, four = (largest_base(2**34, 16, T, 16, 1024) for T in (1, 4))
      >>> round(four / one, 1)
      3.8
    """
    unit = ted_memory_asymptotic(1.0, experts, tensor, expert, devices, **sizes)
    return memory / unit


def ted_memory(
    model: Model,
    layout: Layout,
    *,
    held: float = HELD,
    stepped: float = STEPPED,
    zero: bool = True,
    stacked: tuple[str, ...] = (),
) -> float:
    """Returns bytes of a device as `ted_memory_asymptotic`, of a model's real arrays.

    What is not cut counts whole: norms, routers, biases of outputs, and moments of
    which the devices divide no dimension.

    Args:
      model: a language model with experts.
      layout: the devices.
      held: bytes of what each device holds of a number of its part.
      stepped: bytes of what is cut as the optimizer's state is.
      zero: as for `sharding.spread_experts`.
      stacked: as for `sharding.spread_experts`.

    Raises:
      ConfigError: as `sharding.spread_experts`.
    """
    parallel = spread_experts(model, layout, zero=zero, stacked=stacked)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    sizes, whole = layout._asdict(), PartitionSpec()
    total = 0.0
    for path, leaf in trees.flatten(shapes).items():
        own, parts = (
            leaf.size / count_parts(specs.get(path, whole), sizes)
            for specs in (parallel.held, parallel.stepped)
        )
        total += held * own + stepped * parts
    return total


def ted_volume(
    tokens: int,
    width: int,
    slots: int,
    layout: Layout,
    *,
    drop_duplicates: bool = True,
    remat: Recompute = "none",
) -> dict[str, float]:
    """Returns the words that a device sends for a block with experts, by mesh axis.

    In a step of training, by rings: an all-reduce of w words over T devices sends
    2 w (T - 1) / T, an all-gather of w words in all half of that, an all-to-all of w
    words over X devices w (X - 1) / X. In one pass forward:

    - attention: an all-reduce of tokens · width words over `col`;
    - experts: one of what they have received, slots · width words, over `col`;
    - two all-to-all of slots · width words over `expert`. With `drop_duplicates` they
      are of a T-th of that, and each is followed by a gather over `col`.

    The backward pass has the same, and so has a recomputation that keeps nothing. What
    routers take the mean of, two numbers for each expert, is left out.

    Args:
      tokens: of a device.
      width: numbers of a token.
      slots: experts · capacity, rows that a device has places for.
      layout: the devices.
      drop_duplicates: as for `sharding.spread_experts`.
      remat: of the model; "collectives" sends nothing again.
    """
    passes = 3 if remat == "full" else 2
    sent, summed = slots * width, (tokens + slots) * width
    share, apart = (1 - 1 / size for size in (layout.col, layout.expert))
    along_col = 2 * share * summed
    if drop_duplicates and layout.expert > 1:
        along_col += 2 * share * sent
        sent /= layout.col
    along_expert = 2 * apart * sent
    return {COL_AXIS: passes * along_col, EXPERT_AXIS: passes * along_expert}
