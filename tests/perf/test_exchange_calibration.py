"""What links and devices take: found again, kept, refused for another device."""

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import collectives, cost, perf
from hpcjax.core import ConfigError, DataFormatError, DataMissing
from hpcjax.hostcomm import MessageCost, connected, fit_cost
from hpcjax.perf import exchange_calibration
from hpcjax.perf.exchange_encoding import HostEcho, MeshEcho
from tests.hostcomm.threads import in_threads

SIGNS = cost.Exchanged(name="signSGD", exchange=collectives.SignConfig())
POWER = cost.Exchanged(name="PowerSGD r=4", exchange=collectives.PowerSgdConfig())
WORK = {"forward_s": 0.1, "backward_s": 0.25}


def calibration(**changes):
    options = {
        "device": perf.device_name(),
        "source": "measured",
        "provenance": {"started": "2026-01-01", "versions": {"jax": "1"}},
        "compute": (perf.ComputeTime("resnet50", 16, 0.1, 0.25),),
        "encoding": (perf.EncodeTime("resnet50", "signSGD", 8, 0.02),),
    }
    return perf.Calibration(**options | changes)


@pytest.mark.parametrize("size", [2, 3])
def test_the_slowest_ranks_median_in_all(size):
    def rank(transport):
        ticks = itertools.count(step=float(transport.rank + 1))
        calls = []
        took = perf.time_together(
            transport,
            lambda: calls.append(0),
            repetitions=3,
            warmup=2,
            clock=lambda: next(ticks),
        )
        return took, len(calls)

    got = in_threads(rank, connected(size, patience=20.0))
    assert got == [(float(size), 5)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_both_collectives_are_measured_at_every_size(size, monkeypatch):
    """In a time that goes on by what the model says of what is sent, nothing else."""
    net = cost.System(processes=size, link=MessageCost.of_rate(1e6, 0.5))
    now, called = [0.0], []

    def collective(name):
        def call(transport, array):
            now[0] += net.seconds([getattr(collectives, name)(array.size, size)])
            called.append((name, array.nbytes))

        return call

    def took(transport, thunk, **_):
        before = now[0]
        thunk()
        return now[0] - before

    fake = types.SimpleNamespace(
        allreduce=collective("all_reduce"),
        allgatherv=collective("all_gather"),
        fit_cost=fit_cost,
    )
    monkeypatch.setattr(exchange_calibration, "time_together", took)
    monkeypatch.setattr(exchange_calibration, "hostcomm", fake)
    one, *others = connected(size)
    with one:
        found = perf.calibrate(one, (4, 4000))
        for other in others:
            other.abort()
    assert (found.processes, found.link.alpha) == (size, pytest.approx(0.5))
    assert found.link.bytes_per_s == pytest.approx(1e6)
    expected = itertools.product((4, 4000), ("all_reduce", "all_gather"))
    assert called == [(name, count) for count, name in expected]


def test_a_transport_is_calibrated():
    def rank(transport):
        return perf.calibrate(transport, (4, 40_000), repetitions=2)

    found = in_threads(rank, connected(2, patience=20.0))
    assert found[0] == found[1]
    assert found[0].processes == 2
    assert found[0].link.bytes_per_s > 0


def test_what_cannot_be_calibrated():
    with pytest.raises(ConfigError, match="processes must be"):
        perf.encode_decode(CONFIGS[0].make(), gradients(), 0)
    (alone,) = connected(1)
    with alone, pytest.raises(ConfigError, match="two ranks"):
        perf.calibrate(alone)
    a, b = connected(2)
    for sizes in ((4,), (4, 6), (0, 4)):
        with pytest.raises(ConfigError, match="two sizes"):
            perf.calibrate(a, sizes)
    a.abort()
    b.abort()


def test_a_file_gives_back_what_was_kept(tmp_path):
    path = tmp_path / "made.json"
    calibration().save(path)
    found = perf.load_calibration(path)
    assert found == calibration()
    content = json.loads(path.read_text())
    assert content["units"] == "seconds"
    assert content["provenance"]["versions"] == {"jax": "1"}
    shapes = ((1000, 1000),)
    work = found.workload("resnet50", 16, shapes, slowdown=1.1)
    assert work == cost.Workload(shapes=shapes, batch=16, slowdown=1.1, **WORK)
    timed = found.add_encode_time(SIGNS, "resnet50", 8)
    assert timed == dataclasses.replace(SIGNS, encode_decode_s=0.02)
    assert found.add_encode_time(cost.Dense(), "resnet50", 8) == cost.Dense()


def test_another_device_is_refused_unless_forced(tmp_path):
    path = tmp_path / "made.json"
    calibration(device="NVIDIA V100").save(path)
    with pytest.raises(ConfigError, match=r"of NVIDIA V100.*force it"):
        perf.load_calibration(path)
    assert perf.load_calibration(path, force=True).device == "NVIDIA V100"


@pytest.mark.acceptance("gradcomp-utility", 9)
def test_what_was_not_measured_names_the_command():
    known, command = calibration(), "`hpcjax run gradcomp/calibration`"
    for method, model, count in (
        (SIGNS, "resnet50", 16),
        (SIGNS, "bert_base", 8),
        (POWER, "resnet50", 8),
    ):
        with pytest.raises(ConfigError, match=command):
            known.add_encode_time(method, model, count)
    with pytest.raises(ConfigError, match=command):
        known.workload("resnet50", 32, ((1,),))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "made.json"
    with pytest.raises(DataMissing):
        perf.load_calibration(path)
    for content in ({"kind": "else"}, {"kind": "exchange calibration"}):
        path.write_text(json.dumps(content))
        with pytest.raises(DataFormatError, match="exchange calibration"):
            perf.load_calibration(path)


CONFIGS = (
    collectives.SignConfig(),
    collectives.TopKConfig(density=0.1),
    collectives.MsTopKConfig(density=0.1),
    collectives.PowerSgdConfig(rank=4),
    collectives.HalfConfig(),
)


def gradients():
    rng = np.random.default_rng(0)
    return {"kernel": rng.normal(size=(30, 20)).astype(np.float32)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_timed_is_the_average_of_equal_workers(config, on_host):
    """Real processes that all have this gradient agree on what the echo makes."""
    grads, exchange = gradients(), config.make()

    def rank(transport):
        group = collectives.HostGroup(transport)
        return exchange.average(group, grads, exchange.init(grads))[0]["kernel"]

    expected = in_threads(rank, connected(3, patience=20.0))[0]
    found = perf.encode_decode(exchange, grads, 3, on_host=on_host)()["kernel"]
    if isinstance(config, collectives.MsTopKConfig):  # the ranks' runs differ
        assert np.count_nonzero(found) == 60
        return
    factor = 3 if isinstance(config, collectives.HalfConfig) else 1
    if isinstance(config, collectives.PowerSgdConfig):
        # What stands for the sum is one part of it; it has the same direction.
        left, right = np.asarray(found), np.asarray(expected)
        cosine = np.sum(left * right) / np.linalg.norm(left) / np.linalg.norm(right)
        assert cosine == pytest.approx(1, abs=1e-4)
        return
    np.testing.assert_allclose(factor * np.asarray(found), expected, rtol=2e-3)


REGIONAL = (
    collectives.OkTopkConfig(density=0.1),
    collectives.TopkDsaConfig(density=0.1),
    collectives.GTopkConfig(density=0.1),
)


@pytest.mark.quick("True-TopkDsaConfig", "True-GTopkConfig", "True-OkTopkConfig")
@pytest.mark.parametrize("config", REGIONAL, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("on_host", [False, True])
def test_methods_that_share_out_regions_are_timed_too(config, on_host):
    """What goes to other owners comes back, so that as many entries are merged."""
    grads = gradients()
    for processes in (1, 4):
        thunk = perf.encode_decode(config.make(), grads, processes, on_host=on_host)
        for _ in range(2):
            assert 10 < np.count_nonzero(thunk()["kernel"]) <= 4 * 60


def test_copies_are_decoded_one_by_one():
    """A compiler that knew that they are equal would decode one of them."""

    def decode(count):
        return jax.jit(lambda x: jnp.sum(jnp.cos(MeshEcho(count).all_gather(x)), 0))

    def cosines(count):
        text = decode(count).lower(jnp.ones(1000)).compile()
        return text.cost_analysis()["transcendentals"]

    assert cosines(8) == 8 * cosines(1)
    assert HostEcho(4).all_gather(np.ones(3)).shape == (4, 3)
