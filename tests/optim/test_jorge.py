"""The transform as a whole: against numpy and exact Shampoo, guards, long runs."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

from hpcjax import optim
from hpcjax.core.errors import ConfigError
from tests.oracles import jorge as oracle


def _run(tx, gradients):
    """Feeds `gradients` [steps, m, n]; returns updates and states, stacked."""

    def body(state, gradient):
        updates, state = tx.update({"w": gradient}, state)
        return state, (updates["w"], state)

    start = tx.init({"w": gradients[0]})
    return jax.jit(lambda: jax.lax.scan(body, start, gradients))()[1]


@pytest.mark.quick("2")
@pytest.mark.acceptance("jorge", 5)
@pytest.mark.parametrize("seed", range(3))
def test_direction_is_that_of_exact_shampoo(seed):
    gradients = oracle.problem(seed, 300)
    with jax.enable_x64(True):
        tx = optim.scale_by_jorge(b1=0.0, update_every=1)
        updates, states = _run(tx, jnp.asarray(gradients))
        got = np.asarray(updates)
        factors = optim.factors_of(states)
        left = np.asarray(factors["w/left/0"].beta2)
        right = np.asarray(factors["w/right/0"].beta2)
    exact = oracle.exact_shampoo(gradients, left, right)
    cosines = [oracle.cosine(a, b) for a, b in zip(got, exact, strict=True)]
    assert min(cosines[99:]) >= 0.95


@pytest.mark.slow
def test_slow_start_shows_in_nu_and_init_grad_shortens_it():
    gradients = jnp.asarray(oracle.problem(0, 300), jnp.float32)
    nus = {}
    for init in ("eps", "grad"):
        _, states = _run(optim.scale_by_jorge(update_every=1, init=init), gradients)
        nus[init] = np.asarray(optim.factors_of(states)["w/left/0"].nu)
    assert 1e4 < nus["eps"][99] < 1e5
    assert nus["eps"][299] < 50
    assert nus["grad"][29] < 50


@pytest.mark.slow
@pytest.mark.acceptance("jorge", 6)
def test_guard_against_a_row_without_gradient():
    gradients = oracle.problem(0, 5000)
    gradients[:, 7] = 0
    scaled = jnp.asarray([1e-4, 1, 1e3], jnp.float32)

    def final(max_gain, rows):
        tx = optim.scale_by_jorge(b1=0.0, update_every=1, max_gain=max_gain)
        given = jnp.asarray(gradients[:, rows], jnp.float32)

        def body(carry, gradient):
            updates, state = tx.update({"w": carry[0] * gradient}, carry[1])
            return (carry[0], state), updates["w"]

        def run(scale):
            return jax.lax.scan(body, (scale, tx.init({"w": given[0]})), given)

        (_, states), updates = jax.jit(jax.vmap(run))(scaled)
        matrices = [factor.matrix for factor in optim.factors_of(states).values()]
        return np.asarray(updates), [np.asarray(matrix) for matrix in matrices]

    everything, others = np.arange(16), np.delete(np.arange(16), 7)
    got, matrices = final(1.0, everything)
    assert all(np.isfinite(matrix).all() for matrix in matrices)
    assert np.isfinite(got).all()
    expected, _ = final(1.0, others)
    difference = np.linalg.norm(got[:, :, others] - expected, axis=(2, 3))
    relative = difference / np.linalg.norm(expected, axis=(2, 3))
    assert relative.max() < 1e-3
    _, unguarded = final(None, everything)
    assert not np.isfinite(unguarded[0]).all(axis=(1, 2)).any()


@pytest.mark.acceptance("jorge", 6)
def test_softmax_head_stalls_but_descends():
    gradients = oracle.problem(0, 3000)
    gradients -= gradients.mean(axis=1, keepdims=True)
    tx = optim.scale_by_jorge(b1=0.0, update_every=1)
    updates, states = _run(tx, jnp.asarray(gradients, jnp.float32))
    assert np.isfinite(np.asarray(updates)).all()
    inner = (np.asarray(updates, np.float64) * gradients).sum(axis=(1, 2))
    assert (inner > 0).all()
    assert (np.asarray(states.metrics["jorge_sign"]) == 1).all()
    stalled = np.asarray(optim.factors_of(states)["w/left/0"].stalled)
    assert stalled[-1]
    assert not stalled[:1000].any()


def test_slow_updates_are_counted_in_a_row():
    options = optim.JorgeOptions()
    state = optim.jorge_factor_init(4, options)
    rng = np.random.default_rng(0)
    gradient = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    counts = []
    for scale in (1e3, 1e3, 1.0, 1e3):
        # L̂ stays: how slow an update is depends on the gradient's size alone.
        state = optim.jorge_factor_update(
            state._replace(matrix=jnp.eye(4)), scale * gradient, options
        )
        counts.append(int(state.slow_updates))
    assert counts == [1, 2, 0, 1]


def _regression(seed):
    """Curvature XᵀX/N and start W₀ − W of the least-squares problem of check 10."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(32, 32)))
    x = rng.normal(size=(512, 32)) * np.sqrt(np.geomspace(1, 1e-4, 32)) @ basis.T
    return x.T @ x / 512, -rng.normal(size=(32, 8))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _steps_to_target(make, curvatures, rates, limit, starts):
    """Steps until the loss is 1e-4 of its start, `[seeds, rates]`."""

    def run(curvature, error, rate):
        tx = make(rate)

        def loss(w):
            return 0.5 * jnp.sum(w * (curvature @ w))

        def body(carry):
            w, state, count = carry
            updates, state = tx.update(curvature @ w, state, w)
            return optax.apply_updates(w, updates), state, count + 1

        def going(carry):
            return (loss(carry[0]) > 1e-4 * loss(error)) & (carry[2] < limit)

        start = (error, tx.init(error), jnp.zeros((), jnp.int32))
        return jax.lax.while_loop(going, body, start)[2]

    over_rates = jax.vmap(run, (None, None, 0))
    return jax.vmap(over_rates, (0, 0, None))(curvatures, starts, rates)


