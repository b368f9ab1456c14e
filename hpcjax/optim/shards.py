"""Optimizers that work on parts of parameters, which devices share out."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from hpcjax.core import checks, shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import (
    DATA_AXIS,
    Gradients,
    Method,
    Optimization,
    Parallel,
    PassResult,
    StepInput,
    take_extra_args,
)
from hpcjax.core.model import Model
from hpcjax.core.shards import Cuts, Specs
from hpcjax.core.varying import (
    Axes,
    after,
    assume_equal,
    axis_names,
    require_axes,
    vary,
)
from hpcjax.optim.admission import check_cuttable
from hpcjax.optim.methods import data_parallel, whole_backward

OfLeaf = Callable[[Any, Cuts, Cuts], Any]


def train_shards(
    optimizer: Optimization, parallel: Parallel, model: Model, devices: int
) -> Method:
    """Returns the training of one model that is spread over devices.

    The state has the paths and global shapes of `optim.data_parallel`, so that the
    checkpoints of either go on with the other.

    Args:
      optimizer: whose transform works on elements and norms.
      parallel: how the model is spread.
      model: the model.
      devices: how many.

    Raises:
      ConfigError: a transform that needs whole parameters, see `check_cuttable`; two
        backward passes.
    """
    checks.require_has("an Optimization", ("tx", "facts"), optimizer=optimizer)
    if parallel.gradients and optimizer.gradients:
        raise ConfigError(
            "optimizer and parallel both have a backward pass of their own: give an "
            "optimizer without one, such as K-FAC has"
        )
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    sizes = parallel.mesh_shape(devices)
    check_cuttable(optimizer.tx, shapes, parallel.stepped, sizes)
    held, stepped = parallel.held, parallel.stepped
    tx = update_shards(optimizer.tx, stepped, held=held, axes=parallel.axes)
    gradients = parallel.gradients or optimizer.gradients or whole_backward
    facts = {**optimizer.facts, **parallel.facts}
    spread = Optimization(
        tx, _after_loops(gradients, held), parallel.axes, parallel.mesh_shape, facts
    )

    def specs(params: Any, state: Any) -> tuple[Any, Any]:
        of_state = shards.state_specs(tx, params, state, stepped)
        return shards.spec_tree(held, params), of_state

    method = data_parallel(spread, mean=None)
    return method._replace(specs=specs, split=parallel.split)


def _after_loops(gradients: Gradients, held: Specs) -> Gradients:
    """Returns a backward pass of which nothing is ready before its own collectives.

    Those of cut parameters may be in a loop. All devices have to take what is averaged
    next after it: see `core.after`.
    """

    def ordered(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        found = gradients(one_pass, params, state)
        grads = trees.flatten(found.grads)
        cut = {path: grads.pop(path) for path in held}
        waiting = grads, found.means, found.model_state
        grads, means, model_state = after(waiting, cut)
        grads = trees.unflatten(found.grads, grads | cut)
        return found._replace(grads=grads, means=means, model_state=model_state)

    return ordered if held else gradients


def update_shards(
    tx: optax.GradientTransformation,
    stepped: Specs,
    *,
    held: Specs | None = None,
    axes: Axes | None = DATA_AXIS,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over mesh axes, and has each device update its part.

    Gradients are reduced and scattered, `tx` works on this device's parts, and the
    updates are gathered as far as parameters are not held cut. Expects the gradients of
    what this device holds: of whole parameters its own, of parts already summed over
    the axes they are cut along, which is the gradient of `core.shards.gather`.

    `init` takes parameters of global shapes, `update` those of this device. `tx` gets
    `cut={path: axes}`, for norms, with the whole's shapes as `cut.global_shape`;
    `value_fn` it does not get.

    Args:
      tx: works on elements and norms; see `check_cuttable`.
      stepped: how gradients, updates and the state of `tx` are cut, by path.
      held: how parameters are cut, of which `stepped` may cut the parts further; None
        where each device has them whole.
      axes: the mesh axis, or axes, that gradients are averaged over; None, and no axis,
        averages nothing.

    Returns:
      A transform for use inside `jax.shard_map`. The specifications of its state are
      those of `core.shards.state_specs`.

    Raises:
      ConfigError: `stepped` cuts along an axis that is none of `axes`; an update
        outside of `shard_map` over the axes.

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054, 2020, §5.
    """
    inner = take_extra_args(tx=tx)
    names = () if axes is None else axis_names(axes)
    held = held or {}
    for path, spec in stepped.items():
        kept = shards.list_cuts(held, path, len(spec))
        new = set(shards.list_cuts(stepped, path, len(spec))) - set(kept)
        rule = f"{path} must be cut along the axes that gradients are averaged over"
        checks.require(set(shards.axes_of(tuple(new))) <= set(names), rule, axes=axes)

    def each(function: OfLeaf, tree: Any) -> Any:
        """Maps `function(leaf, cuts as held, further cuts)`."""
        found = {}
        for path, leaf in trees.flatten(tree).items():
            kept = shards.list_cuts(held, path, leaf.ndim)
            cuts = shards.list_cuts(stepped, path, leaf.ndim)
            new = tuple(cut for cut in cuts if cut not in kept)
            found[path] = function(leaf, kept, new)
        return trees.unflatten(tree, found)

    def average(gradient: Any, kept: Cuts, new: Cuts) -> Any:
        summed = shards.sum_parts(gradient, new)
        done = shards.axes_of(kept + new)
        left = tuple(axis for axis in names if axis not in done)
        summed = jax.lax.psum(vary(summed, left), left) if left else summed
        return summed / jax.lax.axis_size(names) if names else summed

    def join(update: Any, _: Cuts, new: Cuts) -> Any:
        return assume_equal(shards.gather(update, new), shards.axes_of(new))

    def average_all(updates, params=None):
        del params
        require_axes(names, "update_shards")
        return each(average, updates)

    def update(updates, state, params=None, value_fn=None, **extra_args):
        del value_fn  # a function of what this device holds, and not of its parts
        own = params and each(lambda p, _, new: shards.take_part(p, new), params)
        flat = trees.flatten(updates)
        cuts = {
            path: shards.list_cuts(stepped, path, x.ndim) for path, x in flat.items()
        }
        shapes = {
            path: shards.whole_shape(x.shape, cuts[path]) for path, x in flat.items()
        }
        cut = shards.CutAxes(cuts, shapes)
        updates, state = inner.update(updates, state, own, cut=cut, **extra_args)
        return each(join, updates), state

    return optax.chain(
        optax.stateless(average_all),
        optax.GradientTransformationExtraArgs(inner.init, update),
    )
