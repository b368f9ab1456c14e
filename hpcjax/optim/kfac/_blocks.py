"""The plan of K-FAC: which layers it preconditions, each as one matrix."""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import LayerSpec, Model, Tap
from hpcjax.core.patterns import check_patterns, matches_any
from hpcjax.core.slots import make_slots
from hpcjax.optim.full_precision import check_real
from hpcjax.optim.kfac._statistics import Statistic
from hpcjax.optim.kfac.options import SKIP, ConvNormalization

log = logging.getLogger(__name__)
Unit = tuple[str, int]
GEOMETRY = ("kernel_size", "strides", "padding", "dilation")


class Block(NamedTuple):
    """One observed layer, or a stack of them, with the matrix [kernel; bias].

    The kernel is reshaped to [inputs, outputs] and the bias appended as a last row, so
    that outputs = [x; 1]ᵀ [kernel; bias]. A is `[a, a]`, G is `[g, g]`.

    Attributes:
      path: of the layer in the parameters.
      kind: `"dense"` or `"conv"`.
      a: rows of the matrix: inputs, times kernel positions, plus one for a bias.
      g: columns of the matrix: outputs.
      depth: number of layers in a scanned stack; 1 for a single layer.
      stacked: whether parameters and statistics have a leading axis of `depth`.
      use_bias: whether the bias is the matrix's last row.
      statistic: computes A and G from inputs and output gradients.
    """

    path: str
    kind: str
    a: int
    g: int
    depth: int
    stacked: bool
    use_bias: bool
    statistic: Statistic

    @property
    def units(self) -> list[Unit]:
        """Keys of the block's matrices: (path, number of the layer in the stack)."""
        return [(self.path, number) for number in range(self.depth)]

    @property
    def params(self) -> tuple[str, ...]:
        """Paths of the parameters that make the matrix, the bias last."""
        names = ("kernel", "bias") if self.use_bias else ("kernel",)
        return tuple(f"{self.path}/{name}" for name in names)

    @property
    def words(self) -> tuple[int, ...]:
        """Entries of each of `params` in a single layer."""
        rows = self.a - self.use_bias
        return (rows * self.g, self.g) if self.use_bias else (rows * self.g,)

    @property
    def observed(self) -> dict[str, int]:
        """Rows of A and G as the taps give them, with the row of a masked-out bias."""
        return {"a": self.a + self.statistic.use_bias - self.use_bias, "g": self.g}

    def without_bias(self) -> "Block":
        """Returns the block of the kernel alone."""
        return self._replace(a=self.a - self.use_bias, use_bias=False)


class Plan(NamedTuple):
    """Which layers K-FAC preconditions; other parameters keep their gradient.

    Attributes:
      blocks: the preconditioned layers, in the model's order.
      skip: regexes of the paths of parameters that keep their gradient.
    """

    blocks: tuple[Block, ...]
    skip: tuple[str, ...] = SKIP

    @property
    def units(self) -> dict[Unit, Block]:
        """Every matrix's key, with the block that it belongs to."""
        return {unit: block for block in self.blocks for unit in block.units}


def plan(
    model: Model,
    *,
    skip: tuple[str, ...] = SKIP,
    conv_normalization: ConvNormalization = "kfc",
    precision: str = "highest",
) -> Plan:
    """Chooses the layers of `model` that K-FAC preconditions.

    These are all observable dense layers and ungrouped convolutions whose path no regex
    of `skip` matches. The gradients of other layers are left to the first-order
    optimizer, and a warning is logged.

    Args:
      model: its `layers` say which layers can be observed.
      skip: regexes of layers and parameters that keep their gradient. The default,
        `kfac.SKIP`, holds embedding tables and norms. To leave out a vocabulary head as
        well, whose G has as many rows as the vocabulary, pass
        `(*kfac.SKIP, "^head(/|$)")`.
      conv_normalization: scaling of convolutions' factors, see `kfac.Statistic`.
      precision: of the products that form the factors.

    Raises:
      ConfigError: an entry of `skip` is not a regex, an unknown `conv_normalization`,
        or no layer is left.

    Examples:
      >>> from hpcjax import models
      >>> model = models.mlp((4,), 3, widths=(5,))
      >>> [(block.path, block.a, block.g) for block in plan(model).blocks]
      [('dense_0', 5, 5), ('head', 6, 3)]
    """
    checks.require_has("a core.Model", ("layers", "apply"), model=model)
    check_patterns("skip", skip)
    if conv_normalization not in ("kfc", "reference"):
        raise ConfigError(
            "conv_normalization must be 'kfc' or 'reference': got "
            f"{conv_normalization!r}"
        )
    reference = conv_normalization == "reference"
    blocks = []
    for spec in model.layers:
        if matches_any(skip, spec.path):
            continue
        grouped = spec.options.get("groups", 1) != 1
        if spec.kind not in ("dense", "conv") or grouped:
            kind = f"grouped {spec.kind}" if grouped else spec.kind
            log.warning("no K-FAC for layer %r of kind %r", spec.path, kind)
            continue
        blocks.append(_make_block(spec, reference, precision))
    if not blocks:
        raise ConfigError(
            f"no layer is left to precondition: skip={skip}, layers "
            f"{[spec.path for spec in model.layers]}"
        )
    return Plan(tuple(blocks), skip)


