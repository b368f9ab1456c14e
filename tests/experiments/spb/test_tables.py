"""What SPB's tables compute of given runs, and what is recorded of them."""

import dataclasses

import numpy as np
import pytest

from experiments.spb import cluster, processes, resources, tables, together
from hpcjax import optim, perf
from hpcjax.averaging import WagmaConfig
from hpcjax.collectives import OkTopkConfig
from hpcjax.core import ConfigError
from hpcjax.models import MlpConfig
from hpcjax.optim import AdamWConfig, KfacConfig
from hpcjax.runs import discover, execute, results, training
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig
from tests.conftest import REPOSITORY
from tests.experiments import rows


def history(error, share, steps=40):
    """Three seeds; the loss of step n is 1 / n."""
    return rows.run(
        seeds=(0, 1, 2),
        loss=("step", 1 / np.arange(1, steps + 1)),
        share=share,
    ).assign(val_error=(("seed", "eval_step"), [[0.9, each] for each in error]))


def test_quality_is_judged_by_the_mean_of_the_last_errors():
    runs = {
        "plain, full": history([0.01, 0.02, 0.03], 1.0),
        "plain, k = 4": history([0.02, 0.03, 0.04], 0.5),
    }
    table = tables.quality(runs)
    claim = tables.QUALITY.tier("cpu").claims["plain"]
    assert table["error"].values == pytest.approx([2.0, 3.0])
    assert (table["error_low"][1], table["error_high"][1]) == pytest.approx((2, 4))
    assert claim.ours(table) == pytest.approx(1.0)
    # After half of the steps full has done the same work: steps 19 and 20.
    assert table["full_loss"].sel(row="plain, k = 4") == pytest.approx(
        (1 / 19 + 1 / 20) / 2
    )
    runs["plain, k = 4"] = history([0.05, 0.05, 0.05], 0.5)
    assert not claim.holds(claim.ours(tables.quality(runs)))


@pytest.mark.slow
@pytest.mark.acceptance("spb-jigsaw", 7)
def test_a_quarter_of_the_workers_suffice_but_not_a_wrong_divisor(tmp_path):
    """The plain rows of the table, trained here, with two of its seeds."""
    tier = tables.QUALITY.tier("cpu")
    trained = {
        name: results.over_seeds(
            {
                seed: execute.run(
                    runs.config,
                    {**runs.overrides, "seed": str(seed)},
                    root=tmp_path,
                    quiet=True,
                ).dataset
                for seed in (0, 2)
            }
        )
        for name, runs in tier.runs.items()
        if name.startswith("plain")
    }
    made = tables.quality(trained)
    plain = tier.claims["plain"]
    ours, broken = plain.ours(made), plain.ours(plain.controls[0].apply(made))
    assert plain.holds(ours), ours
    assert not plain.holds(broken), broken
    seeds = {runs.seeds for runs in tier.runs.values()}
    assert seeds == {(0, 1, 2)}
    assert {tables.WRONG, "k = 4, random freezing"} <= set(tier.runs)


def test_resources_of_compiled_roles_hold_their_claims():
    small = {
        "chain": resources.Config(k=2, layers=3, width=32, rows=256),
        "cnn": resources.Config(network="cnn", k=3, layers=1, width=4, rows=16),
    }
    runs = {
        name: resources.run(cfg, None).expand_dims(seed=[0])
        for name, cfg in small.items()
    }
    table = tables.by_role(runs)
    assert list(table["row"].values)[:2] == ["chain, role 1", "chain, role 2"]
    assert table["exact"].values[:2] == pytest.approx([5 / 11, 1])
    claims = tables.RESOURCES.tier("cpu").claims
    for name in ("flops", "monotone", "memory"):
        assert claims[name].holds(claims[name].ours(table)), name


@pytest.mark.slow
def test_processes_end_with_the_same_parameters_and_own_programs():
    sent, found = {}, {}
    for mode in ("contributors", "zeros"):
        cfg = processes.Config(k=2, layers=1, width=192, rows=64, steps=2, mode=mode)
        found[mode] = processes.run(cfg, None).expand_dims(seed=[0])
        sent[mode] = float(found[mode]["sent"].sum())
    block = 4 * 192**2
    roles = optim.roles(2, 2, 0)
    assert sent["contributors"] == sum(
        optim.contributor_bytes([block] * 2, roles).total
    )
    assert sent["contributors"] == 0.75 * sent["zeros"]
    short, whole = found["contributors"]["flops"].values[0]
    assert short < whole  # the program of role 1 has no product of the first block
    assert len(tables.by_process(found)["row"]) == 4


def test_what_a_layer_costs_is_its_products():
    import jax.numpy as jnp

    def loss(params, x):
        return (jnp.tanh(x @ params["a"]) @ params["b"]).sum()

    params = {"a": jnp.ones((64, 32)), "b": jnp.ones((32, 96))}
    x = jnp.ones((128, 64))
    layers = optim.layers_of(loss, params, x)
    costs = perf.backward_flops(loss, layers, params, x)
    # a: its kernel's gradient and what b's input gets; b: its kernel's.
    wanted = [2 * 128 * 64 * 32 + 2 * 128 * 32 * 96, 2 * 128 * 32 * 96]
    np.testing.assert_allclose(costs, wanted, rtol=0.1)


