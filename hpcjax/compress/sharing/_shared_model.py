"""Any network with the weights of a plan in the place of its kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.compress.sharing import _stores
from hpcjax.compress.sharing._plan import Layer, Plan
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key, derive
from hpcjax.core.model import Model
from hpcjax.core.patterns import check_patterns, matches_any

SHARED = "shared"


def list_layers(
    params: Any,
    include: Sequence[str] = ("(^|/)kernel$",),
    stacked: Sequence[str] = (),
) -> list[Layer]:
    """Returns the layers of a network that may share weights, by their kernels.

    Args:
      params: parameters of the network, or their shapes.
      include: regular expressions for the paths of kernels.
      stacked: for the paths of kernels that are stacks of layers along axis 0.

    Raises:
      ConfigError: a pattern that is none or that nothing matches, or a kernel that is
        neither `[inputs, outputs]` nor `[height, width, inputs, outputs]`.

    Examples:
      >>> kernels = {"a": {"kernel": jnp.zeros((3, 3, 2, 4)), "bias": jnp.zeros(4)}}
      >>> list_layers(kernels)
      [Layer(path='a/kernel', shape=(4, 2, 3, 3), index=None)]
    """
    check_patterns("include", include)
    check_patterns("stacked", stacked)
    leaves = trees.flatten(params)
    for pattern in (*include, *stacked):
        if not any(matches_any((pattern,), path) for path in leaves):
            raise ConfigError(f"no parameter's path matches {pattern!r}")
    layers = []
    for path, leaf in leaves.items():
        if not matches_any(include, path):
            continue
        shape, stack = leaf.shape, matches_any(stacked, path)
        own = shape[1:] if stack else shape
        if len(own) not in (2, 4):
            raise ConfigError(
                f"{path} must be [inputs, outputs] or [height, width, inputs, "
                f"outputs], or a stack of these: got {shape}"
            )
        turned = (own[-1], own[-2], *own[:-2])
        numbers = range(shape[0]) if stack else [None]
        layers += [Layer(path, turned, number) for number in numbers]
    return layers


def share(model: Model, plan: Plan, *, remat: bool = False) -> Model:
    """Returns the network with the weights of a plan.

    Its parameters are those of the network without the kernels that share, and
    `params["shared"][plan.digest]`, see `init`. So a checkpoint of another plan does
    not fit. Gradients, what devices exchange and optimizers' state are of these
    parameters, `plan.weights` and a little, not of the network's.

    K-FAC and other methods that observe layers see those with kernels of their own. The
    result does not decode; `expand` gives the parameters of the network itself.

    Args:
      model: the network; its parameters are nested dicts.
      plan: of its layers.
      remat: whether the backward pass makes the weights again, and all else but the
        products of layers, instead of keeping them.

    Raises:
      ConfigError: when it is initialized, a layer that the network has not.

    Examples:
      >>> from hpcjax import compress, models
      >>> model = models.mlp((2, 2, 1), 3, widths=(4, 4, 4))
      >>> layers = compress.sharing.list_layers(model.init(jax.random.key(0))[0])
      >>> plan = compress.sharing.make_plan(layers, (0, 0, 0, 1), 32)
      >>> params, state = share(model, plan).init(jax.random.key(0))
      >>> sorted(params["dense_0"]), plan.weights
      (['bias'], 32)
    """
    shared = {layer.path for layer, window in plan if window.kind != "own"}

    def initialize(key: jax.Array) -> tuple[Any, Any]:
        params, state = model.init(key)
        leaves = trees.flatten(params)
        _check_layers(plan, leaves)
        # Kept in the type that the network keeps its kernels in.
        kinds = [leaves[path].dtype for path in shared]
        made: dict[str, Any] = jax.tree.map(
            lambda leaf: leaf.astype(jnp.result_type(*kinds)),
            _stores.init(derive(key, SHARED), plan),
        )
        # A layer of a stack that shares nothing, in which others do.
        made["own"] = {
            _stores.key_of(layer): _to_weights(leaves[layer.path][layer.index])
            for layer, window in plan
            if window.kind == "own" and layer.path in shared
        }
        return {**_without(params, shared), SHARED: {plan.digest: made}}, state

    def apply(
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: Key | None = None,
        taps: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        def run(params: Any) -> tuple[Any, Any]:
            whole = expand(params, plan)
            return model.apply(whole, state, x, train=train, key=key, taps=taps)

        return (jax.checkpoint(run, policy=_is_product) if remat else run)(params)

    observed = [spec for spec in model.layers if f"{spec.path}/kernel" not in shared]
    return Model(initialize, apply, tuple(observed), frozen=model.frozen)


def expand(params: Any, plan: Plan) -> Any:
    """Returns the parameters of the network itself.

    Args:
      params: of the model from `share`.
      plan: the same plan.

    Raises:
      ConfigError: the parameters are of another plan.
    """
    kept = params.get(SHARED, {})
    if plan.digest not in kept:
        raise ConfigError(
            f"the parameters must be of the plan {plan.digest}: got those of "
            f"{', '.join(kept) or 'none'}"
        )
    made = _stores.generate(kept[plan.digest], plan)
    stacks: dict[str, dict[int, Any]] = {}
    whole = {name: leaf for name, leaf in params.items() if name != SHARED}
    for layer, window in plan:
        if window.kind == "own":
            weights = kept[plan.digest]["own"].get(_stores.key_of(layer))
            if weights is None:
                continue
        else:
            weights = made[layer.name]
        kernel = _to_kernel(weights)
        if layer.index is None:
            whole = _with(whole, layer.path.split(trees.SEPARATOR), kernel)
        else:
            stacks.setdefault(layer.path, {})[layer.index] = kernel
    for path, kernels in stacks.items():
        stack = jnp.stack([kernels[number] for number in sorted(kernels)])
        whole = _with(whole, path.split(trees.SEPARATOR), stack)
    return whole


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Says what the forward pass keeps. The weights are made without such products."""
    return primitive.name in ("dot_general", "conv_general_dilated")


