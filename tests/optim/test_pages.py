"""What the pages build to train with trains: 100 steps on digits, of full batches.

A page's transform is taken as it stands there, on one device inside `shard_map`, for a
layer that is the same for all; a page that shows its own step is run by that.
"""

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import optim, sharding
from hpcjax.core import per_device
from hpcjax.data.digits import DigitsConfig
from hpcjax.optim import sparse_state
from tests import guides

STEPS = 100
PAPERS = "experiments/{}/README.md"
# Pages and the numbers of the blocks that make a transform `tx`.
MAKE = [
    *[("README.md", 0), ("docs/exchanges.md", 0), ("docs/parallel.md", 3)],
    *[("docs/sparsity.md", 0), (PAPERS.format("jorge"), 0)],
    *[(PAPERS.format("bagpipe"), 0), (PAPERS.format("oktopk"), 0)],
]
# Pages and the blocks, of which the last shows a step: of x, y and K-FAC's statistics.
STEP = [("docs/kfac.md", (number,)) for number in (0, 1)]
STEP += [
    pytest.param("docs/kfac.md", numbers, marks=pytest.mark.slow)
    for numbers in ((2,), (3,), (0, 4))
]
# Those whose loops are of a shape of their own; the tests that run them to the end.
ELSEWHERE = {
    (PAPERS.format("gradcomp"), 0): "tests/experiments/test_readmes.py",
    ("docs/own-work.md", 1): "tests/system/test_own_work.py",
    ("docs/pipelines.md", 2): "tests/optim/kfac/test_pipefisher.py",
    ("docs/pipelines.md", 3): "tests/optim/test_pipedream.py",
    (PAPERS.format("eager"), 0): "tests/experiments/test_readmes.py",
    (PAPERS.format("eager"), 1): "tests/experiments/test_readmes.py",
    (PAPERS.format("spb"), 0): "tests/experiments/test_readmes.py",
    (PAPERS.format("wagma"), 0): "tests/experiments/test_readmes.py",
    (PAPERS.format("wagma"), 1): "tests/experiments/test_readmes.py",
}
SPARSE = (PAPERS.format("samo"), 0)
BUILDS = re.compile(
    r"opt(ax|im)\.(chain|sgd|adam\w*|lamb)\(|scale_by_\w+\(|SgdConfig\(|sparsify\.prune\("
)


@pytest.fixture(scope="module")
def digits():
    """Returns inputs [batch, 64] and labels: 1,024 to train on, and those held out."""
    data = DigitsConfig().load()
    parts = (data.train, data.validation)
    batches = [part.gather(np.arange(len(part))[:1024]) for part in parts]
    return [(np.reshape(each["x"], (-1, 64)), each["y"]) for each in batches]


def network():
    """Returns parameters of two layers, under the names that pages give theirs."""
    draw = np.random.default_rng(0).normal
    return {
        "kernel": jnp.asarray(draw(size=(64, 32)) / 8, jnp.float32),
        "bias": jnp.zeros(32),
        "w": jnp.asarray(draw(size=(32, 10)) / 6, jnp.float32),
        "b": jnp.zeros(10),
    }


def outputs(params, x):
    hidden = jax.nn.relu(x @ params["kernel"] + params["bias"])
    return hidden @ params["w"] + params["b"]


