"""Decompositions that are kept in 16 bits: numpy's bounds, and the bytes they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from hpcjax import models, perf
from hpcjax.core import ConfigError
from hpcjax.optim import kfac
from hpcjax.optim.kfac import _transform
from tests.optim.kfac import problems

DAMPING = 0.03
# Rounding to bfloat16, which has 8 bits of significand, changes a number by so much.
UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-24}
METHODS = {
    "inverse": {"method": "inverse"},
    "triangle": {"method": "inverse", "symmetry_aware": True},
    "quotients": {},
    "values": {"prediv": False},
}


def layer():
    """Plan, gradient and statistics of one layer of 5 rows and 3 columns."""
    rng = np.random.default_rng(0)
    chosen = kfac.plan(models.mlp((4,), 3, widths=()))
    grads = {"head": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)}}
    rows, columns = rng.normal(size=(9, 5)), rng.normal(size=(9, 3))
    taps = {"head": {"a": rows.T @ rows / 9, "g": columns.T @ columns / 9}}
    single = (
        jax.tree.map(lambda x: jnp.asarray(x, "float32"), t) for t in (grads, taps)
    )
    matrix = np.concatenate([grads["head"]["kernel"], grads["head"]["bias"][None]])
    return chosen, *single, matrix, taps["head"]


def exact(name, matrix, factors):
    """The update, and its largest change if each kept array changes by 1 in all parts.

    Entry by entry |ΔX| <= ((1 + u)ⁿ - 1) |left| (...) |right|, of n rounded arrays.
    """
    if name in ("inverse", "triangle"):
        left, right = (
            np.linalg.inv(factors[side] + DAMPING * np.eye(len(factors[side])))
            for side in "ag"
        )
        return left @ matrix @ right, abs(left) @ abs(matrix) @ abs(right), 2
    (values_a, left), (values_g, right) = (np.linalg.eigh(factors[s]) for s in "ag")
    quotients = 1 / (np.outer(values_a, values_g) + DAMPING)
    update = left @ (left.T @ matrix @ right * quotients) @ right.T
    left, right = abs(left), abs(right)
    bound = left @ (left.T @ abs(matrix) @ right * quotients) @ right.T
    # Of two rounded eigenvalues a quotient is rounded twice.
    return update, bound, {"quotients": 5, "values": 6}[name]


def take_step(chosen, grads, taps, **options):
    tx = kfac.scale_by_kfac(
        chosen,
        damping=DAMPING,
        kl_clip=None,
        factor_ramp=True,
        inv_update_steps=2,
        **options,
    )
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(grads), taps=taps, loss_terms=1)
    # The second step reads what the first one has kept.
    updates, state = update(grads, state, taps=taps, loss_terms=1)
    found = updates["head"]
    return np.concatenate([found["kernel"], found["bias"][None]]), state


@pytest.mark.quick("values")
@pytest.mark.parametrize("name", METHODS)
def test_sixteen_bits_cost_what_their_rounding_allows(name):
    chosen, grads, taps, matrix, factors = layer()
    expected, bound, arrays = exact(name, matrix, factors)
    for dtype, unit in UNIT.items():
        found, state = take_step(chosen, grads, taps, inv_dtype=dtype, **METHODS[name])
        kept = state.decompositions["layers"]
        assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype(dtype)}
        # float32 products and decompositions add errors of their own.
        allowed = (1 + unit) ** arrays - 1 + 2e-5
        error = abs(found - expected)
        assert (error <= allowed * bound).all()
        assert found.dtype == np.float32
    rounded, _ = take_step(chosen, grads, taps, inv_dtype="bfloat16", **METHODS[name])
    assert abs(rounded - expected).max() > 100 * error.max()


def test_inverses_are_rounded_once():
    chosen, grads, taps, _, factors = layer()
    options = {"method": "inverse", "inv_dtype": "bfloat16"}
    _, state = take_step(chosen, grads, taps, **options)
    for side in "ag":
        found = state.decompositions["layers"]["head/0"][f"inverse_{side}"]
        n = len(factors[side])
        expected = np.linalg.inv(factors[side] + DAMPING * np.eye(n))
        np.testing.assert_allclose(
            np.asarray(found, "float64"), expected, rtol=UNIT["bfloat16"] + 1e-4
        )


def test_what_sixteen_bits_cannot_hold_is_not_taken():
    chosen, grads, taps, _, _ = layer()
    options = {"method": "inverse", "inv_dtype": "float16", "factor_ramp": True}
    tx = kfac.scale_by_kfac(chosen, damping=1e-7, **options)
    singular = jax.tree.map(lambda f: f.at[0].set(0).at[:, 0].set(0), taps)
    _, state = tx.update(grads, tx.init(grads), taps=singular, loss_terms=1)
    assert int(state.skipped) == 1
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.decompositions))


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("fraction", [1 / 4, 1.0])
def test_on_a_grid_they_take_and_send_half_the_bytes(fraction):
    model = problems.mlp()
    chosen, grid = kfac.plan(model), kfac.Distribution(8, fraction)
    params, _ = model.init(jax.random.key(0))
    # Not bfloat16, which XLA sends as float32 between simulated devices.
    options = {"inv_dtype": "float16", "inv_update_steps": 2, "damping": 0.1}
    _, state, step = problems.on_grid(grid, chosen, model, params, **options)
    compiled = step.lower(params, state, *problems.batch(32)).compile()
    _, sometimes = perf.collectives_by_branch(compiled)
    sent = sum(c.pair_bytes for c in sometimes if c.kind == "collective-permute")
    made = kfac.KfacOptions(**options)
    assert sent == 2 * kfac.comm_volume(chosen, made, grid)["decompositions"]
    tx, alone = problems.alone(chosen, model, **options)
    single, local = params, tx.init(params)
    for _ in range(3):
        params, state = compiled(params, state, *problems.batch(32))
        single, local = alone(single, local, *problems.batch(32))
    words = kfac.memory_words(chosen, made, grid)
    taken = {"factors": 4 * words["factors"]}
    taken["decompositions"] = 2 * words["decompositions"]
    assert kfac.memory_usage(state) == taken
    # Float32 noise may round an entry to the next number of 16 bits.
    for left, right in zip(
        jax.tree.leaves(params), jax.tree.leaves(single), strict=True
    ):
        np.testing.assert_allclose(left, right, atol=2e-5)


def test_the_config_passes_it_on_and_refuses_other_types():
    config = kfac.KfacConfig(inv_dtype="bfloat16")
    tx, curvature = config.make(10, problems.mlp())
    params, _ = problems.mlp().init(jax.random.key(0))
    state = _transform.states(tx.init(params))[0]
    kept = state.decompositions["layers"]
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("bfloat16")}
    assert len(kept) == len(curvature.plan.blocks)
    with pytest.raises((ConfigError, TypeCheckError), match="inv_dtype"):
        kfac.KfacOptions(inv_dtype="int8")
