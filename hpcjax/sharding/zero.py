"""ZeRO: data-parallel training in which devices share out the state."""

import functools
import logging
from typing import Any

import jax
from jax.sharding import PartitionSpec

from hpcjax.core import checks, shards, trees
from hpcjax.core.method import DATA_AXIS, Parallel
from hpcjax.core.model import Model
from hpcjax.core.patterns import check_stacked, matches_any
from hpcjax.core.shards import Part, Shard, Specs
from hpcjax.core.varying import after

log = logging.getLogger(__name__)


def spread_state(
    model: Model, devices: int, stage: int, stacked: tuple[str, ...] = ()
) -> Parallel:
    """Returns how ZeRO spreads the state of a model over a number of devices.

    With Ψ bytes of parameters, N devices and Adam, a device holds between steps

    | stage | parameters | moments | sends in a step |
    |---|---|---|---|
    | 1 | Ψ | 2 Ψ/N | 2 Ψ: gradients are reduced and scattered, updates gathered |
    | 2 | Ψ/N | 2 Ψ/N | 2 Ψ: parameters gathered, gradients reduced and scattered |
    | 3 | Ψ/N | 2 Ψ/N | 3 Ψ: as 2, and parameters gathered again |

    times (N − 1)/N of what is sent. Stage 2 keeps a whole copy of the parameters
    during a step, stage 3 that of one layer; of a model without stacks of layers it
    does what stage 2 does. Biases need not be gathered again. What the paper calls
    stage 2 holds whole parameters between steps; to hold parts costs nothing, as the
    updates need not be gathered.

    Args:
      model: the model.
      devices: N.
      stage: 1, 2 or 3.
      stacked: regexes of parameters whose first axis is a stack of layers.

    Raises:
      ConfigError: an entry of `stacked` matches no parameter.

    References:
      Rajbhandari et al., ZeRO, arXiv 1910.02054, 2020, §5 and §7.
    """
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    check_stacked(stacked, trees.flatten(shapes))
    cut = cut_parameters(shapes, devices, stacked)
    whole = sorted(trees.flatten(shapes).keys() - cut.keys())
    if whole:
        log.info("%d devices divide no dimension, all have: %s", devices, whole)
    if stage == 3 and not stacked:
        log.info("there is no stack of layers: stage 3 gathers once, as stage 2")
    held = {} if stage == 1 else cut

    def mesh_shape(count: int) -> dict[str, int]:
        rule = f"the model was spread over {devices} devices"
        checks.require(count == devices, rule, devices=count)
        return {DATA_AXIS: count}

    return Parallel(
        mesh_shape,
        held,
        cut,
        functools.partial(split_model, held=held, stacked=stacked, again=stage == 3),
        facts={"replicated": len(whole)},
    )


def cut_parameters(shapes: Any, devices: int, stacked: tuple[str, ...] = ()) -> Specs:
    """Cuts each parameter along the largest dimension that the devices divide.

    A stack is not cut between its layers, for each device uses all of them. Parameters
    of which no dimension can be cut are left out.

    Examples:
      >>> shapes = {"kernel": jax.ShapeDtypeStruct((4, 6), "float32")}
      >>> dict(cut_parameters(shapes, 2)), dict(cut_parameters(shapes, 4))
      ({'kernel': P(None, 'data')}, {'kernel': P('data',)})
    """
    found = {}
    for path, leaf in trees.flatten(shapes).items():
        first = int(matches_any(stacked, path))
        dims = range(first, leaf.ndim if leaf.size else 0)
        fitting = [dim for dim in dims if leaf.shape[dim] % devices == 0]
        if fitting:
            dim = max(fitting, key=lambda d: leaf.shape[d])
            found[path] = PartitionSpec(*[None] * dim, DATA_AXIS)
    return found


def split_model(
    model: Model,
    held: Specs,
    stacked: tuple[str, ...] = (),
    *,
    again: bool = False,
    parted: tuple[str, ...] = (),
    once: bool = True,
) -> Model:
    """Returns a model that is applied to parts of its parameters, inside `shard_map`.

    Args:
      model: any model.
      held: how its parameters are cut.
      stacked: regexes of stacks, whose layers gather their own parameters. All others
        are gathered first.
      again: whether layers of stacks gather again in the backward pass.
      parted: mesh axes along which nothing is gathered: layers compute with parts.
      once: see `core.shards.Part`.
    """

    def apply(params: Any, state: Any, x: Any, **options: Any) -> tuple[Any, Any]:
        leaves = trees.flatten(params)
        every = {p: shards.list_cuts(held, p, leaf.ndim) for p, leaf in leaves.items()}
        cuts, kept = (
            {
                path: tuple(cut for cut in own if (cut[1] in parted) is parts)
                for path, own in every.items()
            }
            for parts in (False, True)
        )
        late = [path for path in leaves if cuts[path] and matches_any(stacked, path)]
        first = [path for path in leaves if cuts[path] and path not in late]
        whole, others = shards.gather_first(
            [leaves[path] for path in first],
            {path: leaf for path, leaf in leaves.items() if path not in first},
            tuple(cuts[path] for path in first),
        )
        given = others | dict(zip(first, whole, strict=True))
        for path, leaf in given.items():
            if path in late:
                how = {"cuts": cuts[path], "again": again, "kept": kept[path]}
                given[path] = Shard(value=leaf, **how)
            elif kept[path]:
                given[path] = Part(value=leaf, cuts=kept[path], once=once)
        # All devices gather these before what the stacks gather.
        x = after(x, whole) if late else x
        return model.apply(trees.unflatten(params, given), state, x, **options)

    return model._replace(apply=apply) if held else model
