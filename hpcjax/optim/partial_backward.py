"""Workers that backpropagate through the upper part of a network only.

A network is cut into k blocks. A worker of role i runs the whole forward pass, and the
backward pass from the loss down through the last i blocks; so block j, counted from the
input, gets gradients from j of k roles, and every block from one at least. The average
is over those *contributors*, never over all workers, which would shrink the gradient of
block j to j/k of what it is.

References:
  Kumar, Subramanian, Venkataraman, Akella: Doing More by Doing Less, DistributedML
  2021: the idea. Which worker stops where, and the average, are reconstructed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hpcjax.collectives import MeshGroup, spread, subset_sum
from hpcjax.collectives.config import dense_words
from hpcjax.collectives.group import Group, Vector
from hpcjax.core import checks, trees
from hpcjax.core.varying import Axes, assume_equal, vary
from hpcjax.optim.layer_blocks import Blocks

Mode = Literal["zeros", "contributors"]
Rotation = Literal["rotate", "fixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialBackward:
    """Who backpropagates through what, and how that is averaged.

    Attributes:
      blocks: the k blocks.
      rotation: "rotate": roles move on by one worker each step, so that every block
        sees every part of the data equally often; "fixed": they stay.
      dense_steps: first steps in which every worker goes down to the first block.
      mode: "zeros" sums zeros for what a worker has not; "contributors" sums among the
        workers that have a gradient and sends the result to the others.
      workers: of each device, one after the other; with "zeros" only.
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
        """How many roles there are."""
        return len(self.blocks.paths)

    def role(self, worker: Any, step: Any) -> Any:
        """Returns the role, 1 to k, of a worker in a step; both may be traced."""
        role = _role(worker, self.k, step, self.rotation)
        if not self.dense_steps:
            return role
        if isinstance(step, int):
            return self.k if step < self.dense_steps else role
        return jnp.where(step < self.dense_steps, self.k, role)

    def phases(self, workers: int) -> list[tuple[int, ...]]:
        """Returns the roles of all workers in each kind of step, see `phase`.

        Raises:
          ConfigError: k does not divide the workers.
        """
        turns = self.k if self.rotation == "rotate" else 1
        phases = [roles(workers, self.k, turn, self.rotation) for turn in range(turns)]
        return phases + [(self.k,) * workers] * bool(self.dense_steps)

    def phase(self, step: Any) -> Any:
        """Returns which of the `phases` a step is."""
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
      >>> roles(4, 4, 0), roles(4, 2, 1)
      ((1, 2, 3, 4), (2, 1, 2, 1))
    """
    checks.require_count(1, workers=workers, k=k)
    checks.require_choice("rotation", rotation, ("rotate", "fixed"))
    rule = "workers must be a multiple of k"
    checks.require(workers % k == 0, rule, workers=workers, k=k)
    return tuple(_role(worker, k, step, rotation) for worker in range(workers))


def _role(worker: Any, k: int, step: Any, rotation: Rotation) -> Any:
    return (worker + (step if rotation == "rotate" else 0)) % k + 1


def stop_below(params: Any, blocks: Blocks, role: int) -> Any:
    """Returns parameters that a function of them is not differentiated in below a role.

    What enters the first block that is trained then depends on nothing that is
    differentiated: JAX keeps no activations below it and forms no gradients there.

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
    """Returns `jax.value_and_grad(function)` for the last `role` blocks alone.

    The forward pass is whole and as ever: batch norm and dropout below are in training
    mode if the function's are. Gradients below the cut are zeros.

    Args:
      function: differentiated in its first argument, the parameters.
      blocks: of these.
      role: how many blocks are gone back through, static.
      has_aux: as in `jax.value_and_grad`.

    Examples:
      >>> blocks = Blocks((("a",), ("b",)))
      >>> product = lambda params, x: params["b"] * params["a"] * x
      >>> partial_value_and_grad(product, blocks, 1)({"a": 2.0, "b": 3.0}, 5.0)[1]
      {'a': Array(0., dtype=float32, weak_type=True), 'b': Array(10., dtype=float32, weak_type=True)}
    """  # noqa: E501

    def stopped(params: Any, *arguments: Any) -> Any:
        return function(stop_below(params, blocks, role), *arguments)

    return jax.value_and_grad(stopped, has_aux=has_aux)


