"""The coordinate network against its formulas in plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from hpcjax import core, models
from hpcjax.core.errors import ConfigError
from hpcjax.models import _coord_net

# Frequencies and scales that the published network counts among its parameters.
FIXED = 16 + 128 + 3 * 128 + 4
SMALL = models.CoordNetConfig(
    width=4, depth=1, time_features=2, level_features=3, place_features=5
)
POINTS = np.array(
    [[3.0, 500, 20, 0], [3, 500, 20, 360], [3, 500, 90, 10], [3, 500, 90, 200]],
    np.float32,
)


@pytest.fixture(scope="module")
def net():
    model = SMALL.make()
    params, state = model.init(jax.random.key(0))
    # Norms that do something.
    draws = np.random.default_rng(0)
    state = jax.tree.map(lambda x: draws.uniform(0.5, 2, x.shape).astype("f"), state)
    return model, params, state


@pytest.mark.acceptance("nn-compression", 1)
@pytest.mark.parametrize(("width", "count"), [(32, 44_501), (512, 6_602_261)])
def test_it_has_as_many_parameters_as_published(width, count):
    assert models.num_params(models.coord_net(width=width)) + FIXED == count


@pytest.mark.acceptance("nn-compression", 3)
def test_longitudes_join_and_poles_are_points(net):
    model, params, state = net
    found = np.asarray(model.apply(params, state, POINTS, train=False)[0])
    first, joined, pole, turned = found
    assert first == pytest.approx(joined, rel=1e-6)
    assert pole == turned
    assert first != pole


def test_values_are_those_of_the_formulas(net):
    model, params, state = net
    found = np.asarray(model.apply(params, state, POINTS, train=False)[0])
    np.testing.assert_allclose(found, forward(params, state), atol=1e-5)


def forward(params, state):
    """The network in float64, from the paper's text."""
    t, p, y, x = POINTS.astype(np.float64).T
    y, x = np.deg2rad(y), np.deg2rad(x)
    sphere = np.stack([np.sin(y), np.cos(y) * np.sin(x), np.cos(y) * np.cos(x)], 1)
    parts = (t[:, None] / 60, p[:, None] / 100, sphere)
    phase = np.concatenate(
        [
            part @ _coord_net.draw_frequencies(count, part.shape[1], 1.6, [0, which]).T
            for which, (count, part) in enumerate(zip((2, 3, 5), parts, strict=True))
        ],
        axis=1,
    )
    h = dense(
        np.r_["1", np.sin(2 * np.pi * phase), np.cos(2 * np.pi * phase)], params["stem"]
    )
    h, block, norms = gelu(h), params["block_0"], state["block_0"]
    z = h
    for number in "12":
        norm, seen = block[f"norm{number}"], norms[f"norm{number}"]
        z = (z - seen["mean"]) / np.sqrt(seen["variance"] + 1e-5)
        z = dense(gelu(z * norm["scale"] + norm["bias"]), block[f"dense{number}"])
    return np.tanh(dense(gelu(h + z), params["head"]))[:, 0]


def dense(x, layer):
    return x @ np.asarray(layer["kernel"], np.float64) + layer.get("bias", 0)


def gelu(x):
    return x * (1 + special.erf(x / np.sqrt(2))) / 2


def test_frequencies_are_normal_and_of_the_seed():
    drawn = _coord_net.draw_frequencies(4000, 3, 1.6, [0, 2])
    assert stats.kstest(drawn.ravel() / 1.6, "norm").pvalue > 0.01
    assert drawn.std() == pytest.approx(1.6, rel=0.03)
    assert not np.array_equal(drawn, _coord_net.draw_frequencies(4000, 3, 1.6, [1, 2]))
    # Files are decoded with frequencies that are drawn again: these must stay.
    first = _coord_net.draw_frequencies(1, 3, 1.0, [0, 2])[0]
    np.testing.assert_allclose(first, [-1.4021866, 0.4564411, -0.4823113], rtol=1e-6)


def test_training_uses_and_updates_statistics(net):
    model, params, state = net
    _, new = model.apply(params, state, jnp.asarray(POINTS), train=True)
    old, new = core.trees.flatten(state), core.trees.flatten(new)
    assert all(np.abs(new[path] - old[path]).max() > 1e-4 for path in old)


def test_a_width_of_nothing_is_told():
    with pytest.raises(ConfigError, match="width"):
        models.coord_net(width=0)
