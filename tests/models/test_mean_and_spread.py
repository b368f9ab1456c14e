"""The bias network, the inception network, and both in one model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, data, layers, metrics, models, optim, train
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import PassResult
from hpcjax.data import objectives
from hpcjax.models import _bias_unet, globe_conv

SHAPES = {"members": (4, 8, 3, 1), "fields": (4, 8, 6)}
NAMES = ("mean x", "deviation x", "control x")
BIAS = models.BiasUNetConfig(levels=0, filters=2, features=3, norm="none")
SPREAD = models.SpreadNetConfig(base=2, blocks=1, norm="none")
NOTHING = data.Dataset(None, None, SHAPES, 2, objectives.POSTPROCESSING)


def draw(batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(batch, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }


def fill(model, value=None):
    """Parameters drawn by numpy, or all the same."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(1)

    def one(shape):
        drawn = rng.normal(size=shape.shape) / 3
        return jnp.asarray(drawn if value is None else value + 0 * drawn, "float32")

    return jax.tree.map(one, shapes)


def zeros(model):
    state = jax.eval_shape(model.init, jax.random.key(0))[1]
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)


@pytest.mark.acceptance("ens-postprocess", 1)
def test_a_step_is_the_middle_slice_of_one_in_three_dimensions():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 1, 5, 6, 3)), rng.normal(size=(3, 3, 3, 3, 4))
    x, kernel = (jnp.asarray(each, jnp.float32) for each in (x, kernel))
    step = models.from_nnx(
        lambda: globe_conv.GlobeConv(
            3, 4, padding="zero", policy=core.Policy(), last=True
        ),
        call=lambda step, x, *, train, key: step(x, train=train),
    )
    params = {"conv": {"kernel": kernel[1], "bias": jnp.zeros(4)}}
    found, _ = step.apply(params, {}, x[:, 0], train=True)
    whole = jax.lax.conv_general_dilated(
        x, kernel, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )
    np.testing.assert_allclose(found, whole[:, 0], atol=1e-5)


@pytest.mark.acceptance("ens-postprocess", 2)
@pytest.mark.parametrize("grid", [(361, 720), (181, 360), (32, 64)])
@pytest.mark.parametrize("levels", range(4))
def test_what_is_put_out_has_the_grids_shape(grid, levels):
    shapes = {"members": (*grid, 2, 1), "fields": (*grid, 5)}
    make = functools.partial(models.bias_unet, shapes, 2, levels=levels, filters=1)
    if levels and grid[0] % 2:
        with pytest.raises(ConfigError, match=rf"divide by {2**levels}.*{grid[0]}"):
            make()
    model = make(crop=True)
    x = {
        name: jax.ShapeDtypeStruct((1, *shape), "f4") for name, shape in shapes.items()
    }
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    y, _ = jax.eval_shape(
        lambda p, s, x: model.apply(p, s, x, train=True), params, state, x
    )
    assert y.mean.shape == y.std.shape == (1, *grid)


@pytest.mark.acceptance("ens-postprocess", 2, 3)
@pytest.mark.parametrize("lcn", [None, models.LcnConfig()])
def test_the_start_is_the_raw_ensemble_to_the_bit(lcn):
    model, x = (
        models.bias_unet(SHAPES, 2, levels=0, filters=1, norm="none", lcn=lcn),
        draw(),
    )
    params = fill(model)
    last = "head" if lcn else "out"
    params[last] = jax.tree.map(jnp.zeros_like, params[last])
    found, _ = model.apply(params, zeros(model), x, train=False)
    members = x["members"][..., 0]
    np.testing.assert_array_equal(found.mean, members.mean(-1))
    np.testing.assert_array_equal(found.std, members.std(-1))


