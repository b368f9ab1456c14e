"""Averages of trees over a group: what every method of exchange has in common.

A method says what is sent and what comes of it. Here is the rest, once for all: error
feedback, steps that are averaged densely before it begins, gradients that are not
finite, and how a tree becomes the vector, or the vectors, that a method takes.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.collectives.config import dense_words
from hpcjax.collectives.group import Group, Scalar, Vector
from hpcjax.core import trees

_MOST = 2**31 - 1


class CommStats(NamedTuple):
    """What one member did in one step; counts are int32, the largest one for more.

    Attributes:
      selected: entries of ours that we send, room permitting.
      kept: entries of the result.
      sent_words: 32-bit words of entries that went to others; a sparse entry has two.
      received_words: that came from others.
      summed: entries that came from others to be added up here.
      overflow: entries held back because a buffer was full, or to stay at exactly k.
      lost: entries that reached nobody and are in no residual.
      nonfinite: 1 if a number of some member was not finite, and nothing changed.
    """

    selected: Scalar
    kept: Scalar
    sent_words: Scalar
    received_words: Scalar
    summed: Scalar
    overflow: Scalar
    lost: Scalar
    nonfinite: Scalar

    @classmethod
    def of(cls, group: Group, **counts: Any) -> "CommStats":
        """Returns the given counts, rounded down, and zero for the rest."""
        zeros = dict.fromkeys(cls._fields, 0) | counts
        for name, count in zeros.items():
            known = min(count, _MOST) if isinstance(count, int | float) else count
            zeros[name] = group.xp.asarray(known, "int32")
        return cls(**zeros)


class Outcome(NamedTuple):
    """What a method made of the members' vectors, or trees.

    Attributes:
      mean: the average over members, or what stands for it; the same for all.
      residual: what of ours has not reached the others.
      own: the method's state that differs between members.
      shared: the method's state that does not.
      stats: what was done.
    """

    mean: Any
    residual: Any
    own: Any
    shared: Any
    stats: CommStats


class Method(abc.ABC):
    """A way of averaging trees of float32."""

    @abc.abstractmethod
    def init(self, tree: Any) -> tuple[Any, Any]:
        """Returns the states `own` and `shared` for trees of these shapes, in numpy."""

    @abc.abstractmethod
    def run(self, group: Group, tree: Any, own: Any, shared: Any) -> Outcome:
        """Averages one tree."""


class VectorMethod(abc.ABC):
    """A way of averaging vectors of float32."""

    def init(self, n: int) -> tuple[Any, Any]:
        """Returns the states `own` and `shared` for vectors of length n, in numpy."""
        del n
        return None, None

    @abc.abstractmethod
    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages one vector."""


@dataclasses.dataclass(frozen=True)
class Flat(Method):
    """Takes a tree as one vector, or each leaf as one.

    Attributes:
      method: for vectors.
      by_leaf: each leaf by itself, with a state of its own.
      min_size: by leaf, smaller ones are averaged as they are.
    """

    method: VectorMethod
    by_leaf: bool = False
    min_size: int = 0

    def init(self, tree: Any) -> tuple[Any, Any]:
        if not self.by_leaf:
            return self.method.init(trees.num_params(tree))
        large = self._large(tree)
        states = {path: self.method.init(leaf.size) for path, leaf in large.items()}
        own = {path: state[0] for path, state in states.items()}
        shared = {path: state[1] for path, state in states.items()}
        return own_tree(tree, own), own_tree(tree, shared)

    def run(self, group: Group, tree: Any, own: Any, shared: Any) -> Outcome:
        leaves, structure = jax.tree.flatten(tree)
        if not trees.num_params(tree):
            return Outcome(tree, tree, own, shared, CommStats.of(group))
        if not self.by_leaf:
            flat = [leaf.reshape(-1) for leaf in leaves]
            whole = flat[0] if len(flat) == 1 else group.xp.concatenate(flat)
            made = self.method.run(group, whole, own, shared)
            mean, residual = (_split(v, tree) for v in (made.mean, made.residual))
            return made._replace(mean=mean, residual=residual)
        large, made = self._large(tree), {}
        if set(own) != set(large):
            differing = sorted(set(own) ^ set(large))[:5]
            raise ValueError(f"the tree is not like that of init at {differing}")
        for path, leaf in trees.flatten(tree).items():
            method = self.method if path in large else Dense()
            states = (own[path], shared[path]) if path in large else (None, None)
            outcome = method.run(group, leaf.reshape(-1), *states)
            made[path] = outcome._replace(
                mean=outcome.mean.reshape(leaf.shape),
                residual=outcome.residual.reshape(leaf.shape),
            )
        stats = [outcome.stats for outcome in made.values()]
        return Outcome(
            structure.unflatten([outcome.mean for outcome in made.values()]),
            structure.unflatten([outcome.residual for outcome in made.values()]),
            {path: made[path].own for path in large},
            {path: made[path].shared for path in large},
            jax.tree.map(lambda *each: sum(each), *stats),
        )

    def _large(self, tree: Any) -> dict[str, Any]:
        least = max(1, self.min_size)
        leaves = trees.flatten(tree)
        return {path: leaf for path, leaf in leaves.items() if leaf.size >= least}


def own_tree(tree: Any, by_path: dict[str, Any]) -> Any:
    """Returns a state by path, or one empty array if the tree has no leaf.

    So `optax.tree_map_params`, which asks for the state of no parameters, takes all of
    it as not being parameters.
    """
    return by_path if jax.tree.leaves(tree) else np.zeros(0, np.float32)


