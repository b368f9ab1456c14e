"""Codecs between a model's stages, in the loop: its numbers, and what is refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from hpcjax import data, optim, sharding, train
from hpcjax.compress import Autoencoder, Identity, Quantizer, RandomK, TopK
from hpcjax.core import ConfigError, trees
from hpcjax.models import CausalLmConfig, MlpConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import PipelineConfig

CONTEXT, TOKENS, ROWS, RATE = 4, 8, 8, 0.5
LM = CausalLmConfig(depth=2, width=8, heads=2)
PIPE = PipelineConfig(stages=2, micro_batches=2, schedule="gpipe")
LEARNT = Autoencoder(d=3)


def network(codec=LEARNT, model=LM, tensor=1):
    plain = model.make((CONTEXT,), TOKENS)
    return codec.apply_between(plain, PIPE.stages, tensor)


def on_one_device(model):
    """The same parameters, with the codec before the last of the blocks."""
    cut = model.cut()

    def apply(params, state, x, **_):
        rest = {name: leaf for name, leaf in params.items() if name != cut.stack}
        stack = dict(params[cut.stack])
        learnt, end = stack.pop("codecs", {}), len(jax.tree.leaves(stack)[0]) - 1
        *before, last = (
            jax.tree.map(lambda w, at=at: w[at], stack) for at in range(end + 1)
        )
        y = cut.first(rest, x)
        for block in before:
            y = cut.block(block, y)
        code = cut.between.encode(rest, y, end, None)
        last = fold_sums(last, jax.tree.map(lambda w: w[end], learnt))
        y = cut.block(last, cut.between.decode(rest, code, y, end))
        return cut.last(rest, y), state

    return model._replace(apply=apply, cut=None)


def fold_sums(block, learnt):
    """A block whose kernels do what the autoencoders do behind them."""
    for layer, inner in learnt.items():
        for name, own in inner.items():
            kernel = block[layer][name]["kernel"] @ own["encoder"].T @ own["decoder"].T
            put = {**block[layer], name: {**block[layer][name], "kernel": kernel}}
            block = {**block, layer: put}
    return block


def composed(schedule, tensor, codec, stages=PIPE.stages):
    """A task of stages of one block, its devices, and a batch on them."""
    own = data.noise_tokens(ROWS, CONTEXT, TOKENS, seed=0)
    model = dataclasses.replace(LM, depth=stages).make((CONTEXT,), TOKENS)
    model = model if codec is None else codec.apply_between(model, stages, tensor)
    parallel, devices = None, 1
    if schedule is None:
        model = on_one_device(model)
    else:
        sizes = {"stages": stages, "tensor": tensor}
        parallel = dataclasses.replace(PIPE, schedule=schedule, **sizes)
        devices = stages * tensor
    method = train.compose(
        model,
        own,
        optim.SgdConfig(lr=RATE),
        parallel=parallel,
        batch_size=ROWS,
        steps=1,
        devices=devices,
    )
    task = train.supervised(model, method, own)
    mesh = task.mesh(devices)
    batch = sharding.place_batch(own.train.gather(np.arange(ROWS)), mesh)
    return task, mesh, batch


@functools.cache
def trained(schedule, tensor=1, codec=LEARNT, stages=PIPE.stages):
    """Parameters after a step, its loss, and sums of a validation."""
    task, mesh, batch = composed(schedule, tensor, codec, stages)
    state = train.init_state(task, 0, mesh)
    state, metrics = train.train_step(task, mesh, state)(state, batch)
    totals = train.eval_step(task, mesh)(state.params, state.model_state, batch)
    sums = {name: float(value) for name, value in totals.sums.items()}
    return trees.flatten(jax.device_get(state.params)), float(metrics["loss"]), sums


@pytest.mark.slow
@pytest.mark.acceptance("mpcompress", 9)
@pytest.mark.parametrize(
    ("schedule", "tensor", "stages"),
    [
        *(("gpipe", 1, 2), ("one_f_one_b", 1, 2), ("one_f_one_b", 2, 2)),
        # The last of three stages alone is sent codes, the second its input whole.
        *(("gpipe", 1, 3), ("one_f_one_b", 1, 3)),
    ],
)
def test_autoencoders_of_stages_train_as_on_one_device(schedule, tensor, stages):
    codec = dataclasses.replace(LEARNT, start=stages - 1)
    ours, loss, sums = trained(schedule, tensor, codec, stages)
    theirs, wanted, whole = trained(None, tensor, codec, stages)
    assert ours.keys() == theirs.keys()
    assert ours["codecs/stages/encoder"].shape == (1, 3, 8)
    assert ("blocks/codecs/mlp/down/encoder" in ours) == (tensor == 2)
    for path, leaf in theirs.items():
        np.testing.assert_allclose(ours[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert sums == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.acceptance("mpcompress", 1)
def test_identity_in_and_between_stages_changes_no_bit():
    ours, theirs = (
        trained("one_f_one_b", 2, codec) for codec in (Identity(start=0), None)
    )
    assert ours[1:] == theirs[1:]
    for path, leaf in theirs[0].items():
        np.testing.assert_array_equal(ours[0][path], leaf, err_msg=path)


@pytest.mark.slow
def test_entries_of_sums_in_stages_have_the_slopes_of_one_program():
    """Though backward ops choose them again: JAX's own gradient of the validation."""
    given = "zero_bubble_h1", 2, TopK(k=40, grad="masked", start=0)
    task, mesh, batch = composed(*given)
    state = train.init_state(task, 0, mesh)
    before = trees.flatten(jax.device_get(state.params))
    score = train.eval_step(task, mesh)

    def loss(params):
        totals = score(params, state.model_state, batch)
        return totals.sums["loss"] / totals.count

    wanted = trees.flatten(jax.device_get(jax.grad(loss)(state.params)))
    after, _, _ = trained(*given)
    for path, leaf in wanted.items():
        ours = (before[path] - after[path]) / RATE
        np.testing.assert_allclose(ours, leaf, rtol=1e-4, atol=1e-5, err_msg=path)


