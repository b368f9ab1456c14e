"""Memory and layouts of pruned networks, against the paper and a simulator."""

import dataclasses

import pytest

from hpcjax import cost, sharding
from hpcjax.core.errors import ConfigError
from hpcjax.cost.sparse_state import bubble_seconds, transmission_seconds
from hpcjax.hostcomm import MessageCost

SIZE = 1_000_000


@pytest.mark.acceptance("samo", 1)
def test_the_papers_memory_and_savings():
    assert cost.dense_memory(SIZE).total == 20 * SIZE
    for sparsity, saved in ((0.8, 0.66), (0.9, 0.78)):
        kept = (1 - sparsity) * SIZE
        total = cost.sparse_memory(SIZE, sparsity).total
        assert total == pytest.approx(24 * kept + 2 * SIZE)
        assert 1 - total / (20 * SIZE) == pytest.approx(saved, abs=1e-12)


@pytest.mark.acceptance("samo", 1)
@pytest.mark.parametrize(
    ("options", "sparsity"),
    [
        ({}, 0.25),
        ({"optimizer": "momentum"}, 0.3),
        ({"precision": "single"}, 0.25),
        ({"precision": "single", "account": "jax"}, 0.25),
        ({"account": "jax"}, 2 / 9),
    ],
)
def test_where_compression_begins_to_pay(options, sparsity):
    assert cost.break_even(**options) == pytest.approx(sparsity, abs=1e-12)


@pytest.mark.acceptance("samo", 1)
@pytest.mark.parametrize(
    ("options", "per_element", "per_value"),
    [
        ({}, 2, 16),
        ({"index": "bitmap"}, 2 + 1 / 8, 12),
        ({"mode": "rematerialize"}, 0, 18),
        ({"optimizer": "momentum"}, 2, 12),
        ({"precision": "single"}, 4, 12),
    ],
)
def test_what_a_jax_program_holds_between_steps(options, per_element, per_value):
    held = cost.sparse_memory(SIZE, 0.75, account="jax", others=1000, **options)
    other = cost.dense_memory(
        1000,
        account="jax",
        **{k: v for k, v in options.items() if k in ("optimizer", "precision")},
    )
    expected = per_element * SIZE + per_value * SIZE / 4 + other.persistent
    assert held.persistent == expected


JOB = cost.PipelineJob(
    size=2.7e9,
    layers=32,
    devices=128,
    device_bytes=16e9,
    batch=512,
    message_bytes=10e6,
    t_f=0.2,
    t_b=0.6,
    neighbours=MessageCost.of_rate(12.5e9),
    replicas=MessageCost.of_rate(12.5e9),
    workspace=2e9,
)