@dataclasses.dataclass(frozen=True)
class Dense(VectorMethod):
    """The mean of all numbers; see `DenseConfig`."""

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the vector."""
        words, rest = dense_words(x.size, group.size), group.xp.zeros_like(x)
        stats = CommStats.of(
            group, selected=x.size, kept=x.size, sent_words=words, received_words=words
        )
        return Outcome(
            group.sum(x) / group.xp.float32(group.size), rest, own, shared, stats
        )


class ExchangeState(NamedTuple):
    """What an exchange remembers from step to step.

    Attributes:
      residual: a tree like the one averaged, float32: what of ours has not reached the
        others; None without error feedback.
      own: differs between members; started again when their number changes.
      shared: the same for all members.
      step: int32, averages made.
      stats: of the last one.
    """

    residual: Any
    own: Any
    shared: Any
    step: Scalar
    stats: CommStats


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A method with error feedback: what is not sent is added to the next tree.

    With residual r and tree g, a = r + g is exchanged, and what of a has not reached
    the others is the next r.

    Attributes:
      method: what is sent.
      error_feedback: False forgets what is not sent.
      dense_steps: first averages that are exact, before the method begins.
    """

    method: Method
    error_feedback: bool = True
    dense_steps: int = 0

    def init(self, tree: Any) -> ExchangeState:
        """Returns the state before the first average, of numpy arrays.

        Args:
          tree: arrays or shapes like those to average.

        Raises:
          TypeError: a leaf is not floating; names its path.
        """
        _check_floating(tree)
        own, shared = self.method.init(tree)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), tree)
        count = np.zeros((), np.int32)
        residual = zeros if self.error_feedback else None
        stats = CommStats(*[count] * len(CommStats._fields))
        return ExchangeState(residual, own, shared, count, stats)

    def average(
        self, group: Group, tree: Any, state: ExchangeState
    ) -> tuple[Any, ExchangeState]:
        """Returns the average over the group, in the tree's dtypes, and the new state.

        Where a number of any member is not finite all get zeros, and the states stay as
        they are but for `stats`.

        Args:
          group: its members.
          tree: ours.
          state: ours.

        Raises:
          TypeError: a leaf is not floating; names its path.
          ValueError: the tree is not like that of `init`, as far as the state tells.
        """
        _check_floating(tree)
        given = jax.tree.map(lambda leaf: _cast(leaf, "float32"), tree)
        if self.error_feedback:
            _check_alike(state.residual, given)
            given = jax.tree.map(lambda r, g: r + g, state.residual, given)
        bad = group.sum(_not_finite(group, given)) > 0

        def skip() -> Outcome:
            zeros = jax.tree.map(group.xp.zeros_like, given)
            stats = CommStats.of(group, nonfinite=1)
            return Outcome(zeros, state.residual, state.own, state.shared, stats)

        def dense() -> Outcome:
            made = Flat(Dense()).run(group, given, state.own, state.shared)
            return made._replace(residual=self._kept(made.residual))

        def sparse() -> Outcome:
            made = self.method.run(group, given, state.own, state.shared)
            return made._replace(residual=self._kept(made.residual))

        def go() -> Outcome:
            if not self.dense_steps:
                return sparse()
            return group.cond(state.step < self.dense_steps, dense, sparse)

        made = group.cond(bad, skip, go)
        # Finite numbers can have sums, or products, that are not.
        # All see it in the mean, which is the same for all.
        spilled = _not_finite(group, made.mean) > 0
        made = group.cond(spilled, skip, lambda: made)
        step = state.step + group.xp.asarray(~(bad | spilled), "int32")
        mean = jax.tree.map(lambda m, leaf: _cast(m, leaf.dtype), made.mean, tree)
        if self.error_feedback:
            # What the tree's dtype does not hold is not lost either.
            rounded = jax.tree.map(_with_rounding, made.residual, made.mean, mean)
            made = made._replace(residual=rounded)
        new = ExchangeState(made.residual, made.own, made.shared, step, made.stats)
        return mean, new

    def _kept(self, residual: Any) -> Any:
        return residual if self.error_feedback else None


def _split(whole: Vector, tree: Any) -> Any:
    """Returns a vector's parts in the structure and shapes of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    parts, start = [], 0
    for leaf in leaves:
        parts.append(whole[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return structure.unflatten(parts)


def _cast(leaf: Vector, dtype: Any) -> Vector:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _with_rounding(residual: Vector, mean: Vector, cast: Vector) -> Vector:
    if cast.dtype == mean.dtype:
        return residual
    return residual + (mean - cast.astype(mean.dtype))


def _check_floating(tree: Any) -> None:
    for path, leaf in trees.flatten(tree).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"an exchange averages floating-point leaves: {path!r} is {leaf.dtype}"
            )


def _not_finite(group: Group, tree: Any) -> Scalar:
    """Returns 1 if a number is not finite; extremes tell, without a mask in memory."""
    xp, bad = group.xp, False
    for leaf in jax.tree.leaves(tree):
        if leaf.size:
            bad = bad | ~xp.isfinite(xp.max(leaf)) | ~xp.isfinite(xp.min(leaf))
    return xp.asarray(bad, "int32")


def _check_alike(residual: Any, tree: Any) -> None:
    old, new = trees.flatten(residual), trees.flatten(tree)
    differing = [
        f"{path}: {getattr(old.get(path), 'shape', None)} in the state, "
        f"{getattr(new.get(path), 'shape', None)} now"
        for path in old.keys() | new.keys()
        if path not in old or path not in new or old[path].shape != new[path].shape
    ]
    if differing:
        raise ValueError(
            f"the gradients are not like those the exchange began with: "
            f"{sorted(differing)[:5]}"
        )