def test_outside_of_stages_the_network_runs_without_its_codec():
    coded = network()
    params, state = jax.eval_shape(coded.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, CONTEXT), "int32")
    run = functools.partial(coded.apply, train=False)
    found, _ = jax.eval_shape(run, params, state, tokens)
    assert found.shape == (2, CONTEXT, TOKENS)
    assert "codecs" in params


def test_devices_draw_places_of_their_own_and_send_them_once():
    """A backward pass takes those that were sent, without a key."""
    encode = network(RandomK(k=5, grad="masked")).cut().between.encode
    y = jax.random.normal(jax.random.key(1), (4, 2, 8))

    def both(y):
        code = encode({}, y, 1, jax.random.key(2))
        return code[1], *encode({}, 2 * y, 1, None, (None, code[1]))

    mesh = sharding.make_mesh({"data": 2})
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)
    sent, values, again = map(np.asarray, jax.jit(mapped)(y))
    np.testing.assert_array_equal(again, sent)
    first, second = np.split(sent, 2)
    assert set(first) != set(second)
    rows = (2 * np.asarray(y)).reshape(2, -1)
    np.testing.assert_array_equal(values, [*rows[0, first], *rows[1, second]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "tensor"),
    [
        (RandomK(k=5, grad="masked"), 1),
        (RandomK(k=5, grad="masked"), 2),
        (Quantizer(bits=4, skip_in_validation=True), 2),
    ],
)
def test_codecs_fit_steps_and_validations_of_copies(codec, tensor):
    """By shapes: two copies of two stages, or two stages of two devices."""
    own = data.noise_tokens(ROWS, CONTEXT, TOKENS, seed=0)
    model = network(codec, tensor=tensor)
    method = train.compose(
        model,
        own,
        optim.SgdConfig(lr=RATE),
        parallel=dataclasses.replace(PIPE, schedule="zero_bubble_h1", tensor=tensor),
        batch_size=ROWS,
        steps=1,
        devices=4,
    )
    task = train.supervised(model, method, own)
    mesh = task.mesh(4)
    state = train.init_state(task, 0, mesh)
    batch = sharding.place_batch(own.train.gather(np.arange(ROWS)), mesh)
    after, _ = jax.eval_shape(train.train_step(task, mesh, state), state, batch)
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)
    score = train.eval_step(task, mesh)
    totals = jax.eval_shape(score, state.params, state.model_state, batch)
    assert totals.count.shape == ()


CONFIG = TrainingConfig(
    dataset=data.CharTextConfig(context=CONTEXT),
    model=LM,
    parallel=PIPE,
    codec=Quantizer(bits=4),
)


def test_stages_count_no_scales():
    assert "clamped_scales" not in CONFIG.figures


@pytest.mark.acceptance("mpcompress", 10)
@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Identity(start=2), "codec.start must be a layer of the stack: got 2"),
        (Identity(warmup=1), "codec.warmup must be 0: got warmup=1"),
        (TopK(k=2), "set codec.grad=masked: got grad='through'"),
        (RandomK(k=2), "set codec.grad=masked: got grad='through'"),
    ],
)
def test_a_codec_that_stages_cannot_use_is_told(codec, message):
    with pytest.raises(ConfigError, match=message):
        network(codec)


@pytest.mark.acceptance("mpcompress", 6, 10)
def test_boundaries_from_the_start_on_are_compressed():
    deep = dataclasses.replace(LM, depth=4).make((CONTEXT,), TOKENS)
    for start, first in {None: 2, 0: 1, 1: 1, 2: 2, 3: 3}.items():
        codec = dataclasses.replace(LEARNT, start=start)
        assert codec.apply_between(deep, 4).cut().between.coded == first
    late = dataclasses.replace(LEARNT, start=3)
    with pytest.raises(
        ConfigError, match=r"last stage.*got 3, stages begin at \[0, 2\]"
    ):
        late.apply_between(deep, 2)
    with pytest.raises(ConfigError, match=r"divide the depth .*depth=4, stages=3"):
        LEARNT.apply_between(deep, 3)
    with pytest.raises(ConfigError, match=r"core\.Model\.cut"):
        LEARNT.apply_between(MlpConfig().make((4,), 2), 2)
