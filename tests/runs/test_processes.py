"""A config's function in processes: each gets the config, its data and its devices."""

import dataclasses
import os

import numpy as np
import pytest

from hpcjax import hostcomm
from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.runs.processes import in_processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Numbers that are added up.

    Attributes:
      terms: the numbers.
      seed: added, too.
    """

    terms: tuple[float, ...] = (1.0, 2.0)
    seed: int = 0


def add_up(transport, cfg, scale, more):
    """Returns the sum over all ranks, and whether the experiments are found."""
    from experiments.eager import throughput

    mean = np.array([sum(cfg.terms) + cfg.seed + more[transport.rank]])
    total = hostcomm.allreduce(transport, scale * mean)
    return {"total": float(total[0]), "found": throughput.Config().processes}


def count_devices(transport, cfg):
    import jax

    del transport, cfg
    return jax.device_count(), jax.default_backend()


def fail(transport, cfg):
    raise ValueError(f"no good: {cfg.seed}")


@pytest.mark.processes
def test_all_get_the_config_and_what_is_given(tmp_path, monkeypatch):
    """From whatever folder: each finds the root of the function."""
    monkeypatch.chdir(tmp_path)
    cfg = Config(terms=(0.5, 0.25), seed=1)
    made = in_processes(add_up, cfg, 2, given=(2.0, np.array([10.0, 20.0])))
    assert made == [{"total": 2 * (2 * 1.75 + 30), "found": 8}] * 2


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_has_as_many_simulated_devices_as_are_asked_for():
    assert os.environ["XLA_FLAGS"].count("device_count=8") == 1  # ours are others
    assert in_processes(count_devices, Config(), 1, devices=3) == [(3, "cpu")]
    assert in_processes(count_devices, Config(), 2) == [(1, "cpu")] * 2


@pytest.mark.processes
def test_what_goes_wrong_is_told():
    with pytest.raises(HpcjaxError, match=r"(?s)rank 0 failed.*no good: 3"):
        in_processes(fail, Config(seed=3), 1)
    with pytest.raises(ConfigError, match="able to import the function"):
        in_processes(lambda transport, cfg: 0, Config(), 1)
    with pytest.raises(ConfigError, match="devices must be an integer >= 1"):
        in_processes(fail, Config(), 1, devices=0)
