"""Stages in threads that follow their messages, against one program."""

import concurrent.futures
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import hostcomm, perf, sharding
from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost

STAGES, DATA, COUNT = 4, 2, 8


def layer(params, x, _):
    return jnp.tanh(x @ params["w"] + params["b"])


def loss(params, x, target):
    return jnp.mean((layer(params, x, None) - target) ** 2)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    params = [
        {
            "w": rng.normal(size=(5, 5)).astype(np.float32),
            "b": rng.normal(size=5).astype(np.float32),
        }
        for _ in range(STAGES)
    ]
    x, target = rng.normal(size=(2, DATA, COUNT, 3, 5)).astype(np.float32)
    return params, x, target


def whole(params, x, target):
    """The mean loss of all micro-batches of both replicas."""
    y = x.reshape(-1, 3, 5)
    for own in params:
        y = layer(own, y, None)
    return jnp.mean((y - target.reshape(y.shape)) ** 2)


def train(
    batch, seed, *, in_flight=None, ties: sharding.Ties = "arrival", deterministic=False
):
    """Gradients of each stage, averaged over replicas, of two batches of delays."""
    params, x, target = batch
    pipes = [hostcomm.connected(STAGES, patience=20.0) for _ in range(DATA)]
    across = [hostcomm.connected(DATA, patience=20.0) for _ in range(STAGES)]

    def run(replica, stage):
        rng = np.random.default_rng([seed, replica, stage])
        noise = rng.normal(size=(30, 30))
        first, last = stage == 0, stage == STAGES - 1
        work = perf.StageWork(
            loss if last else layer,
            params[stage],
            COUNT,
            inputs=x[replica] if first else None,
            targets=target[replica] if last else None,
            deterministic=deterministic,
        )

        def run_op(op, received):
            for _ in range(rng.integers(40) * (seed > 0)):
                np.linalg.inv(noise)  # work, so that messages come in other orders
            return work.run_op(op, received)

        own = perf.DeviceWork(run_op=run_op, run_task=print, flush=lambda _: None)
        pipeline = perf.HostPipeline(None, pipes[replica][stage], own)
        for step in range(2):
            pipeline.step(
                step, sharding.MessageDriven(STAGES, stage, COUNT, in_flight, ties)
            )
            gradient = work.take_gradient()
        leaves, tree = jax.tree.flatten(gradient)
        flat = np.concatenate([np.ravel(leaf) for leaf in leaves])
        mean = hostcomm.allreduce(across[stage][replica], flat) / DATA
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = zip(np.split(mean, ends), leaves, strict=True)
        made = [part.reshape(leaf.shape) for part, leaf in parts]
        return jax.tree.unflatten(tree, made), pipeline.spans, work.losses

    with concurrent.futures.ThreadPoolExecutor(STAGES * DATA) as pool:
        asked = [
            [pool.submit(run, replica, stage) for stage in range(STAGES)]
            for replica in range(DATA)
        ]
        return [[each.result(timeout=60) for each in row] for row in asked]


@pytest.mark.acceptance("axonn-myelin", 1)
def test_gradients_are_those_of_one_program_in_whatever_order(batch):
    """Three patterns of delays; to the bit where they are added in order."""
    params, x, target = batch
    wanted = jax.grad(whole)(params, x, target)
    kept = []
    ways: list[tuple[int | None, sharding.Ties]] = [
        *((None, "arrival"), (8, "arrival"), (6, "backward"))
    ]
    for seed, (in_flight, ties) in enumerate(ways):
        found = train(batch, seed, in_flight=in_flight, ties=ties, deterministic=True)
        kept.append([gradient for gradient, *_ in found[0]])
        for stage, own in enumerate(kept[-1]):
            for name, value in own.items():
                np.testing.assert_allclose(value, wanted[stage][name], atol=1e-6)
        losses = [mean for *_, each in found for mean in each[-1].values()]
        assert np.mean(losses) == pytest.approx(float(whole(*batch)), rel=1e-5)
        for row in found:
            for _, spans, _ in row:
                assert len(spans) == 2 * 2 * COUNT
    for other in kept[1:]:
        jax.tree.map(np.testing.assert_array_equal, kept[0], other)


@pytest.mark.acceptance("axonn-myelin", 3)
def test_no_more_are_in_flight_than_allowed(batch):
    wanted = jax.grad(whole)(*batch)
    for in_flight, most in ((None, STAGES), (6, 6), (99, COUNT)):
        found = train(batch, 1, in_flight=in_flight)
        for row in found:
            for own, right in zip(row, wanted, strict=True):
                jax.tree.map(
                    lambda one, two: np.testing.assert_allclose(one, two, atol=1e-6),
                    *(own[0], right),
                )
            flying = [0]
            for span in row[0][1]:
                flying.append(flying[-1] + (1 if span.work.kind == "F" else -1))
            assert max(flying) == most


def test_a_stage_that_leaves_is_named():
    pipes = hostcomm.connected(2, patience=20.0)
    work = perf.DeviceWork(
        run_op=lambda op, _: np.zeros(1), run_task=print, flush=print
    )
    pipes[1].abort()
    with pytest.raises(ProcessLost, match="rank 1"):
        perf.HostPipeline(None, pipes[0], work).step(0, sharding.MessageDriven(2, 0, 2))


def test_a_stage_that_is_silent_is_given_up():
    pipes = hostcomm.connected(2, patience=0.2)
    work = perf.DeviceWork(
        run_op=lambda op, _: np.zeros(1), run_task=print, flush=print
    )
    with pytest.raises(
        ProcessLost, match="a message of step 3 from stage 1 was waited"
    ):
        perf.HostPipeline(None, pipes[0], work).step(3, sharding.MessageDriven(2, 0, 2))


