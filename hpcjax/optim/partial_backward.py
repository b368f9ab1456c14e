"""Partial backward passes: workers that backpropagate through the last blocks only.

A network is cut into k blocks. A worker of role i runs the whole forward pass, and the
backward pass from the loss down through the last i blocks. Role i reaches block j,
counted from the input, if i > k − j, so that j of k roles have a gradient of block j.
Gradients of a block are averaged over these *contributors*. A mean over all workers
would scale the gradient of block j by j/k.

References:
  Kumar, Subramanian, Venkataraman, Akella: Doing More by Doing Less, DistributedML
  2021, for the idea. Which worker stops where and how gradients are averaged is not
  specified there; both are choices made here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from hpcjax.collectives import MeshGroup, spread, subset_sum
from hpcjax.collectives.group import Group, Vector
from hpcjax.core import checks, trees
from hpcjax.core.method import Gradients, PassResult, StepInput
from hpcjax.core.varying import Axes, assume_equal, vary
from hpcjax.optim.layer_blocks import Blocks
from hpcjax.optim.methods import whole_backward

Mode = Literal["zeros", "contributors"]
Rotation = Literal["rotate", "fixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialBackward:
    """Which worker backpropagates through which blocks, and how this is averaged.

    Attributes:
      blocks: the k blocks.
      rotation: "rotate" moves roles on by one worker each step, so that every block is
        trained on every part of the data equally often; "fixed" leaves them.
      dense_steps: initial steps in which every worker has role k.
      mode: "zeros" sums over all workers, those without a gradient adding zeros;
        "contributors" sums among the workers that have one and sends the result
        to the others.
      workers: workers of each device, which it runs one after the other; more than one
        needs mode "zeros".
    """

    blocks: Blocks
    rotation: Rotation = "rotate"
    dense_steps: int = 0
    mode: Mode = "contributors"
    workers: int = 1

    def __post_init__(self) -> None:
        paths = self.blocks.paths
        checks.require(
            all(paths) and self.k > 0, "every block must hold a parameter", blocks=paths
        )
        checks.require_choice("rotation", self.rotation, ("rotate", "fixed"))
        checks.require_choice("mode", self.mode, ("zeros", "contributors"))
        checks.require_count(0, dense_steps=self.dense_steps)
        checks.require_count(1, workers=self.workers)
        good = self.mode == "zeros" or self.workers == 1
        rule = "several workers of a device can be averaged with mode='zeros' only"
        checks.require(good, rule, workers=self.workers, mode=self.mode)

    @property
    def k(self) -> int:
        """Number of blocks, and so of roles."""
        return len(self.blocks.paths)

    def role(self, worker: Any, step: Any) -> Any:
        """Returns the role of a worker in a step, 1 to k; both may be traced."""
        role = _role(worker, self.k, step, self.rotation)
        if not self.dense_steps:
            return role
        if isinstance(step, int):
            return self.k if step < self.dense_steps else role
        return jnp.where(step < self.dense_steps, self.k, role)

    def phases(self, workers: int) -> list[tuple[int, ...]]:
        """Returns the roles of all workers, for each of the possible kinds of steps.

        Roles must be static, as they decide who communicates with whom. So a program
        has a branch for each phase: k of them where roles rotate, one where they are
        fixed, and one more, the last, for dense steps.

        Raises:
          ConfigError: k does not divide the workers.
        """
        turns = self.k if self.rotation == "rotate" else 1
        phases = [roles(workers, self.k, turn, self.rotation) for turn in range(turns)]
        return phases + [(self.k,) * workers] * bool(self.dense_steps)

    def phase(self, step: Any) -> Any:
        """Returns the index of a step's kind in `phases`; may be traced."""
        turn = step % self.k if self.rotation == "rotate" else 0 * step
        if not self.dense_steps:
            return turn
        last = self.k if self.rotation == "rotate" else 1
        return jnp.where(step < self.dense_steps, last, turn)


