"""Codecs of sums over two devices: what is sent, what is learnt, what is refused."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import layers, perf, sharding, train
from hpcjax.compress import Autoencoder, Identity, Quantizer, RandomK, TopK
from hpcjax.core import ConfigError, compat, shards, trees
from hpcjax.core.keys import BatchKey
from hpcjax.core.varying import vary
from hpcjax.data import CharTextConfig
from hpcjax.models import GPT2, CausalLmConfig, ExpertsConfig
from hpcjax.models.scan import POLICIES
from hpcjax.runs import training
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import PipelineConfig, TedConfig, Tensor3dConfig
from hpcjax.train import loop
from hpcjax.train.config import TrainConfig
from tests.conftest import REPOSITORY
from tests.train import tiny

SHAPE = 3, 4, 16
HALVES = slice(0, 4), slice(4, 8)  # of the inputs, on two devices
QUICK = compat.quick_compilation("cpu")
CODECS = {
    "none": None,
    "all": Identity(),
    "quantize": Quantizer(bits=4),
    "masked": TopK(k=10, grad="masked"),
    "learnt": Autoencoder(d=3),
}
CONFIG = TrainingConfig(
    dataset=CharTextConfig(context=4),
    model=CausalLmConfig(depth=3, width=16, heads=2),
    parallel=Tensor3dConfig(col=2),
    train=TrainConfig(batch_size=3, steps=2),
)


def mesh():
    return sharding.make_mesh({"col": 2})


def draw():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(*SHAPE[:-1], 8)), rng.normal(size=(8, SHAPE[-1]))
    given = CODECS["learnt"].init(jax.random.key(0), SHAPE[-1])
    return tuple(np.float32(leaf) for leaf in (x, w)), given


def by_codec(x, w, given):
    """Each codec's sum of x w, with the part that a device has of both."""
    found = {}
    for name, codec in CODECS.items():
        part = shards.Part(value=w, cuts=((-2, "col"),), codec=codec, given=given)
        found[name] = layers.dense(x, part)
    return found


def on_devices(function, outputs):
    given = P(None, None, "col"), P("col"), P()
    mapped = jax.shard_map(function, mesh=mesh(), in_specs=given, out_specs=outputs)
    return jax.jit(mapped, compiler_options=QUICK)


def compressed(name, x, w):
    """The sum of what two devices' parts decode to, each encoded by itself."""
    codec, parts = CODECS[name], (x[..., :4] @ w[:4], x[..., 4:] @ w[4:])
    return sum(codec.decode(codec.encode(y, {}), y, {}) for y in parts), parts


@pytest.mark.acceptance("mpcompress", 1, 2, 5)
def test_sums_send_codes_and_each_has_its_own_slope():
    (x, w), given = draw()

    def local(x, w, given):
        def loss(x, w, given):
            sums = by_codec(x, w, given)
            return sum((y**2).sum() for y in sums.values()), sums

        def slopes(name):
            return jax.grad(
                lambda *own: (by_codec(*own)[name] ** 2).sum(), argnums=(0, 2)
            )(x, w, given)

        return loss(x, w, given)[1], {name: slopes(name) for name in CODECS}

    slope = P(None, None, "col"), P()
    run = on_devices(local, (P(), dict.fromkeys(CODECS, slope)))
    sums, slopes = run(x, w, given)
    np.testing.assert_array_equal(sums["all"], sums["none"])
    np.testing.assert_array_equal(slopes["all"][0], slopes["none"][0])
    for name in ("quantize", "masked"):
        wanted, parts = compressed(name, x, w)
        np.testing.assert_allclose(sums[name], wanted, atol=1e-4)
        back = 2 * np.asarray(wanted)
        kept = [np.ones(SHAPE)] * 2
        if name == "masked":
            kept = [np.zeros(SHAPE), np.zeros(SHAPE)]
            for mask, part in zip(kept, parts, strict=True):
                mask.ravel()[np.argsort(-abs(part).ravel())[:10]] = 1
        halves = [(back * m) @ w[at].T for m, at in zip(kept, HALVES, strict=True)]
        np.testing.assert_allclose(
            slopes[name][0], np.concatenate(halves, -1), rtol=1e-4, atol=1e-3
        )

    def alone(x, given):
        y = (x @ w) @ given["encoder"].T @ given["decoder"].T
        return (y**2).sum()

    # The encoder's gradient is summed over devices, and the decoder's is not.
    wanted = jax.grad(alone, argnums=(0, 1))(x, given)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
        slopes["learnt"],
        wanted,
    )


