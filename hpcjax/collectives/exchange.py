"""Averages of trees over a group: what all methods of exchange have in common.

A method decides what is sent and computes the average of it. The rest is here: error
feedback, the first steps with a dense average, the check for non-finite gradients, and
the division of a tree into the vectors that most methods take.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.collectives.buckets import fill_buckets, map_buckets
from hpcjax.collectives.group import Group, Scalar, Vector
from hpcjax.collectives.transfers import Transfer, all_reduce
from hpcjax.core import checks, trees

_MOST = 2**31 - 1


class CommStats(NamedTuple):
    """Counts of one member's step, int32; larger ones are cut off at 2³¹ − 1.

    Attributes:
      selected: entries of ours that were selected to be sent.
      kept: entries of the result.
      sent_words: 32-bit words of entries that went to others; a sparse entry has two.
      received_words: 32-bit words of entries that came from others.
      summed: entries that came from others to be added up here.
      overflow: entries held back because a buffer was full, or to send exactly k.
      lost: entries that reached nobody and are in no residual.
      nonfinite: 1 if a value of some member was not finite and the step was skipped.
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
        """Returns counts, rounded down; those that are not named are zero."""
        every = dict.fromkeys(cls._fields, 0) | counts
        for name, count in every.items():
            known = min(count, _MOST) if isinstance(count, int | float) else count
            every[name] = group.xp.asarray(known, "int32")
        return cls(**every)


class Outcome(NamedTuple):
    """The result of a method for vectors or trees.

    Attributes:
      mean: the (approximate) average over members; the same for all members.
      residual: the part of our vector or tree that is not in the mean.
      own: state of the method that differs between members.
      shared: state of the method that is the same for all members.
      stats: counts of this step.
    """

    mean: Any
    residual: Any
    own: Any
    shared: Any
    stats: CommStats


