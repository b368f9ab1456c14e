"""Stages in threads that follow their messages, against one program."""

import concurrent.futures
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import hostcomm, perf, sharding
from hpcjax.core.errors import ConfigError, ProcessLost

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
    for in_flight, most in ((None, STAGES), (6, 6), (99, COUNT)):
        for row in train(batch, 1, in_flight=in_flight):
            flying = [0]
            for span in row[0][1]:
                flying.append(flying[-1] + (1 if span.work.kind == "F" else -1))
            assert max(flying) <= most
            assert max(flying) == most or in_flight == 99


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
    words = r"stage 2 cannot take float32\[3, 5\], which stage 1 gives: dot_general"
    with pytest.raises(ConfigError, match=words):
        perf.check_stages(functions, cut, x[0, 0], target[0, 0])
    with pytest.raises(ConfigError, match=r"stage 0 cannot take .*pipeline's input"):
        perf.check_stages(functions, params, x[0, 0, :, :2], target[0, 0])
    with pytest.raises(ConfigError, match=r"loss must be a scalar.*\[3, 5\]"):
        perf.check_stages([layer] * STAGES, params, x[0, 0], target[0, 0])
    with pytest.raises(ConfigError, match="params must be of 4 stages"):
        perf.check_stages(functions, params[:3], x[0, 0], target[0, 0])


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
