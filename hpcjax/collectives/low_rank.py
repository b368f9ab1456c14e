"""PowerSGD: the mean of matrices M, approximated by a product of two thin ones.

With a right factor Q `[columns, rank]` of the last step, P = orthonormalize(Σ M Q) is
`[rows, rank]`, the new Q is the mean of Mᵀ P, and P Qᵀ approximates the mean of M.

References:
  Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, algorithm 1.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np

from hpcjax.collectives.exchange import CommStats, Outcome, TreeExchange, own_tree
from hpcjax.collectives.group import Group, Scalar, Vector
from hpcjax.collectives.low_rank_config import PowerSgdConfig
from hpcjax.collectives.transfers import Transfer, all_reduce
from hpcjax.core import trees
from hpcjax.core.patterns import check_stacked


@dataclasses.dataclass(frozen=True)
class LowRank(TreeExchange):
    """See `PowerSgdConfig`."""

    config: PowerSgdConfig

    def init(self, tree: Any) -> tuple[None, Any]:
        """Returns the states: right factors by path, and the number of averages.

        Raises:
          ConfigError: an entry of `stacked` matches nothing.
        """
        draws = np.random.default_rng(self.config.seed)
        right = {
            path: draws.normal(size=self._factor_shape(path, leaf)).astype(np.float32)
            for path, leaf in self._matrices(tree).items()
        }
        return None, (own_tree(tree, right), np.zeros((), np.int32))

    def run(self, group: Group, tree: Any, own: Any, shared: Any) -> Outcome:
        """Averages a tree."""
        xp, size, (right, step) = group.xp, group.xp.float32(group.size), shared
        leaves = trees.flatten(tree)
        if not leaves:
            return Outcome(tree, tree, own, shared, CommStats.of(group))
        matrices = {
            p: leaves[p].reshape(self._matrix_shape(p, leaves[p])) for p in right
        }
        vectors = {p: leaf for p, leaf in leaves.items() if p not in matrices}
        old = right
        if not self.config.warm_start:
            right = {p: self._draw_factor(group, p, leaves[p], step) for p in right}

        left = {p: matrix @ right[p] for p, matrix in matrices.items()}
        # The vectors, which need no factors, go into the same communication.
        left, vectors = group.sum((left, vectors))
        # The sum has the same column space as the mean: no division is needed.
        left = {p: orthonormalize(xp, columns) for p, columns in left.items()}
        # One step of power iteration: Mᵀ orthonormalize(M Q) spans what Mᵀ M Q does,
        # and tends to the leading right singular vectors over the steps.
        right = group.sum({p: matrix.mT @ left[p] for p, matrix in matrices.items()})
        # Mᵀ P is linear in M: the mean of the products is the product of the mean.
        right = {p: rows / size for p, rows in right.items()}

        mean = {p: total / size for p, total in vectors.items()}
        rest = {p: xp.zeros_like(total) for p, total in vectors.items()}
        for p, matrix in matrices.items():
            product = left[p] @ right[p].mT
            mean[p] = product.reshape(leaves[p].shape)
            rest[p] = (matrix - product).reshape(leaves[p].shape)
        transfers = self.transfers(tree, group.size, 1.0)
        sent = sum(transfer.words for transfer in transfers)
        stats = CommStats.of(group, sent_words=sent, received_words=sent)
        return Outcome(
            trees.unflatten(tree, mean),
            trees.unflatten(tree, rest),
            own,
            (
                {p: _keep_nonzero(xp, right[p], old[p]) for p in right},
                step + xp.int32(1),
            ),
            stats,
        )

    def transfers(self, tree: Any, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns the all-reduces of vectors, of left and then of right factors."""
        left = right = 0
        vectors = trees.num_params(tree)
        for path, leaf in self._matrices(tree).items():
            *layers, rows, columns = self._matrix_shape(path, leaf)
            rank = math.prod(layers) * self._factor_shape(path, leaf)[-1]
            left, right = left + rank * rows, right + rank * columns
            vectors -= leaf.size
        sums = (vectors, True), (left, False), (right, False)
        return tuple(all_reduce(n, members, early=early) for n, early in sums if n)

    def _matrices(self, tree: Any) -> dict[str, Any]:
        """Returns the leaves that are matrices or stacks of matrices, by path."""
        check_stacked(self.config.stacked, trees.paths(tree))
        return {
            path: leaf
            for path, leaf in trees.flatten(tree).items()
            if leaf.ndim - self._stacks(path) > 1 and leaf.size
        }

    def _stacks(self, path: str) -> int:
        """Returns the number of leading axes that stack layers, 0 or 1."""
        return int(any(re.search(rule, path) for rule in self.config.stacked))

    def _matrix_shape(self, path: str, leaf: Any) -> tuple[int, ...]:
        """Returns `[rows, columns]`, with the axis of a stack in front."""
        layers, columns = leaf.shape[: self._stacks(path)], leaf.shape[-1]
        return *layers, leaf.size // math.prod((*layers, columns)), columns

    def _factor_shape(self, path: str, leaf: Any) -> tuple[int, ...]:
        """Returns the shape of the right factor, `[columns, rank]`, likewise."""
        *layers, rows, columns = self._matrix_shape(path, leaf)
        return *layers, columns, min(self.config.rank, columns, rows)

    def _draw_factor(self, group: Group, path: str, leaf: Vector, step: Scalar) -> Any:
        def normal(key: Any) -> Any:
            return jax.random.normal(key, self._factor_shape(path, leaf))

        return group.draw(self.config.seed, step, path, normal)


def _keep_nonzero(xp: Any, new: Vector, old: Vector) -> Vector:
    """Returns the new factor, with old columns in place of columns of zeros.

    A column of zeros would stay zero in all later steps: M · 0 = 0.
    """
    return xp.where(xp.any(new != 0, axis=-2, keepdims=True), new, old)


def orthonormalize(xp: Any, columns: Vector) -> Vector:
    """Returns an orthonormal basis of columns, `[..., rows, rank]`.

    It comes from a QR decomposition in which the diagonal of R is positive, which makes
    it unique. A single pass of Gram–Schmidt in float32 would lose orthogonality near
    full rank, and divide by zero for a column of zeros.
    """
    basis, upper = xp.linalg.qr(columns)
    diagonal = xp.diagonal(upper, axis1=-2, axis2=-1)[..., None, :]
    return basis * xp.where(diagonal < 0, xp.float32(-1), xp.float32(1))