@pytest.mark.acceptance("ens-postprocess", 3)
@pytest.mark.parametrize("size", [1, 3])
def test_the_head_weighs_each_place_in_its_own_way(size):
    lcn = models.LcnConfig(alpha=0.5, kernel=size)
    head = models.from_nnx(
        lambda: _bias_unet._PlaceHead(2, (4, 5), lcn, core.Policy()),
        call=lambda head, x, *, train, key: head(x, train=train),
    )
    params, state = fill(head), zeros(head)
    u = np.random.default_rng(0).normal(size=(3, 4, 5, 2))
    found, after = head.apply(params, state, jnp.asarray(u, "f4"), train=True)
    w, b = (np.asarray(params[name], np.float64) for name in ("kernel", "bias"))
    half = size // 2
    wide = np.pad(u, ((0, 0), (half, half), (half, half), (0, 0)))
    for i, j in np.ndindex(4, 5):
        window = wide[:, i : i + size, j : j + size]
        own = np.einsum("nuvc,uvc->n", window, w[i, j, ..., 0]) + b[i, j]
        np.testing.assert_allclose(found[:, i, j], own, atol=1e-5)
    added = float(core.added_loss(after))
    apart = sum(
        np.abs(each - np.roll(each, 1, 1)).mean() + np.abs(each[1:] - each[:-1]).mean()
        for each in (w, b)
    )
    assert added == pytest.approx(0.5 * apart / (2 * size**2 + 2), rel=1e-5)


@pytest.mark.acceptance("ens-postprocess", 3)
def test_the_published_code_leaves_alpha_out_and_joins_the_poles():
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(4, 5, 1, 1, 2, 1)), rng.normal(size=(4, 5))

    def both(each, wrap):
        down = np.roll(each, 1, 0) - each if wrap else each[1:] - each[:-1]
        return np.abs(down).mean() + np.abs(np.roll(each, 1, 1) - each).mean()

    for options, strength, wrap in (
        ({"alpha": 2.0}, 2.0, False),
        ({"alpha": 2.0, "lat_wrap": True}, 2.0, True),
        ({"alpha": 2.0, "paper_code": True}, 1.0, True),
    ):
        found = _bias_unet._penalise(
            jnp.asarray(w), jnp.asarray(b), models.LcnConfig(**options)
        )
        expected = strength * (both(w, wrap) + both(b, wrap)) / 4
        assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(layers.difference_of_places(jnp.ones((4, 5)))) == 0
    assert np.isfinite(layers.difference_of_places(jnp.asarray(b[:1], "f4")))


def count_resnet2d(base, blocks, own, spreads):
    """Weights, biases, and two numbers of a norm for each channel it is of."""
    beside = spreads + 3
    total = own * 3 + 3 * 3
    total += 9 * beside * base + 3 * base
    wide = base
    for at in range(blocks):
        n, inputs = base + 4 * at, wide + beside
        total += sum(size**2 * inputs * n + n for size in (3, 5, 7)) + 2 * 3 * n
        total += (inputs + 3 * n) * n + n
        wide = n
    return total + 9 * (base + wide) * 8 + 3 * 8 + 8 * 4 + 4 + 5 + 1


