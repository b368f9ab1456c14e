"""PowerSGD: the mean of matrices as a product of two thin ones."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np

from hpcjax.collectives.config import PowerSgdConfig, dense_words
from hpcjax.collectives.exchange import CommStats, Method, Outcome, own_tree
from hpcjax.collectives.group import Group, Scalar, Vector
from hpcjax.core import trees
from hpcjax.core.patterns import check_stacked


@dataclasses.dataclass(frozen=True)
class LowRank(Method):
    """See `PowerSgdConfig`."""

    config: PowerSgdConfig

    def init(self, tree: Any) -> tuple[None, Any]:
        """Returns the states: right factors by path, and the number of averages.

        Raises:
          ConfigError: an entry of `stacked` matches nothing.
        """
        draws, leaves = np.random.default_rng(self.config.seed), trees.flatten(tree)
        check_stacked(self.config.stacked, leaves)
        right = {
            path: draws.normal(size=self._thin(path, leaf)).astype(np.float32)
            for path, leaf in leaves.items()
            if leaf.ndim - self._stacks(path) > 1 and leaf.size
        }
        return None, (own_tree(tree, right), np.zeros((), np.int32))

    def run(self, group: Group, tree: Any, own: Any, shared: Any) -> Outcome:
        """Averages one tree."""
        xp, size, (right, step) = group.xp, group.xp.float32(group.size), shared
        leaves = trees.flatten(tree)
        if not leaves:
            return Outcome(tree, tree, own, shared, CommStats.of(group))
        matrices = {p: leaves[p].reshape(self._shape(p, leaves[p])) for p in right}
        vectors = {p: leaf for p, leaf in leaves.items() if p not in matrices}
        old = right
        if not self.config.warm_start:
            right = {p: self._fresh(group, p, leaves[p], step) for p in right}

        left = {p: matrix @ right[p] for p, matrix in matrices.items()}
        left, vectors = group.sum((left, vectors))
        # Of the sum the mean's basis, too: it has no length.
        left = {p: orthonormal(xp, columns) for p, columns in left.items()}
        right = group.sum({p: matrix.mT @ left[p] for p, matrix in matrices.items()})
        right = {p: rows / size for p, rows in right.items()}

        mean = {p: total / size for p, total in vectors.items()}
        rest = {p: xp.zeros_like(total) for p, total in vectors.items()}
        for p, matrix in matrices.items():
            made = left[p] @ right[p].mT
            mean[p] = made.reshape(leaves[p].shape)
            rest[p] = (matrix - made).reshape(leaves[p].shape)
        sent = sum(
            dense_words(trees.num_params(part), group.size)
            for part in (left, right, vectors)
        )
        stats = CommStats.of(group, sent_words=sent, received_words=sent)
        return Outcome(
            trees.unflatten(tree, mean),
            trees.unflatten(tree, rest),
            own,
            ({p: _kept(xp, right[p], old[p]) for p in right}, step + xp.int32(1)),
            stats,
        )

    def _stacks(self, path: str) -> int:
        """Returns how many leading axes count layers, 0 or 1."""
        return int(any(re.search(rule, path) for rule in self.config.stacked))

    def _shape(self, path: str, leaf: Any) -> tuple[int, ...]:
        """Returns `[rows, columns]`, behind the axis of a stack."""
        layers, columns = leaf.shape[: self._stacks(path)], leaf.shape[-1]
        return *layers, leaf.size // math.prod((*layers, columns)), columns

    def _thin(self, path: str, leaf: Any) -> tuple[int, ...]:
        """Returns the shape of the right factor, `[columns, rank]` likewise."""
        *layers, rows, columns = self._shape(path, leaf)
        return *layers, columns, min(self.config.rank, columns, rows)

    def _fresh(self, group: Group, path: str, leaf: Vector, step: Scalar) -> Any:
        def normal(key: Any) -> Any:
            return jax.random.normal(key, self._thin(path, leaf))

        return group.draw(self.config.seed, step, path, normal)


def _kept(xp: Any, new: Vector, old: Vector) -> Vector:
    """Returns the factor to go on with: a column of zeros would always be zero."""
    return xp.where(xp.any(new != 0, axis=-2, keepdims=True), new, old)


def orthonormal(xp: Any, columns: Vector) -> Vector:
    """Returns an orthonormal basis `[..., rows, rank]` of columns, of one sign.

    By QR with a positive diagonal: one float32 pass of Gram and Schmidt's loses
    orthogonality near full rank, and a zero column would be divided by zero.
    """
    basis, upper = xp.linalg.qr(columns)
    diagonal = xp.diagonal(upper, axis1=-2, axis2=-1)[..., None, :]
    return basis * xp.where(diagonal < 0, xp.float32(-1), xp.float32(1))
