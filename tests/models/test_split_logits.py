"""Logits that devices share out, against whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import metrics, models


def test_scores_and_slopes_are_those_of_whole_logits():
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(40, 12))).astype(np.float32)
    # The largest twice, on one device and on two; and numbers that overflow exp.
    logits[0, [2, 3]] = logits[1, [2, 9]] = 50
    logits[2] += 1e4
    labels = rng.integers(0, 12, 40).astype(np.int32)
    labels[:2] = 2
    mesh = jax.make_mesh((4,), ("col",), axis_types=(AxisType.Auto,))

    def local(values, labels):
        def loss(values):
            split = models.SplitLogits(values=values, axes=("col",))
            totals = metrics.label_totals(split, {"y": labels})
            return totals.sums["loss"], totals.sums["error"]

        return jax.value_and_grad(loss, has_aux=True)(values)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(None, "col"), P()),
        out_specs=(P(), P(None, "col")),
    )
    (loss, error), slope = jax.jit(run)(logits, labels)

    def whole(values):
        totals = metrics.label_totals(values, {"y": labels})
        return totals.sums["loss"], totals.sums["error"]

    (wanted, errors), slopes = jax.value_and_grad(whole, has_aux=True)(
        jnp.asarray(logits)
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert error == errors
    np.testing.assert_allclose(slope, slopes, atol=1e-6)
    labels[:3] = (-1, 12, 3)
    (loss, _), _ = jax.jit(run)(logits, labels)
    assert jnp.isnan(loss)
