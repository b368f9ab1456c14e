"""Checkpoints against `transformers` on torch: random models, both ways."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, data, layers, metrics, models
from hpcjax.core import trees
from hpcjax.models import pretrained
from hpcjax.runs import directory
from tests.models.checkpoints import CASES, VOCABULARY, build

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="the oracle of these tests is torch")
transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
TIME = 11
CAUSAL = [name for name in CASES if not name.startswith("bert")]
every = pytest.mark.parametrize("case", list(CASES), indirect=True)


def batch_of(name, batch=3):
    """Tokens; for BERT with types, and with padding of another length in each row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, VOCABULARY, (batch, TIME)).astype(np.int32)
    if not name.startswith("bert"):
        return tokens
    types = (np.arange(TIME) > 5).astype(np.int32) + np.zeros_like(tokens)
    real = (np.arange(TIME) < TIME - 3 * np.arange(batch)[:, None]).astype(np.int32)
    return np.stack([tokens, types, real], axis=-1)


def theirs(model, x, **more):
    x = torch.from_numpy(x).long()
    if x.ndim == 2:
        return model(input_ids=x, **more)
    return model(
        input_ids=x[..., 0], token_type_ids=x[..., 1], attention_mask=x[..., 2], **more
    )


def outputs_of(found):
    """What a model of `transformers` gives, in the order of ours."""
    names = ("prediction_logits", "seq_relationship_logits", "logits")
    names += ("last_hidden_state", "pooler_output")
    found = [found[name].detach().numpy() for name in names if name in found]
    return found


PLACES = ("blocks/attention/query", "blocks/attention/output", "blocks/mlp/down")


def hidden_of(loaded, x):
    """Our outputs, and the carry before every block and, with post norm, the last."""
    taps = {place: core.Tap(forward=lambda x, y: (x, y)) for place in PLACES}
    y, state = loaded.model.apply(loaded.params, {}, x, train=False, taps=taps)
    query, output, down = (state[core.SEEN][place] for place in PLACES)
    options = getattr(loaded.config, "options", models.BERT)
    if options.norm_position == "post":
        return y, np.asarray(query[0])
    # Before a block is what was embedded and what the blocks before have added.
    flat = trees.flatten(loaded.params)
    first = flat["embed/table"][x]
    if "position/table" in flat:
        offset = 2 if options.position == "offset" else 0
        first = first + flat["position/table"][offset:][: x.shape[1]]
    if "embed_norm/scale" in flat:
        norm, eps = loaded.params["embed_norm"], options.norm_eps
        first = layers.layer_norm(first, norm["scale"], norm["bias"], eps=eps)
    added = np.cumsum(np.asarray(output[1] + down[1]), axis=0)
    return y, np.asarray(first) + np.concatenate([np.zeros_like(added[:1]), added[:-1]])


@every
@pytest.mark.acceptance("lm-models", 1)
def test_outputs_and_hidden_states_equal_transformers(case):
    name, model, folder = case
    loaded = pretrained.load(folder)
    x = batch_of(name)
    with torch.no_grad():
        found = theirs(model, x, output_hidden_states=True)
    ours, hidden = hidden_of(loaded, jnp.asarray(x))
    expected = outputs_of(found)
    assert len(expected) == len(jax.tree.leaves(ours))
    real = x[..., 2] > 0 if x.ndim == 3 else np.ones(x.shape, bool)
    for a, b in zip(jax.tree.leaves(ours), expected, strict=True):
        assert a.shape == b.shape
        # What is at a padded place is nothing to anyone, but equal all the same.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    assert len(hidden) == 3
    for state, wanted in zip(hidden, found.hidden_states, strict=False):
        np.testing.assert_allclose(state[real], wanted[real], rtol=0, atol=2e-5)


