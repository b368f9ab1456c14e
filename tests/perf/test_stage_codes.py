"""Two stages in threads that send each other codes, against one program."""

import concurrent.futures
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import hostcomm, perf, sharding
from hpcjax.compress import Autoencoder, Identity, Quantizer, RandomK, TopK
from hpcjax.core.errors import ConfigError, HpcjaxError

COUNT, ROWS, WIDTH = 3, 4, 8
LIKE = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
CODECS = {
    "learnt": Autoencoder(d=3),
    "4 bits": Quantizer(bits=4),
    "largest": TopK(k=5, grad="masked"),
    "random": RandomK(k=5, grad="masked"),
    "all": Identity(),
}
CODED = {  # dtype and shape of arrays, if others than the activations'
    "learnt": [("<f4", (ROWS, 3))],
    "4 bits": [("|u1", (ROWS, WIDTH // 2)), ("<f2", (WIDTH,))],
    "largest": [("<f4", (5,)), ("<i4", (5,))],
}
RNG = np.random.Generator(np.random.Philox(0))
KERNELS = RNG.normal(size=(2, WIDTH, WIDTH)).astype(np.float32) / 2
X, TARGETS = RNG.normal(size=(2, COUNT, ROWS, WIDTH)).astype(np.float32)


LEARNT = CODECS["learnt"]
WIDER = Autoencoder(d=5).init(jax.random.key(1), WIDTH)


def layer(kernel, x, _):
    return jnp.tanh(x @ kernel)


def loss(kernel, x, target):
    return jnp.mean((layer(kernel, x, None) - target) ** 2)


def given(codec):
    return codec.init(jax.random.key(1), WIDTH)


def works(codec, **options):
    own = given(codec)
    shared = {"codec": codec, "like": LIKE, "key": jax.random.key(2)} | options
    first = {"stage": KERNELS[0], "sent": own}
    last = {"stage": KERNELS[1], "received": own}
    return (
        perf.StageWork(layer, first, COUNT, inputs=X, **shared),
        perf.StageWork(loss, last, COUNT, targets=TARGETS, **shared),
    )


def train(stages):
    """Gradients of both stages, and the bytes of arrays that each sends in a step."""
    pipes = hostcomm.connected(2, patience=20.0)

    def run(at):
        device = perf.DeviceWork(
            run_op=stages[at].run_op, run_task=print, flush=lambda _: None
        )
        order = sharding.MessageDriven(2, at, COUNT)
        perf.HostPipeline(None, pipes[at], device).step(0, order)
        return stages[at].take_gradient(), pipes[at].counters().total_sent().payload

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [pool.submit(run, at).result for at in range(2)]
        return [each(timeout=60) for each in found]


def whole(kernels, own, codec):
    """The mean loss in one program, by the gradient rule that the definition names."""
    total = 0.0
    for x, target in zip(X, TARGETS, strict=True):
        y = layer(kernels[0], x, None)
        if isinstance(codec, Autoencoder):
            z = y @ own["encoder"].T @ own["decoder"].T
        elif isinstance(codec, Quantizer):
            z = codec.decode(codec.encode(y, {}), LIKE, {})
            z = y + jax.lax.stop_gradient(z - y)
        elif isinstance(codec, TopK):
            z = jnp.where(abs(y) >= jnp.sort(abs(y).ravel())[-codec.k], y, 0)
        else:
            z = y
        total += loss(kernels[1], z, target) / COUNT
    return total


def header(codec, value, *arrays):
    """Bytes that say what a message is: a length, and the words themselves."""
    told = [[f"{n}", form, list(shape)] for n, (form, shape) in enumerate(arrays)]
    return 8 + len(json.dumps([f"{codec} of float32[4, 8]", {"value": value}, told]))


@pytest.mark.acceptance("mpcompress", 5)
@pytest.mark.parametrize("name", ["learnt", "4 bits", "largest", "all"])
def test_processes_have_the_slopes_and_send_the_bytes_of_codes(name):
    codec = CODECS[name]
    own = given(codec)
    (first, up), (last, down) = train(works(codec))
    kernels, learnt = jax.grad(whole, (0, 1))(KERNELS, own, codec)
    near = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(first["stage"], kernels[0], **near)
    np.testing.assert_allclose(last["stage"], kernels[1], **near)
    for part, stage, other in (
        ("encoder", first["sent"], last["received"]),
        ("decoder", last["received"], first["sent"]),
    ):
        if own:
            np.testing.assert_allclose(stage[part], learnt[part], **near)
            assert not other[part].any()
    wire = codec.wire_bytes(LIKE.shape, "float32", where="pipeline")
    coded = CODED.get(name, [("<f4", LIKE.shape)])
    shape = (ROWS, 3) if name == "learnt" else LIKE.shape
    slope = ("<f4", (5,) if name == "largest" else shape)
    parts = [{"array": f"{n}"} for n in range(len(coded))]
    value = {"tuple": parts} if len(parts) > 1 else parts[0]
    assert up == COUNT * (wire + header(codec, value, *coded))
    back = header(codec, {"list": parts[:1]}, slope)
    assert down == COUNT * (4 * math.prod(slope[1]) + back)


def test_slopes_are_of_the_places_that_were_drawn():
    codec = CODECS["random"]
    first, last = works(codec)
    wanted, places, stage = 0.0, [], KERNELS[0]
    for number in range(COUNT):
        up = first.run_op(sharding.Op(0, "F", 0, number), None)
        places.append(hostcomm.unpack_array(first.message, up)[1])
        last.run_op(sharding.Op(1, "F", 1, number), up)
        down = last.run_op(sharding.Op(1, "B", 1, number), None)
        first.run_op(sharding.Op(0, "B", 0, number), down)
        mask = np.isin(np.arange(ROWS * WIDTH), places[-1]).reshape(LIKE.shape)

        def masked(kernel, n=number, mask=mask):
            return loss(KERNELS[1], layer(kernel, X[n], None) * mask, TARGETS[n])

        wanted += jax.grad(masked)(stage) / COUNT
    found = first.take_gradient()["stage"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert len({tuple(each) for each in places}) == COUNT


@pytest.mark.acceptance("mpcompress", 10)
@pytest.mark.parametrize(
    ("codec", "params", "options", "words"),
    [
        (TopK(k=5), {"sent": {}}, {}, "set codec.grad=masked"),
        (Quantizer(warmup=1), {"sent": {}}, {}, "warmup must be 0"),
        (TopK(k=33, grad="masked"), {"sent": {}}, {}, "k must be at most the entries"),
        (CODECS["random"], {"sent": {}}, {"key": None}, "that draws needs a key"),
        (Identity(), {"sent": {}}, {"like": None}, "needs like, an activation"),
        (Identity(), {}, {}, r"'stage', and codes by .*got .*\['stage'\]"),
        (Identity(), {"received": {}}, {}, r"by \['sent', 'stage'\]: got"),
        (LEARNT, {"sent": {}}, {}, r"'sent' must be as .* draws it"),
        (LEARNT, {"sent": WIDER}, {}, r"\(3, 8\).* got .*\(5, 8\)"),
    ],
)
def test_what_stages_cannot_send_is_told(codec, params, options, words):
    shared = {"codec": codec, "like": LIKE, "key": jax.random.key(2)} | options
    with pytest.raises(ConfigError, match=words):
        perf.StageWork(layer, {"stage": KERNELS[0]} | params, 3, inputs=X, **shared)


def test_what_is_no_code_of_this_codec_is_told():
    first, last = works(Identity())
    up = first.run_op(sharding.Op(0, "F", 0, 0), None)
    other = works(Quantizer(bits=8))[1]
    with pytest.raises(HpcjaxError, match=r"Quantizer.* was waited for: got Identity"):
        other.run_op(sharding.Op(1, "F", 1, 0), up)
    for broken in (X[0], up[:-1]):
        with pytest.raises(HpcjaxError, match=r"waited for: got .*, which nobody"):
            last.run_op(sharding.Op(1, "F", 1, 0), broken)
    plain = perf.StageWork(loss, KERNELS[1], COUNT, targets=TARGETS)
    with pytest.raises(ConfigError, match="for which the stage has no codec"):
        plain.run_op(sharding.Op(1, "F", 1, 0), up)
    # Of as many numbers: places of one shape are others of another.
    for codec in (Identity(), CODECS["largest"]):
        tall = jax.ShapeDtypeStruct((WIDTH, ROWS), "float32")
        first, _ = works(codec)
        last = {"stage": KERNELS[1], "received": {}}
        own = {"targets": TARGETS, "codec": codec, "like": tall}
        other = perf.StageWork(loss, last, COUNT, **own)
        up = first.run_op(sharding.Op(0, "F", 0, 0), None)
        with pytest.raises(HpcjaxError, match=r"\[8, 4\] was .*: got .*\[4, 8\]"):
            other.run_op(sharding.Op(1, "F", 1, 0), up)
    more = {"codec": TopK(k=33, grad="masked"), "like": LIKE}
    with pytest.raises(ConfigError, match="k must be at most the entries"):
        perf.StageWork(loss, last, COUNT, targets=TARGETS, **more)
    wrong = works(Identity(), like=jax.ShapeDtypeStruct((1, WIDTH), "float32"))[0]
    with pytest.raises(ConfigError, match=r"must give like=float32\[1, 8\]: got "):
        wrong.run_op(sharding.Op(0, "F", 0, 0), None)