def collectives(compiled):
    """Returns {kind: bytes of operands of each, times it runs}."""
    found = collections.defaultdict(list)
    for each in perf.collectives(compiled):
        found[each.kind] += [each.bytes] * each.times
    return found


@pytest.mark.acceptance("mpcompress", 5)
def test_the_compiled_program_sends_the_bytes_that_codecs_say():
    given = draw()[1]
    own = {**CODECS, "random": RandomK(k=7)}
    del own["none"]
    (x, w), _ = draw()
    for name, codec in own.items():

        def local(x, w, given, codec=codec):
            given = {"key": jax.random.key(0)} if codec.draws else given
            return codec.sum(jnp.matmul(x, w), ("col",), given)

        compiled = on_devices(local, P()).lower(x, w, given).compile()
        sent = sum(
            each.total * perf.sent_per_byte(each.kind, 2)
            for each in perf.collectives(compiled)
        )
        assert sent == codec.wire_bytes(SHAPE, "float32"), name
        if name == "quantize":
            assert "u8[" in compiled.as_text()


def apply(cfg, **options):
    """Returns the model's loss-free forward pass on two devices, and its inputs."""
    task = training.task(cfg, REPOSITORY, 2)
    on = task.mesh(2)
    shapes = train.state_shapes(task, on)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes.params)

    def local(params, tokens):
        key = jax.random.key(1)
        key = BatchKey(key=key, rows=jnp.arange(3)) if options["train"] else None
        warm = cfg.codec is not None and cfg.codec.warmup
        state = {"codec_steps": jnp.float32(0)} if warm else {}
        y, _ = task.model.apply(params, state, tokens, key=key, **options)
        return shards.gather_equal(y.values, ((-1, "col"),))

    tokens = jnp.ones((3, 4), jnp.int32)
    run = jax.shard_map(local, mesh=on, in_specs=(specs, P()), out_specs=P())
    return jax.jit(run, compiler_options=QUICK), shapes.params, tokens


def lower(codec, accumulate=1, **options):
    steps = dataclasses.replace(CONFIG.train, accumulate=accumulate)
    cfg = dataclasses.replace(CONFIG, codec=codec, train=steps)
    run, params, tokens = apply(cfg, **{"train": True, **options})
    return run.lower(params, tokens)


@pytest.mark.acceptance("mpcompress", 1)
def test_a_codec_that_sends_all_changes_no_operation():
    assert lower(Identity(start=0)).as_text() == lower(None).as_text()


@pytest.mark.acceptance("mpcompress", 6)
def test_layers_before_start_send_all():
    wire = Quantizer(bits=8).wire_bytes(SHAPE, "float32")
    found = collectives(lower(Quantizer(bits=8, start=2)).compile())
    plain = collectives(lower(None).compile())
    whole = 4 * np.prod(SHAPE)
    gathered = sum(found["all-gather"]) - sum(plain["all-gather"])
    assert gathered == 2 * wire
    assert plain["all-reduce"].count(whole) - found["all-reduce"].count(whole) == 2