def _make_block(spec: LayerSpec, reference: bool, precision: str) -> Block:
    """Returns the block of an observable layer.

    Raises:
      ConfigError: the layer's options lack its sizes or geometry.
    """
    options: dict[str, Any] = {"use_bias": True, "depth": None, **spec.options}
    names = GEOMETRY if spec.kind == "conv" else ()
    missing = [n for n in ("inputs", "outputs", *names) if n not in options]
    if missing:
        raise ConfigError(
            f"options of the {spec.kind} layer {spec.path!r} must say {missing}: got "
            f"{sorted(spec.options)}"
        )
    geometry = {name: options[name] for name in names}
    # A convolution is a dense layer over patches of h · w · in numbers; the product
    # over no axes is 1 for a dense one.
    positions = math.prod(geometry.get("kernel_size", ()))
    return Block(
        path=spec.path,
        kind=spec.kind,
        a=positions * options["inputs"] + options["use_bias"],
        g=options["outputs"],
        depth=options["depth"] or 1,
        stacked=options["depth"] is not None,
        use_bias=options["use_bias"],
        statistic=Statistic(
            use_bias=options["use_bias"],
            conv=spec.kind == "conv",
            reference=reference,
            precision=precision,
            **geometry,
        ),
    )


def check_covered(chosen: Plan, params: Any) -> None:
    """Raises ConfigError unless each parameter is in a block or matched by `skip`.

    Regexes that match no parameter are refused too, except those of `kfac.SKIP`. A
    parameter that `optax.masked` has taken out counts as present, and needs no regex.
    """
    leaves, named = trees.flatten(params), trees.paths(params)
    inside = {path for block in chosen.blocks for path in block.params}
    missing = sorted(inside - set(named))
    if missing:
        raise ConfigError(
            f"parameters of K-FAC's layers are missing: {missing}; a layer without a "
            "bias says use_bias=False"
        )
    for block in part_of(chosen, params).blocks:
        for path, words in zip(block.params, block.words, strict=True):
            size = leaves[path].size
            # A device of a pipeline may hold only some layers of a stack.
            if size != words and not (block.stacked and size % words == 0):
                raise ConfigError(
                    f"{path!r} of K-FAC's plan has {words} numbers a layer: got shape "
                    f"{leaves[path].shape}"
                )
    rest = [path for path in named if path not in inside]
    loose = [p for p in rest if p in leaves and not matches_any(chosen.skip, p)]
    if loose:
        raise ConfigError(
            f"parameters in no K-FAC block and matched by no rule of skip: {loose}; "
            "add a regex for them to skip, they then keep their gradient"
        )
    idle = [
        rule
        for rule in chosen.skip
        if rule not in SKIP and not any(matches_any((rule,), path) for path in rest)
    ]
    if idle:
        raise ConfigError(f"rules of skip that match no parameter: {idle}; {rest}")


def check_parameters(chosen: Plan, params: Any) -> None:
    """Raises unless all parameters are real, and each in a block or left out.

    An empty tree passes: `optax.tree_map_params` calls `init` with one.
    """
    check_real(params)
    if trees.paths(params):
        check_covered(chosen, params)


def part_of(chosen: Plan, tree: Any) -> Plan:
    """Returns the part of a plan whose parameters are in `tree`.

    `optax.masked` takes parameters out of the tree that a transform sees. A layer whose
    kernel is missing is left out of the plan; one whose bias is missing has the matrix
    and the factor A of its kernel alone.

    Args:
      chosen: the plan of all parameters.
      tree: parameters, gradients or shapes, with their paths.

    Raises:
      ConfigError: a bias whose kernel is masked out.
    """
    here = trees.flatten(tree)
    lone_biases = [
        block.params[1]
        for block in chosen.blocks
        if block.params[0] not in here and block.params[-1] in here
    ]
    if lone_biases:
        raise ConfigError(
            "K-FAC preconditions a bias together with its kernel: got biases whose "
            f"kernels are masked out: {lone_biases}; mask them out too"
        )
    blocks = (
        block if block.params[-1] in here else block.without_bias()
        for block in chosen.blocks
        if block.params[0] in here
    )
    return chosen._replace(blocks=tuple(blocks))


def withholds(taps: Any) -> bool:
    """Returns whether `taps={}`, or nested dicts as empty, was passed to an update.

    That is right in steps that take no statistics; None is what was forgotten.
    """
    return taps is not None and not jax.tree.leaves(taps)


