"""Networks on volumes: sizes, and what blocks of a volume give."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import models
from hpcjax.core import ConfigError


@pytest.mark.acceptance("hybrid3dcnn", 5)
def test_counts_are_the_papers_at_every_width():
    for side in (32, 64, 128, 256, 512):
        assert models.num_params(models.cosmoflow((side,) * 3 + (4,), 4)) == 9_437_636
    unet = models.volume_unet((32, 32, 32, 1), 3)
    assert models.num_params(unet) == 19_070_560
    # MLPerf's, by hand: five convolutions with biases, and 4^3 x 512 values.
    widths = (4, 32, 64, 128, 256, 512)
    convs = sum(27 * a * b + b for a, b in itertools.pairwise(widths))
    dense = 64 * 512 * 128 + 128 + 128 * 64 + 64 + 64 * 4 + 4
    other = models.cosmoflow((128, 128, 128, 4), 4, variant="mlperf")
    assert models.num_params(other) == convs + dense


def test_the_published_order_of_layers():
    shapes = jax.eval_shape(
        models.cosmoflow((128, 128, 128, 4), 4).init, jax.random.key(0)
    )[0]
    sizes = [shapes[f"conv_{n}"]["kernel"].shape[-1] for n in range(1, 8)]
    assert sizes == [16, 32, 64, 128, 256, 256, 256]
    assert shapes["fc_1"]["kernel"].shape == (2048, 2048)
    params, _ = models.cosmoflow((8, 8, 8, 1), 4, width_divisor=16).init(
        jax.random.key(0)
    )
    assert np.all(params["fc_1"]["bias"] == np.float32(0.1))


def test_dropout_needs_a_key_and_is_of_the_row():
    model = models.cosmoflow((8, 8, 8, 1), 4, width_divisor=16)
    params, state = model.init(jax.random.key(0))
    x = jnp.ones((2, 8, 8, 8, 1))
    run = functools.partial(model.apply, params, state, x)
    with pytest.raises(ConfigError, match=r"dropout=0\.2 needs a key"):
        run(train=True)
    plain, _ = run(train=False)
    dropped, _ = run(train=True, key=jax.random.key(1))
    again, _ = run(train=True, key=jax.random.key(1))
    assert np.array_equal(dropped, again)
    assert np.array_equal(plain[0], plain[1])
    assert not np.array_equal(dropped[0], dropped[1])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.cosmoflow((12, 12, 12, 4), 4), "power of two.*side=12"),
        (lambda: models.cosmoflow((8, 8, 4), 4), "inputs must be"),
        (lambda: models.cosmoflow((8,) * 3 + (1,), 4, width_divisor=3), "must divide"),
        (lambda: models.cosmoflow((8,) * 3 + (1,), 4, dropout=1.0), "dropout"),
        (lambda: models.volume_unet((12, 8, 8, 1), 3), "sides that 8 divides"),
        (lambda: models.volume_unet((8, 8, 8, 1), 3, width_divisor=5), "must divide"),
    ],
)
def test_wrong_sizes_are_told(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
