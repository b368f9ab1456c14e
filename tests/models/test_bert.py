import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, models
from hpcjax.core import trees
from tests.models import helpers
from tests.models.registry import REGISTRY
from tests.oracles import transformer as oracle

NAMES = ["bert", "bert_remat"]


def forward(params, x, config):
    """Logits and the inputs of every block of one sequence, in numpy float64."""
    tokens, types, real = x.T
    embedded = params["embed"]["table"][tokens] + params["types"]["table"][types]
    y = embedded + params["position"]["table"][: len(x)]
    y = oracle.norm(y, params["embed_norm"], 1e-12)
    hidden = [y]
    for index in range(config.depth):
        p = jax.tree.map(lambda a, i=index: a[i], params["blocks"])
        y = oracle.layer(y, p, config, models.BERT, real[None] != 0)
        hidden.append(y)
    order = oracle.dense(np.tanh(oracle.dense(y[0], params["pooler"])), params["order"])
    words = oracle.ACTIVATE["gelu_erf"](oracle.dense(y, params["transform"]))
    words = oracle.norm(words, params["transform_norm"], 1e-12)
    words = words @ params["embed"]["table"].T + params["decoder_bias"]
    return words, order, np.stack(hidden)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_hidden_states_equal_numpy(name):
    config = REGISTRY[name].config
    model, params, state, x, _ = helpers.instance(name)
    places = ("blocks/attention/query", "transform")
    taps = {path: core.Tap(forward=lambda x, y: x) for path in places}
    found, after = model.apply(params, state, x, train=False, taps=taps)
    seen = [after[core.SEEN][path] for path in places]
    hidden = np.concatenate([seen[0], seen[1][None]])
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    for row, example in enumerate(np.asarray(x)):
        words, order, states = forward(wide, example, config)
        pairs = (
            (found.tokens[row], words),
            (found.order[row], order),
            (hidden[:, row], states),
        )
        for ours, expected in pairs:
            atol = 1e-5 * (1 + np.abs(expected).max())
            np.testing.assert_allclose(ours, expected, rtol=0, atol=atol)


@pytest.mark.slow
def test_padding_is_seen_from_nowhere_and_all_else_from_everywhere():
    model, params, state, *_ = helpers.instance("bert")
    real = jnp.array([1, 1, 1, 1, 0, 0])
    x = jnp.stack([jnp.arange(6), jnp.zeros(6, int), real], axis=-1)[None]

    def words(table):
        changed = params | {"position": {"table": table}}
        return model.apply(changed, state, x, train=True)[0].tokens[0, :, 1]

    influence = jnp.abs(jax.jacrev(words)(params["position"]["table"])).sum(-1)
    assert (influence[:4, :4] > 0).all()
    assert (influence[:4, 4:] == 0).all()


def test_tokens_alone_are_all_real_and_of_the_first_type():
    model, params, state, x, _ = helpers.instance("bert")
    full = x.at[..., 1].set(0).at[..., 2].set(1)
    found, _ = model.apply(params, state, x[..., 0], train=False)
    expected, _ = model.apply(params, state, full, train=False)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "width", "heads", "count"),
    # Encoder with pooler, the two heads: d² + 3d + V, and 2d + 2.
    [
        (12, 768, 12, 109_482_240 + 768**2 + 3 * 768 + 30522 + 2 * 768 + 2),
        (24, 1024, 16, 335_141_888 + 1024**2 + 3 * 1024 + 30522 + 2 * 1024 + 2),
    ],
)
def test_full_size_parameter_counts(depth, width, heads, count):
    config = models.BertConfig(depth=depth, width=width, heads=heads)
    params, _ = jax.eval_shape(config.make((512, 3), 30522).init, jax.random.key(0))
    assert trees.num_params(params) == count


def test_a_sequence_longer_than_the_table_is_refused():
    model, params, state, *_ = helpers.instance("bert")
    with pytest.raises(ValueError, match="7 tokens, context=6"):
        model.apply(params, state, jnp.zeros((1, 7, 3), jnp.int32), train=False)