def check_statistics(
    chosen: Plan, taps: Any, like: Mapping[str, Mapping[str, jax.Array]]
) -> dict[str, dict[str, Float[Array, "depth n n"]]]:
    """Returns the plan's statistics as `{path: {"a": [depth, n, n], "g": ...}}`.

    Args:
      chosen: the layers.
      taps: statistics by path or nested, with or without the axis `depth`. Those of
        other layers, and the rows of masked-out biases, are dropped.
      like: the running factors, whose `depth` the result has.

    Raises:
      ValueError: statistics are missing, have another shape than the layer's, or are
        no statistics but taps.
    """
    nodes = jax.tree.leaves(taps, is_leaf=lambda node: isinstance(node, Tap))
    if any(isinstance(node, Tap) for node in nodes):
        raise ValueError(
            "taps must be statistics, and these are the taps themselves: pass "
            "taps=kfac.statistics_of(gradient of the taps) to update"
        )
    given, statistics = trees.flatten(taps or {}), {}
    missing = [
        block.path
        for block in chosen.blocks
        if any(f"{block.path}/{side}" not in given for side in block.observed)
    ]
    if missing:
        raise ValueError(
            f"taps are missing for layers {missing}: pass "
            "taps=kfac.statistics_of(gradient of the taps) to update"
        )
    for block in chosen.blocks:
        statistics[block.path] = {}
        for side, n in block.observed.items():
            factor, new = like[block.path][side], given[f"{block.path}/{side}"]
            if new.shape[-2:] != (n, n) or new.size != len(factor) * n * n:
                raise ValueError(
                    f"statistics {side!r} of {block.path!r} must be "
                    f"{(len(factor), n, n)}: got {new.shape}"
                )
            rows = factor.shape[-1]
            # The bias is last, so a factor without it is the leading square.
            statistics[block.path][side] = new.reshape(-1, n, n)[:, :rows, :rows]
    return statistics


def make_taps(
    chosen: Plan, model: Model, params: Any, state: Any, x: Any, *, active: Any = None
) -> dict[str, Tap]:
    """Returns taps for the plan's layers, to be passed to `model.apply`.

    The gradient of a loss with respect to these taps is the statistics, see
    `statistics_of`. A layer that is used several times in a pass, such as one of tied
    weights, has the mean of its A and of its G over all uses: uses count as further
    rows, as in K-FAC-expand.

    Args:
      chosen: which layers.
      model: the model of the plan.
      params: parameters, or their shapes.
      state: state of the model, or its shapes.
      x: a batch of inputs, or its shapes.
      active: whether to compute statistics, such as `kfac.statistics_due(opt_state)`;
        None always does.

    Raises:
      ValueError: see `core.make_slots`.

    References:
      Eschenhagen, Immer, Turner, Schneider, Hennig, Kronecker-Factored Approximate
      Curvature for Modern Neural Network Architectures, NeurIPS 2023.
    """
    wanted = {block.path: block.statistic for block in chosen.blocks}
    return make_slots(model, wanted, params, state, x, active=active, average_uses=True)


def statistics_of(taps: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the statistics `{path: {"a": A, "g": G}}` in the gradient of taps."""
    return {path: tap.slot for path, tap in taps.items()}


def to_matrices(
    chosen: Plan, leaves: Mapping[str, jax.Array]
) -> dict[Unit, Float[Array, "a g"]]:
    """Returns the matrix [kernel; bias] of each layer, from gradients by path."""
    # With a constant 1 appended to its input, a layer is one product with [W; b]. So A
    # has a last row for the bias, and one block preconditions kernel and bias together.
    matrices = {}
    for block in chosen.blocks:
        kernel, *bias = (leaves[path] for path in block.params)
        rows = block.a - len(bias)
        whole = kernel.reshape(block.depth, rows, block.g)
        if bias:
            last = bias[0].reshape(block.depth, 1, block.g)
            whole = jnp.concatenate([whole, last.astype(whole.dtype)], axis=1)
        matrices |= {unit: whole[unit[1]] for unit in block.units}
    return matrices


def from_matrices(
    chosen: Plan,
    matrices: Mapping[Unit, Float[Array, "a g"]],
    like: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns gradients by path from matrices: the inverse of `to_matrices`."""
    leaves = {}
    for block in chosen.blocks:
        whole = jnp.stack([matrices[unit] for unit in block.units])
        split = [whole[:, : block.a - 1], whole[:, block.a - 1 :]]
        parts = split if block.use_bias else [whole]
        for path, part in zip(block.params, parts, strict=True):
            leaves[path] = part.reshape(like[path].shape).astype(like[path].dtype)
    return leaves


def explain(chosen: Plan, params: Any) -> str:
    """Returns a table of all parameters: the block of each, or why it has none.

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
            rule = next(rule for rule in chosen.skip if matches_any((rule,), path))
            lines.append((path, f"first order, by skip {rule!r}"))
    heads = {path: f"{path} {leaves[path].shape}" for path, _ in lines}
    width = max(map(len, heads.values()))
    return "\n".join(f"{heads[path]:<{width}}  {what}" for path, what in lines)