@pytest.mark.acceptance("samo", 11)
def test_fewer_stages_are_needed_the_more_is_pruned():
    stages = [
        cost.plan_pipeline(JOB, sparsity).stages
        for sparsity in (0.3, 0.6, 0.8, 0.9, 0.95)
    ]
    assert stages == sorted(stages, reverse=True)
    assert stages[0] > stages[-1]
    dense = cost.plan_pipeline(JOB)
    assert dense.stages >= stages[0]
    # Half as many would not hold the state; so many do.
    half = 20 * JOB.size / (dense.stages // 2) + 32 * 10e6 + 2e9
    assert half > JOB.device_bytes >= 20 * JOB.size / dense.stages + 32 * 10e6 + 2e9


@pytest.mark.acceptance("samo", 11)
def test_the_times_of_the_paper_by_hand():
    before, after = (cost.time_pipeline(JOB, stages, 0.9) for stages in (8, 2))
    assert before.bubble == pytest.approx(0.875 * 0.8)
    assert after.bubble == pytest.approx(0.5 * 0.8)
    assert before.transmission == pytest.approx(4 * after.transmission)
    # 512 examples of 128 / 8 pipelines are 32 micro-batches, of 4 messages each.
    assert before.transmission == pytest.approx(4 * 32 * 10e6 / 12.5e9)
    assert before.compute == pytest.approx(32 * 0.8 / 8)
    # Half of the 16-bit gradients, of which a tenth is kept, around a ring of 64.
    ring = 2 * 63 / 64 * 2 * 2.7e9 / 2 / 10
    assert after.collective == pytest.approx(ring / 12.5e9)
    assert cost.time_pipeline(JOB, 2).collective == pytest.approx(10 * ring / 12.5e9)
    assert after.seconds == pytest.approx(sum(after[2:]))


@pytest.mark.acceptance("samo", 11)
def test_messages_and_gathers_take_time_of_their_own():
    slow = MessageCost.of_rate(12.5e9, alpha=1e-3)
    job = dataclasses.replace(JOB, neighbours=slow, replicas=slow, gather_s=0.3)
    plain, timed = (cost.time_pipeline(each, 4, 0.9) for each in (JOB, job))
    # 16 micro-batches of 32 pipelines, each of four messages; a ring of 32 sends 62.
    assert timed.transmission - plain.transmission == pytest.approx(4 * 16 * 1e-3)
    assert timed.collective - plain.collective == pytest.approx(62e-3)
    assert timed.gather == pytest.approx(16 * 0.3 / 4)
    assert plain.gather == cost.time_pipeline(job, 4).gather == 0
    assert cost.time_pipeline(job, 1).transmission == 0


@pytest.mark.acceptance("samo", 1)
def test_what_lives_within_a_step_in_jaxs_account():
    for precision, width in (("mixed", 2), ("single", 4)):
        held = cost.sparse_memory(SIZE, 0.75, account="jax", precision=precision)
        assert held.gradients == held.temporary == width * SIZE / 4
        assert held.wide_gradients == 0
    assert cost.sparse_memory(SIZE, 0.75, precision="single").temporary == 0


@pytest.mark.parametrize("stages", [2, 4])
def test_the_formula_of_idle_time_is_that_of_a_simulated_pipeline(stages):
    micro_batches = 8
    line = cost.simulate(
        sharding.one_f_one_b(stages, micro_batches),
        cost.StageCosts(t_f=1 / stages, t_b=3 / stages),
    )
    idle = line.makespan - line.busy(0)
    assert idle == pytest.approx(bubble_seconds(stages, 1, 3))


def test_a_model_that_fits_nowhere_is_told():
    small = dataclasses.replace(JOB, device_bytes=2.5e9)
    with pytest.raises(ConfigError, match="no number of stages up to 32 fits"):
        cost.plan_pipeline(small)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"account": "pytorch"}, "account must be one of"),
        ({"precision": "fp16"}, "precision must be one of .*'mixed', 'single'.*'fp16'"),
        ({"index": "bitmaps"}, "index must be one of .*did you mean 'bitmap'"),
        ({"mode": "rematerialise"}, "did you mean 'rematerialize'"),
        ({"others": -1}, "others must be finite and >= 0: got others=-1"),
        ({"sparsity": 1.5}, r"sparsity must be in \[0, 1\]: got sparsity=1.5"),
    ],
)
def test_memory_of_unknown_choices_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        cost.sparse_memory(SIZE, **{"sparsity": 0.5, **options})


def test_a_job_of_negative_times_is_refused():
    with pytest.raises(ConfigError, match="size must be finite and >= 0: got size=-1"):
        cost.dense_memory(-1)
    with pytest.raises(ConfigError, match="precision must be one of"):
        cost.dense_memory(1, precision="single16")
    for name in ("t_f", "t_b", "message_bytes", "workspace", "gather_s"):
        with pytest.raises(ConfigError, match=f"{name} must be finite and >= 0"):
            dataclasses.replace(JOB, **{name: -1.0})


def test_no_stage_and_times_below_zero_are_refused():
    with pytest.raises(ConfigError, match="stages must be an integer >= 1"):
        bubble_seconds(0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="t_b must be finite and >= 0"):
        bubble_seconds(2, 1.0, float("nan"))
    with pytest.raises(ConfigError, match="message_bytes must be finite and >= 0"):
        transmission_seconds(MessageCost.of_rate(1e9), -1.0, 4)
