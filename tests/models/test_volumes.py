"""Networks on volumes: sizes, and what blocks of a volume give."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from hpcjax import models, sharding
from hpcjax.core import ConfigError, trees
from hpcjax.models import _volume_unet
from hpcjax.models.modules import FLOAT32


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


@pytest.mark.slow
def test_a_level_of_the_unet_in_blocks_gives_what_the_whole_gives():
    axis = sharding.SPACE_AXES[0]
    mesh, blocks = sharding.make_mesh({axis: 2}), PartitionSpec(None, axis)
    keys = jax.random.split(jax.random.key(0), 3)
    low, skip, slope = (
        jax.random.normal(key, (1, side, side, side, channels))
        for key, side, channels in zip(keys, (2, 4, 4), (2, 3, 3), strict=True)
    )

    def level(space):
        return models.from_nnx(
            lambda: _volume_unet._Up(2, 3, "up_0", None, FLOAT32),
            call=lambda module, x, *, train, key: module(*x, train=train, space=space),
        )

    params, state = level(()).init(keys[0])

    def run(space, params, low, skip, slope):
        def loss(params):
            y, new = level(space).apply(params, state, (low, skip), train=True)
            return jnp.mean(y * slope), (y, new)

        return jax.grad(loss, has_aux=True)(params)

    def in_blocks(params, *rest):
        local = jax.lax.pcast(params, axis, to="varying")
        slopes, (y, new) = run((axis, None, None), local, *rest)
        return jax.lax.pmean(slopes, axis), (y, new)

    rows = PartitionSpec(), blocks, blocks, blocks
    mapped = jax.shard_map(
        in_blocks,
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows[0], (blocks, rows[0])),
    )
    ours = jax.jit(mapped)(params, low, skip, slope)
    theirs = jax.jit(functools.partial(run, ()))(params, low, skip, slope)
    for path, leaf in trees.flatten(theirs).items():
        found = trees.flatten(ours)[path]
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-5, err_msg=path)
