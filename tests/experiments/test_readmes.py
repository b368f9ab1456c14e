"""The Python of the papers' READMEs runs, with tiny values for what it takes as given.

What a block takes as given (`params`, `batches`, ...) is the reader's own; the rest is
executed as it stands.
"""

import concurrent.futures
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import hostcomm, ir, models, sharding
from hpcjax.models import pretrained
from tests import guides
from tests.hostcomm.threads import in_threads
from tests.sharding import test_staged
from tests.train import tiny

WORKERS, STEPS = 4, 6


def page(paper):
    return f"experiments/{paper}/README.md"


def run(paper, **given):
    """Runs a README's only block; returns the names that it makes."""
    (block,) = guides.blocks(page(paper))
    guides.run_block(block, page(paper), given)
    return given


def speaker(depth, seed=0):
    """A random language model of as many layers, and its config."""
    config = models.CausalLmConfig(
        depth=depth, width=36, heads=9, kv_heads=3, options=models.LLAMA
    )
    model = config.make((128,), 50)
    params, _ = model.init(jax.random.key(seed))
    return model, params, config


def test_nopfs():
    assert round(run("nopfs")["often"]) == 31_635


def test_polythrottle():
    names = run("polythrottle")
    assert names["search"].best_feasible()["batch"] > 1


@pytest.mark.slow
def test_bagpipe():
    names = run("bagpipe")
    assert np.isfinite(names["metrics"]["loss"])
    assert names["capacity"] < len(names["store"])
    moved = {*names["cache"].moved.values()}
    assert [each * names["store"].row_bytes for each in moved] == [
        names["store"].bytes_read
    ]


PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.mark.slow
def test_chai():
    model, params, _ = speaker(30)
    names = run("chai", model=model, params=params, prompts=PROMPTS)
    assert names["made"].generated.tokens.shape == (2, 64)
    assert names["made"].cache_bytes > 0


def test_fields():
    names = run("fields")
    assert names["march"].sizes == {"time": 1, "latitude": 8, "longitude": 16}
    assert np.isfinite(names["value"])


def test_hammingmesh():
    names = run("hammingmesh")
    assert names["system"].share(names["all_reduce"](1e8, 1024)) == 1


@pytest.mark.slow
def test_samo():
    model, params, config = speaker(2)
    masks = jax.tree.map(
        lambda p: np.ones(p.shape, bool) if p.ndim > 2 else None, params
    )
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8))
    masks = jax.tree.map(
        lambda mask: (
            np.random.default_rng(1).permutation(mask.size).reshape(mask.shape) % 5 == 0
        ),
        masks,
    )

    def loss_fn(params, batch):
        return model.apply(params, {}, batch, train=True)[0].var()

    given = {"params": params, "masks": masks, "loss_fn": loss_fn, "batch": tokens}
    names = run("samo", **given)
    assert config.stacks == ("^blocks/",)
    assert np.isfinite(float(names["value"]))
    kernel = names["params"]["blocks"]["mlp"]["down"]["kernel"]
    assert 0.15 < float((kernel != 0).mean()) < 0.25


@pytest.mark.slow
def test_speculation():
    model, params, _ = speaker(30)
    small, small_params, _ = speaker(2, seed=1)
    batches = np.random.default_rng(0).integers(0, 50, (150, 2, 8))
    names = run(
        "specdec",
        model=model,
        params=params,
        small_model=small,
        small_params=small_params,
        prompts=PROMPTS,
        batches=batches,
        optimizer=optax.sgd(1e-3),
    )
    assert names["made"].counts.sum() == names["made"].iterations.sum()
    assert all(len(leaf) == 4 for leaf in jax.tree.leaves(names["blocks"]))
    ahead = names["cost"].best_lookahead(names["times"], rate=0.7)[0]
    assert f"(ahead={ahead}, " in guides.blocks(page("specdec"))[0]