@pytest.mark.slow
@pytest.mark.acceptance("jorge", 10)
def test_fewer_steps_than_sgd_on_ill_conditioned_regression():
    curvatures, starts = zip(*[_regression(seed) for seed in range(5)], strict=True)
    limit = 20_000
    with jax.enable_x64(True):
        problem = jnp.asarray(np.stack(curvatures)), jnp.asarray([0.1, 0.3, 1.0])
        begin = jnp.asarray(np.stack(starts))
        slow = _steps_to_target(
            functools.partial(optim.sgd, momentum=0.9), *problem, limit, begin
        )
        fast = _steps_to_target(
            functools.partial(optim.jorge, update_every=1), *problem, limit, begin
        )
    assert max(slow.max(), fast.max()) < limit
    ratio = np.asarray(fast) / np.asarray(slow)
    assert np.exp(np.log(ratio).mean()) <= 0.85


@pytest.mark.acceptance("jorge", 6)
def test_zero_gradients_take_no_step_once_the_momenta_are_zero():
    tx = optim.jorge(0.1, update_every=1, graft_momentum=0.0, b1=0.0)
    params = {"w": jnp.ones((4, 6))}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for gradient in jnp.asarray(oracle.problem(0, 5, (4, 6)), jnp.float32):
        _, state = update({"w": gradient}, state, params)
    before = optim.factors_of(state)
    for _ in range(100):
        updates, state = update({"w": jnp.zeros((4, 6))}, state, params)
        np.testing.assert_array_equal(updates["w"], 0)
    after = optim.factors_of(state)
    for name, factor in before.items():
        np.testing.assert_array_equal(after[name].matrix, factor.matrix)


@pytest.mark.parametrize("init", ["eps", "grad"])
def test_whole_optimizer_equals_numpy(init):
    gradients = oracle.problem(4, 12, (5, 7))
    reference = oracle.Jorge((5, 7), lr=0.1, weight_decay=0.02, init=init)
    params = np.random.default_rng(0).normal(size=(5, 7))
    with jax.enable_x64(True):
        tx = optim.jorge(0.1, weight_decay=0.02, update_every=1, init=init)
        got = jnp.asarray(params)
        state, update = tx.init(got), jax.jit(tx.update)
        for gradient in gradients:
            updates, state = update(jnp.asarray(gradient), state, got)
            got = optax.apply_updates(got, updates)
            params = reference.step(params, gradient)
    np.testing.assert_allclose(got, params, rtol=1e-9, atol=1e-12)


def _final(tx, params, steps=4, seed=0):
    """Updates after `steps` steps on fixed random gradients."""
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(steps):
        rng = np.random.default_rng([seed, step])
        gradients = jax.tree.map(
            lambda p, rng=rng: jnp.asarray(rng.normal(size=p.shape), p.dtype), params
        )
        updates, state = update(gradients, state, params)
    return updates, state


def test_convolution_kernel_is_a_matrix_by_output_channel():
    tx = optim.scale_by_jorge(update_every=1)
    conv, state = _final(tx, {"w": jnp.ones((3, 3, 2, 5))})
    dense, _ = _final(tx, {"w": jnp.ones((18, 5))})
    np.testing.assert_allclose(conv["w"].reshape(18, 5), dense["w"], rtol=1e-5)
    shapes = {n: f.matrix.shape for n, f in optim.factors_of(state).items()}
    assert shapes == {"w/left/0": (18, 18), "w/right/0": (5, 5)}


@pytest.mark.slow
def test_long_sides_have_no_preconditioner_and_vectors_plain_momentum():
    tx = optim.scale_by_jorge(b1=0.5, update_every=1, max_dim=4)
    params = {"a": jnp.ones((4, 5)), "b": jnp.ones(3), "c": jnp.ones((5, 6))}
    state = tx.init(params)
    assert list(optim.factors_of(state)) == ["a/left/0"]
    gradient = jax.tree.map(lambda p: 2 * p, params)
    updates, state = tx.update(gradient, state)
    np.testing.assert_array_equal(updates["b"], 1)
    np.testing.assert_array_equal(updates["c"], 1)
    root = optim.factors_of(state)["a/left/0"].matrix
    np.testing.assert_allclose(updates["a"], 0.5 * root @ gradient["a"], rtol=1e-5)


