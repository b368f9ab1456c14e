"""Rewinding on a network whose training is followed by hand, and early birds."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.core import ConfigError, masks
from hpcjax.optim import sparsify
from hpcjax.optim.sparsify._lottery import mask_distance

PARAMS = {
    "kernel": jnp.asarray(np.random.default_rng(0).normal(size=(10, 20)), jnp.float32),
    "bias": jnp.ones(3),
}
STEPS = 6


def train(params, kept, start, stop):
    """Each step adds a number that depends on the step, and masks."""
    for number in range(start, STEPS if stop is None else stop):
        moved = {k: v + 0.1 * np.cos(number + v) for k, v in params.items()}
        params = masks.apply(moved, kept)
    return params


@pytest.mark.quick("2")
@pytest.mark.acceptance("sparsity", 10)
@pytest.mark.parametrize("rewind_step", [0, 2])
def test_a_ticket_has_the_weights_of_the_step_it_goes_back_to(rewind_step):
    tickets = sparsify.lottery(
        train, PARAMS, rounds=4, rewind_step=rewind_step, exclude=("bias",)
    )
    assert len(tickets) == 5
    dense = {"kernel": None, "bias": None}
    early = train(PARAMS, dense, 0, rewind_step)
    for number, ticket in enumerate(tickets):
        kept = np.asarray(ticket.masks["kernel"])
        count = 200 * Fraction(4, 5) ** number
        assert kept.sum() == int(count + Fraction(1, 2))
        expected = np.where(kept, early["kernel"], 0)
        np.testing.assert_array_equal(ticket.params["kernel"], expected)
        np.testing.assert_array_equal(ticket.params["bias"], early["bias"])
        if number:
            before = tickets[number - 1]
            assert not np.any(kept & ~np.asarray(before.masks["kernel"]))
            size = np.where(
                before.masks["kernel"], np.abs(before.trained["kernel"]), -1
            )
            assert size[kept].min() >= np.sort(size, axis=None)[-kept.sum()]


@pytest.mark.acceptance("sparsity", 10)
def test_what_was_pruned_stays_so_where_what_is_left_is_zero():
    weights = {"kernel": jnp.arange(20.0).reshape(4, 5)}

    def train(params, kept, start, stop):
        """Of the dense network the last weights are the largest; then all are 0."""
        dense = bool(kept["kernel"].all())
        return params if dense else {"kernel": 0 * params["kernel"]}

    _, first, second = sparsify.lottery(train, weights, rounds=2, share=0.5)
    expected = np.arange(20).reshape(4, 5)
    np.testing.assert_array_equal(first.masks["kernel"], expected >= 10)
    wanted = (expected >= 10) & (expected < 15)
    np.testing.assert_array_equal(second.masks["kernel"], wanted)


def test_where_only_the_rate_goes_back_weights_go_on():
    _, ticket = sparsify.lottery(
        train, PARAMS, rounds=1, rewind="rate", include=("kernel",)
    )
    trained = train(PARAMS, {"kernel": None, "bias": None}, 0, None)
    expected = np.where(ticket.masks["kernel"], trained["kernel"], 0)
    np.testing.assert_allclose(ticket.params["kernel"], expected, rtol=1e-6)


def test_the_layers_of_a_stack_lose_the_same_share():
    params = {
        "w": PARAMS["kernel"].reshape(4, 5, 10)
        * jnp.array([1, 2, 4, 9.0])[:, None, None]
    }
    ticket = sparsify.lottery(train, params, rounds=1, stacked=("w",))[1]
    assert ticket.masks["w"].sum((1, 2)).tolist() == [40] * 4


def test_birds_are_early_when_masks_have_settled():
    rng = np.random.default_rng(0)
    base = rng.random(1000) < 0.5

    def changed(count):
        mask = base.copy()
        mask[:count] ^= True
        return {"w": mask, "b": None}

    assert mask_distance(changed(0), changed(120)) == 0.12
    moving = [changed(300), changed(0), changed(40), changed(60), changed(80)]
    assert not sparsify.is_early_bird(moving)
    assert sparsify.is_early_bird([*moving, changed(20)])
    assert not sparsify.is_early_bird([*moving, changed(100)])  # 0.1 from the second
    assert not sparsify.is_early_bird(moving[1:])


def test_lotteries_that_cannot_be_held_are_refused():
    with pytest.raises(ConfigError, match=r"share must be in \(0, 1\)"):
        sparsify.lottery(train, PARAMS, rounds=1, share=1.0)
    with pytest.raises(ConfigError, match="rewind must be one of"):
        sparsify.lottery(train, PARAMS, rounds=1, rewind="wait")  # pyrefly: ignore