@pytest.mark.slow
def test_gptq(tmp_path, monkeypatch):
    """A random model stands in for SmolLM2: its file has 90 MB, and 30 blocks."""
    pytest.importorskip("tokenizers", reason="pip install 'hpcjax[text]'")
    config = models.CausalLmConfig(depth=2, width=64, heads=4, options=models.LLAMA)
    model = config.make((32,), 50)
    key = "tokenizer.ggml."
    vocabulary = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    stored = pretrained.Pretrained(
        params=model.init(jax.random.key(0))[0],
        config=config,
        context=32,
        vocabulary=50,
        metadata={key + name: value for name, value in vocabulary.items()},
    )
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(pretrained, "load", lambda path: asked.append(path) or stored)
    tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, 50)
    names = run("gptq", tokens=tokens)
    monkeypatch.undo()
    assert asked == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    again = pretrained.load(tmp_path / "smollm2-3bit")
    packed, _ = stored.model.apply(names["params"], {}, tokens, train=False)
    read, _ = again.model.apply(again.params, {}, tokens, train=False)
    # Files of GPTQ hold scales in float16.
    np.testing.assert_allclose(packed, read, atol=1e-3)
    assert (tmp_path / "smollm2-3bit" / "tokenizer.json").exists()


def test_jorge():
    names = run("jorge")
    tx, params = names["tx"], {"w": jnp.ones((2, 3))}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].shape == (2, 3)
    assert "decay_epochs" in str(names["report"])


def test_ok_topk():
    tx = run("oktopk")["tx"]
    params = {"w": jnp.ones((8, 50))}

    def step(params):
        updates, _ = tx.update(params, tx.init(params), params)
        return updates

    mesh = sharding.data_mesh(WORKERS)
    average = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    updates = jax.jit(average)(params)
    assert 0 < np.count_nonzero(updates["w"]) <= 400


def test_pipefisher():
    names = run("pipefisher")
    assert names["filled"].utilization > 0.8
    assert not names["filled"].unplaced


@pytest.mark.slow
def test_partial_backward():
    dataset = tiny.dataset()
    model = models.MlpConfig(widths=(8, 8, 8)).make(dataset.inputs, dataset.outputs)
    params, _ = model.init(jax.random.key(0))
    x = jnp.ones((8, 4))

    def loss(params, x):
        return model.apply(params, {}, x, train=True)[0].sum()

    given = {"model": model, "params": params, "x": x, "loss": loss}
    given |= {"dataset": dataset, "number": 0}

    def inside(grads):
        return run("spb", **given, grads=grads)["mean"]

    # The block composes a method for a mesh, too, which inside of one cannot be.
    each = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), params)
    mean = jax.vmap(inside, axis_name="data")(each)
    assert jax.tree.structure(mean) == jax.tree.structure(params)


def test_the_utility_of_compression():
    first, second = guides.blocks(page("gradcomp"))
    shapes = {"first": (2048, 4096), "second": (2048, 4096)}  # two buckets
    grads = {path: jnp.zeros(shape) for path, shape in shapes.items()}
    names = {"shapes": shapes, "grads": grads}
    guides.run_block(first, page("gradcomp"), names)
    assert names["method"].sent_bytes(names["shapes"], 64) > 0

    params, tokens, targets = test_staged.example()
    (transport,) = hostcomm.connected(1)
    given = {"segments": test_staged.SEGMENTS, "loss": test_staged.loss}
    given |= {"params": params, "x": tokens, "targets": targets}
    with transport:
        given["transport"] = transport
        guides.run_block(second, page("gradcomp"), given)
    expected = jax.value_and_grad(test_staged.whole)(params, tokens, targets)
    test_staged.assert_close((given["value"], given["grads"]), expected)


@pytest.mark.parametrize("paper", ["eager", "wagma"])
def test_workers_that_do_not_wait(paper):
    first, second = guides.blocks(page(paper))

    def loss_and_gradient(params, step):
        return jax.value_and_grad(lambda p: ((p - 1.0) ** 2).sum())(params)

    given = {
        "params": jnp.zeros(3),
        "batches": range(STEPS),
        "gradient": lambda params, batch: loss_and_gradient(params, batch)[1],
    }
    guides.run_block(first, page(paper), given)
    start = (given.pop("params"), given.pop("batches"))
    told = in_threads(given["train"], hostcomm.connected(WORKERS), *start)
    given |= {"told": told, "round": 0, "loss_and_gradient": loss_and_gradient}
    given["seconds_of_steps"] = np.ones((STEPS, WORKERS))

    def inside(params):
        names = given | {"params": params}
        guides.run_block(second, page(paper), names)
        return names["losses"]

    mesh = sharding.data_mesh(WORKERS)
    replayed = jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P("data"))
    losses = jax.jit(replayed)(jnp.zeros(3)).reshape(WORKERS, STEPS)
    assert (losses[:, -1] < losses[:, 0]).all()