def test_blocks_are_preconditioned_as_matrices_of_their_own():
    tx = optim.scale_by_jorge(update_every=1, block_size=3)
    update = jax.jit(tx.update)
    whole = {"w": jnp.ones((5, 3))}
    state = tx.init(whole)
    rng = np.random.default_rng(0)
    gradients = jnp.asarray(rng.normal(size=(3, 5, 3)), jnp.float32)
    parts = {"top": jnp.ones((3, 3)), "rest": jnp.ones((2, 3))}
    other = tx.init(parts)
    for gradient in gradients:
        updates, state = update({"w": gradient}, state)
        cut = {"top": gradient[:3], "rest": gradient[3:]}
        expected, other = update(cut, other)
    np.testing.assert_allclose(updates["w"][:3], expected["top"], rtol=1e-5)
    np.testing.assert_allclose(updates["w"][3:], expected["rest"], rtol=1e-5)
    assert len(optim.factors_of(state)) == 4


def test_equal_shapes_together_equal_each_alone():
    tx = optim.scale_by_jorge(update_every=1)
    update = jax.jit(tx.update)
    grads = jnp.asarray(oracle.problem(0, 3, (4, 4)), jnp.float32)
    together, _ = update(
        dict(zip("abc", grads, strict=True)),
        tx.init(dict.fromkeys("abc", grads[0])),
    )
    for name, gradient in zip("abc", grads, strict=True):
        alone, _ = update({"w": gradient}, tx.init({"w": gradient}))
        np.testing.assert_allclose(together[name], alone["w"], rtol=1e-5, atol=1e-4)


def test_factors_are_updated_on_their_turn_and_applied_stale():
    tx = optim.scale_by_jorge(update_every=3, start_step=2)
    grads = jnp.asarray(oracle.problem(0, 9, (4, 5)), jnp.float32)
    _, states = _run(tx, grads)
    done = np.asarray(optim.factors_of(states)["w/left/0"].updates)
    assert done.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_init_grad_starts_before_the_updates_do():
    tx = optim.scale_by_jorge(update_every=5, start_step=2, init="grad")
    grads = oracle.problem(0, 4, (4, 5))
    grads[0] = 0
    _, states = _run(tx, jnp.asarray(grads, jnp.float32))
    left = optim.factors_of(states)["w/left/0"]
    assert np.asarray(left.updates).tolist() == [-1, 0, 1, 1]
    started = (np.sum(grads[1] ** 2) / 4) ** -0.25 * np.eye(4)
    np.testing.assert_allclose(left.matrix[1], started, rtol=1e-5)


def test_series_that_does_not_converge_warns_and_is_counted():
    tx = optim.scale_by_jorge(update_every=1, beta2=0.9)
    params = {"w": jnp.ones((3, 3))}

    def step():
        _, state = jax.jit(tx.update)(params, tx.init(params))
        jax.effects_barrier()
        return state

    with pytest.warns(UserWarning, match="does not converge"):
        state = step()
    assert float(optim.inspect(state)["jorge_diverged_updates"]) == 2


def test_fixed_beta2_within_range_is_silent(recwarn):
    tx = optim.scale_by_jorge(update_every=1, beta2=0.999, init="grad")
    params = {"w": jnp.eye(3)}
    _, state = jax.jit(tx.update)(params, tx.init(params))
    jax.effects_barrier()
    assert float(optim.inspect(state)["jorge_diverged_updates"]) == 0
    assert not [w for w in recwarn if "converge" in str(w.message)]


def test_dead_row_raises_the_logged_gain_unless_guarded():
    gradients = oracle.problem(0, 60, (4, 6))
    gradients[:, 1] = 0
    given = jnp.asarray(gradients, jnp.float32)
    gains = [
        _run(optim.scale_by_jorge(update_every=1, max_gain=gain), given)[1].metrics
        for gain in (None, 0.1)
    ]
    unguarded, guarded = (np.asarray(m["jorge_gain"]) for m in gains)
    assert unguarded[-1] > 0.2
    assert 0.1 < guarded[-1] < 0.15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": 4}, r"order must be 1 \| 2 \| 3: got order=4"),
        ({"beta2": 1.0}, "beta2 must be"),
        ({"beta2": -0.5}, "beta2 must be"),
        ({"update_every": 0}, "update_every must be"),
        ({"max_gain": 0.0}, "max_gain must be"),
        ({"block_size": 0}, "block_size must be"),
        ({"eps": 0.0}, "eps must be"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        optim.JorgeConfig(**options)


@pytest.mark.parametrize(
    "options",
    [{"init": "gradd"}, {"precision": "hihg"}, {"graft": "adam"}, {"beta2": "dynamc"}],
)
def test_unknown_choices_are_refused(options):
    # Run-time type checks, which tests may turn on, refuse the value first.
    with pytest.raises((ConfigError, jaxtyping.TypeCheckError)):
        optim.JorgeConfig(**options)


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="max_dims"):
        optim.scale_by_jorge(max_dims=3)
