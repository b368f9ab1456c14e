"""Assertions about trees that the contract of transforms is made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_finite(tree: Any) -> bool:
    """Returns whether all entries of a tree are finite."""
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


def assert_close(tree: Any, other: Any, what: str) -> None:
    """Asserts that leaves agree, relative to the largest entry of `other`'s leaf."""

    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=0) + 1e-30
        np.testing.assert_allclose(
            a / scale, b / scale, rtol=2e-4, atol=2e-5, err_msg=f"{what} differ"
        )

    jax.tree.map(check, tree, other)


def assert_same_shardings(old: Any, new: Any) -> None:
    """Asserts that the leaves of two trees are on the same devices in the same way."""

    def same(a, b):
        assert b.sharding.is_equivalent_to(a.sharding, a.ndim), (
            f"a state moves from {a.sharding} to {b.sharding}"
        )

    jax.tree.map(same, old, new)


def assert_alike(tree: Any, other: Any, what: str) -> None:
    """Asserts that two trees have the same structure, shapes and dtypes."""
    first, second = _signature(tree), _signature(other)
    differing = sorted(
        f"{path}: {first.get(path)} and {second.get(path)}"
        for path in first.keys() | second.keys()
        if first.get(path) != second.get(path)
    )
    assert not differing, f"{what} differ at {differing[0]}"
    structures = jax.tree.structure(tree), jax.tree.structure(other)
    assert structures[0] == structures[1], f"{what} differ: {structures}"


def _signature(tree: Any) -> dict[str, str]:
    """Returns `{path: "float32[8, 3]"}`, with `weak` before weakly typed arrays."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{'weak ' * leaf.weak_type}{jnp.dtype(leaf.dtype)}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
