import math

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import layers
from hpcjax.layers._activations import ACTIVATIONS

EPS = np.finfo(np.float32).eps

ORACLES = {
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "gelu_erf": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def test_every_activation_has_an_oracle():
    assert set(ACTIVATIONS) == set(ORACLES)


@pytest.mark.parametrize("kind", sorted(ORACLES))
def test_activation_equals_its_formula(kind):
    x = np.linspace(-6, 6, 49, dtype=np.float32)
    expected = [ORACLES[kind](float(value)) for value in x]
    found = layers.activation(kind, jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=0, atol=32 * EPS)


def test_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'gelu_tanh'"):
        layers.activation("gelu_tan", jnp.ones(1))


def test_embedding_reads_rows_and_marks_indices_outside():
    table = jnp.arange(6.0).reshape(3, 2)
    found = layers.embedding(table, jnp.array([[2, 0], [3, -1]]))
    assert found[0].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert jnp.isnan(found[1]).all()
    assert layers.embedding(table, jnp.array([1]), compute="bfloat16").dtype == (
        jnp.bfloat16
    )