def test_what_is_recomputed_sends_no_code_again():
    """Checkpointed with the policy `collectives`: the decoder's slope needs the sum."""
    (x, w), given = draw()

    def sums(x, w, given):
        part = shards.Part(
            value=w, cuts=((-2, "col"),), codec=CODECS["learnt"], given=given
        )
        return (layers.dense(x, part) ** 2).sum()

    kept = jax.checkpoint(sums, policy=POLICIES["collectives"])
    found = [
        str(
            jax.make_jaxpr(
                jax.shard_map(
                    jax.grad(each, argnums=(0, 2)),
                    mesh=mesh(),
                    in_specs=(P(None, None, "col"), P("col"), P()),
                    out_specs=(P(None, None, "col"), P()),
                )
            )(x, w, given)
        ).count("f32[3,4,3] = psum")
        for each in (kept, jax.checkpoint(sums))
    ]
    assert found == [1, 2]


def test_random_entries_differ_between_devices_with_other_rows_too():
    codec = RandomK(k=3)
    on = sharding.make_mesh({"data": 2, "col": 2})

    def local(y):
        total = codec.sum(y, ("col",), {"key": jax.random.key(0)})
        return (total != 0)[None]

    y = jnp.ones((2, 16)), P("data", None)
    run = jax.shard_map(
        lambda y: local(vary(y, "col")), mesh=on, in_specs=y[1], out_specs=P("data")
    )
    first, second = np.asarray(jax.jit(run, compiler_options=QUICK)(y[0]))
    assert (first != second).any()


def test_validation_sends_all_if_asked_to_and_warming_up_does():
    plain = lower(None, train=False).as_text()
    kept = Quantizer(bits=2, skip_in_validation=True)
    assert lower(kept, train=False).as_text() == plain
    assert "ui8" in lower(kept).as_text()
    warming = Quantizer(bits=2, start=0, warmup=3)
    for trains, passes in ((True, 1), (False, 1), (True, 3)):
        text = lower(warming, train=trains, accumulate=passes).as_text()
        assert "case" in text
        # So many passes, and not steps, are counted.
        assert ("dense<9.000000e+00> : tensor<f32>" in text) == (passes == 3)


@pytest.mark.slow
@pytest.mark.acceptance("mpcompress", 2)
@pytest.mark.parametrize(
    "codec",
    [
        Autoencoder(d=3),
        Quantizer(bits=4, warmup=1),
        TopK(k=9, grad="masked"),
        RandomK(k=9, start=0),
    ],
)
def test_runs_train_and_what_is_learnt_stays_equal_on_all_devices(codec):
    task = training.task(dataclasses.replace(CONFIG, codec=codec), REPOSITORY, 2)
    on = task.mesh(2)
    state = train.init_state(task, 0, on)
    first = jax.tree.map(np.asarray, state.params.get("codecs", {}))
    batch = sharding.place_batch(task.dataset.train.gather(np.arange(3)), on)
    step, losses = train.train_step(task, on, state), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    if codec.warmup:
        assert int(state.model_state["codec_steps"]) == 20
    for path, leaf in trees.flatten(state.params.get("codecs", {})).items():
        a, b = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        np.testing.assert_array_equal(a, b, err_msg=path)
        assert (a != trees.flatten(first)[path]).any()


def with_codec(codec, **changes):
    cfg = dataclasses.replace(CONFIG, codec=codec, **changes)
    devices = 4 if cfg.parallel is not CONFIG.parallel else 2
    task = training.task(cfg, REPOSITORY, devices)
    return task, task.mesh(devices)