def roles(
    workers: int, k: int, step: int, rotation: Rotation = "rotate"
) -> tuple[int, ...]:
    """Returns the role of each worker in a step, 1 to k; k is the whole backward pass.

    Raises:
      ConfigError: k does not divide the workers.

    Examples:
      >>> roles(4, 4, 0), roles(6, 3, 1)
      ((1, 2, 3, 4), (2, 3, 1, 2, 3, 1))
    """
    checks.require_count(1, workers=workers, k=k)
    checks.require_choice("rotation", rotation, ("rotate", "fixed"))
    rule = "workers must be a multiple of k"
    checks.require(workers % k == 0, rule, workers=workers, k=k)
    return tuple(_role(worker, k, step, rotation) for worker in range(workers))


def _role(worker: Any, k: int, step: Any, rotation: Rotation) -> Any:
    """Returns the role of a worker in a step that is not dense."""
    return (worker + (step if rotation == "rotate" else 0)) % k + 1


def stop_below(params: Any, blocks: Blocks, role: int) -> Any:
    """Returns parameters through which no gradient flows into blocks below a role.

    The input of the lowest trained block then depends on no differentiated value, so
    that JAX stores no activations below it and computes no gradients there.

    Raises:
      ConfigError: blocks that are not those of the parameters, or no such role.
    """
    blocks.check(params)
    k = len(blocks.paths)
    checks.require(1 <= role <= k, f"role must be 1 to {k}", role=role)
    number = blocks.numbers()
    leaves = {
        path: leaf if number[path] > k - role else jax.lax.stop_gradient(leaf)
        for path, leaf in trees.flatten(params).items()
    }
    return trees.unflatten(params, leaves)