def contributor_mean(
    backward: PartialBackward, axis_name: Axes | None = None
) -> optax.GradientTransformationExtraArgs:
    """Averages each block's gradients over the workers that have them.

    Expects of each device the sum of its workers' gradients, zeros where they have
    none; returns identical updates on every member of `axis_name`. With P workers, m of
    a role, block j is divided by m·j. What moves, with s bytes of block j:

    - "zeros": an all-reduce of everything; nothing is saved.
    - "contributors": for j < k a ring among the c = m·j contributors, 2 (c - 1) s in
      all, then (P - c) s along binomial trees to the others, which send nothing of
      their own. Block k, which all have, is an all-reduce.

    `contributor_bytes` says how much each worker sends.

    Args:
      backward: the blocks and roles.
      axis_name: the mesh axis, or axes, of the workers; with None the gradients are
        those of this device's workers alone.

    Returns:
      A transform without state, for use inside `jax.shard_map`, whose `update` is also
      given `step=`, the number that the roles of the gradients came of.

    Raises:
      ConfigError: when traced, if k does not divide the workers.
      TypeError: likewise, without `step`.
    """

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
            phases = phases[:1]  # All divide by the same.
        axes = () if axis_name is None else axis_name

        def average(phase: tuple[int, ...], grads: Any) -> Any:
            mean = average_contributions(
                group, grads, blocks=backward.blocks, roles=phase, mode=backward.mode
            )
            return vary(mean, axes)

        branches = [functools.partial(average, phase) for phase in phases]
        number = backward.phase(jnp.asarray(step)) if len(phases) > 1 else 0
        mean = jax.lax.switch(number, branches, updates)
        # By construction: all got them from the same contributors.
        return assume_equal(mean, axes), state

    return optax.GradientTransformationExtraArgs(init, update)


def average_contributions(
    group: Group, grads: Any, *, blocks: Blocks, roles: Sequence[int], mode: Mode
) -> Any:
    """Returns each block's mean over the workers with a role that reaches it.

    Blocks are averaged one after the other, those at the output first: their gradients
    are there while the longer roles still go on. Sums are float32.

    Args:
      group: the workers, or devices with equally many of them, in order.
      grads: ours; below our role they are not looked at with "contributors", and zeros
        with "zeros".
      blocks: of the gradients.
      roles: of all workers, static.
      mode: see `contributor_mean`.

    Raises:
      ConfigError: roles of another number of blocks, or of members that there are not.
    """
    k, leaves = len(blocks.paths), trees.flatten(grads)
    shared = mode == "zeros" and len(roles) % group.size == 0
    rule = f"roles must be of {group.size} workers, or of a multiple with mode='zeros'"
    good = shared or len(roles) == group.size
    checks.require(good, rule, roles=tuple(roles), mode=mode)
    wide = {path: leaf.astype("float32") for path, leaf in leaves.items()}
    for number in range(k, 0, -1):
        own = {path: wide[path] for path in blocks.paths[number - 1]}
        ranked = _contributors(roles, number, k)
        if mode == "zeros" or len(ranked) == len(roles):
            total = group.sum(own)
        else:
            total = _summed(group, own, ranked, roles)
        wide |= {path: leaf / len(ranked) for path, leaf in total.items()}
    made = {path: leaf.astype(leaves[path].dtype) for path, leaf in wide.items()}
    return trees.unflatten(grads, made)