def count_simple(base, own):
    total = 9 * own * base + 3 * base + 9 * base * (base * 3 // 2) + 3 * (base * 3 // 2)
    wide = base * 3 // 2 + 1
    for part in (4, 5, 7, 7, 5, 4):
        each = base * part // 8
        total += sum(size**2 * wide * each + each for size in (1, 3, 5, 7)) + 6 * each
        wide = 4 * each
    return total + wide + 2


@pytest.mark.acceptance("ens-postprocess", 6)
def test_sizes_are_those_that_are_counted_by_hand():
    # Three leads, two levels, seven variables.
    names = [
        f"{lead} h {level} hPa {each} {name}"
        for lead in (0, 24, 48)
        for level in (500, 850)
        for name in "tqwuvzd"
        for each in ("mean", "deviation", "control")
    ]
    shapes = {"members": (32, 64, 5, 7), "fields": (32, 64, len(names) + 3)}
    make = functools.partial(models.spread_net, shapes, 2, channels=names)
    assert models.num_params(make()) == count_resnet2d(64, 10, 42, 42)
    assert models.num_params(make(variant="simple")) == count_simple(64, 84)


@pytest.mark.acceptance("ens-postprocess", 6)
@pytest.mark.parametrize("variant", ["resnet2d", "simple"])
def test_channels_are_chosen_by_name(variant):
    """Those of other names count for nothing, wherever they stand."""
    x = draw()
    make = functools.partial(
        models.spread_net, variant=variant, base=8, blocks=1, norm="none"
    )
    model = make(SHAPES, 2, channels=NAMES)
    params = fill(model)
    expected, _ = model.apply(params, {}, x, train=False)
    own, order = x["fields"], (1, 2, 0)
    turned = own[..., jnp.array([*order, 3, 4, 5])]
    # Variables may have names of several words.
    names = [f"24 h 500 hPa {NAMES[at]} of mean control" for at in order]
    found, _ = make(SHAPES, 2, channels=names).apply(
        params, {}, x | {"fields": turned}, train=False
    )
    np.testing.assert_array_equal(found.std, expected.std)
    for at, counts in enumerate((False, True, True)):
        moved = x | {"fields": own.at[..., at].add(1)}
        other, _ = model.apply(params, {}, moved, train=False)
        assert (not np.allclose(other.std, expected.std, atol=1e-3)) == counts


@pytest.mark.acceptance("ens-postprocess", 7)
@pytest.mark.parametrize("positive", ["softplus", "abs"])
def test_the_spread_learns_by_the_crps_alone(positive):
    x, y = draw(), jnp.asarray(np.random.default_rng(3).normal(size=(2, 4, 8)), "f4")
    spread = models.SpreadNetConfig(base=2, blocks=1, norm="none", positive=positive)
    made = models.MeanAndSpreadConfig(mean=BIAS, spread=spread)
    model = made.make(SHAPES, 2, channels=NAMES, joint=True)
    params, state = fill(model), zeros(model)
    batch = {"y": y, "spread": y, "efi": y, "area": jnp.ones_like(y)}
    batch |= {"scale": jnp.ones(2), "asked": jnp.tile(jnp.array([1.0, 0, 0]), (2, 1))}

    def loss(params, shift):
        outputs, new = model.apply(params, state, x, train=True)
        moved = outputs._replace(std=outputs.std + shift)
        total = metrics.gaussian_totals(moved, batch).sums["loss"]
        return total + core.added_loss(new), outputs

    slopes, outputs = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
        params, jnp.zeros_like(y)
    )
    assert (np.asarray(outputs.std) >= 0).all()
    # d CRPS / dσ = 2 φ(z) − 1/√π, of means over points.
    z = (np.asarray(y) - outputs.mean) / outputs.std
    expected = 2 * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi)
    np.testing.assert_allclose(slopes[1], expected / 32, atol=1e-5)
    assert all(not leaf.any() for leaf in jax.tree.leaves(slopes[0]["mean"]))
    assert all(leaf.any() for leaf in jax.tree.leaves(slopes[0]["spread"]["head"]))