def partial_value_and_grad(
    function: Callable[..., Any], blocks: Blocks, role: int, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad(function)` for the parameters of the last blocks.

    The forward pass is unchanged: batch norm and dropout of the other blocks are in
    training mode if `function` runs them so. Gradients of the other blocks are zeros.

    Args:
      function: differentiated with respect to its first argument, the parameters.
      blocks: the blocks of these parameters.
      role: number of blocks, from the output, that get gradients; static.
      has_aux: as in `jax.value_and_grad`.

    Examples:
      >>> blocks = Blocks((("a",), ("b",)))
      >>> product = lambda params, x: params["b"] * params["a"] * x
      >>> function = partial_value_and_grad(product, blocks, 1)
      >>> jax.tree.map(float, function({"a": 2.0, "b": 3.0}, 5.0))
      (30.0, {'a': 0.0, 'b': 10.0})
    """

    def stop_and_call(params: Any, *arguments: Any) -> Any:
        return function(stop_below(params, blocks, role), *arguments)

    return jax.value_and_grad(stop_and_call, has_aux=has_aux)


def contributor_mean(
    backward: PartialBackward, axis_name: Axes | None = None
) -> optax.GradientTransformationExtraArgs:
    """Averages each block's gradients over the workers that have them.

    Expects from each device the sum of its workers' gradients, with zeros for blocks
    that they do not reach; returns identical updates on every member of `axis_name`.
    With P workers, m = P/k of each role, the sum of block j is divided by m·j. For a
    block of s bytes the workers together send

    - "zeros": what an all-reduce among all P sends; no communication is saved.
    - "contributors": 2 (c - 1) s for a ring all-reduce among the c = m·j contributors,
      then (P - c) s along binomial trees to the other workers. Block k, of which all
      workers have gradients, is an all-reduce.

    `contributor_bytes` returns how much each worker sends.

    Args:
      backward: the blocks and roles.
      axis_name: the mesh axis, or axes, of the workers; with None the gradients are
        those of this device's workers alone.

    Returns:
      A transform without state, for use inside `jax.shard_map`. Its `update` also needs
      the keyword `step`, from which the roles of these gradients were derived.

    Raises:
      ConfigError: when traced, if k does not divide the number of workers.
      TypeError: when traced, if `step` is missing.
    """
    checks.require_has("a PartialBackward", ("blocks", "workers"), backward=backward)

    def init(params):
        backward.blocks.check(params)
        return optax.EmptyState()

    def update(updates, state, params=None, *, step=None, **extra_args):
        del params, extra_args
        if step is None:
            raise TypeError("contributor_mean needs the step that roles came of: step=")
        group = MeshGroup(axis_name)
        phases = backward.phases(group.size * backward.workers)
        if backward.mode == "zeros" and not backward.dense_steps:
            # The sum is over all workers in every phase, and rotating roles does not
            # change how many reach a block: one branch serves all phases.
            phases = phases[:1]
        axes = () if axis_name is None else axis_name

        def average(phase: tuple[int, ...], grads: Any) -> Any:
            mean = average_contributions(
                group, grads, blocks=backward.blocks, roles=phase, mode=backward.mode
            )
            return vary(mean, axes)

        branches = [functools.partial(average, phase) for phase in phases]
        number = backward.phase(jnp.asarray(step)) if len(phases) > 1 else 0
        mean = jax.lax.switch(number, branches, updates)
        # Every device has the same bits, received from the same contributors; the type
        # system of `shard_map` cannot know this.
        return assume_equal(mean, axes), state

    return optax.GradientTransformationExtraArgs(init, update)


def gradients_of_roles(backward: PartialBackward) -> Gradients:
    """Returns the backward pass in which every worker goes as deep as its role says.

    The program has a branch for each role, of which a device runs one for each of its
    workers; a step takes as long as that of the largest role on any device. Gradients
    are summed over the device's workers, as `contributor_mean` expects them, with zeros
    for blocks that none reaches. Metrics and the model's state are averaged over the
    device's workers.

    Raises:
      ConfigError: when traced, if the number of a device's workers does not divide the
        number of its examples.
    """
    checks.require_has("a PartialBackward", ("blocks", "workers"), backward=backward)
    count = backward.workers

    def gradients(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        del state
        batch, axes = one_pass.batch, one_pass.axes
        rows = len(jax.tree.leaves(dict(batch))[0])
        rule = f"workers must divide the {rows} examples of a device"
        checks.require(rows % count == 0, rule, workers=count)

        def of_role(role: int, own: StepInput, params: Any) -> PassResult:
            def apply(params: Any, *arguments: Any, **options: Any) -> Any:
                stopped = stop_below(params, backward.blocks, role)
                return own.model.apply(stopped, *arguments, **options)

            model = own.model._replace(apply=apply)
            result = whole_backward(own._replace(model=model), params, None)
            # Branches of a `switch` return arrays only, so the function `value_fn` and
            # the Python number `step` cannot pass.
            extras = {"value": result.extras["value"]}
            return vary(result._replace(extras=extras), axes)

        def of_worker(own: tuple[Any, Any, Any]) -> PassResult:
            number, part, rows = own
            worker = jax.lax.axis_index(axes) * count + number
            key = dataclasses.replace(one_pass.key, rows=rows)
            share = one_pass.share / count
            each = one_pass._replace(batch=part, key=key, share=share)
            branches = [
                functools.partial(of_role, role, each)
                for role in range(1, backward.k + 1)
            ]
            chosen = backward.role(worker, one_pass.step) - 1
            return jax.lax.switch(chosen, branches, params)

        step = {"step": one_pass.step}
        if count == 1:
            result = of_worker((0, batch, one_pass.key.rows))
            return result._replace(extras=result.extras | step)
        # Several workers on a device: worker n has the n-th equal part of the examples.
        parts = jax.tree.map(
            lambda b: b.reshape(count, -1, *b.shape[1:]),
            (dict(batch), one_pass.key.rows),
        )
        result = jax.lax.map(of_worker, (jnp.arange(count), *parts))
        rest = jax.tree.map(lambda leaf: leaf.mean(0), result._replace(grads=None))
        return rest._replace(
            grads=jax.tree.map(lambda leaf: leaf.sum(0), result.grads),
            extras=rest.extras | step,
        )

    return gradients


def average_contributions(
    group: Group, grads: Any, *, blocks: Blocks, roles: Sequence[int], mode: Mode
) -> Any:
    """Returns each block's mean gradient over the workers whose role reaches it.

    Blocks are averaged one after another from the output to the input, the order in
    which a backward pass finishes them. Sums are taken in float32.

    Args:
      group: the workers in order, or devices with the same number of workers each.
      grads: gradients of this member. Below its role they are ignored in mode
        "contributors", and must be zeros in mode "zeros".
      blocks: the parameters of each block.
      roles: the roles of all workers, static.
      mode: see `contributor_mean`.

    Raises:
      ConfigError: roles that are not those of k blocks, or not one for each worker.
    """
    k, leaves = len(blocks.paths), trees.flatten(grads)
    shared = mode == "zeros" and len(roles) % group.size == 0
    rule = f"roles must be of {group.size} workers, or of a multiple with mode='zeros'"
    good = shared or len(roles) == group.size
    checks.require(good, rule, roles=tuple(roles), mode=mode)
    wide = {path: leaf.astype("float32") for path, leaf in leaves.items()}
    for number in range(k, 0, -1):
        # `optax.masked` may have taken parameters out of the tree.
        own = {path: wide[path] for path in blocks.paths[number - 1] if path in wide}
        if not own:
            continue
        ranked = contributors_of(roles, number, k)
        if mode == "zeros" or len(ranked) == len(roles):
            total = group.sum(own)
        else:
            total = _sum_contributions(group, own, ranked, roles)
        wide |= {path: leaf / len(ranked) for path, leaf in total.items()}
    mean = {path: leaf.astype(leaves[path].dtype) for path, leaf in wide.items()}
    return trees.unflatten(grads, mean)


def contributors_of(roles: Sequence[int], number: int, k: int) -> list[int]:
    """Returns the workers that reach block `number`, in order of their roles.

    Those with the least role among them send the mean to the other workers, so each
    role has this task for one block.

    Raises:
      ConfigError: roles that are not 1 to k, or none of them is k.
    """
    good = k in roles and set(roles) <= set(range(1, k + 1))
    checks.require(good, f"roles must be 1 to {k}, one of them {k}", roles=roles)
    return [worker for worker in _sort_by_role(roles) if roles[worker] > k - number]


def trees_of(roles: Sequence[int], contributors: Sequence[int]) -> list[list[int]]:
    """Returns the members of each tree that spreads a block's mean, the root first.

    The roots are the contributors with the least role; workers without a gradient are
    dealt out to them in turn, in order of their roles. In a binomial tree the members
    that come first send most, and workers with low roles have the least else to send.
    """
    least = roles[contributors[0]]
    givers = [worker for worker in contributors if roles[worker] == least]
    rest = [w for w in _sort_by_role(roles) if w not in contributors]
    return [[g, *rest[i :: len(givers)]] for i, g in enumerate(givers)]


def _sort_by_role(roles: Sequence[int]) -> list[int]:
    """Returns the workers in order of role, equal roles in order of number."""
    return sorted(range(len(roles)), key=lambda worker: (roles[worker], worker))


def _sum_contributions(
    group: Group, own: dict[str, Vector], contributors: list[int], roles: Sequence[int]
) -> dict[str, Vector]:
    """Sums one block among its contributors and sends the sum to everyone."""
    flat = group.xp.concatenate([leaf.reshape(-1) for leaf in own.values()])
    total = subset_sum(group, flat, contributors)
    total = spread(group, total, trees_of(roles, contributors))
    parts, start = {}, 0
    for path, leaf in own.items():
        parts[path] = total[start : start + leaf.size].reshape(leaf.shape)
        start += leaf.size
    return parts


def scale_blocks(
    blocks: Blocks, scales: Sequence[int | float]
) -> optax.GradientTransformation:
    """Multiplies the updates of each block by a number of its own.

    At the end of a chain this is a learning rate for each block. It can make up for the
    fact that the gradient of block j is that of j/k of the batch.

    Args:
      blocks: the parameters of each block.
      scales: one number for each block, from the input to the output.

    Raises:
      ConfigError: there is not one finite scale >= 0 for each block.
    """
    checks.require_has("what cut_layers returns", ("paths", "numbers"), blocks=blocks)
    rule = f"scales must be {len(blocks.paths)}, one for each block"
    checks.require(len(scales) == len(blocks.paths), rule, scales=tuple(scales))
    checks.require_finite(0.0, **{f"scale_{j}": s for j, s in enumerate(scales, 1)})
    number = blocks.numbers()

    def update(updates, params=None):
        del params
        leaves = trees.flatten(updates).items()
        scaled = {path: scales[number[path] - 1] * leaf for path, leaf in leaves}
        return trees.unflatten(updates, scaled)

    return optax.stateless(update)