def test_inputs_of_other_micro_batches_are_told():
    with pytest.raises(ConfigError, match="inputs must be of 3 micro-batches: got "):
        perf.StageWork(layer, {}, 3, inputs=np.zeros((2, 1)))


def test_stages_that_do_not_fit_are_named_before_anything_runs(batch):
    params, x, target = batch
    functions = [layer] * (STAGES - 1) + [loss]
    shapes = perf.check_stages(functions, params, x[0, 0], target[0, 0])
    assert [each.shape for each in shapes] == [(3, 5)] * 3 + [()]
    cut = [*params[:2], {"w": np.zeros((4, 5)), "b": np.zeros(5)}, params[3]]
    words = r"stage 2 cannot take float32\[3, 5\], which stage 1 gives: TypeError: dot_"
    with pytest.raises(ConfigError, match=words):
        perf.check_stages(functions, cut, x[0, 0], target[0, 0])
    with pytest.raises(ConfigError, match=r"stage 0 cannot take .*pipeline's input"):
        perf.check_stages(functions, params, x[0, 0, :, :2], target[0, 0])
    with pytest.raises(ConfigError, match=r"loss must be a real scalar.*\[3, 5\]"):
        perf.check_stages([layer] * STAGES, params, x[0, 0], target[0, 0])
    with pytest.raises(ConfigError, match="params must be of 4 stages"):
        perf.check_stages(functions, params[:3], x[0, 0], target[0, 0])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda w, x, _: (x, x),
            "stage 0 must give an array of f.*: got given='tuple'",
        ),
        (lambda w, x, _: x > 0, r"stage 0 must give.*floating.*'bool\[3, 5\]'"),
        (lambda w, x, _: w["c"], "stage 0 cannot take .* input: KeyError: 'c'"),
        (
            lambda w, x, _: next(iter(())),
            "stage 0 cannot take .* input: StopIteration: $",
        ),
    ],
)
def test_a_stage_that_gives_what_has_no_slope_is_named(batch, function, words):
    params, x, target = batch
    functions = [function, layer, layer, loss]
    with pytest.raises(ConfigError, match=words):
        perf.check_stages(functions, params, x[0, 0], target[0, 0])
    with pytest.raises(ConfigError, match="inputs must be an array: got given='dict'"):
        perf.check_stages(functions, params, {"x": x[0, 0]}, target[0, 0])
    with pytest.raises(ConfigError, match=r"stages must be an integer >= 1.*stages=0"):
        perf.check_stages([], [], x[0, 0], target[0, 0])


def test_losses_of_other_dtypes_have_the_gradient_of_their_mean(batch):
    params, x, target = batch
    narrow = {name: value.astype(jnp.bfloat16) for name, value in params[0].items()}
    work = perf.StageWork(
        lambda w, x, target: loss(w, x, target).astype(jnp.bfloat16),
        narrow,
        2,
        inputs=x[0, :2].astype(jnp.bfloat16),
        targets=target[0, :2].astype(jnp.bfloat16),
    )
    for number in range(2):
        for kind in ("F", "B"):
            work.run_op(sharding.Op(0, kind, 0, number), None)
    wanted = jax.grad(loss)(params[0], x[0, :2], target[0, :2])
    for name, value in work.take_gradient().items():
        assert value.dtype == jnp.bfloat16
        far = np.abs(np.asarray(value, np.float32) - wanted[name]).max()
        assert far < 0.05 * np.abs(wanted[name]).max()


def test_a_gradient_of_a_step_that_failed_is_not_added_to_the_next(batch):
    params, x, target = batch
    work = perf.StageWork(loss, params[0], 2, inputs=x[0, :2], targets=target[0, :2])

    def run(number):
        for kind in ("F", "B"):
            work.run_op(sharding.Op(0, kind, 0, number), None)

    for numbers in ([0], [0, 1, 0]):
        for number in numbers:
            run(number)
        words = f"of 2 micro-batches: {len(numbers)} backward"
        with pytest.raises(HpcjaxError, match=words):
            work.take_gradient()
    run(1)
    run(0)
    wanted = jax.grad(loss)(params[0], x[0, :2], target[0, :2])
    found = work.take_gradient()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted
    )


def test_a_state_machine_is_of_this_stage_and_of_one_batch():
    alone, *pair = *hostcomm.connected(1), *hostcomm.connected(2)
    work = perf.DeviceWork(run_op=lambda op, _: None, run_task=print, flush=print)
    pipeline = perf.HostPipeline(None, alone, work)
    row = sharding.MessageDriven(1, 0, 2)
    pipeline.step(0, row)
    assert [span.work.kind for span in pipeline.spans] == list("FBFB")
    with pytest.raises(HpcjaxError, match="stage 0 has begun"):
        pipeline.step(1, row)
    other = perf.HostPipeline(None, pair[0], work)
    for machine in (sharding.MessageDriven(2, 1, 2), sharding.MessageDriven(3, 0, 2)):
        with pytest.raises(ConfigError, match=r"\(stage, stages\) \(0, 2\): got"):
            other.step(0, machine)
    for each in (alone, *pair):
        each.abort()


def killed(transport):
    """What a stage does, of which the second one dies in its third pass."""

    def run_op(op, _):
        if op.stage == 1 and op.micro_batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(1)

    work = perf.DeviceWork(run_op=run_op, run_task=print, flush=print)
    stage = sharding.MessageDriven(3, transport.rank, 4)
    perf.HostPipeline(None, transport, work).step(0, stage)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.acceptance("axonn-myelin", 8)
def test_a_stage_that_is_killed_ends_the_others():
    with pytest.raises(ProcessLost, match="rank 1 was killed by SIGKILL"):
        hostcomm.launch(killed, 3, patience=60.0)