def test_a_fork_begins_with_what_a_codec_learns_as_drawn(tmp_path):
    learnt = Autoencoder(d=3, warmup=1)
    (plain, on), (coded, _) = with_codec(None), with_codec(learnt)
    before, drawn = (train.init_state(task, 1, on) for task in (plain, coded))
    before = dataclasses.replace(before, step=jnp.int32(5))

    def resume(task, folder):
        with train.Checkpoints(tmp_path / folder) as kept:
            records = tiny.Records()
            steps = dataclasses.replace(CONFIG.train, steps=9)
            return loop.resume(task, steps, 1, on, kept, records)[:2]

    for folder, state in (("plain", before), ("coded", drawn)):
        with train.Checkpoints(tmp_path / folder) as kept:
            kept.save(int(state.step), state, {})
    state, step = resume(coded, "plain")
    assert step == 5
    found, wanted = trees.flatten(state.params), trees.flatten(drawn.params)
    old = trees.flatten(before.params)
    assert len(found) == len(old) + 4
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, old.get(path, wanted[path]), err_msg=path)
    assert state.model_state["codec_steps"] == 0
    assert resume(coded, "coded")[1] == 0
    with pytest.raises(ConfigError, match=r"beyond those asked for .*codecs/"):
        resume(plain, "coded")
    with pytest.raises(
        ConfigError, match=r"saved float32\[2, 3, 16\], asked for .*\[3,"
    ):
        resume(with_codec(dataclasses.replace(learnt, start=0))[0], "coded")


@pytest.mark.acceptance("mpcompress", 3)
def test_a_run_counts_scales_that_are_clamped():
    task, on = with_codec(Quantizer(bits=8, start=2))
    shapes = train.state_shapes(task, on)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, shapes.params)

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(
        jax.shard_map, mesh=on, in_specs=(specs, P(), P()), out_specs=(P(), P())
    )
    def count(params, tokens, state):
        return tuple(
            task.model.apply(params, state, tokens, train=train)[1]["clamped_scales"]
            for train in (True, False)
        )

    params = jax.tree.map(np.array, train.init_state(task, 0, on).params)
    # Of three layers the last is compressed, and each of two devices sends 16 scales.
    large = params["blocks"]["mlp"]["down"]["kernel"]
    large[:, :, :5] = 1e9
    found = count(
        params, jnp.ones((3, 4), jnp.int32), {"clamped_scales": jnp.float32(7)}
    )
    assert tuple(found) == (7 + 2 * 5, 7)


EXPERTS = dataclasses.replace(GPT2, experts=ExpertsConfig(count=2, top_k=1, every=2))


def experts(codec, remat="none"):
    model = CausalLmConfig(depth=2, width=16, heads=2, options=EXPERTS, remat=remat)
    parallel = TedConfig(tensor=2, expert=2)
    steps = dataclasses.replace(CONFIG.train, batch_size=4)
    return with_codec(codec, model=model, parallel=parallel, train=steps)


@pytest.mark.parametrize("remat", ["none", "collectives"])
def test_random_entries_are_sent_between_experts(remat):
    task, on = experts(RandomK(k=9, start=0, grad="masked"), remat)
    state, batch = train.state_shapes(task, on), train.batch_shapes(task, 4, on)
    text = train.train_step(task, on, state).lower(state, batch).as_text()
    assert "tensor<1x9xi32>" in text


@pytest.mark.slow
def test_random_entries_of_all_are_the_sum_between_experts():
    """As many numbers as there are, each at random, lose nothing."""
    found = []
    for codec in (None, RandomK(k=2 * 4 * 16, start=0)):
        task, on = experts(codec)
        state = train.init_state(task, 0, on)
        batch = sharding.place_batch(task.dataset.train.gather(np.arange(4)), on)
        state, metrics = train.train_step(task, on, state)(state, batch)
        found.append((metrics["loss"], state.params["blocks"]))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *found
    )


@pytest.mark.acceptance("mpcompress", 10)
@pytest.mark.parametrize(
    "parallel",
    [
        *(None, Tensor3dConfig(), Tensor3dConfig(row=2, col=2)),
        *(PipelineConfig(stages=1), PipelineConfig(stages=1, tensor=2)),
    ],
)
def test_a_codec_without_sums_of_activations_is_refused_by_name(parallel):
    with pytest.raises(ConfigError, match=r"codec=topk compresses .* parallel.col abo"):
        dataclasses.replace(CONFIG, parallel=parallel, codec=TopK())
