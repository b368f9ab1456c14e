"""Transforms of all sorts, for tests of who may be cut, compressed or cached."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from hpcjax import optim


def each(function):
    """Returns a transform of each gradient by itself."""
    return optax.stateless(lambda updates, params=None: jax.tree.map(function, updates))


def in_steps(tx, count, **options):
    return optax.MultiSteps(tx, count, **options).gradient_transformation()


def called(gradient):
    """Holds its size in a constant of a program of its own."""
    held = np.asarray([1 / gradient.size], np.float32)
    return jax.jit(lambda x: x * held)(gradient)


def looped(gradient):
    """Finds its size in the body of a loop over numbers."""

    def body(_, total):
        return total + jnp.ones(gradient.shape).sum()

    return gradient / jax.lax.fori_loop(0, 3, body, 1.0)


def mapped(gradient):
    sums = jax.lax.map(lambda x: x * jnp.ones(gradient.shape).sum(), jnp.ones(3))
    return gradient * sums[0]


def by_number():
    """Returns a transform by the numbers of parts."""

    def update(updates, state, params=None, *, cut=(), **extra):
        del params, extra
        axes = next(iter(cut.values())) if cut else ()
        number = jax.lax.axis_index(axes) if axes else 0
        return jax.tree.map(lambda g: g * (1 + number), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def by_floats():
    """Adds up gradients and hands them on when a number in float32 has come to 50."""

    def init(params):
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        del params
        count, total = state
        total = jax.tree.map(jnp.add, total, updates)
        due = count + 1.25 >= 50
        kept = jax.tree.map(lambda t: jnp.where(due, 0, t), total)
        handed = jax.tree.map(lambda t: jnp.where(due, t, 0), total)
        return handed, (jnp.where(due, 0, count + 1.25), kept)

    return optax.GradientTransformation(init, update)


def with_params(function):
    """Returns a transform of each gradient and parameter."""
    return optax.stateless(
        lambda updates, params=None: jax.tree.map(function, updates, params)
    )


def by_parts(function):
    """Returns a transform of each gradient that may ask which part it has."""

    def update(updates, state, params=None, *, cut=(), **extra):
        del params, cut, extra
        return jax.tree.map(function, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def by_looped_number(gradient):
    """Asks for the number of a part in the body of a loop over numbers."""

    def body(_, total):
        return total + jax.lax.axis_index("part")

    return gradient * jax.lax.fori_loop(0, 3, body, 1)


def told_by_host(gradient):
    """Gets a number from a function that may hold anything."""
    number = jax.ShapeDtypeStruct((), "float32")
    return gradient * jax.pure_callback(lambda: np.float32(gradient.size), number)


def with_one_of_three(updates, count, params):
    del params

    def change(gradient):
        cases = [jnp.zeros_like(gradient)] * 2 + [jnp.ones_like(gradient)]
        return gradient * jax.lax.select_n(jnp.clip(count, 0, 2), *cases).sum()

    return jax.tree.map(change, updates), count + 1


def least_at_first(params):
    """Returns a count, and a number that is of all places."""
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "shape")]
    return jnp.zeros(()), sum((jnp.min(x) for x in leaves), jnp.zeros(()))


@jax.jit
def is_due(count):
    return jnp.sin(count) > 0


def with_two_counts(updates, counts, params):
    """Adds 1 if one count is not due, and another one is: by one jitted function."""
    del params
    first, second = counts
    one = jnp.where(is_due(first), 0.0, 1.0) * jnp.where(is_due(second), 1.0, 0.0)
    return jax.tree.map(lambda g: g + one, updates), (first + 1, second + 2)


def with_powers(updates, number, params):
    """Decays where the square of a number is small, and its cube is not."""
    both = jnp.where(number**2 > 3, 0.0, 1.0) * jnp.where(number**3 > 3, 1.0, 0.0)
    return jax.tree.map(lambda g, p: g + both * p, updates, params), number - 1


def with_mask(updates, mask, params):
    """Decays if a mask holds both."""
    both = jnp.where(mask, 1.0, 0.0).max() * jnp.where(mask, 0.0, 1.0).max()
    return jax.tree.map(lambda g, p: g + both * p, updates, params), mask


def with_turned_mask(updates, mask, params):
    """Decays if a mask is not symmetric."""
    uneven = (jnp.where(mask, 1.0, 0.0) * jnp.where(mask.T, 0.0, 1.0)).sum()
    return jax.tree.map(lambda g, p: g + uneven * p, updates, params), mask


def with_rows(function):
    """Keeps for each row something that changes by itself."""

    def update(updates, rows, params):
        del params
        return updates, jax.tree.map(function, rows)

    return optax.GradientTransformation(lambda params: params, update)


def numbers(count, dtype="float32"):
    """Returns a first state of numbers."""
    one = jnp.zeros((), dtype)
    return lambda _: one if count == 1 else (one,) * count


KNOTS = optax.piecewise_interpolate_schedule("linear", 0.1, {5: 0.5, 9: 0.1})
NOISE = jax.random.key(0)
# Right on parts: they work on elements, and on norms by `cut`.
CUTTABLE = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9, nesterov=True),
    "our sgd": lambda: optim.sgd(0.1, clip_norm=1.0, momentum=0.9),
    "our lamb": lambda: optim.lamb(0.1, clip_norm=1.0),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adan": lambda: optax.adan(0.1),
    "nadam": lambda: optax.nadam(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "adabelief": lambda: optax.adabelief(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "radam": lambda: optax.radam(0.1),
    "yogi": lambda: optax.yogi(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(0.1),
    "lion": lambda: optax.lion(0.1),
    "sign": lambda: optax.sign_sgd(0.1),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
    "ademamix": lambda: contrib.ademamix(0.1),
    "acprop": lambda: contrib.acprop(0.1),
    "cocob": contrib.cocob,
    "schedule free": lambda: contrib.schedule_free_adamw(0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "in steps": lambda: in_steps(optax.adam(0.1), 2),
    "clipped": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "trace": lambda: optax.trace(0.9),
    "ema": lambda: optax.ema(0.9),
    "positive": optax.keep_params_nonnegative,
    "cosine": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    "one cycle": lambda: optax.sgd(optax.cosine_onecycle_schedule(100, 0.1)),
    "knots": lambda: optax.sgd(KNOTS),
}
# Wrong on parts, or not to be told.
WHOLE = {
    "by size": lambda: each(lambda g: g / g.size),
    "by fan-in": lambda: each(lambda g: g / g.shape[-1]),
    "by rows": lambda: each(lambda g: g / g.shape[0]),
    "by root": lambda: each(lambda g: g * g.size**-0.5),
    "size and 1": lambda: each(lambda g: g / jnp.ones(g.shape[-1] + 1).sum()),
    "diagonal": lambda: each(lambda g: g / jnp.trace(jnp.eye(g.shape[-1] + 1))),
    "half": lambda: each(lambda g: g * jnp.ones(g.shape[-1] // 2 + 1).sum()),
    "eighth": lambda: each(lambda g: g * jnp.ones(g.shape[-1] // 8 + 1).sum()),
    "called": lambda: each(called),
    "looped": lambda: each(looped),
    "mapped": lambda: each(mapped),
    "number": by_number,
    "if large": lambda: each(lambda g: g if g.size > 30 else 2 * g),
    "sign if large": lambda: with_params(lambda g, p: g - p if g.size > 30 else p - g),
    "dtype if large": lambda: each(
        lambda g: g.astype("bfloat16" if g.size > 30 else "float16").astype(g.dtype)
    ),
    "looped number": lambda: by_parts(by_looped_number),
    "scattered": lambda: by_parts(
        lambda g: g * jax.lax.psum_scatter(jnp.arange(2.0), "part")
    ),
    "other axis": lambda: by_parts(lambda g: g / jax.lax.psum(g.sum(), "other")),
    "told by host": lambda: each(told_by_host),
    "branches": lambda: optax.GradientTransformation(
        numbers(1, "int32"),
        lambda updates, count, params: (
            jax.tree.map(
                lambda g: jax.lax.switch(count, [jnp.sin, jnp.cos] * g.shape[-1], g),
                updates,
            ),
            count,
        ),
    ),
    "not done": lambda: each(lambda g: g // 0 if 1 // (g.size - g.size) else g),
    "row 0": lambda: each(lambda g: g.at[0].multiply(0.0)),
    "row 0 set": lambda: each(lambda g: g.at[0].set(0.0)),
    "row 0 least": lambda: each(lambda g: g.at[0].min(0.0)),
    "first": lambda: each(lambda g: g - g[..., :1]),
    "places": lambda: each(lambda g: g * np.arange(g.shape[-1])),
    "counted": lambda: each(lambda g: g * jnp.arange(g.shape[-1])),
    "sums": lambda: each(lambda g: jnp.cumsum(g, -1)),
    "turned": lambda: each(lambda g: g[..., ::-1]),
    "rolled": lambda: each(lambda g: jnp.roll(g, 1)),
    "sorted": lambda: each(jnp.sort),
    "median": lambda: each(lambda g: g - jnp.median(g)),
    "mean": lambda: each(lambda g: g - g.mean()),
    "norm": lambda: each(lambda g: g / jnp.linalg.norm(g)),
    "greatest": lambda: each(lambda g: g / jnp.abs(g).max()),
    "softmax": lambda: each(jax.nn.softmax),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "adafactor whole": lambda: optax.adafactor(0.1, factored=False),
    "block rms": optax.scale_by_param_block_rms,
    "clip rms": lambda: optax.clip_by_block_rms(1.0),
    "clip norm": lambda: optax.clip_by_global_norm(1.0),
    "centralize": optax.centralize,
    "if finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "zero nans": optax.zero_nans,
    "adaptive clip": lambda: optax.adaptive_grad_clip(0.1),
    "noise": lambda: optax.noisy_sgd(0.1, key=NOISE),
    "prodigy": contrib.prodigy,
    "dog": lambda: contrib.dog(0.1),
    "muon": lambda: contrib.muon(0.1),
    "lbfgs": optax.scale_by_lbfgs,
    "jorge": lambda: optim.jorge(0.1),
    "shampoo": lambda: optim.shampoo(0.1),
}
# Right for some steps, and then not.
LATE = {
    "mean in steps": lambda: in_steps(each(lambda g: g - g.mean()), 4),
    "adafactor in steps": lambda: in_steps(optax.adafactor(0.1, factored=False), 3),
    "mean from step 3": lambda: optax.conditionally_transform(
        each(lambda g: g - g.mean()), lambda step, **_: step >= 3
    ),
    "one of three": lambda: optax.GradientTransformation(
        numbers(1, "int32"), with_one_of_three
    ),
    "least at first": lambda: optax.GradientTransformation(
        least_at_first,
        lambda updates, state, params: (
            jax.tree.map(lambda g: g * state[1], updates),
            (state[0] + 1, state[1]),
        ),
    ),
    "two counts": lambda: optax.GradientTransformation(numbers(2), with_two_counts),
    "another state": lambda: optax.GradientTransformation(
        numbers(1), lambda updates, number, params: (updates, {"a": number})
    ),
    "warm-up": lambda: optax.chain(
        optax.scale_by_param_block_rms(),
        optax.scale_by_schedule(lambda step: jnp.where(step < 5, 0.0, 0.1)),
    ),
}
# Of matrices something else than of vectors of what is kept of them.
BY_RANK = {
    "decay of matrices": lambda: optax.adamw(
        0.1, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)
    ),
    "norm of rows": lambda: each(
        lambda g: g / jnp.sqrt(jnp.sum(g * g, -1, keepdims=True))
    ),
    "if large": lambda: each(lambda g: g if g.size > 100 else 2 * g),
    "sum from step 20": lambda: optax.conditionally_transform(
        each(lambda g: g - g.sum()), lambda step, **_: step >= 20
    ),
    "least": lambda: each(lambda g: g / g.max()),
    "noise": lambda: optax.add_noise(0.1, 0.5, NOISE),
    "filled": lambda: each(lambda g: g * jnp.full(g.shape, 2.0 if g.ndim > 1 else 3.0)),
    "sign of matrices": lambda: with_params(
        lambda g, p: g - p if g.ndim > 1 else p - g
    ),
    "divided by 0": lambda: each(
        lambda g: g + jax.lax.rem(0 * g.astype("int32") + 1, 0)
    ),
    "tiny": lambda: each(lambda g: jnp.where(g + 1e-40 > 0, 0.0, 1.0)),
    "half up": lambda: each(lambda g: jax.lax.round(g + 0.5)),
    "not a number": lambda: each(
        lambda g: jnp.where((g / jnp.abs(g)).astype("int32") == 0, 1.0, g)
    ),
    "a ones": lambda: each(lambda g: g + 1),
}
# Rows that have no gradient change in a later step.
AFTERWARDS = {
    "in 2 steps": lambda: in_steps(optax.sgd(0.1), 2),
    "in 3 steps": lambda: in_steps(optax.sgd(0.1), 3, use_grad_mean=False),
    "in 40 steps": lambda: optax.chain(optax.apply_every(40), optax.sgd(0.1)),
    "late decay": lambda: optax.chain(
        optax.add_decayed_weights(lambda step: jnp.where(step > 100, 0.1, 0.0)),
        optax.sgd(0.1),
    ),
    "counted in floats": by_floats,
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "average": lambda: optax.ema(0.9),
    "powers": lambda: optax.GradientTransformation(numbers(1), with_powers),
    "mask": lambda: optax.GradientTransformation(
        lambda _: jnp.zeros(4, bool), with_mask
    ),
    "turned mask": lambda: optax.GradientTransformation(
        lambda _: jnp.zeros((4, 4), bool), with_turned_mask
    ),
    "greatest of rows": lambda: with_rows(
        lambda row: jnp.broadcast_to(row.max(-1, keepdims=True), row.shape)
    ),
    "rounded": lambda: with_rows(lambda row: jax.lax.reduce_precision(row, 8, 7)),
}
# Of these norms are those of all that is kept, so that they may be compressed.
NORMS = "lars", "lamb", "fromage", "clip norm", "norm", "greatest", "if finite"