def _contributors(roles: Sequence[int], number: int, k: int) -> list[int]:
    """Returns the workers that reach block `number`, those with the least role first.

    These give the average to the others: each role has this task for one block.

    Raises:
      ConfigError: roles of another number of blocks, or none that reaches the first.
    """
    good = k in roles and set(roles) <= set(range(1, k + 1))
    checks.require(good, f"roles must be 1 to {k}, one of them {k}", roles=roles)
    return [worker for worker in _by_role(roles) if roles[worker] > k - number]


def _trees(roles: Sequence[int], contributors: Sequence[int]) -> list[list[int]]:
    """Returns for each giver itself and whom it gives to, the least roles first.

    The first ones pass on to others: those that send least besides.
    """
    least = roles[contributors[0]]
    givers = [worker for worker in contributors if roles[worker] == least]
    rest = [w for w in _by_role(roles) if w not in contributors]
    return [[g, *rest[i :: len(givers)]] for i, g in enumerate(givers)]


def _by_role(roles: Sequence[int]) -> list[int]:
    return sorted(range(len(roles)), key=lambda worker: (roles[worker], worker))


def _summed(
    group: Group, own: dict[str, Vector], contributors: list[int], roles: Sequence[int]
) -> dict[str, Vector]:
    flat = group.xp.concatenate([leaf.reshape(-1) for leaf in own.values()])
    total = subset_sum(group, flat, contributors)
    total = spread(group, total, _trees(roles, contributors))
    parts, start = {}, 0
    for path, leaf in own.items():
        parts[path] = total[start : start + leaf.size].reshape(leaf.shape)
        start += leaf.size
    return parts


class Sends(NamedTuple):
    """Bytes that each worker sends in a step.

    Attributes:
      reduced: by rings among the contributors.
      given: of averages to those that did not contribute.
    """

    reduced: tuple[float, ...]
    given: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """Both, by worker."""
        return tuple(a + b for a, b in zip(self.reduced, self.given, strict=True))


def contributor_bytes(
    block_bytes: Sequence[int | float],
    roles: Sequence[int],
    mode: Mode = "contributors",
) -> Sends:
    """Returns what each worker sends in a step with these roles, all sums by rings.

    The mean is 3/4 of that with "zeros" for k blocks of the same size and one worker a
    role.

    Args:
      block_bytes: of each block, float32.
      roles: of all workers.
      mode: see `contributor_mean`.

    Raises:
      ConfigError: roles of another number of blocks.

    Examples:
      >>> sum(contributor_bytes([1, 1, 1, 1], roles(4, 4, 0)).total)
      18.0
      >>> sum(contributor_bytes([1, 1, 1, 1], roles(4, 4, 0), "zeros").total)
      24.0
    """
    k, workers = len(block_bytes), len(roles)
    reduced, given = [0.0] * workers, [0.0] * workers
    for number, size in enumerate(block_bytes, 1):
        contributors = _contributors(roles, number, k)
        members = range(workers) if mode == "zeros" else contributors
        for worker in members:
            reduced[worker] += dense_words(size, len(members))
        for tree in _trees(roles, contributors) if mode == "contributors" else ():
            for place in range(len(tree)):
                given[tree[place]] += size * _children(place, len(tree))
    return Sends(tuple(reduced), tuple(given))


def _children(place: int, size: int) -> int:
    """Returns to how many a place of a binomial tree sends: `spread`'s rounds."""
    step, count = 1, 0
    while step < size:
        count += place < step and place + step < size
        step *= 2
    return count


def scale_blocks(
    blocks: Blocks, scales: Sequence[int | float]
) -> optax.GradientTransformation:
    """Multiplies the updates of each block by a number of its own.

    At the end of a chain it is a learning rate for each block: block j's gradient is
    that of a batch of j/k of the whole.

    Args:
      blocks: of the parameters.
      scales: of each block, from the input.

    Raises:
      ConfigError: not one number for each block.
    """
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
