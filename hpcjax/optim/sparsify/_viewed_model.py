"""A network that sees other weights than are trained, as a network like any other."""

from collections.abc import Mapping
from typing import Any

import jax

from hpcjax.core import trees
from hpcjax.core.keys import Key, derive, whole_batch
from hpcjax.core.model import LOSSES, Model
from hpcjax.optim.sparsify._views import Viewed, no_penalty

_PENALTY = "sparsity"  # the name of the penalty among the losses that layers add


def view_model(model: Model, viewed: Viewed) -> Model:
    """Returns the network that sees the weights of a view.

    Its parameters are those of the network and, beside each weight, what is learned
    beside it: `dense_0/kernel_scores` beside `dense_0/kernel`. So it is in the same
    layer, and in the same stack, for all that finds layers by their paths. The penalty
    is added to the loss in training, see `core.added_loss`. Noise is drawn anew for
    each pass that is given a key. The result does not decode: that the network itself
    does, with `viewed.view(split(params, viewed))`.

    Args:
      model: the network; its parameters are nested dicts.
      viewed: such as `l0(tx, weight=1e-4)`, of which the transform is not used.

    Raises:
      ConfigError: when it is initialized, no parameter is pruned.

    Examples:
      >>> import optax
      >>> from hpcjax import models
      >>> from hpcjax.optim.sparsify import movement
      >>> model = models.mlp((2, 2, 1), 3, widths=(4,))
      >>> model = view_model(model, movement(optax.sgd(0.1)))
      >>> params, _ = model.init(jax.random.key(0))
      >>> sorted(params["dense_0"])
      ['bias', 'kernel', 'kernel_scores']
    """

    def initialize(key: jax.Array) -> tuple[Any, Any]:
        params, state = model.init(key)
        trained = viewed.start(params)
        return _join(trained, viewed), _with_penalty(state, trained, viewed)

    def apply(
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: Key | None = None,
        taps: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        trained = split(params, viewed)
        noise = None
        if train and key is not None:
            noise = derive(whole_batch(key), _PENALTY)
        seen, own = viewed.view(trained, noise), _without_penalty(state)
        outputs, new = model.apply(seen, own, x, train=train, key=key, taps=taps)
        return outputs, _with_penalty(new, trained, viewed) if train else state

    return Model(initialize, apply, model.layers, frozen=model.frozen)


def split(params: Any, viewed: Viewed) -> Any:
    """Returns what a view takes, of the parameters of `view_model`."""
    if not viewed.beside:
        return params
    beside: dict[str, Any] = {}
    end = f"_{viewed.beside}"

    def take(tree: dict[str, Any], above: str) -> dict[str, Any]:
        own = {}
        for name, leaf in tree.items():
            path = f"{above}{name}"
            if isinstance(leaf, dict):
                own[name] = take(leaf, path + trees.SEPARATOR)
            elif name.endswith(end) and name.removesuffix(end) in tree:
                beside[path.removesuffix(end)] = leaf
            else:
                own[name] = leaf
        return own

    return {"weights": take(params, ""), viewed.beside: beside}


def _join(trained: Any, viewed: Viewed) -> Any:
    """Undoes `split`."""
    if not viewed.beside:
        return trained
    beside = trained[viewed.beside]

    def put(tree: dict[str, Any], above: str) -> dict[str, Any]:
        own = {}
        for name, leaf in tree.items():
            path = f"{above}{name}"
            nested = isinstance(leaf, dict)
            own[name] = put(leaf, path + trees.SEPARATOR) if nested else leaf
            if path in beside:
                own[f"{name}_{viewed.beside}"] = beside[path]
        return own

    return put(trained["weights"], "")


def _with_penalty(state: Any, trained: Any, viewed: Viewed) -> Any:
    if viewed.penalty is no_penalty:
        return state
    losses = {**state.get(LOSSES, {}), _PENALTY: viewed.penalty(trained)}
    return {**state, LOSSES: losses}


def _without_penalty(state: Any) -> Any:
    """Returns the state that the network itself has."""
    if _PENALTY not in state.get(LOSSES, {}):
        return state
    losses = {name: term for name, term in state[LOSSES].items() if name != _PENALTY}
    own = {name: leaf for name, leaf in state.items() if name != LOSSES}
    return {**own, LOSSES: losses} if losses else own