class TreeExchange(abc.ABC):
    """A method of averaging trees of float32."""

    def check_members(self, members: int) -> None:
        """Raises ConfigError for a number of members with which it does not work.

        Called before anything is sent: members that find out one after another would
        leave the others waiting.
        """
        del members

    @abc.abstractmethod
    def init(self, tree: Any) -> tuple[Any, Any]:
        """Returns the states `own` and `shared` for trees of these shapes, in numpy."""

    @abc.abstractmethod
    def run(self, group: Group, tree: Any, own: Any, shared: Any) -> Outcome:
        """Averages a tree; all members must call this."""

    @abc.abstractmethod
    def transfers(self, tree: Any, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns what `run` sends in order; see `Exchange.transfers`."""


class VectorMethod(abc.ABC):
    """A method of averaging vectors of float32."""

    def check_members(self, members: int) -> None:
        """As `TreeExchange.check_members`."""
        del members

    def init(self, n: int) -> tuple[Any, Any]:
        """Returns the states `own` and `shared` for vectors of length n, in numpy."""
        del n
        return None, None

    @abc.abstractmethod
    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages a vector; all members must call this."""

    @abc.abstractmethod
    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns what `run` sends in order; see `Exchange.transfers`."""

    def words(self, n: int, members: int) -> float:
        """Returns the words that a method sends whose number is always the same."""
        return sum(transfer.words for transfer in self.transfers(n, members, 1.0))


@dataclasses.dataclass(frozen=True)
class Flat(TreeExchange):
    """Applies a method for vectors to a tree, as one vector or leaf by leaf.

    Attributes:
      method: for vectors.
      by_leaf: whether each leaf is a vector, with a state of its own.
      min_size: with `by_leaf`, smaller leaves are averaged exactly.
    """

    method: VectorMethod
    by_leaf: bool = False
    min_size: int = 0

    def check_members(self, members: int) -> None:
        self.method.check_members(members)

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
            outcome = self.method.run(group, whole, own, shared)
            mean, residual = (_split(v, tree) for v in (outcome.mean, outcome.residual))
            return outcome._replace(mean=mean, residual=residual)
        # Every large leaf has a state of its own; small ones are averaged exactly.
        large, outcomes = self._large(tree), {}
        if set(own) != set(large):
            differing = sorted(set(own) ^ set(large))[:5]
            raise ValueError(f"the tree is not like that of init at {differing}")
        for path, leaf in trees.flatten(tree).items():
            method = self.method if path in large else Dense()
            states = (own[path], shared[path]) if path in large else (None, None)
            outcome = method.run(group, leaf.reshape(-1), *states)
            outcomes[path] = outcome._replace(
                mean=outcome.mean.reshape(leaf.shape),
                residual=outcome.residual.reshape(leaf.shape),
            )
        stats = [outcome.stats for outcome in outcomes.values()]
        return Outcome(
            structure.unflatten([outcome.mean for outcome in outcomes.values()]),
            structure.unflatten([outcome.residual for outcome in outcomes.values()]),
            {path: outcomes[path].own for path in large},
            {path: outcomes[path].shared for path in large},
            jax.tree.map(lambda *counts: sum(counts), *stats),
        )

    def transfers(self, tree: Any, members: int, place: float) -> tuple[Transfer, ...]:
        if not self.by_leaf:
            n = trees.num_params(tree)
            return self.method.transfers(n, members, place) if n else ()
        large, transfers = self._large(tree), []
        for path, leaf in trees.flatten(tree).items():
            if path in large:
                transfers += self.method.transfers(leaf.size, members, place)
            elif leaf.size:
                transfers.append(all_reduce(leaf.size, members, early=True))
        return tuple(transfers)

    def _large(self, tree: Any) -> dict[str, Any]:
        least = max(1, self.min_size)
        leaves = trees.flatten(tree)
        return {path: leaf for path, leaf in leaves.items() if leaf.size >= least}


def own_tree(tree: Any, by_path: dict[str, Any]) -> Any:
    """Returns a state by path, or an empty array if the tree has no leaves."""
    # `optax.tree_map_params` finds out which leaves of a state belong to parameters by
    # an `init` without parameters: a dict that is empty then would be taken for them.
    return by_path if jax.tree.leaves(tree) else np.zeros(0, np.float32)


@dataclasses.dataclass(frozen=True)
class Dense(VectorMethod):
    """The exact mean; see `DenseConfig`."""

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the vector."""
        words, rest = self.words(x.size, group.size), group.xp.zeros_like(x)
        stats = CommStats.of(
            group, selected=x.size, kept=x.size, sent_words=words, received_words=words
        )
        return Outcome(
            group.sum(x) / group.xp.float32(group.size), rest, own, shared, stats
        )

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        return (all_reduce(n, members),)


@dataclasses.dataclass(frozen=True)
class DenseBuckets(TreeExchange):
    """The exact mean, bucket by bucket; see `DenseConfig.bucket_bytes`."""

    bucket_bytes: int

    def init(self, tree: Any) -> tuple[Any, Any]:
        del tree
        return None, None

    def run(self, group: Group, tree: Any, own: Any, shared: Any) -> Outcome:
        """Averages a tree."""
        total = map_buckets(group.sum, tree, self.bucket_bytes, group.xp)
        size = group.xp.float32(group.size)
        mean = jax.tree.map(lambda leaf: leaf / size, total)
        rest = jax.tree.map(group.xp.zeros_like, tree)
        n, sent = trees.num_params(tree), self.transfers(tree, group.size, 1.0)
        words = sum(transfer.words for transfer in sent)
        stats = CommStats.of(
            group, selected=n, kept=n, sent_words=words, received_words=words
        )
        return Outcome(mean, rest, own, shared, stats)

    def transfers(self, tree: Any, members: int, place: float) -> tuple[Transfer, ...]:
        leaves = jax.tree.leaves(tree)
        return tuple(
            all_reduce(sum(leaves[place].size for place in bucket), members)
            for bucket in fill_buckets(leaves, self.bucket_bytes)
        )


class ExchangeState(NamedTuple):
    """State of an exchange between steps.

    Attributes:
      residual: the part of our trees that is not in any mean yet, float32, of the shape
        of the tree; None without error feedback.
      own: state of the method that differs between members; it is initialized again
        when their number changes.
      shared: state of the method that is the same for all members.
      step: int32, number of averages so far, those that were skipped too.
      stats: counts of the last one.
    """

    residual: Any
    own: Any
    shared: Any
    step: Scalar
    stats: CommStats


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A method with error feedback: what was not sent is added to the next tree.

    With residual r and tree g, the method averages a = r + g, and the part of a that is
    not in the mean is the next r.

    Attributes:
      method: averages trees.
      error_feedback: False drops what was not sent.
      dense_steps: number of first averages that are exact.
    """

    method: TreeExchange
    error_feedback: bool = True
    dense_steps: int = 0

    def init(self, tree: Any) -> ExchangeState:
        """Returns the state in front of the first average, in numpy arrays.

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
        """Averages a tree over the group; all members must call this.

        If a value of any member is not finite, all members get zeros, and of the state
        only `stats` and `step` change.

        Args:
          group: the members.
          tree: ours.
          state: ours.

        Returns:
          The average, in the tree's dtypes, and the new state.

        Raises:
          TypeError: a leaf is not floating; names its path.
          ValueError: the tree is not like that of `init`, as far as the state tells.
          ConfigError: the method does not work with so many members.
        """
        _check_floating(tree)
        self.method.check_members(group.size)
        total = jax.tree.map(lambda leaf: _cast(leaf, "float32"), tree)
        if self.error_feedback:
            _check_alike(state.residual, total)
            total = jax.tree.map(lambda r, g: r + g, state.residual, total)
        bad = group.sum(_flag_not_finite(group, total)) > 0
        # Zeros are exchanged then, and the outcome is dropped. If a group did not take
        # part, others of the same mesh might wait for it: a `ppermute` is run by all
        # devices, of whatever group (XLA on the CPU).
        sound = jax.tree.map(lambda leaf: group.xp.where(bad, 0, leaf), total)

        def dense() -> Outcome:
            return Flat(Dense()).run(group, sound, state.own, state.shared)

        def sparse() -> Outcome:
            return self.method.run(group, sound, state.own, state.shared)

        if self.dense_steps:
            # `step` counts skipped averages, too, and so is the same in all groups.
            outcome = group.cond(state.step < self.dense_steps, dense, sparse)
        else:
            outcome = sparse()
        if not self.error_feedback:
            outcome = outcome._replace(residual=None)
        # Finite values can have infinite sums or products. Here nothing has to be
        # communicated, since all members have the same mean.
        skipped = bad | (_flag_not_finite(group, outcome.mean) > 0)

        def skip() -> Outcome:
            zeros = jax.tree.map(group.xp.zeros_like, total)
            stats = CommStats.of(group, nonfinite=1)
            return Outcome(zeros, state.residual, state.own, state.shared, stats)

        outcome = group.choose(skipped, skip, lambda: outcome)
        mean = jax.tree.map(lambda m, leaf: _cast(m, leaf.dtype), outcome.mean, tree)
        if self.error_feedback:
            # What the cast to the tree's dtype rounds off goes into the residual, too.
            rounded = jax.tree.map(_add_rounding, outcome.residual, outcome.mean, mean)
            outcome = outcome._replace(residual=rounded)
        new = ExchangeState(
            outcome.residual,
            outcome.own,
            outcome.shared,
            state.step + group.xp.int32(1),
            outcome.stats,
        )
        return mean, new

    def transfers(
        self, tree: Any, members: int, place: float = 1.0
    ) -> tuple[Transfer, ...]:
        """Returns what one average sends, in order, after the dense steps.

        Entries, values and bits are counted; thresholds, counts of entries and flags, a
        few words of each member, are not. Sparse methods are taken to select exactly k
        entries that are not zero, as with exact thresholds; GaussianK nearly does.

        Args:
          tree: arrays or shapes like those to average.
          members: P.
          place: for methods with regions, whose words depend on where the large entries
            are: 0 for the fewest words, 1 for the most, or in between.

        Raises:
          ConfigError: `place` outside of [0, 1], or fewer than one member.
        """
        checks.require_count(1, members=members)
        checks.require(0 <= place <= 1, "place must be in [0, 1]", place=place)
        return self.method.transfers(tree, members, place) if members > 1 else ()

    def words(self, tree: Any, members: int, place: float = 1.0) -> float:
        """Returns the 32-bit words that pass a member's link in all `transfers`.

        Examples:
          >>> from hpcjax.collectives import OkTopkConfig, TopKConfig
          >>> x = np.zeros(1000)
          >>> [c(density=0.01).make().words(x, 4) for c in (TopKConfig, OkTopkConfig)]
          [60.0, 45.0]
        """
        transfers = self.transfers(tree, members, place)
        return float(sum(transfer.words for transfer in transfers))


def _split(whole: Vector, tree: Any) -> Any:
    """Divides a vector into the shapes and structure of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    parts, start = [], 0
    for leaf in leaves:
        parts.append(whole[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return structure.unflatten(parts)


def _cast(leaf: Vector, dtype: Any) -> Vector:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _add_rounding(residual: Vector, mean: Vector, cast: Vector) -> Vector:
    if cast.dtype == mean.dtype:
        return residual
    # Every member adds the rounding error of the mean: it is P times in the sum of the
    # residuals, and once in their mean.
    return residual + (mean - cast.astype(mean.dtype))


def _check_floating(tree: Any) -> None:
    for path, leaf in trees.flatten(tree).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"an exchange averages floating-point leaves: {path!r} is {leaf.dtype}"
            )


def _flag_not_finite(group: Group, tree: Any) -> Scalar:
    """Returns 1 if a value is not finite, else 0."""
    # Not by extremes, which need no mask: on a CPU those of 4096 numbers and more are
    # those without NaN (jax 0.10.2).
    xp, bad = group.xp, False
    for leaf in jax.tree.leaves(tree):
        bad = bad | ~xp.isfinite(leaf).all()
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
