"""Work and depth against counts by hand."""

import logging

import jax
import jax.numpy as jnp
import pytest

from hpcjax import graphs, perf
from hpcjax.core.errors import ConfigError, UnsupportedOp


def of(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_tree_of_sums_and_a_chain():
    cost = perf.work_depth(lambda x, w: jnp.tanh(x @ w).sum(), of(6, 9), of(9, 5))
    assert cost.by_operator == {"dot_general": 2 * 6 * 9 * 5, "tanh": 30} | {
        "reduce_sum": 30
    }
    # ⌈log2 9⌉, 1, ⌈log2 30⌉.
    assert cost == (540 + 60, 4 + 1 + 5, cost.by_operator)


def test_what_only_renames_is_free():
    def turn(x):
        return jnp.broadcast_to(x.T.reshape(-1)[None, 2:], (3, 10)).astype("bfloat16")

    assert perf.work_depth(turn, of(3, 4))[:2] == (0, 0)


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) * 2, None), x, length=7)[0]

    assert perf.work_depth(loop, of(5))[:2] == (7 * 10, 7 * 2)


def test_a_choice_is_of_each_element():
    cost = perf.work_depth(lambda x: jnp.where(x > 0, x, -x), of(5))
    assert (cost.by_operator["select_n"], cost.work, cost.depth) == (5, 15, 2)


def test_independent_chains_run_beside_each_other():
    def two(x):
        return jnp.sin(jnp.sin(jnp.sin(x))), jnp.cos(x)

    assert perf.work_depth(two, of(4))[:2] == (16, 3)


def test_sums_over_segments_are_of_what_is_added():
    vertices, edges, width = 10, 60, 4

    def spread(senders, receivers, x):
        graph = graphs.Graph(senders=senders, receivers=receivers, vertices=vertices)
        return graphs.spread(graph, x)

    ends = of(edges, dtype="int32")
    count = perf.work_depth(spread, ends, ends, of(vertices, width), degree=9)
    assert count.by_operator["scatter-add"] == edges * width
    assert count.by_operator["gather"] == edges * width
    other = perf.work_depth(spread, ends, ends, of(vertices, width), degree=512)
    assert other.depth - count.depth == 9 - 4
    with pytest.raises(ConfigError, match="degree=, the most entries"):
        perf.work_depth(spread, ends, ends, of(vertices, width))
    with pytest.raises(ConfigError, match="degree"):
        perf.work_depth(spread, ends, ends, of(vertices, width), degree=0)


def test_a_maximum_over_segments_is_too():
    def largest(x, segments):
        return graphs.segment_max(x, segments, 3)

    count = perf.work_depth(largest, of(20, 2), of(20, dtype="int32"), degree=8)
    assert count.by_operator["scatter-max"] == 40
    assert count.by_operator["scatter-add"] == 20


def test_gradients_are_counted():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    forward = perf.work_depth(loss, of(8, 3), of(16, 8))
    both = perf.work_depth(jax.value_and_grad(loss), of(8, 3), of(16, 8))
    assert both.by_operator["dot_general"] == 2 * forward.by_operator["dot_general"]


def test_a_sort_is_as_deep_as_a_tree():
    cost = perf.work_depth(jnp.sort, of(4, 100))
    assert (cost.by_operator["sort"], cost.depth) == (400, 7)
    cost = perf.work_depth(lambda x: jnp.sort(x, 0), of(100, 4))
    assert (cost.by_operator["sort"], cost.depth) == (400, 7)
    cost = perf.work_depth(lambda x, y: jax.lax.sort((x, y)), of(4, 100), of(4, 100))
    assert cost.by_operator["sort"] == 800


def test_a_window_is_counted_as_its_input(caplog):
    def window(x):
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (3,), (1,), "SAME")

    with caplog.at_level(logging.WARNING):
        perf.work_depth(window, of(10))
    assert "work of reduce_window" in caplog.text


def test_what_is_not_known_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        perf.work_depth(jnp.linalg.cholesky, of(4, 4))
    assert "work of cholesky is counted as" in caplog.text
    with pytest.raises(UnsupportedOp, match="while"):
        perf.work_depth(lambda x: jax.lax.while_loop(lambda x: x < 9, jnp.exp, x), of())
