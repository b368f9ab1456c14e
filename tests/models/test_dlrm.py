"""DLRM against its definition in numpy, and what it refuses."""

import itertools

import jax
import numpy as np
import pytest

from hpcjax import core, metrics, models
from tests.models import helpers


def perceptron(params, x, last):
    layers = [params[f"dense_{index}"] for index in range(len(params))]
    for index, layer in enumerate(layers):
        x = x @ np.float64(layer["kernel"]) + np.float64(layer["bias"])
        x = np.maximum(x, 0) if last or index < len(layers) - 1 else x
    return x


def test_the_logit_is_that_of_vectors_and_their_products():
    model, params, state, x, _ = helpers.instance("dlrm")
    found, _ = model.apply(params, state, x, train=False)
    params = jax.device_get(params)
    for number, (dense, ids) in enumerate(zip(x["dense"], x["ids"], strict=True)):
        vector = perceptron(params["bottom"], np.float64(dense), True)
        vectors = [vector, *np.float64(params["table"])[np.asarray(ids)]]
        pairs = [a @ b for b, a in itertools.combinations(vectors, 2)]
        # By rows of the lower triangle: (1, 0), (2, 0), (2, 1).
        assert len(pairs) == 3
        seen = np.concatenate([vector, pairs])
        logit = perceptron(params["top"], seen, False)
        np.testing.assert_allclose(found[number], logit[0], rtol=1e-5)


def test_rows_are_drawn_by_their_tables_and_layers_as_published():
    shapes = {"dense": (13,), "ids": (2,)}
    model = models.dlrm(shapes, 1, tables=(4, 400), bottom=(8,), top=(256, 256))
    params = jax.device_get(model.init(jax.random.key(0))[0])
    for rows, bound in ((params["table"][:4], 0.5), (params["table"][4:], 0.05)):
        assert 0.9 * bound < np.abs(rows).max() <= bound
    layer = params["top"]["dense_1"]
    assert abs(layer["kernel"].std() - np.sqrt(2 / 512)) < 1e-3
    assert abs(layer["bias"].std() - np.sqrt(1 / 256)) < 0.02


def test_a_number_that_is_no_row_gives_nan():
    model, params, state, x, _ = helpers.instance("dlrm")
    ids = np.array(x["ids"])
    ids[0, 0], ids[1, 1] = 11, -1
    found, _ = model.apply(params, state, {**x, "ids": ids}, train=False)
    assert np.isnan(found).tolist() == [True, True, False, False]


def test_clicks_are_scored_by_cross_entropy():
    logits, labels = np.float32([-90, 0.5, 90, -1]), np.array([0, 1, 0, 1])
    weight = np.float32([1, 1, 1, 0])
    totals = metrics.click_totals(logits, {"y": labels, "weight": weight})
    np.testing.assert_allclose(totals.sums["loss"], np.log1p(np.exp(-0.5)) + 90)
    assert (float(totals.sums["error"]), float(totals.count)) == (1, 3)
    plain = metrics.click_totals(logits, {"y": labels})
    np.testing.assert_allclose(
        plain.sums["loss"], np.log1p(np.exp(-0.5)) + 90 + np.log1p(np.exp(1)), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "tables", "message"),
    [
        ((3,), 1, (5,), r"inputs must be .*inputs=\(3,\)"),
        ({"dense": (3,)}, 1, (5,), "inputs must be"),
        ({"dense": (3,), "ids": (2,)}, 2, (5,), "outputs=2"),
        ({"dense": (3,), "ids": (2,)}, 1, (), "must be a table"),
        ({"dense": (3,), "ids": (2,)}, 1, (5, 0), r"tables\[1\].*0"),
    ],
)
def test_what_is_no_click_is_refused(inputs, outputs, tables, message):
    with pytest.raises(core.ConfigError, match=message):
        models.dlrm(inputs, outputs, tables=tables)
