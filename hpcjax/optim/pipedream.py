"""PipeDream: pipelines that never drain, by weights that are some updates old.

Stage s of p (from 0) computes forward and backward with the weights of p − 1 − s
updates ago, which it has kept for that, and updates the newest ones:

    w(t+1) = w(t) − lr · ∇L(w_0(t − p + 1), ..., w_{p−1}(t)),    w_s(t < 0) = w_s(0)

Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP
2019, §3.3; "double" is PipeDream-2BW (ICML 2021, §3.1), where all stages use the
weights of the update before. All devices take the same step here, so what it shows is
what asynchrony does to the numbers, and the versions that are held; not its speed.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hpcjax.core import checks, trees
from hpcjax.core.method import Gradients, PassResult, StepInput
from hpcjax.core.model import Model
from hpcjax.optim.layer_blocks import layer_counts, layers_of_model, partition
from hpcjax.optim.methods import whole_backward
from hpcjax.optim.sparsify._plan import find_stacked

# By path of a parameter, how many updates old its weights are: a number for each layer
# of a stack (its first dimension), one number for any other parameter.
Delays = Mapping[str, tuple[int, ...]]


class WeightVersions(NamedTuple):
    """The older weights that stages still need.

    Attributes:
      older: in place d − 1 the weights of d updates ago, a tree as the parameters': of
        each the first layers, those that are as old or older; a zero for none.
    """

    older: tuple[Any, ...]


def stage_delays(
    model: Model,
    x: Any,
    stages: int,
    versions: Literal["stash", "double"] = "stash",
    costs: Sequence[float] | None = None,
    stacked: tuple[str, ...] = (),
) -> Delays:
    """Returns the delay of each parameter where a model is cut into stages.

    Layers are cut into consecutive ones of equal cost; those of a stack one by one, in
    the order of the stack. A parameter that two stages use is of the first.

    Args:
      model: the network.
      x: a batch of inputs, or its shapes.
      stages: p, of a pipeline.
      versions: "stash" has stage s, from 0, wait p − 1 − s updates; "double" all one.
      costs: of each of `layers_of_model(model, x)`, of a stack that of one of its
        layers, as `perf.backward_flops` counts; None: all layers cost the same.
      stacked: regexes of the parameters that are stacks of layers.

    Raises:
      ConfigError: fewer layers than stages, costs of other layers, or a regex that
        matches nothing.
    """
    layers = layers_of_model(model, x)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    deep = find_stacked(params, stacked)
    sizes = layer_counts(layers, params, deep)
    costs = [1.0] * len(layers) if costs is None else costs
    rule = f"costs must be one for each of the {len(layers)} layers of the model"
    checks.require(len(costs) == len(layers), rule, costs=costs)
    each = zip(costs, sizes, strict=True)
    shares = [cost for cost, size in each for _ in range(size)]
    rule = f"stages must be at most the {len(shares)} layers of the model"
    checks.require(1 <= stages <= len(shares), rule, stages=stages)
    edges = [0, *partition(shares, stages), len(shares)]
    waits = {
        "stash": [*range(stages - 1, -1, -1)],
        "double": [min(1, stages - 1)] * stages,
    }
    checks.require_choice("versions", versions, tuple(waits))
    old = [
        wait
        for wait, (a, b) in zip(waits[versions], itertools.pairwise(edges), strict=True)
        for _ in range(a, b)
    ]
    ends = itertools.pairwise([0, *itertools.accumulate(sizes)])
    return {
        path: tuple(old[a : b if path in deep else a + 1])
        for layer, (a, b) in zip(layers, ends, strict=True)
        for path in layer.paths
    }


def keep_versions(delays: Delays) -> optax.GradientTransformationExtraArgs:
    """Keeps the weights that gradients of the next steps are taken at.

    Updates pass unchanged; a stage of delay d costs d times its weights. It stands in
    the chain of the optimizer whose gradients `gradients_of_versions` takes.

    Args:
      delays: from `stage_delays`.

    Raises:
      ConfigError: no delays; when traced, delays of other parameters than there are, a
        stack of another depth, or delays that grow along it.
      ValueError: an update without `params`.
    """
    checks.require_has("what stage_delays returns", ("values",), delays=delays)

    def init(params: Any) -> WeightVersions:
        newest = _check(delays, params)
        oldest = max((own[0] for own in delays.values()), default=0)
        older = [_keep(delays, d, newest) for d in range(1, oldest + 1)]
        # Copies: one array twice in a state could not be donated.
        own = tuple(trees.unflatten(params, weights) for weights in older)
        return WeightVersions(
            jax.tree.map(functools.partial(jnp.array, copy=True), own)
        )

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("keep_versions needs params in update: got None")
        before = [_check(delays, params), *map(trees.flatten, state.older)]
        # All become one update older, and what nobody needs any more is let go.
        older = [_keep(delays, d, own) for d, own in enumerate(before[:-1], 1)]
        own = tuple(trees.unflatten(params, weights) for weights in older)
        return updates, WeightVersions(own)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(delays: Delays, params: Any) -> dict[str, jax.Array]:
    """Returns parameters by path, with layers as first dimension."""
    leaves = {p: _array(leaf) for p, leaf in trees.flatten(params).items()}
    named = set(trees.paths(params))
    unknown = sorted(set(leaves) - set(delays)) or sorted(set(delays) - named)
    checks.require(
        not (named and unknown), "delays must be the parameters'", unknown=unknown
    )
    deep = {p: leaf if len(delays[p]) > 1 else leaf[None] for p, leaf in leaves.items()}
    other = [p for p, leaf in deep.items() if len(leaf) != len(delays[p])]
    checks.require(not other, "a stack must have a delay for each layer", other=other)
    rising = [p for p in deep if list(delays[p]) != sorted(delays[p], reverse=True)]
    checks.require(not rising, "delays must not grow along a stack", rising=rising)
    return deep


def _array(leaf: Any) -> jax.Array:
    """Returns a leaf as an array, zeros of a shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.asarray(leaf)