def test_ssn():
    names = run("ssn")
    assert names["plan"].weights == 2_000
    shapes = jax.tree.map(np.shape, names["whole"])
    init = names["model"].init
    assert shapes == jax.tree.map(np.shape, init(jax.random.key(0))[0])


def test_smoe():
    names = run("smoe")
    assert names["to_gate"].shape == names["gate"].shape
    assert (names["to_gate"] != 0).all()
    assert (names["to_kernel"] != 0).any()


@pytest.mark.slow
def test_data_movement():
    arrays = jnp.ones((4, 8)), jnp.ones((8, 8))
    names = run("data_movement", fn=lambda x, w: jax.nn.softmax(x @ w), args=arrays)
    assert 0 < names["saved"] < 1
    assert names["best"].gap < 1e-9


@pytest.mark.smoke
def test_tensor3d():
    model = models.causal_lm((8,), 64, depth=1, width=64, heads=64)
    names = run("tensor3d", model=model)
    assert int(np.prod(names["best"].grid)) == 64
    totals = [each.total for each in (names["best"], *names["others"])]
    assert totals == sorted(totals)


@pytest.mark.smoke
def test_ted():
    run("ted")


def test_axonn():
    names = {}
    for block in guides.blocks(page("axonn")):
        guides.run_block(block, page("axonn"), names)
    assert min(names["activations"], key=names["activations"].get) == 8

    def loss(params, x, target):
        return jnp.sum(params * x * target)

    ends = hostcomm.connected(2, patience=20.0)
    x, targets = np.arange(8.0, dtype="f4"), np.ones(8, "f4")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        train, two = names["train_stage"], np.float32(2)
        below = pool.submit(train, ends[0], lambda p, x, _: p * x, two, x)
        above = pool.submit(train, ends[1], loss, two, None, targets)
        assert below.result() == above.result() == 2 * x.mean()


def test_sdfg():
    names = {}
    for block in guides.blocks(page("sdfg")):
        guides.run_block(block, page("sdfg"), names)
    words = (
        sum(edge.words for edge in names[name].graph.movement())
        for name in ("read", "less")
    )
    assert tuple(words) == (1072, 816)
    assert jnp.allclose(names["run"](jnp.eye(8, 16)), jax.nn.softmax(jnp.eye(8, 16)))
    words = (
        ir.find_operators(each, {"n": 8}).total().words
        for each in (names["graph"], names["tiled"])
    )
    assert tuple(words) == (30, 18)


def test_programl():
    names = run("programl")
    assert names["graph"].texts[1:4] == ("add", "mul", "ret")
    text = (guides.REPOSITORY / page("programl")).read_text()
    drawn = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    assert drawn == [names[name].to_mermaid() for name in ("graph", "steps")]


def test_omen():
    result = run("omen")["result"]
    assert result.converged
    with jax.enable_x64(True):
        assert result.imbalance() < 1e-8


def test_graphsnapshot():
    names = run("graphsnapshot")
    store, blocks = names["store"], names["blocks"]
    assert blocks.vertices[-64:].tolist() == list(range(64))
    assert store.snapshot(0).degrees(range(1024)).sum() == 30_000
    assert store.snapshot(1).degrees(range(1024)).sum() == 29_999


def test_mpcompress():
    names = run("mpcompress")
    assert 1 < names["few"] < names["many"]
    x = np.ones((1, 8, 64), "f4")
    stage = names["first_stage"](lambda a, x, _: a * x, 2.0, x, rows=8, width=64)
    code = stage.run_op(sharding.Op(0, "F", 0, 0), None)
    assert 8 * 50 * 4 < code.nbytes < 8 * 64 * 4


def test_every_block_of_a_readme_is_run_here():
    shown = {name for name in guides.PAGES if guides.blocks(name)}
    papers = {name.split("/")[1] for name in shown if name.startswith("experiments/")}
    tested = "chai specdec gptq jorge oktopk pipefisher spb gradcomp eager wagma "
    tested += "samo data_movement ssn tensor3d hammingmesh ted nopfs omen "
    tested += "polythrottle smoe bagpipe fields axonn sdfg programl graphsnapshot"
    tested += " mpcompress"
    assert papers == set(tested.split())