def loss(params, batch):
    x, y = batch
    logits = outputs(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def has_learnt(params, digits, outputs=outputs):
    """Says whether held-out digits are missed half as often as by the commonest.

    A network that has diverged misses as many by chance, or a few less.
    """
    x, y = digits[1]
    error = np.mean(np.argmax(outputs(params, x), axis=-1) != y)
    return error < (1 - np.bincount(y).max() / len(y)) / 2


def transforms(page, number):
    """Returns the values that a block gives `tx`, of what it does up to the last."""
    body = ast.parse(guides.blocks(page)[number]).body
    bound = [
        "tx" in ast.unparse(getattr(each, "targets", [])[:1] or ast.Pass()).split(", ")
        for each in body
    ]
    names, found = {}, []
    while any(bound):
        guides.run_block(ast.unparse(body.pop(0)), page, names)
        if bound.pop(0):
            found.append(names["tx"])
    return found


def train(tx, digits):
    """Returns the network after `STEPS` updates in one program."""
    mesh, params = sharding.data_mesh(1), network()
    state = per_device.expand(tx.init(params), mesh)
    specs = per_device.specs(state)

    def step(_, carried, batch):
        params, state = carried
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    def steps(params, state, batch):
        state = per_device.enter(state)
        step_of = functools.partial(step, batch=batch)
        params, state = jax.lax.fori_loop(0, STEPS, step_of, (params, state))
        return params, per_device.leave(state)

    split = jax.shard_map(
        steps,
        mesh=mesh,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    return jax.jit(split)(params, state, digits[0])[0]


@pytest.mark.parametrize(("page", "number"), MAKE)
def test_the_transform_of_a_page_trains(page, number, digits):
    found = transforms(page, number)
    assert found
    for tx in found:
        assert has_learnt(train(tx, digits), digits)


def test_a_bare_preconditioner_does_not(digits):
    """As the page of Jorge says, and so the other tests can fail."""
    direction = optim.scale_by_jorge(update_every=50)
    bare = optax.chain(direction, optax.scale_by_learning_rate(0.1))
    assert not has_learnt(train(bare, digits), digits)


@pytest.mark.parametrize(("page", "numbers"), STEP)
def test_the_step_of_a_page_trains(page, numbers, digits):
    names, blocks = {}, guides.blocks(page)
    for number in numbers:
        guides.run_block(blocks[number], page, names)
    x, y = digits[0]
    shape = names["x"].shape[1:] if "x" in names else x.shape[1:]
    params, state, model = names["params"], names["opt_state"], names["model"]
    for _ in range(STEPS):
        params, state, *_ = names["step"](params, state, x.reshape(-1, *shape), y)

    def outputs(params, x):
        given = names.get("state", {})
        return model.apply(params, given, x.reshape(-1, *shape), train=False)[0]

    assert has_learnt(params, digits, outputs)


def test_the_sparse_step_of_a_page_trains(digits):
    page, number = SPARSE
    draw, plain = np.random.default_rng(0).random, network()
    cut = {name: plain.pop(name)[None] for name in ("kernel", "w")}  # a stack of one
    params = {"blocks": cut, "plain": plain}

    def join(params):
        layers = {name: leaf[0] for name, leaf in params["blocks"].items()}
        return {**params["plain"], **layers}

    def loss_fn(params, batch):
        layers = {name: leaf.realize() for name, leaf in params["blocks"].items()}
        return loss(join({**params, "blocks": layers}), batch)

    masks = {
        "blocks": {name: draw(leaf.shape) < 0.5 for name, leaf in cut.items()},
        "plain": dict.fromkeys(plain),
    }
    given = {"params": params, "masks": masks, "loss_fn": loss_fn, "batch": digits[0]}
    guides.run_block(guides.blocks(page)[number], page, given)
    state = given["state"]
    for _ in range(STEPS - 1):
        state, _ = given["step"](state, given["batch"])
    assert has_learnt(join(sparse_state.to_dense(state)), digits)


def test_every_block_that_builds_an_optimizer_is_trained():
    known = {*MAKE, SPARSE, *ELSEWHERE}
    known |= {("docs/kfac.md", number) for number in range(5)}
    found = {
        (page, number)
        for page in guides.PAGES
        for number, block in enumerate(guides.blocks(page))
        if BUILDS.search(block)
    }
    assert found == known
    for (page, _), test in ELSEWHERE.items():
        name = pathlib.Path(page).parts[-2 if "experiments" in page else -1]
        assert f'"{name}"' in (guides.REPOSITORY / test).read_text()