def _check_layers(plan: Plan, leaves: Mapping[str, Any]) -> None:
    """Raises ConfigError for layers of the plan that are not the network's."""
    counts: dict[str, int] = {}
    for layer in plan.layers:
        leaf = leaves.get(layer.path)
        own = None if leaf is None else leaf.shape
        if own is not None and layer.index is not None:
            own, counts[layer.path] = own[1:], counts.get(layer.path, 0) + 1
        if own is None or (own[-1], own[-2], *own[:-2]) != layer.shape:
            raise ConfigError(
                f"the plan's layer {layer.name}, {layer.shape}, is not in the network: "
                + ("it has no such path" if own is None else f"there it is {own}")
            )
    for path, count in counts.items():
        if count != len(leaves[path]):
            raise ConfigError(
                f"the plan must hold all layers of the stack {path}, "
                f"{len(leaves[path])}: got {count}"
            )


def _to_weights(kernel: jax.Array) -> jax.Array:
    """Returns a kernel with its axes in the order of `Layer.shape`."""
    return jnp.moveaxis(kernel, (-1, -2), (0, 1))


def _to_kernel(weights: jax.Array) -> jax.Array:
    """Undoes `_to_weights`."""
    return jnp.moveaxis(weights, (0, 1), (-1, -2))


def _without(params: Any, paths: set[str], above: str = "") -> Any:
    """Returns nested dicts without the leaves of some paths."""
    kept = {}
    for name, value in params.items():
        path = f"{above}{name}"
        if path in paths:
            continue
        nested = isinstance(value, dict)
        kept[name] = _without(value, paths, path + trees.SEPARATOR) if nested else value
    return kept


def _with(params: dict[str, Any], keys: list[str], leaf: Any) -> dict[str, Any]:
    """Returns nested dicts with a leaf at a path; the given ones do not change."""
    name, *rest = keys
    below = _with(params.get(name, {}), rest, leaf) if rest else leaf
    return {**params, name: below}
