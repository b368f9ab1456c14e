"""Codes between stages: slopes beside one device's, bytes, and what is refused."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hpcjax import perf, sharding
from hpcjax.compress import Autoencoder, Identity, Quantizer, RandomK, TopK
from hpcjax.core import ConfigError, compat
from tests.sharding import pipelines

COUNT = 4  # micro-batches
SENT = pipelines.ROWS // COUNT, pipelines.WIDTH
QUICK = compat.quick_compilation("cpu")
CODECS = {
    "none": None,
    "all": Identity(),
    "learnt": Autoencoder(d=2),
    "quantize": Quantizer(bits=4),
    "largest": TopK(k=5, grad="masked"),
    "random": RandomK(k=5, grad="masked"),
}
# The first of three stages behind the first is sent its input whole.
LATER = "largest", "random", "some, learnt", "some, quantize"
CASES = {
    "all": (sharding.one_f_one_b(2, COUNT), "all"),
    "none": (sharding.one_f_one_b(2, COUNT), "none"),
    "gpipe": (sharding.gpipe(2, COUNT), "learnt"),
    "one_f_one_b": (sharding.one_f_one_b(2, COUNT), "learnt"),
    "quantize": (sharding.one_f_one_b(2, COUNT), "quantize"),
    "largest": (sharding.zero_bubble_h1(2, COUNT), "largest"),
    "random": (sharding.gpipe(2, COUNT), "random"),
    "some, learnt": (sharding.zero_bubble_h1(3, COUNT), "learnt"),
    "some, quantize": (sharding.one_f_one_b(3, COUNT), "quantize"),
    "some, largest": (sharding.gpipe(3, COUNT), "largest"),
}


def cases(*without):
    """The others, of which some compile programs for the slow tests."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(case, marks=slow if case in LATER else [])
        for case in CASES
        if case not in without
    ]


def key(visit):
    return jax.random.fold_in(jax.random.key(1), visit.micro_batch)


@functools.cache
def functions(name, coded=1):
    codec, plain = CODECS[name], pipelines.functions()
    if codec is None:
        return plain
    like = jax.ShapeDtypeStruct(SENT, "float32")

    def given(params, visit):
        if visit.sent is not None:  # a backward op, which needs no key
            return params["codec"] | {"sent": visit.sent}
        return params["codec"] | ({"key": key(visit)} if codec.draws else {})

    return dataclasses.replace(
        plain,
        encode=lambda params, y, visit: codec.encode(y, given(params, visit)),
        decode=lambda params, code, visit: codec.decode(
            code, like, given(params, visit)
        ),
        coded=coded,
        through=getattr(codec, "grad", "") == "through",
    )


def params(schedule, name):
    made = pipelines.params(schedule.stages)
    given = (
        CODECS[name].init(jax.random.key(0), pipelines.WIDTH) if name != "none" else {}
    )
    return made | {"codec": given}


@functools.cache
def compiled(case):
    schedule, name = CASES[case]
    own = params(schedule, name)
    specs = sharding.stage_specs(own)
    mapped = jax.shard_map(
        sharding.pipelined_value_and_grad(
            schedule, functions(name, schedule.stages - 1)
        ),
        mesh=sharding.make_mesh({"stage": schedule.devices}),
        in_specs=(specs, jax.sharding.PartitionSpec()),
        out_specs=sharding.Pipelined(
            jax.sharding.PartitionSpec(), specs, jax.sharding.PartitionSpec("stage")
        ),
    )
    lowered = jax.jit(mapped).lower(own, pipelines.batch())
    return lowered.compile(compiler_options=QUICK), own


@functools.cache
def found(case):
    program, own = compiled(case)
    return jax.device_get(program(own, pipelines.batch()))


def one_device(schedule, name):
    """Loss and gradients with the same codec between layers; slopes by hand."""
    codec, plain, last = CODECS[name], pipelines.functions(), schedule.stages - 1

    def sent(y, given):
        if codec is None or isinstance(codec, Identity):
            return y
        if isinstance(codec, Autoencoder):
            return y @ given["encoder"].T @ given["decoder"].T
        decoded = codec.decode(codec.encode(y, given), y, given)
        if isinstance(codec, Quantizer):
            return y + lax.stop_gradient(decoded - y)
        return y * lax.stop_gradient(decoded != 0)

    def loss(own, batch, number):
        visit = sharding.Visit(batch, 0, number)
        x = plain.first(own, visit)
        for stage in range(schedule.stages):
            if stage == last:
                given = own["codec"]
                if getattr(codec, "draws", False):
                    given = {"key": key(visit)}
                x = sent(x, given)
            x = plain.stage(
                jax.tree.map(lambda w, s=stage: w[s], own["stages"]), x, visit
            )
        return plain.last(own, x, visit)

    def mean(own):
        batch = jax.tree.map(
            lambda b: b.reshape(COUNT, -1, *b.shape[1:]), pipelines.batch()
        )
        each = functools.partial(loss, own)
        return lax.map(lambda given: each(*given), (batch, jnp.arange(COUNT))).mean()

    return jax.jit(jax.value_and_grad(mean), compiler_options=QUICK)


