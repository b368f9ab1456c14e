"""Which parameters K-FAC preconditions, and how each layer is one matrix."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import LayerSpec, Model, Tap, make_slots
from hpcjax.core.patterns import check_patterns
from hpcjax.optim.kfac import config
from hpcjax.optim.kfac._statistics import Statistic

log = logging.getLogger(__name__)
Unit = tuple[str, int]


class Block(NamedTuple):
    """One observed layer: its matrix is [kernel; bias], `[a, g]`.

    Attributes:
      path: of the layer in the parameters.
      kind: `"dense"` or `"conv"`.
      a: rows: inputs, times the kernel's positions, and one for a bias.
      g: columns: outputs.
      depth: layers of a scanned stack; 1 outside one.
      stacked: whether parameters and statistics have a leading axis of `depth`.
      statistic: what forms A and G from inputs and output gradients.
    """

    path: str
    kind: str
    a: int
    g: int
    depth: int
    stacked: bool
    statistic: Statistic

    @property
    def units(self) -> list[Unit]:
        """The block's matrices: (path, number in the stack)."""
        return [(self.path, number) for number in range(self.depth)]

    @property
    def params(self) -> tuple[str, ...]:
        """Paths of the parameters in the matrix, the bias last."""
        names = ("kernel", "bias") if self.statistic.use_bias else ("kernel",)
        return tuple(f"{self.path}/{name}" for name in names)

    @property
    def words(self) -> tuple[int, ...]:
        """How many numbers a layer has of each of `params`."""
        rows = self.a - self.statistic.use_bias
        return (rows * self.g, self.g) if self.statistic.use_bias else (rows * self.g,)


class Plan(NamedTuple):
    """What is preconditioned, and what is left to the first-order optimizer.

    Attributes:
      blocks: the observed layers, in the model's order.
      skip: regexes of the paths that are left out.
    """

    blocks: tuple[Block, ...]
    skip: tuple[str, ...] = config.SKIP

    @property
    def units(self) -> dict[Unit, Block]:
        """Every matrix with its block."""
        return {unit: block for block in self.blocks for unit in block.units}


def plan(
    model: Model,
    *,
    skip: tuple[str, ...] = config.SKIP,
    conv_normalization: config.ConvNormalization = "kfc",
    precision: str = "highest",
) -> Plan:
    """Chooses the layers of `model` that K-FAC preconditions.

    Every observable dense layer and convolution is one, except where a regex of `skip`
    is found in its path. Layers of other kinds are left to the first-order optimizer,
    with a notice.

    Args:
      model: whose `layers` say what can be observed.
      skip: regexes of layers, and of parameters of no layer, that keep their gradient.
        The default is `kfac.SKIP`: tables and norms. For a vocabulary head, whose
        factor is as large as the vocabulary, pass `(*kfac.SKIP, "^head(/|$)")`.
      conv_normalization: see `kfac.Statistic`.
      precision: of the products that form the factors.

    Raises:
      ConfigError: a regex of your own that matches nothing, or no layer is left.

    Examples:
      >>> from hpcjax import models
      >>> model = models.mlp((4,), 3, widths=(5,))
      >>> [(block.path, block.a, block.g) for block in plan(model).blocks]
      [('dense_0', 5, 5), ('head', 6, 3)]
    """
    check_patterns("skip", skip)
    if conv_normalization not in ("kfc", "reference"):
        raise ConfigError(
            "conv_normalization must be 'kfc' or 'reference': got "
            f"{conv_normalization!r}"
        )
    reference = conv_normalization == "reference"
    blocks = []
    for spec in model.layers:
        if _found(skip, spec.path):
            continue
        grouped = spec.options.get("groups", 1) != 1
        if spec.kind not in ("dense", "conv") or grouped:
            kind = f"grouped {spec.kind}" if grouped else spec.kind
            log.warning("no K-FAC for layer %r of kind %r", spec.path, kind)
            continue
        blocks.append(_block(spec, reference, precision))
    if not blocks:
        raise ConfigError(
            f"no layer is left to precondition: skip={skip}, layers "
            f"{[spec.path for spec in model.layers]}"
        )
    return Plan(tuple(blocks), skip)


def _block(spec: LayerSpec, reference: bool, precision: str) -> Block:
    options, positions, geometry = spec.options, 1, {}
    if spec.kind == "conv":
        names = ("kernel_size", "strides", "padding", "dilation")
        missing = [name for name in names if name not in options]
        if missing:
            raise ConfigError(f"options of layer {spec.path!r} lack {missing}")
        geometry = {name: options[name] for name in names}
        positions = math.prod(options["kernel_size"])
    return Block(
        path=spec.path,
        kind=spec.kind,
        a=positions * options["inputs"] + options["use_bias"],
        g=options["outputs"],
        depth=options["depth"] or 1,
        stacked=options["depth"] is not None,
        statistic=Statistic(
            use_bias=options["use_bias"],
            conv=spec.kind == "conv",
            reference=reference,
            precision=precision,
            **geometry,
        ),
    )


