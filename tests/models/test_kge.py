"""Embeddings of knowledge graphs against numpy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, metrics, models
from hpcjax.core.errors import ConfigError
from tests.models import helpers

DECODERS = ("distmult", "complex", "transe", "dot")


def score(decoder, h, r, t):
    """One link's score by the formula of the decoder."""
    if decoder == "complex":
        parts = [np.array(v[: len(v) // 2]) + 1j * v[len(v) // 2 :] for v in (h, r, t)]
        return np.real(np.sum(parts[0] * parts[1] * np.conj(parts[2])))
    return {
        "distmult": lambda: np.sum(h * r * t),
        "transe": lambda: -np.linalg.norm(h + r - t),
        "dot": lambda: np.sum(h * t),
    }[decoder]()


def every_score(decoder, params, triple, side):
    """Scores of all entities as tail (side 0), or as head."""
    table = params["table"]
    head, relation, tail = triple
    given = table[(head, tail)[side]]
    vectors = params.get(("relations", "inverses")[side], np.zeros((9, 4)))
    return np.array([score(decoder, given, vectors[relation], each) for each in table])


@pytest.mark.parametrize("decoder", DECODERS)
def test_training_scores_a_link_among_its_negatives(decoder):
    model, params, state, x, _ = helpers.instance(decoder)
    x = jax.tree.map(np.array, x)
    x["triples"][..., ::2] = np.arange(24).reshape(4, 3, 2) % 9
    x["negatives"][:] = np.arange(40).reshape(4, 2, 5) % 9
    scored, hidden = np.ones((4, 3), "f4"), np.zeros((4, 2, 3, 5), bool)
    scored[1, 2], hidden[2, 0, 1, 3] = 0, True
    batch = {"x": x, "scored": scored, "hidden": hidden}

    def loss(params):
        outputs, _ = model.apply(params, state, x, train=True)
        return metrics.link_totals(outputs, batch).means()["loss"]

    found, grads = jax.value_and_grad(loss)(params)
    params = jax.tree.map(np.float64, params)
    losses, masked = [], 0
    for row, edge in np.argwhere(scored):
        triple = x["triples"][row, edge]
        for side in range(2):
            scores, right = (
                every_score(decoder, params, triple, side),
                triple[2 - 2 * side],
            )
            wrong = x["negatives"][row, side]
            kept = wrong[(wrong != right) & ~hidden[row, side, edge]]
            masked += len(wrong) - len(kept)
            among = np.array([scores[right], *scores[kept]])
            losses.append(np.log(np.exp(among).sum()) - scores[right])
    assert masked > 1
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("decoder", DECODERS)
def test_held_out_links_are_ranked_among_all_entities(decoder):
    model, params, state, *_ = helpers.instance(decoder)
    rng = np.random.default_rng(3)
    triples = rng.integers([9, 2, 9], size=(2, 3, 3)).astype("i4")
    known = rng.integers(0, 10, (2, 3, 2, 4)).astype("i4")  # 9 is no entity
    batch = {"x": {"triples": triples}, "scored": np.ones((2, 3), "f4"), "known": known}
    batch["scored"][1, 1] = 0
    outputs, _ = model.apply(params, state, batch["x"], train=False)
    totals = metrics.link_totals(outputs, {**batch, "weight": np.float32([1, 1])})
    params = jax.tree.map(np.float64, params)
    ranks, losses = [], []
    for row, edge in np.argwhere(batch["scored"]):
        triple = triples[row, edge]
        for side in range(2):
            right = triple[2 - 2 * side]
            scores = every_score(decoder, params, triple, side)
            others = set(range(9)) - {right, *known[row, edge, side]}
            ranks.append(1 + sum(scores[each] > scores[right] for each in others))
            among = np.exp([scores[right], *(scores[each] for each in others)])
            losses.append(np.log(among.sum()) - scores[right])
    assert float(totals.count) == 5
    assert len(set(ranks)) > 2
    means = {name: float(value) for name, value in totals.means().items()}
    np.testing.assert_allclose(means["mrr"], np.mean(1 / np.array(ranks)), rtol=1e-6)
    assert means["hits10"] == 1  # there are nine
    np.testing.assert_allclose(means["loss"], np.mean(losses), rtol=1e-5)


def test_a_number_that_is_no_row_is_no_other_row():
    model, params, state, x, _ = helpers.instance("distmult")
    triples = np.array(x["triples"])
    triples[0, 0, 2], triples[1, 0, 1] = 9, -1
    outputs, _ = model.apply(params, state, {**x, "triples": triples}, train=False)
    right = np.isnan(outputs.score_answers())
    assert right[0, :, 0].all()
    assert right[1, :, 0].all()
    assert right.sum() == 4


def test_equal_vectors_have_the_gradient_zero_of_a_distance():
    model, params, state, x, labels = helpers.instance("transe")
    same = jax.tree.map(jnp.zeros_like, params)
    grads = jax.grad(lambda p: helpers.loss(model, p, state, x, labels)[0])(same)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_what_no_embedding_can_be_of_is_refused():
    with pytest.raises(ConfigError, match="width of decoder=complex must be even"):
        models.KgeConfig(decoder="complex", width=5)
    shapes = {"triples": (3, 3), "negatives": (2, 5)}
    with pytest.raises(ConfigError, match=r"tables must be \(entities, relations\)"):
        models.kge(shapes, 8, tables=(9, 2), policy=core.Policy())
