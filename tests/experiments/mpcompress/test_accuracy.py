"""Which codec between two stages costs what, of a small network."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import sharding
from hpcjax.compress import Autoencoder, Quantizer, RandomK, TopK, equal_bytes

SEEDS, STEPS, TOLD, RATE = range(5), 150, 20, 0.02
ROWS, COUNT, WIDTH, INNER, LABELS, CLUSTERS = 64, 2, 16, 32, 8, 24
SENT = ROWS // COUNT, WIDTH
LEARNT = Autoencoder(d=2)
TOP, RANDOM = (
    dataclasses.replace(
        equal_bytes(codec, LEARNT, SENT, "float32", where="pipeline"), grad="masked"
    )
    for codec in (TopK(), RandomK())
)
CODECS = {
    **{"without": None, "eight": Quantizer(bits=8), "learnt": LEARNT},
    **{"top": TOP, "random": RANDOM, "chance": RandomK(k=1, grad="masked")},
}


def stage(params, x, visit):
    return x + jnp.tanh(x @ params["in"]) @ params["out"]


def last(params, x, visit):
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(x @ params["head"], visit.batch["y"]).mean()


def functions(codec):
    """Two stages as the executor runs them, with a codec between them."""
    plain = sharding.StageFunctions(
        first=lambda _, visit: visit.batch["x"], stage=stage, last=last
    )
    if codec is None:
        return plain
    like = jax.ShapeDtypeStruct(SENT, "float32")

    def encode(params, y, visit):
        given = {"sent": visit.sent}
        if codec.draws and visit.sent is None:
            given["key"] = jax.random.key(visit.batch["draw"][0])
        return codec.encode(y, {**params["codec"], **given})

    return dataclasses.replace(
        plain,
        encode=encode,
        decode=lambda params, code, visit: codec.decode(code, like, params["codec"]),
        through=codec.grad == "through",
    )


@functools.cache
def trainer(name):
    """`(params, batches)` to what is learnt, and the loss before each step."""
    codec = CODECS[name]
    spec = jax.sharding.PartitionSpec
    specs = {"head": spec(), "codec": spec(), "stages": spec("stage")}
    differentiate = jax.shard_map(
        sharding.pipelined_value_and_grad(
            sharding.one_f_one_b(2, COUNT), functions(codec)
        ),
        mesh=sharding.make_mesh({"stage": 2}),
        in_specs=(specs, spec()),
        out_specs=sharding.Pipelined(spec(), specs, spec("stage")),
    )
    tx = optax.adam(RATE)

    def step(carry, batch):
        params, state = carry
        found = differentiate(params, batch)
        updates, state = tx.update(found.grads, state, params)
        return (optax.apply_updates(params, updates), state), found.value

    def fit(params, batches):
        (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
        return params, losses

    return jax.jit(fit)


def draw(seed, steps):
    """Batches of points near the centres of clusters, of which each label has three."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLUSTERS, WIDTH))
    cluster = rng.integers(CLUSTERS, size=(steps, ROWS))
    noise = rng.normal(size=(steps, ROWS, WIDTH))
    return {
        "x": np.float32(centres[cluster] + 0.3 * noise),
        "y": np.int32(cluster % LABELS),
        "draw": np.int32(rng.integers(1 << 30, size=(steps, ROWS))),
    }


def losses(seed):
    """Of the last steps by each codec, after as many steps without one."""
    rng = np.random.default_rng(100 + seed)

    def kernel(*shape):
        return np.float32(rng.normal(size=shape) / math.sqrt(shape[-2]))

    stages = {"in": kernel(2, WIDTH, INNER), "out": kernel(2, INNER, WIDTH)}
    params = {"head": kernel(WIDTH, LABELS), "stages": stages, "codec": {}}
    batches = draw(seed, 2 * STEPS)
    before = {name: leaf[:STEPS] for name, leaf in batches.items()}
    after = {name: leaf[STEPS:] for name, leaf in batches.items()}
    params, _ = trainer("without")(params, before)
    found = {}
    for name, codec in CODECS.items():
        own = codec.init(jax.random.key(seed), WIDTH) if codec else {}
        _, told = trainer(name)({**params, "codec": own}, after)
        found[name] = float(told[-TOLD:].mean())
    return found


def above(cells, one, other):
    """The mean of paired differences, in their standard errors."""
    apart = np.array(cells[one]) - np.array(cells[other])
    return apart.mean() / (apart.std(ddof=1) / math.sqrt(len(apart)))


@pytest.mark.slow
@pytest.mark.acceptance("mpcompress", 7)
def test_codecs_of_equal_bytes_rank_as_the_paper_has_them():
    """Random-k of one number is at chance, as are all whose codes arrive as zeros."""
    each = [losses(seed) for seed in SEEDS]
    found = {name: [one[name] for one in each] for name in CODECS}
    means = {name: np.mean(own) for name, own in found.items()}
    chance = math.log(LABELS)
    assert means["without"] < 0.05 * chance
    assert abs(means["eight"] - means["without"]) < 0.02 * chance
    assert above(found, "top", "learnt") > 2
    assert above(found, "random", "top") > 2
    assert means["learnt"] < 0.1 * chance
    assert means["random"] < 0.9 * chance
    assert means["chance"] == pytest.approx(chance, rel=0.01)