@pytest.mark.acceptance("mpcompress", 9)
@pytest.mark.parametrize("case", cases("all", "none"))
def test_slopes_are_those_of_one_device_with_the_codec_between_layers(case):
    schedule, name = CASES[case]
    value, grads = one_device(schedule, name)(params(schedule, name))
    ours = found(case)
    assert ours.value == pytest.approx(float(value), rel=1e-5)
    for part in [part for part in grads if jax.tree.leaves(grads[part])]:
        assert pipelines.distance(ours.grads[part], grads[part]) < 1e-5, part
    assert abs(ours.value - found("none").value) > 1e-4 or schedule.stages > 2


@pytest.mark.acceptance("mpcompress", 9)
def test_schedules_give_one_gradient():
    ours, theirs = found("gpipe"), found("one_f_one_b")
    for part, leaf in theirs.grads.items():
        assert pipelines.distance(ours.grads[part], leaf) < 1e-5, part


def permuted(case):
    """Bytes that a tick passes on, by source and target."""
    ticks = sharding.tick_table(CASES[case][0]).op.shape[1]
    always, sometimes = perf.collectives_by_branch(compiled(case)[0])
    assert not sometimes
    moved = [each for each in always if each.kind == "collective-permute"]
    assert all(each.times == ticks for each in moved)
    sizes = collections.Counter()
    for each in moved:
        sizes.update(dict.fromkeys(each.groups, each.bytes))
    return sizes


@pytest.mark.acceptance("mpcompress", 1)
def test_a_codec_that_sends_all_is_no_codec():
    """To the bit, by the same bytes."""
    np.testing.assert_equal(found("all"), found("none"))
    assert permuted("all") == permuted("none")


@pytest.mark.acceptance("mpcompress", 5, 6)
@pytest.mark.parametrize("case", cases("none"))
def test_up_go_codes_and_down_their_slopes(case):
    schedule, name = CASES[case]
    whole, codec = 4 * np.prod(SENT), CODECS[name]
    up = codec.wire_bytes(SENT, "float32", where="pipeline")
    down = {"quantize": whole, "largest": 4 * 5, "random": 4 * 5}.get(name, up)
    last = schedule.stages - 1
    wanted = {(last - 1, last): up, (last, last - 1): down}
    if last > 1:  # the boundary before is as it was
        wanted |= {(0, 1): whole, (1, 0): whole}
    assert permuted(case) == wanted


@pytest.mark.parametrize(
    ("schedule", "change", "message"),
    [
        (sharding.interleaved(4, 4, 2), {}, "each device has one.*got interleaved"),
        (sharding.chimera(2, 2), {}, "each device has one.*got chimera"),
        (sharding.gpipe(2, 4), {"coded": 2}, "coded must be .* 1 to 1: got 2"),
        (sharding.gpipe(2, 4), {"coded": 0}, "coded must be .* 1 to 1: got 0"),
        (sharding.gpipe(1, 4), {}, "coded must be"),
        (sharding.gpipe(2, 4), {"decode": None}, "encode and decode go together"),
    ],
)
@pytest.mark.acceptance("mpcompress", 10)
def test_what_cannot_send_codes_is_told(schedule, change, message):
    own = dataclasses.replace(functions("all"), **change)
    with pytest.raises(ConfigError, match=message):
        sharding.pipelined_value_and_grad(schedule, own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decode": lambda params, y, visit: y[:1]},
            "what decodes must be like a stage's input",
        ),
        (
            {
                "encode": lambda params, y, visit: y.astype("int8"),
                "decode": lambda params, code, visit: code.astype("float32"),
            },
            r"no slope passes .* set through.*got \['int8'\]",
        ),
    ],
)
def test_codes_that_do_not_fit_are_told(change, message):
    own = dataclasses.replace(functions("all"), **change)
    schedule = sharding.gpipe(2, COUNT)
    specs = sharding.stage_specs(params(schedule, "all"))
    mapped = jax.shard_map(
        sharding.pipelined_value_and_grad(schedule, own),
        mesh=sharding.make_mesh({"stage": 2}),
        in_specs=(specs, jax.sharding.PartitionSpec()),
        out_specs=jax.sharding.PartitionSpec(),
    )
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(mapped, params(schedule, "all"), pipelines.batch())