def test_devices_that_do_not_divide_the_workers_are_refused(tmp_path):
    """Neither are there fewer workers than were asked for, nor more."""
    changes = {"backward.workers": "4", "backward.k": "2"}
    cfg = discover.load("spb/digits", changes, REPOSITORY).config
    for devices in (3, 8):
        with pytest.raises(ConfigError, match=f"workers=4, devices={devices}"):
            training.task(cfg, tmp_path, devices)


@pytest.mark.acceptance("spb-jigsaw", 8)
def test_a_small_cluster_holds_the_claims_of_large_ones():
    cfg = cluster.Config(gpus=32, jobs=24, rate=0.5, iterations=(20, 40))
    made = cluster.run(cfg, None).expand_dims(seed=[0])
    table = tables.by_policy(dict.fromkeys(("64 GPUs", "512 GPUs"), made))
    # Roles alone save computing, and no GPU time where gangs wait for the longest.
    gang = table.sel(row="64 GPUs, spb_gang")
    assert gang["computing"] > 10
    assert abs(gang["saved"]) < 1
    for name, claim in tables.CLUSTER.tier("model").claims.items():
        assert claim.holds(claim.ours(table)), name
        broken = claim.ours(claim.controls[0].apply(table))
        assert not claim.holds(broken), name


def test_a_trace_is_simulated(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit,gpus,duration\na,0,2,4\nb,0,2,4\n")
    cfg = cluster.Config(gpus=2, trace=str(path), k=2, switch=0.0, bytes=0.0)
    made = cluster.run(cfg, None)
    hours = made["busy"].sel(policy=["jigsaw", "gang_fifo"]).values
    # 16 tasks of 1 s, of which b (k - 1) / 2k = 1/6 is saved.
    assert hours * 3600 == pytest.approx([16 - 8 / 3, 16])
    assert float(made["derived"]) == pytest.approx(1 / 6)


def job(**changes):
    model = MlpConfig(widths=(16, 16, 16), activation="tanh")
    own = TrainingConfig(model=model, train=TrainConfig(batch_size=32))
    return dataclasses.replace(own, **changes)


@pytest.mark.slow
@pytest.mark.acceptance("spb-jigsaw", 9, 10)
def test_jobs_side_by_side_learn_what_they_learn_alone():
    """Nothing is timed here; that roles of other steps are told is the control."""
    cfg = together.Config(
        first=job(),
        second=job(optimizer=AdamWConfig(lr=1e-3), seed=1),
        iterations=4,
        repetitions=1,
        timings=1,
        pinned=False,
    )
    made = together.run(cfg, None)
    assert float(made["others"].min()) > 1e-4
    table = tables.by_order({"2 cores": made.expand_dims(seed=[0])})
    claim = tables.TOGETHER.tier("cpu").claims["same"]
    assert claim.holds(claim.ours(table)), made["apart"].values
    assert not claim.holds(claim.ours(claim.controls[0].apply(table)))


def turns(whole, jigsaw, aligned, ideal):
    coords = {"order": together.ROWS, "repetition": range(3), "job": together.JOBS}
    seconds = [[each, each + 1, each + 1] for each in (whole, jigsaw, aligned)]
    order = dict.fromkeys(("apart", "others", "foretold"), "order")
    return rows.run(
        coords,
        seconds=("order repetition", seconds),
        idle="order repetition",
        forward="job",
        backward="job",
        ideal=ideal,
        iterations=24,
        **order,
    )


@pytest.mark.acceptance("spb-jigsaw", 10)
def test_half_of_the_ideal_gain_is_wanted():
    claims = tables.TOGETHER.tier("cpu").claims
    table = tables.by_order({"2 cores": turns(23.0, 19.0, 23.0, 1.3)})
    row = table.sel(row="2 cores, jigsaw")
    assert float(row["faster"]) == pytest.approx(1.2)  # medians: 24 and 20
    assert float(row["rate"]) == pytest.approx(24 / 20)
    assert claims["faster"].ours(table) == pytest.approx(2 / 3)
    assert claims["beside"].holds(claims["beside"].ours(table))
    slow = tables.by_order({"2 cores": turns(23.0, 21.0, 19.0, 1.3)})
    assert not claims["faster"].holds(claims["faster"].ours(slow))
    assert not claims["beside"].holds(claims["beside"].ours(slow))


def test_ideal_is_that_of_two_equal_jobs():
    times = perf.IterationTimes(1.0, (2.0, 3.0))
    assert together.ideal({"first": times, "second": times}, 2) == 6 / 5


@pytest.mark.acceptance("spb-jigsaw", 10)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 3}, "workers must be a multiple of k: got workers=3, k=2"),
        ({"first": job(optimizer=KfacConfig())}, r"first.optimizer .*: got kfac"),
        ({"second": job(exchange=OkTopkConfig())}, "second.exchange .* got ok_topk"),
        ({"second": job(averaging=WagmaConfig())}, "second.averaging .* got wagma"),
        ({"workers": 6}, "first.train.batch_size must divide by the 6 workers"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        together.Config(**{"first": job(), "second": job()} | changes)