def _keep(
    delays: Delays, age: int, weights: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the layers that are as old or older: the first ones, as delays fall.

    Where there are none a zero stands, for XLA's compiler of jax 0.11.2 crashes at
    empty arrays in a program for several devices.
    """
    counts = {path: sum(own >= age for own in delays[path]) for path in weights}
    return {
        path: leaf[:count] if count else jnp.zeros((1,) * leaf.ndim, leaf.dtype)
        for (path, leaf), count in zip(weights.items(), counts.values(), strict=True)
    }


def mix_versions(params: Any, state: Any, delays: Delays) -> Any:
    """Returns the weights of a step: of each layer the version that its stage uses.

    Args:
      params: the newest weights.
      state: of an optimizer with one `keep_versions` in its chain.
      delays: as given to it.

    Raises:
      ValueError: none in it, or several.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, WeightVersions))
    found = [node for node in nodes if isinstance(node, WeightVersions)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} states of keep_versions in the optimizer's")
    versions = [_check(delays, params), *map(trees.flatten, found[0].older)]

    def mix(path: str, like: jax.Array) -> jax.Array:
        own = delays[path]
        rows, at = [], 0
        for old, run in itertools.groupby(own):
            end = at + len(list(run))
            rows.append(versions[old][path][at:end])
            at = end
        return jnp.concatenate(rows).reshape(like.shape)

    leaves = trees.flatten(params)
    return trees.unflatten(params, {p: mix(p, leaf) for p, leaf in leaves.items()})


def gradients_of_versions(delays: Delays) -> Gradients:
    """Returns the backward pass at the weights that each stage has kept.

    Args:
      delays: of the `keep_versions` in the optimizer's chain.

    Raises:
      ConfigError: no delays.
    """
    checks.require_has("what stage_delays returns", ("values",), delays=delays)

    def gradients(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        return whole_backward(one_pass, mix_versions(params, state, delays), None)

    return gradients
