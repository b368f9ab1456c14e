"""Distillation: losses by hand in numpy, gradients, and what must not move."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from hpcjax import compress, models
from hpcjax.compress.distillation import distillation_loss
from hpcjax.core import ConfigError, Diverged
from tests.models.helpers import noisy

KINDS = ("forward", "reverse", "total_variation")


def by_hand(teacher, student, kind):
    """Loss and its gradient with respect to the student's logits, in float64."""
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (teacher, student))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    if kind == "forward":
        return (p * np.log(p / q)).sum(-1), q - p
    # dL/dq, through the softmax.
    if kind == "reverse":
        loss, outer = (q * np.log(q / p)).sum(-1), np.log(q / p) + 1
    else:
        loss, outer = np.abs(p - q).sum(-1) / 2, np.sign(q - p) / 2
    return loss, q * (outer - (outer * q).sum(-1, keepdims=True))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_equal_numpy(kind):
    rng = np.random.default_rng(0)
    teacher, student = 3 * rng.normal(size=(2, 4, 5, 9))
    loss, gradient = by_hand(teacher, student, kind)
    pair = [jnp.asarray(x, jnp.float32) for x in (teacher, student)]
    found = distillation_loss(*pair, kind)
    assert found.shape == (4, 5)
    np.testing.assert_allclose(found, loss, rtol=1e-4, atol=1e-6)
    own = jax.grad(lambda x: distillation_loss(pair[0], x, kind).sum())(pair[1])
    np.testing.assert_allclose(own, gradient, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(distillation_loss(pair[0], pair[0], kind), 0, atol=1e-6)


def pair(seed=0):
    """A teacher of three layers and a student of one, which begins as its first."""
    options = models.LLAMA
    teacher = models.CausalLmConfig(depth=3, width=8, heads=2, options=options)
    student = models.CausalLmConfig(depth=1, width=8, heads=2, options=options)
    params, _ = teacher.make((8,), 13).init(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: leaf.astype("float32"), noisy(params))
    small = {**params, "blocks": compress.prune_layers(params["blocks"], (0,))}
    return student.make((8,), 13), small, teacher.make((8,), 13), params


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, 13, (4, 6)).astype(np.int32)


@pytest.mark.slow
def test_a_step_of_sgd_is_the_gradient():
    student, small, teacher, params = pair()
    x = jnp.asarray(next(tokens()))

    def loss(small):
        said, _ = teacher.apply(params, {}, x, train=False)
        tried, _ = student.apply(small, {}, x, train=True)
        p, q = jax.nn.softmax(said), jax.nn.softmax(tried)
        return jnp.mean(jnp.sum(p * jnp.log(p / q), -1))

    gradient = jax.grad(loss)(small)
    # Two nearly equal distributions: differences of logarithms need more digits.
    logits = teacher.apply(params, {}, x, train=False)[0]
    tried = student.apply(small, {}, x, train=True)[0]
    p, q = (scipy.special.log_softmax(np.float64(z), -1) for z in (logits, tried))
    value = np.mean(np.sum(np.exp(p) * (p - q), -1))
    made = compress.distil(
        student, small, teacher, params, [x], optax.sgd(0.1), steps=1
    )
    assert made.losses == pytest.approx([value], rel=1e-5)
    jax.tree.map(
        lambda new, old, g: np.testing.assert_allclose(
            new, old - 0.1 * g, rtol=1e-4, atol=1e-6
        ),
        made.params,
        small,
        gradient,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_what_is_frozen_stays(kind):
    student, small, teacher, params = pair()
    before = jax.tree.map(np.array, (small, params))
    told = []
    made = compress.distil(
        student,
        small,
        teacher,
        params,
        tokens(),
        optax.adamw(1e-2, weight_decay=0.1),
        steps=40,
        frozen=("^embed/", "^head/"),
        divergence=kind,
        report=lambda step, loss: told.append((step, loss)),
    )
    assert made.losses[-5:].mean() < 0.5 * made.losses[:5].mean()
    assert told == list(zip(range(1, 41), made.losses.tolist(), strict=True))
    for part in ("embed", "head"):
        jax.tree.map(np.testing.assert_array_equal, made.params[part], small[part])
    for new, old in zip(
        *map(jax.tree.leaves, (made.params["blocks"], small["blocks"])), strict=True
    ):
        assert np.abs(new - old).max() > 0
    # Neither the caller's parameters nor the teacher's were given away.
    jax.tree.map(np.testing.assert_array_equal, before, (small, params))


def test_the_teacher_is_an_argument_of_the_program(monkeypatch):
    """Else every constant of it would be in the compiled program as well."""
    found = []
    jit = jax.jit

    def spied(function, **options):
        compiled = jit(function, **options)

        def call(*arguments):
            jaxpr = jax.make_jaxpr(function)(*arguments)
            found.extend(np.size(each) for each in jaxpr.consts)
            return compiled(*arguments)

        return call

    student, small, teacher, params = pair()
    monkeypatch.setattr(jax, "jit", spied)
    compress.distil(student, small, teacher, params, tokens(), optax.sgd(0.1), steps=1)
    assert max(found, default=0) < 13 * 8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, ConfigError, "steps=0"),
        ({"frozen": ("^embd/",)}, ConfigError, r"got '\^embd/'"),
        ({"frozen": ("(",)}, ConfigError, "regular expressions"),
        ({"frozen": (".",)}, ConfigError, "nothing to train"),
        ({"batches": list(itertools.islice(tokens(), 1))}, ConfigError, "got 1"),
        ({"optimizer": optax.sgd(float("inf"))}, Diverged, "step 2 is nan"),
    ],
)
def test_what_cannot_be_done_is_refused(change, error, message):
    given = {"batches": tokens(), "optimizer": optax.sgd(0.1), "steps": 2} | change
    with pytest.raises(error, match=message):
        compress.distil(*pair(), **given)


@pytest.mark.parametrize("change", [{"words": 12}, {"loss_chunk": 2}])
def test_logits_that_cannot_be_compared_are_refused(change):
    _, _, teacher, params = pair()
    config = models.CausalLmConfig(
        width=8, heads=2, options=models.LLAMA, loss_chunk=change.get("loss_chunk")
    )
    student = config.make((8,), change.get("words", 13))
    small, _ = student.init(jax.random.key(0))
    with pytest.raises(ConfigError, match="logits of the same words"):
        compress.distil(
            student, small, teacher, params, tokens(), optax.sgd(0.1), steps=1
        )


def test_an_unknown_divergence_is_refused():
    logits = jnp.zeros((1, 2))
    # Around the type checker of `make test-all`, which guards the argument as well.
    plain = inspect.unwrap(distillation_loss)
    with pytest.raises(ConfigError, match="did you mean 'forward'"):
        plain(logits, logits, "foward")