@every
@pytest.mark.acceptance("lm-models", 1)
def test_what_is_saved_loads_in_transformers(case, tmp_path):
    name, model, folder = case
    pretrained.save(tmp_path, pretrained.load(folder))
    kind = getattr(transformers, CASES[name][0])
    again, report = kind.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert (again.config.bos_token_id, again.config.pad_token_id) == (2, 1)
    x = batch_of(name)
    with torch.no_grad():
        pairs = zip(
            outputs_of(theirs(again.eval(), x)),
            outputs_of(theirs(model, x)),
            strict=True,
        )
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)


def language_loss(logits, x):
    """Mean cross-entropy of the next token; for BERT, of the token itself."""
    if x.ndim == 3:
        return jnp.mean(metrics.token_cross_entropy(logits, x[..., 0]))
    return jnp.mean(metrics.token_cross_entropy(logits[:, :-1], x[:, 1:]))


@pytest.mark.parametrize("case", [*CAUSAL, "bert_words"], indirect=True)
@pytest.mark.acceptance("lm-models", 2)
def test_gradients_equal_those_of_torch(case, tmp_path):
    name, model, folder = case
    loaded, x = pretrained.load(folder), batch_of(name)

    def loss(params):
        logits, _ = loaded.model.apply(params, {}, jnp.asarray(x), train=True)
        return language_loss(logits, jnp.asarray(x))

    value, gradients = jax.jit(jax.value_and_grad(loss))(loaded.params)
    model.zero_grad()
    logits, wanted = theirs(model, x).logits, torch.from_numpy(x).long()
    if x.ndim == 3:
        wanted = wanted[..., 0]
    else:
        logits, wanted = logits[:, :-1], wanted[:, 1:]
    entropy = torch.nn.functional.cross_entropy
    expected = entropy(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    # Written and read as parameters are, torch's gradients come in our form.
    with torch.no_grad():
        twin = build(name)
        for parameter, source in zip(
            twin.parameters(), model.parameters(), strict=True
        ):
            parameter.copy_(source.grad)
    twin.save_pretrained(tmp_path)
    theirs_by_path = trees.flatten(pretrained.load(tmp_path).params)
    for path, ours in trees.flatten(gradients).items():
        distance = np.linalg.norm(ours - theirs_by_path[path])
        # A key's bias changes no softmax: its gradient is nothing but rounding.
        like = path.replace("key/bias", "query/bias")
        assert distance <= 1e-4 * np.linalg.norm(theirs_by_path[like]), path


SENTENCES = (
    "A man is playing a guitar on the stage.",
    "Someone performs music with a guitar in front of people.",
    "The central bank raised its interest rates by half a percent.",
)


@pytest.mark.slow
@pytest.mark.acceptance("lm-models", 4)
def test_sentences_of_minilm_equal_transformers():
    folder = data.fetch("minilm", directory.data_root(ROOT))
    coder = data.WordPiece(data.read_vocabulary(folder / "vocab.txt"))
    rows = [[coder.start, *coder.encode(text), coder.end] for text in SENTENCES]
    x = np.zeros((len(rows), max(map(len, rows)), 3), np.int32)
    for row, tokens in zip(x, rows, strict=True):
        row[: len(tokens), 0], row[: len(tokens), 2] = tokens, 1
    loaded = pretrained.load(folder)
    assert loaded.config.head == "pooler"
    assert models.num_params(loaded.model) == 22_713_216
    ours, _ = loaded.model.apply(loaded.params, {}, jnp.asarray(x), train=False)
    theirs_model = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        found = theirs(theirs_model, x).last_hidden_state.numpy()

    def embedded(hidden):
        """Means over what is no padding, of length one."""
        real = x[..., 2:]
        mean = (np.asarray(hidden) * real).sum(1) / real.sum(1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    vectors = embedded(ours.hidden)
    np.testing.assert_allclose(vectors, embedded(found), rtol=0, atol=1e-5)
    cosines = vectors @ vectors.T
    assert cosines[0, 1] > 0.5 > cosines[0, 2]
