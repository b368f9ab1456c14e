"""Steps that processes take: small ones here, and the recorded measurements."""

import json
import pathlib

import numpy as np
import pytest

from experiments.gradcomp import overlap, ranks, tables, validation
from experiments.gradcomp.chain import ChainConfig
from hpcjax.core import ConfigError, drift
from hpcjax.hostcomm import Agent, connected
from hpcjax.runs.processes import in_processes
from hpcjax.sharding import staged

RESULTS = pathlib.Path(tables.__file__).parent / "results"
SMALL = ChainConfig(width=16, layers=4, rows=8)


def record(name):
    return json.loads((RESULTS / f"{name}.cpu.json").read_text())


@pytest.mark.slow
def test_processes_measure_every_part():
    cfg = validation.Config(chain=SMALL, repetitions=1)
    labels = cfg.methods
    found, other = in_processes(ranks.measure, cfg, 2)
    assert found == other
    assert set(found["step_s"]) == set(found["encode_decode_s"]) == set(labels)
    assert all((x == "dense") == (t == 0) for x, t in found["encode_decode_s"].items())
    assert found["slowdown"] >= 1
    made = validation.compared(validation.Config(methods=labels), 2, found)
    assert (made["predicted"] > 0).all()


@pytest.mark.slow
def test_a_round_is_a_turn_of_all():
    with drift.listening() as told:  # what processes measured, their parent hears
        found, _ = in_processes(ranks.overlap, overlap.Config(chain=SMALL, rounds=3), 2)
    assert len(told) == 2
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
        ("computing", "sending", "both", "afterwards"), 3
    )


def test_one_worker_sends_nothing_and_is_refused():
    with pytest.raises(ConfigError, match="processes must be"):
        overlap.Config(processes=1)
    with pytest.raises(ConfigError, match="layers must be"):
        ChainConfig(layers=1)


def test_the_recorded_predictions_hold_and_are_of_the_default_setups():
    found = record("validation")
    assert found["source"] == "measured"
    assert all(found["claims"][name]["holds"] for name in ("median", "worst"))
    cfg = validation.Config()
    assert set(cfg.processes) == {2, 4}
    setups = len(cfg.processes) * len(cfg.mbit_per_s) * len(cfg.methods)
    errors = [v for name, v in found["cells"].items() if name.endswith(".error")]
    assert len(errors) == setups
    assert sorted(map(abs, errors))[-1] == pytest.approx(
        found["claims"]["worst"]["ours"]
    )
    (run,) = found["runs"]
    assert run["config"] == "gradcomp/validation"


@pytest.mark.acceptance("how-to-train", 6)
def test_all_but_the_last_bucket_is_under_way_while_layers_are_computed(monkeypatch):
    """Played: the backward pass of a layer takes a second, and so does its bucket."""
    now, sent, backward = [0.0], [0.0], staged._backward

    class Link(Agent):
        def submit(self, function, *args, **options):
            sent.append(max(sent[-1], now[-1]) + 1)
            return super().submit(function, *args, **options)

    def played(*args):
        now.append(now[-1] + 1)
        return backward(*args)

    monkeypatch.setattr(staged, "_backward", played)
    (transport,) = connected(1)
    with Link() as agent, transport:
        worker = ranks.Worker(transport, SMALL, 0)
        made = worker.averaged(agent)()
        assert (now[-1], sent[-1]) == (SMALL.layers, SMALL.layers + 1)
        for ours, theirs in zip(made, worker.compute(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_recorded_backward_pass_hides_its_communication():
    found = record("overlap")
    assert found["source"] == "measured"
    assert found["claims"]["exposed"]["holds"]
    (row, *_) = found["labels"]["row"]
    cells = {
        name.rpartition(".")[2]: value
        for name, value in found["cells"].items()
        if name.rpartition(".")[0] == row
    }
    assert "4 buckets, 2 processes" in row
    cfg = overlap.Config()
    assert (cfg.chain.layers, cfg.processes, cfg.share) == (4, 2, 1.0)
    assert cfg.rounds >= 5
    # Sending took about as long as the backward pass, two thirds of both passes.
    backward = 2 / 3 * cells["computing"]
    assert 0.6 < cells["sending"] / backward < 1.7
    assert cells["exposed"] <= 0.6
    # At least a fifth less than plain data parallelism, which sends afterwards.
    assert cells["exposed"] <= 0.8 * found["cells"]["sent afterwards.exposed"]


def test_a_backward_pass_takes_some_time_whatever_noise_says():
    assert ranks.split(1.0, 3.0) == {"forward_s": 1.0, "backward_s": 2.0}
    assert ranks.split(1.2, 0.9)["backward_s"] == pytest.approx(0.3)
