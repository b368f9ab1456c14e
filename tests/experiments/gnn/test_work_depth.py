"""Terms that are fitted to counts, and what layers' programs have of them."""

import numpy as np
import pytest

from experiments.gnn import layers, names, work_depth
from experiments.gnn.names import TERMS


def draw(count, seed=0):
    rng = np.random.default_rng(seed)
    n = 2 ** rng.integers(6, 12, count)
    more = [n * 2 ** rng.integers(1, 5, count), 2 ** rng.integers(2, 8, count)]
    return np.stack([n, *more, 2 ** rng.integers(1, 7, count)])


def test_a_fit_finds_what_was_planted():
    points = draw(30)
    n, m, k, d = points.astype(float)
    planted = 3 * m * k + 2 * n * k**2 + 7 * m
    (found, none), off = work_depth.fit_work(points, planted)
    assert not none.any()
    np.testing.assert_allclose(found, [3, 0, 0, 2, 7, 0], atol=1e-6)
    assert off < 1e-9
    assert work_depth.fit_work(points, planted + n**2 * k)[1] > 0.05
    (logs, none), steps = work_depth.fit_depth(points, np.log2(k) + 3 * np.log2(d) + 5)
    assert not none.any()
    np.testing.assert_allclose(logs, [1, 3, 0, 5], atol=1e-9)
    assert steps < 1e-9
    assert work_depth.fit_depth(points, k)[1] > 1


@pytest.mark.acceptance("gnn-parallelism", 7)
def test_a_layer_that_projects_edges_has_a_factor_of_the_width_more():
    points = draw(8, seed=1)
    found = {}
    for name in ("gat", names.BY_EDGE, "edge_conv", names.POOLED):
        layer = layers.layer_of(name)
        counts = [layers.count(layer, *map(int, p)) for p in points.T]
        work = np.array([count.work for count in counts], float)
        (terms, _), off = work_depth.fit_work(points, work)
        assert off < 0.01
        found[name] = dict(zip(TERMS, terms, strict=True))
    assert found["gat"]["mk²"] < 1e-3
    assert found["gat"]["nk²"] == pytest.approx(2, rel=1e-3)
    # Two products of each edge, and of edge_conv one of twice the width and one.
    assert found[names.BY_EDGE]["mk²"] == pytest.approx(4, rel=1e-3)
    assert found["edge_conv"]["mk²"] == pytest.approx(6, rel=1e-3)
    assert found[names.POOLED]["mk²"] == pytest.approx(2, rel=1e-3)
    assert found[names.POOLED]["nk²"] == pytest.approx(4, rel=1e-3)


@pytest.mark.acceptance("gnn-parallelism", 7)
def test_matrices_have_the_terms_of_their_steps():
    points = draw(16, seed=2)
    found = {}
    for name in ("gat, matrices", "sgc, matrices", "appnp", names.ONCE):
        layer = layers.layer_of(name)
        counts = [layers.count(layer, *map(int, p)) for p in points.T]
        work = np.array([count.work for count in counts], float)
        (terms, _), off = work_depth.fit_work(points, work)
        assert off < 0.01
        found[name] = terms[TERMS.index("mk")]
        assert terms[TERMS.index("mk²")] < 1e-3
    # Two operations of an entry by each step.
    assert list(found.values()) == pytest.approx([2, 4, 20, 2], rel=1e-3)


@pytest.mark.acceptance("gnn-parallelism", 7)
@pytest.mark.parametrize(
    ("name", "mk", "nk2", "once", "logs"),
    [
        (names.HOPS, 3, 0, 2, (0, 1)),  # m L k + n k², log k + L log d
        (names.STEPS, 2, 0, 2, (0, 1)),
        (names.ONCE, 0, 0, 2, (0, 0)),
        (names.LAYERS, 3, 2, 0, (1, 1)),
        (names.KERNELS, 3, 2, 0, (0, 0)),
        (names.HEADS, 3, 2, 0, (0, 0)),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_terms_of_each_repetition_are_told_from_those_that_come_once(
    name, mk, nk2, once, logs
):
    points = draw(24, seed=3)
    points = np.stack([*points, np.random.default_rng(4).integers(1, 5, 24)])
    counts = [
        layers.count(layers.layer_of(name, t), *size) for *size, t in points.T.tolist()
    ]
    (terms, each), off = work_depth.fit_work(
        points, np.array([count.work for count in counts], float)
    )
    assert off < 0.01
    found = each[TERMS.index("mk")], each[TERMS.index("nk²")], terms[TERMS.index("nk²")]
    assert found == pytest.approx((mk, nk2, once), abs=0.01)
    depth = np.array([count.depth for count in counts], float)
    (_, each), steps = work_depth.fit_depth(points, depth)
    assert steps < 2
    assert each[:2] == pytest.approx(logs, abs=0.3)


def test_a_control_of_appnp_leaves_its_bound():
    own, control = layers.distances(seed=1, alpha=0.2, steps=8)
    assert own <= 1.001 < control


def test_all_rows_have_a_layer():
    for name in names.NAMES:
        assert callable(layers.layer_of(name).compute)