def _found(patterns: tuple[str, ...], path: str) -> bool:
    return any(re.search(pattern, path) for pattern in patterns)


def check_covered(chosen: Plan, params: Any) -> None:
    """Raises ConfigError unless each parameter is in a block or left out by a rule.

    Regexes beyond `kfac.SKIP` that are found in no parameter's path are refused too.
    """
    paths = list(trees.flatten(params))
    inside = {path for block in chosen.blocks for path in block.params}
    missing = sorted(inside - set(paths))
    if missing:
        raise ConfigError(f"parameters of K-FAC's layers are missing: {missing}")
    leaves = trees.flatten(params)
    for block in chosen.blocks:
        for path, words in zip(block.params, block.words, strict=True):
            size = leaves[path].size
            # Of a stack, a device may have its own layers only.
            if size != words and not (block.stacked and size % words == 0):
                raise ConfigError(
                    f"{path!r} of K-FAC's plan has {words} numbers a layer: got shape "
                    f"{leaves[path].shape}"
                )
    rest = [path for path in paths if path not in inside]
    loose = [path for path in rest if not _found(chosen.skip, path)]
    if loose:
        raise ConfigError(
            f"parameters in no K-FAC block and matched by no rule of skip: {loose}; "
            "add a regex for them to skip, they then keep their gradient"
        )
    idle = [
        rule
        for rule in chosen.skip
        if rule not in config.SKIP and not any(_found((rule,), path) for path in rest)
    ]
    if idle:
        raise ConfigError(f"rules of skip that match no parameter: {idle}; {rest}")


def make_taps(
    chosen: Plan, model: Model, params: Any, state: Any, x: Any, *, active: Any = None
) -> dict[str, Tap]:
    """Returns the taps of the plan's layers, to be passed to `model.apply`.

    Their gradient holds the statistics, see `statistics_of`.

    Args:
      chosen: which layers.
      model: the model of the plan.
      params: parameters, or their shapes.
      state: state of the model, or its shapes.
      x: a batch of inputs, or its shapes.
      active: `kfac.statistics_due(opt_state)`; where false nothing is computed.
    """
    wanted = {block.path: block.statistic for block in chosen.blocks}
    return make_slots(model, wanted, params, state, x, active=active)


def statistics_of(taps: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{path: {"a": A, "g": G}}` from the gradient of taps."""
    return {path: tap.slot for path, tap in taps.items()}


def to_matrices(
    chosen: Plan, leaves: Mapping[str, jax.Array]
) -> dict[Unit, Float[Array, "a g"]]:
    """Returns the matrix [kernel; bias] of each unit from parameters' gradients."""
    found = {}
    for block in chosen.blocks:
        kernel, *bias = (leaves[path] for path in block.params)
        rows = block.a - len(bias)
        whole = kernel.reshape(block.depth, rows, block.g)
        if bias:
            last = bias[0].reshape(block.depth, 1, block.g)
            whole = jnp.concatenate([whole, last.astype(whole.dtype)], axis=1)
        found |= {unit: whole[unit[1]] for unit in block.units}
    return found


def from_matrices(
    chosen: Plan,
    matrices: Mapping[Unit, Float[Array, "a g"]],
    like: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns `{path of parameter: gradient}` for the plan's parameters."""
    leaves = {}
    for block in chosen.blocks:
        whole = jnp.stack([matrices[unit] for unit in block.units])
        split = [whole[:, : block.a - 1], whole[:, block.a - 1 :]]
        parts = split if block.statistic.use_bias else [whole]
        for path, part in zip(block.params, parts, strict=True):
            leaves[path] = part.reshape(like[path].shape).astype(like[path].dtype)
    return leaves


def explain(chosen: Plan, params: Any) -> str:
    """Returns a table: for each parameter its block, or why it has none.

    Raises:
      ConfigError: a parameter is in no block and matched by no rule of `skip`.

    Examples:
      >>> from hpcjax import models
      >>> model = models.mlp((4,), 3, widths=())
      >>> print(explain(plan(model), model.init(jax.random.key(0))[0]))
      head/kernel (4, 3)  dense head: A 5x5, G 3x3
      head/bias (3,)      dense head: A 5x5, G 3x3
    """
    check_covered(chosen, params)
    leaves, lines = trees.flatten(params), []
    for block in chosen.blocks:
        layers = f"{block.depth} layers, " if block.stacked else ""
        what = f"{block.kind} {block.path}: {layers}A {block.a}x{block.a}, "
        lines += [(path, what + f"G {block.g}x{block.g}") for path in block.params]
    inside = {path for path, _ in lines}
    for path in leaves:
        if path not in inside:
            rule = next(rule for rule in chosen.skip if re.search(rule, path))
            lines.append((path, f"first order, by skip {rule!r}"))
    heads = {path: f"{path} {leaves[path].shape}" for path, _ in lines}
    width = max(map(len, heads.values()))
    return "\n".join(f"{heads[path]:<{width}}  {what}" for path, what in lines)
