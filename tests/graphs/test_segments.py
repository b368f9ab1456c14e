"""Operations over segments, empty and masked ones too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import graphs
from hpcjax.core import ConfigError

SEGMENTS = jnp.array([0, 0, 2, 2, 2, 4])
MASK = jnp.array([True, False, True, True, False, False])
OPERATIONS = {
    "sum": (graphs.segment_sum, np.sum),
    "mean": (graphs.segment_mean, np.mean),
    "max": (graphs.segment_max, np.max),
}


def by_hand(values, function, mask=None):
    out = np.zeros((6, *values.shape[1:]))
    for segment in range(6):
        live = np.asarray(SEGMENTS) == segment
        if mask is not None:
            live &= np.asarray(mask)
        if live.any():
            out[segment] = function(values[live], axis=0)
    return out


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_segments_are_reduced_and_what_is_not_live_is_nothing(name, mask):
    operation, function = OPERATIONS[name]
    values = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32) - 3

    def run(values):
        return operation(values, SEGMENTS, 6, mask=mask, is_sorted=True)

    given = values.copy()
    if mask is not None:
        given[~np.asarray(mask)] = np.nan
    wanted = by_hand(values, function, mask)
    np.testing.assert_allclose(run(given), wanted, rtol=1e-6)
    shuffled = np.array([3, 5, 0, 2, 4, 1])
    unsorted = operation(
        values[shuffled],
        SEGMENTS[shuffled],
        6,
        mask=None if mask is None else mask[shuffled],
    )
    np.testing.assert_allclose(unsorted, wanted, rtol=1e-6)
    gradient = jax.grad(lambda values: jnp.sum(run(values) ** 2))(given)
    live = np.ones(6, bool) if mask is None else np.asarray(mask)
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~live] == 0).all()
    assert (np.abs(gradient[live]).sum(1) > 0).any()


@pytest.mark.acceptance("gnn-models", 5)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_softmax_sums_to_one_and_to_zero_where_nothing_is_live(scale):
    logits = scale * jnp.asarray(np.random.default_rng(1).normal(size=(6, 2)))

    def run(logits, mask):
        return graphs.segment_softmax(logits, SEGMENTS, 6, mask=mask, is_sorted=True)

    for mask in (None, MASK):
        shares = run(logits, mask)
        total = by_hand(np.asarray(shares), np.sum)
        live = by_hand(np.ones((6, 2)), np.sum, mask) > 0
        np.testing.assert_allclose(total, live, atol=1e-6)
        gradient = jax.grad(lambda x, mask=mask: jnp.sum(run(x, mask)[:, 0] ** 2))
        assert jnp.isfinite(gradient(logits)).all()
    assert (run(logits, MASK)[~MASK] == 0).all()
    powers = np.exp(np.float64(logits) / scale)
    small = run(logits / scale, None)
    wanted = powers / by_hand(powers, np.sum)[np.asarray(SEGMENTS)]
    np.testing.assert_allclose(small, wanted, rtol=1e-5)


def test_sums_of_low_precision_are_added_in_float32():
    ones = jnp.ones(5000, jnp.bfloat16)
    total = graphs.segment_sum(ones, jnp.zeros(5000, int), 1, is_sorted=True)
    assert total.dtype == jnp.bfloat16
    assert float(total[0]) == 4992  # 5000, rounded once


def test_what_is_in_no_segment_is_left_out():
    values = jnp.array([1.0, 2.0, 4.0])
    found = graphs.segment_sum(values, jnp.array([-1, 1, 2]), 2)
    assert found.tolist() == [0, 2]


@pytest.mark.parametrize("bytes_", [256 << 20, 100])
def test_few_segments_are_summed_by_products_on_a_gpu(monkeypatch, bytes_):
    from hpcjax.graphs import segments

    monkeypatch.setattr(segments, "_ONE_HOT_BYTES", bytes_)
    values = np.random.default_rng(2).normal(size=(50, 3)).astype(np.float32)
    numbers = jnp.asarray(np.random.default_rng(3).integers(-1, 6, 50))
    here = graphs.segment_sum(values, numbers, 5)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        there = graphs.segment_sum(values, numbers, 5)
        text = str(jax.make_jaxpr(lambda v: graphs.segment_sum(v, numbers, 5))(values))
        wide = str(
            jax.make_jaxpr(lambda v: graphs.segment_sum(v, numbers, 2000))(values)
        )
    np.testing.assert_allclose(there, here, atol=1e-6)
    assert "scatter" not in text
    assert "scatter" in wide


def test_sums_by_products_differ_between_devices_as_their_values_do(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    values = jnp.arange(8.0)

    def local(values):
        def loss(values):
            return jnp.sum(graphs.segment_sum(values, jnp.array([0, 1, 1, 2]), 3) ** 2)

        return jax.grad(loss)(values)

    run = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    found = jax.jit(run)(values)
    assert found.tolist() == [0, 6, 6, 6, 8, 22, 22, 14]
    empty = graphs.segment_sum(jnp.zeros((0, 2)), jnp.zeros(0, int), 3)
    assert empty.tolist() == [[0, 0]] * 3
    assert graphs.segment_sum(values, jnp.zeros(8, int), 0).shape == (0,)
    spoilt = graphs.segment_sum(jnp.array([jnp.nan, 1]), jnp.array([0, 1]), 2)
    assert jnp.isnan(spoilt).tolist() == [True, False]


def test_softmax_of_what_is_in_no_segment_is_nothing():
    def run(logits):
        return graphs.segment_softmax(logits, jnp.array([-1, 0, 1, 5]), 4)

    logits = jnp.array([100.0, 2.0, 3.0, 400.0])
    assert run(logits).tolist() == [0, 1, 1, 0]
    assert jax.grad(lambda x: run(x)[1])(logits).tolist() == [0, 0, 0, 0]


def test_bad_values_and_masks_are_refused():
    one = jnp.ones(3)
    with pytest.raises(ConfigError, match="must be floats: got int32"):
        graphs.segment_max(jnp.ones(3, int), jnp.zeros(3, int), 2)
    with pytest.raises(ConfigError, match=r"equally many: got \[3, 2\]"):
        graphs.segment_mean(one, jnp.zeros(2, int), 2)
    with pytest.raises(ConfigError, match=r"equally many: got \[3, 3, 1\]"):
        graphs.segment_sum(one, jnp.zeros(3, int), 2, mask=jnp.array([True]))