def test_dates_are_learnt_around_means_that_do_not_know_them():
    made = models.MeanAndSpreadConfig(mean=BIAS, spread=models.RawConfig())
    model = made.make(SHAPES, 2, channels=NAMES, folds=3)
    x, y = draw(4), jnp.zeros((4, 4, 8))
    params, state = fill(model), zeros(model)
    fold = jnp.array([0, 1, 1, -1])
    batch = {"y": y, "spread": y, "efi": y, "area": jnp.ones_like(y)}
    batch |= {"scale": jnp.full(4, 2.0)}

    def score(params, asked, **said):
        outputs, _ = model.apply(params, state, x, train=True)
        own = {**batch, **said, "asked": jnp.tile(jnp.array(asked, "f4"), (4, 1))}
        return metrics.gaussian_totals(outputs, own).sums, outputs

    @jax.jit
    def learn(params):
        return jax.value_and_grad(lambda p: score(p, (0, 1, 1), fold=fold)[0]["loss"])(
            params
        )

    sums, outputs = jax.jit(lambda p: score(p, (1, 0, 0), around=fold))(params)
    means = [np.asarray(each) for each in (*outputs.apart, outputs.mean)]
    around = np.stack([means[0][0], means[1][1], means[1][2], means[3][3]])
    crps = metrics.crps_gaussian(around, outputs.std, y)
    assert float(sums["loss"]) == pytest.approx(2 * 4 * float(crps.mean()), rel=1e-5)
    loss, slopes = learn(params)
    squares = [4 * (each**2).mean((1, 2)) for each in means]
    spread = 4 * (np.asarray(outputs.std) ** 2).mean((1, 2))
    expected = (squares[3] + spread).sum()
    for at in range(3):
        expected += 1.5 * squares[at][np.asarray(fold) != at].sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert {f"fold_{at}" for at in range(3)} < set(slopes)
    own = batch | {"asked": jnp.zeros((4, 3)), "around": fold}
    with pytest.raises(ConfigError, match="model=mean_and_spread"):
        metrics.gaussian_totals(models.Gaussian(y, y + 1), own)


def test_nothing_moves_means_that_are_as_they_are():
    made = models.MeanAndSpreadConfig(mean=BIAS, spread=SPREAD)
    model = made.make(SHAPES, 2, channels=NAMES, folds=2, joint=True)
    params = fill(model)
    decaying = optim.data_parallel(optax.adamw(0.1, weight_decay=0.5), mean=None)
    method = train.supervised(model, decaying, NOTHING).method
    begun, state = method.init(params)
    slopes = PassResult(jax.tree.map(jnp.ones_like, params), {}, {}, {})
    moved, _ = jax.jit(method.update)(slopes, state, begun)
    for name, each in moved.items():
        held = jax.tree.map(np.array_equal, each, params[name])
        assert set(jax.tree.leaves(held)) == {name != "spread"}
    with pytest.raises(ConfigError, match=r"match no parameter: .*other"):
        optim.holding(decaying, ("^other/",)).init(params)
    free = made.make(SHAPES, 2, channels=NAMES, folds=2)
    assert not free.frozen


def test_blocks_that_are_computed_again_are_not_kept():
    """Not seen in XLA's memory on a CPU, which joins both computations again."""

    def prepare(remat, shapes, blocks):
        options = {"base": 4, "blocks": blocks, "remat": remat, "channels": NAMES}
        model = models.spread_net(shapes, 2, **options)
        state = jax.tree.map(lambda leaf: leaf + 1, zeros(model))

        def run(params, x):
            return model.apply(params, state, x, train=True)[0].std.mean()

        return model, run

    wide = {"members": (361, 720, 2, 1), "fields": (361, 720, 6)}
    x = {n: jax.ShapeDtypeStruct((1, *shape), "f4") for n, shape in wide.items()}
    kept, slopes = [], []
    for remat in (False, True):
        model, run = prepare(remat, wide, 4)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        back = jax.eval_shape(lambda p, x, run=run: jax.vjp(run, p, x)[1], params, x)
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(back)))
        model, run = prepare(remat, SHAPES, 1)
        slopes.append(jax.jit(jax.grad(run))(fill(model), draw()))
    assert kept[1] <= 0.7 * kept[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), *slopes
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.LcnConfig(kernel=2), "kernel must be odd"),
        (lambda: models.spread_net(SHAPES, 2), "channels must name"),
        (
            lambda: models.spread_net(SHAPES, 2, channels=("mean t", "t", "of z")),
            "must each say one of mean",
        ),
        (
            lambda: models.spread_net(
                SHAPES, 2, channels=NAMES, variant="simple", base=6
            ),
            "base must divide by 8",
        ),
        (
            lambda: models.MeanAndSpreadConfig(mean=models.MlpConfig()),
            "mean must be a model of forecasts",
        ),
        (
            lambda: layers.inception(
                jnp.ones((1, 4, 4, 1)), [jnp.ones((2, 2, 1, 1))], [jnp.ones(1)]
            ),
            "odd number of points",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
