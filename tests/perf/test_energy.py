"""Counters of energy on scripted sequences, and a window of scripted batches."""

import sys
import types

import pytest

from hpcjax import perf
from hpcjax.core import ConfigError, DataFormatError
from tests.perf import fake_sysfs


@pytest.fixture
def root(tmp_path):
    return fake_sysfs.make(tmp_path)


@pytest.mark.acceptance("polythrottle", 7)
def test_rapl_wraps_around(root):
    """Its subzones, which are parts of it, are not counted."""
    counter, path = perf.Rapl(root), root / fake_sysfs.RAPL / "energy_uj"
    sums = []
    for reading in (1000, 4000, 9000, 500, 8000, 7000):
        path.write_text(str(reading))
        sums.append(round(1e6 * counter.read_joules()))
    assert sums == [0, 3000, 8000, 8500, 16000, 24000]
    path.write_text("9001")
    with pytest.raises(DataFormatError, match="is 9001, beyond its 9000"):
        counter.read_joules()


def test_rapl_does_not_count_the_platform_besides(root):
    """On laptops a zone `psys` holds all that the package takes, and more."""
    package, platform = root / fake_sysfs.RAPL, root / "class/powercap/intel-rapl:1"
    platform.mkdir()
    for zone, name in ((package, "package-0"), (platform, "psys")):
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text("1000")
        (zone / "max_energy_range_uj").write_text("9000")
    counter = perf.Rapl(root)
    for zone in (package, platform):
        (zone / "energy_uj").write_text("4000")
    assert round(1e6 * counter.read_joules()) == 3000


@pytest.fixture
def nvml(monkeypatch):
    """A driver with a scripted counter of millijoules."""
    readings = [5000]
    fake = types.SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: readings[0],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake, readings


@pytest.mark.acceptance("polythrottle", 7)
def test_nvml_counts_millijoules_and_does_not_run_backwards(nvml):
    _, readings = nvml
    counter, sums = perf.open_counter("nvml"), []
    for reading in (5000, 5001, 8500):
        readings[0] = reading
        sums.append(counter.read_joules())
    assert sums == [0, 0.001, 3.5]
    readings[0] = 8000
    with pytest.raises(DataFormatError, match="ran backwards: 8000 after 8500"):
        counter.read_joules()


def test_what_counts_no_energy(nvml, monkeypatch, tmp_path):
    fake, _ = nvml

    def refuse(handle):
        raise fake.NVMLError("Not Supported")

    fake.nvmlDeviceGetTotalEnergyConsumption = refuse
    with pytest.raises(ConfigError, match="GPU 0 counts no energy: Not Supported"):
        perf.Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpcjax\[power\]'"):
        perf.Nvml()
    with pytest.raises(ConfigError, match="no package counts energy"):
        perf.open_counter("rapl", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'rapl'"):
        perf.open_counter("rappl")


class Machine:
    """10 W when idle and 30 W for the 50 ms of each batch."""

    def __init__(self):
        self.now = self.joules = 0.0

    def read_joules(self):
        return self.joules

    def wait(self, seconds, watts=10.0):
        self.now += seconds
        self.joules += watts * seconds

    def measure(self, **options):
        return perf.measure_energy(
            lambda: self.wait(0.05, 30.0),
            self,
            4,
            clock=lambda: self.now,
            wait=self.wait,
            **options,
        )


def test_a_window_of_batches():
    window = Machine().measure(seconds=0.2, batches=8)
    assert window.joules == pytest.approx(30 * 0.05 / 4)
    assert window.dynamic == pytest.approx(20 * 0.05 / 4)
    assert (window.idle_watts, window.p95) == pytest.approx((10.0, 0.05))
    assert len(window.latencies) == 8
    assert len(Machine().measure(seconds=1.01, batches=8).latencies) == 21


def test_a_window_has_a_length():
    with pytest.raises(ConfigError, match="seconds must be finite and > 0"):
        Machine().measure(seconds=0.0)
