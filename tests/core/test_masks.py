"""Masks against sorting in numpy: exact counts, ties, NaN, structures, shards."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax.core import ConfigError, masks
from hpcjax.core.structures import (
    NM,
    Block,
    Channels,
    Group,
    Member,
    Unstructured,
    count_kept,
    vector,
)

keep_largest = jax.jit(masks.keep_largest, static_argnames="at_least")
choose = jax.jit(masks.choose, static_argnums=0)


def by_sorting(scores, k):
    """The k largest by a stable sort: NaN last, of equal ones the first."""
    flat = np.where(np.isnan(scores), -np.inf, scores).ravel()
    nan = np.isnan(scores).ravel()
    kept = np.zeros(flat.size, bool)
    kept[np.lexsort((np.arange(flat.size), -flat, nan))[:k]] = True
    return kept.reshape(scores.shape)


def scores_with_ties():
    rng = np.random.default_rng(0)
    scores = rng.integers(-2, 3, (24, 16)).astype(np.float32)
    scores[3, :4], scores[5, 5], scores[6, 6] = np.nan, np.inf, -np.inf
    scores[7], scores[8, 0], scores[8, 1] = -0.0, 1e-42, -1e-42
    return scores


@pytest.mark.acceptance("sparsity", 2)
@pytest.mark.parametrize("k", [0, 1, 77, 200, 380, 383, 384, 400])
def test_the_largest_are_kept_exactly_whatever_is_equal(k):
    scores = scores_with_ties()
    np.testing.assert_array_equal(keep_largest(scores, k), by_sorting(scores, k))


@pytest.mark.acceptance("sparsity", 2)
def test_of_equal_scores_the_lower_indices_are_kept_and_over_leaves_the_earlier():
    equal = {"a": jnp.ones((2, 3)), "b": jnp.ones(4), "c": None}
    found = keep_largest(equal, 8)
    assert found["a"].all()
    assert found["b"].tolist() == [True, True, False, False]
    assert found["c"] is None


def test_every_leaf_keeps_one_where_that_is_asked_for():
    rng = np.random.default_rng(1)
    scores = {"a": rng.normal(size=30) + 9, "b": rng.normal(size=20)}
    plain = keep_largest(scores, 10)
    assert (plain["a"].sum(), plain["b"].sum()) == (10, 0)
    held = choose(Unstructured(), scores, 10)
    np.testing.assert_array_equal(held["a"], by_sorting(scores["a"], 9))
    np.testing.assert_array_equal(held["b"], by_sorting(scores["b"], 1))


@pytest.mark.acceptance("sparsity", 8)
@pytest.mark.parametrize("kind", ["unstructured", "nm", "block"])
def test_masks_of_a_leaf_that_is_split_both_ways_are_those_of_one_device(kind):
    structure = {"unstructured": Unstructured(), "nm": NM(), "block": Block()}[kind]
    counts = {"w": {"unstructured": 100, "nm": 2, "block": 7}[kind]}
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P("x", "y"))
    scores = {"w": jnp.round(jnp.asarray(scores_with_ties()[:16]))}
    alone, shared = choose(structure, scores, counts), jax.device_put(scores, split)
    program = jax.jit(lambda s: masks.choose(structure, s, counts), out_shardings=split)
    program = program.lower(shared).compile()
    np.testing.assert_array_equal(program(shared)["w"], alone["w"])
    assert "all-gather" not in program.as_text()


@pytest.mark.acceptance("sparsity", 4)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (3, 3)])
def test_of_each_group_exactly_n_are_kept_the_best_and_of_equal_ones_the_first(n, m):
    scores = scores_with_ties()
    found = np.asarray(choose(NM(n=n, m=m), {"w": scores}, {"w": n})["w"])
    for start in range(0, 24, m):
        for column in range(16):
            group = slice(start, start + m), column
            np.testing.assert_array_equal(found[group], by_sorting(scores[group], n))


@pytest.mark.acceptance("sparsity", 4)
@pytest.mark.parametrize("pooling", ["sum", "max"])
@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_masks_are_constant_on_blocks_and_keep_the_best(shape, pooling):
    height, width = shape
    structure = Block(inputs=height, outputs=width, pooling=pooling)
    if height == 1:
        assert vector(width, pooling) == structure
    scores = np.random.default_rng(2).normal(size=(3, 8, 16))
    found = choose(structure, {"w": scores}, {"w": 9})["w"]
    blocks = scores.reshape(3, 8 // height, height, 16 // width, width)
    pooled = getattr(np, pooling)(blocks, axis=(2, 4))
    kept = by_sorting(pooled, 9)
    expected = np.kron(kept, np.ones((1, height, width), bool))
    np.testing.assert_array_equal(found, expected)


def test_channels_go_with_all_that_depends_on_them():
    # A convolution of 3 channels, its norm, and a dense layer behind 2 flattened pixels
    # whose outputs are 2 heads of 2 features.
    groups = (
        Group(
            name="conv",
            units=3,
            members=(
                Member(path="conv", axis=-1),
                Member(path="norm", axis=0, scored=False),
                Member(path="dense", axis=0),
            ),
        ),
        Group(name="heads", units=2, members=(Member(path="dense", inner=2),)),
    )
    structure = Channels(groups=groups)
    rng = np.random.default_rng(3)
    shapes = {"conv": (3, 3, 1, 3), "norm": (3,), "dense": (6, 4)}
    scores = {path: rng.normal(size=shape) for path, shape in shapes.items()}
    scores["norm"] = np.array([100.0, -100.0, 0.0])  # does not count
    assert structure.sizes(shapes) == {"conv": 9 + 1 + 8, "heads": 12}
    found = choose(structure, scores, {"conv": 2, "heads": 1})
    pixels = scores["dense"].reshape(2, 3, 4).sum((0, 2))
    channels = by_sorting(scores["conv"].sum((0, 1, 2)) + pixels, 2)
    heads = by_sorting(scores["dense"].reshape(6, 2, 2).sum((0, 2)), 1)
    np.testing.assert_array_equal(found["norm"], channels)
    np.testing.assert_array_equal(found["conv"], np.tile(channels, (3, 3, 1, 1)))
    inputs, outputs = np.tile(channels, 2), heads.repeat(2)
    np.testing.assert_array_equal(found["dense"], np.outer(inputs, outputs))


@pytest.mark.parametrize(
    ("size", "sparsity", "kept"),
    [(5, 0.9, 1), (15, 0.9, 2), (5, 0.7, 2), (3, 1.0, 1), (7, 0.0, 7), (0, 0.5, 0)],
)
def test_counts_are_exact_and_halves_go_up(size, sparsity, kept):
    assert count_kept(size, sparsity) == kept
    assert count_kept(size, Fraction(str(sparsity))) == kept


def test_pruned_parameters_are_zero_even_where_they_were_not_finite():
    params = {"a": jnp.array([-1.0, jnp.nan, -3.0]), "b": jnp.ones(2)}
    kept = {"a": jnp.array([True, False, False]), "b": None}
    found = masks.apply(params, kept)
    assert np.signbit(found["a"]).tolist() == [True, False, False]
    assert found["a"].tolist() == [-1.0, 0.0, 0.0]
    assert found["b"] is params["b"]
    assert {path: int(n) for path, n in masks.count_true(kept).items()} == {"a": 1}


def test_scores_that_are_no_numbers_are_named():
    masks.check_scores({"a": jnp.ones(2), "b": None})
    with pytest.raises(ConfigError, match=r"NaN in \['c/d'\]"):
        masks.check_scores({"a": jnp.ones(2), "c": {"d": jnp.array([jnp.nan])}})


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (NM(n=2, m=5), r"w: NM must divide .*m=5.*shape=\[24, 16\]"),
        (Block(inputs=5), r"w: Block must divide .*inputs=5.*shape=\[24, 16\]"),
        (
            Channels(groups=(Group(name="g", units=5, members=(Member(path="w"),)),)),
            r"axis -1 of w must be a multiple .*units=5.*shape=\[24, 16\]",
        ),
        (
            Channels(groups=(Group(name="g", units=4, members=(Member(path="v"),)),)),
            r"'g' has the member 'v', which is no pruned parameter",
        ),
        (Channels(groups=()), r"needs a group: got none=\['w'\]"),
    ],
)
def test_what_does_not_fit_a_structure_is_refused(structure, message):
    with pytest.raises(ConfigError, match=message):
        structure.unit_shapes({"w": (24, 16)})
    with pytest.raises(ConfigError, match="n must be at most m"):
        NM(n=5, m=4)


def test_what_cannot_be_asked_for_is_refused():
    with pytest.raises(ConfigError, match=r"sparsity must be in \[0, 1\]"):
        count_kept(4, 1.5)
    large = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    with pytest.raises(ConfigError, match="less than 2"):
        jax.eval_shape(lambda s: masks.keep_largest({"w": s}, 3), large)
    half = jax.ShapeDtypeStruct((2**15, 2**15), jnp.float32)
    with pytest.raises(ConfigError, match="together must be less than 2"):
        jax.eval_shape(lambda s: masks.keep_largest({"a": s, "b": s}, 3), half)
