import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import models
from hpcjax.core import trees
from tests.models import helpers


def conv(x, params):
    """3×3 with a border of zeros, [height, width, channels], tap by tap."""
    kernel = params["kernel"]
    wide = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    height, width = x.shape[:2]
    return sum(
        wide[u : u + height, v : v + width] @ kernel[u, v]
        for u in range(3)
        for v in range(3)
    )


def group_norm(x, params, size=16):
    size = np.gcd(x.shape[-1], size)
    parts = []
    for first in range(0, x.shape[-1], size):
        part = x[..., first : first + size]
        parts.append((part - part.mean()) / np.sqrt(part.var() + 1e-5))
    return np.concatenate(parts, -1) * params["scale"] + params["bias"]


def double(x, params):
    for number in (1, 2):
        x = conv(x, params[f"conv{number}"])
        x = np.maximum(group_norm(x, params[f"norm{number}"]), 0)
    return x


def forward(params, x, depth, level=0):
    """Features of one image after the way down from `level` and up again, float64."""
    beside = double(x, params[f"down_{level}"])
    if level == depth:
        return beside
    rows = np.maximum(beside[::2], beside[1::2])
    below = forward(params, np.maximum(rows[:, ::2], rows[:, 1::2]), depth, level + 1)
    up = params[f"up_{level}"]
    doubled = conv(np.kron(below, np.ones((2, 2, 1))), up["conv"])
    return double(np.concatenate([beside, doubled], -1), up["double"])


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 24])
def test_logits_equal_numpy(width):
    config = models.UNetConfig(depth=2, width=width)
    model = config.make((8, 12, 3), 4)
    params, state = model.init(jax.random.key(0))
    params = jax.tree.map(lambda a: a.astype("float32"), helpers.noisy(params))
    x = np.random.default_rng(0).normal(size=(2, 8, 12, 3)).astype(np.float32)
    found, _ = model.apply(params, state, jnp.asarray(x), train=True)
    assert state == {}
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    for row, image in enumerate(x):
        expected = forward(wide, image, 2)
        expected = expected @ wide["head"]["kernel"] + wide["head"]["bias"]
        atol = 1e-5 * (1 + np.abs(expected).max())
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=atol)


@pytest.mark.slow
def test_every_pixel_sees_beside_itself_and_far():
    model = models.unet((32, 32, 1), 1, depth=3, width=8)
    params, state = model.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 32, 1)), "float32")

    def one(x):
        return model.apply(params, state, x, train=False)[0][0, 9, 20, 0]

    influence = np.abs(jax.grad(one)(x)[0, ..., 0])
    near = influence[7:12, 18:23].mean()
    assert near > 3 * influence[24:].mean()
    assert influence[24:].mean() > 0


def test_parameter_count():
    """Of convolutions, 9 each; norms, 2 a channel; and the head."""
    params, _ = jax.eval_shape(models.unet((64, 64, 3), 2).init, jax.random.key(0))
    widths = [16, 32, 64, 128]
    count = 16 * 2 + 2
    for inputs, wide in zip([3, *widths], widths, strict=False):
        count += 9 * (inputs * wide + wide**2) + 4 * wide
    for wide in widths[:-1]:
        count += 9 * (2 * wide * wide + 2 * wide * wide + wide**2) + 4 * wide
    assert trees.num_params(params) == count
