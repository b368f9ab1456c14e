"""The doctor: what it looks at, and what it says."""

import importlib.metadata

import jax
import pytest

from hpcjax.runs import doctor, show


def printed(checks):
    output = show.console()
    with output.capture() as capture:
        output.print(doctor.render(checks))
    return capture.get()


def by_part(checks):
    return {check.part: check for check in checks}


def requirements(monkeypatch, *lines):
    monkeypatch.setattr(
        doctor,
        "_stated",
        lambda field: {
            "Requires-Dist": list(lines),
            "Provides-Extra": ["gpu", "other"],
            "Requires-Python": [">=3.11"],
        }[field],
    )


def test_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCJAX_DATA", str(tmp_path))
    checks = doctor.examine(tmp_path)
    parts = by_part(checks)
    assert doctor.healthy(checks)
    assert parts["jax"].found == jax.__version__
    assert (
        parts["devices"].found == f"{jax.device_count()} {jax.devices()[0].device_kind}"
    )
    for part in ("python", "jaxlib", "flax", "optax", "data digits"):
        assert parts[part].verdict == "ok", part
    assert parts["data fashion-mnist"].verdict == "missing"
    assert "hpcjax data fetch" in parts["data fashion-mnist"].advice
    kernel = parts["kernel select_above"]
    assert (kernel.found, kernel.verdict) == ("reference", "ok")
    assert kernel.advice == "the device is a cpu"
    text = printed(checks)
    assert "Everything needed is here." in text
    assert all(part in text for part in parts)


def test_a_package_out_of_range(monkeypatch):
    requirements(monkeypatch, "jax<0.2", "no-such-package>=1", "numpy>=1")
    found = by_part(doctor.packages())
    assert found["jax"].verdict == "wrong"
    assert found["jax"].found == importlib.metadata.version("jax")
    assert "pip install 'jax<0.2'" in found["jax"].advice
    assert found["no-such-package"].verdict == "wrong"
    assert "numpy" not in found
    assert not doctor.healthy(tuple(found.values()))
    assert "Wrong: jax, no-such-package" in printed(tuple(found.values()))


def test_python_out_of_range(monkeypatch):
    monkeypatch.setattr(doctor, "_stated", lambda field: ["<3"])
    assert doctor.python().verdict == "wrong"


def test_a_missing_extra_says_what_it_costs(monkeypatch):
    versions = {"jax-cuda13-pjrt": "0.10.2", "numpy": "2.0"}
    versions["jax-cuda13-plugin"] = "0.10.2"
    monkeypatch.setattr(doctor, "_version", versions.get)
    requirements(
        monkeypatch,
        "jax-triton>=0.3.1; extra == 'gpu'",
        "jax[cuda13]>=0.10.2; extra == 'gpu'",
        "numpy; extra == 'other'",
    )
    found = by_part(doctor.extras())
    gpu = found["extra gpu"]
    assert (gpu.found, gpu.verdict) == ("2 of 4 packages", "missing")
    assert "jax-triton: kernels run in their plain JAX, also on a GPU;" in gpu.advice
    assert "pip install" in gpu.advice
    assert "[gpu]'" in gpu.advice
    assert found["extra other"].verdict == "ok"
    assert doctor.healthy(tuple(found.values()))


def test_an_installation_is_told_the_plain_command(monkeypatch):
    monkeypatch.setattr(doctor.places, "checkout", lambda: None)
    assert doctor._install("gpu").endswith("-m pip install 'hpcjax[gpu]'")


def test_jax_that_does_not_start(monkeypatch):
    def fails():
        raise RuntimeError("no backend\nand more")

    monkeypatch.setattr(jax, "devices", fails)
    (check,) = doctor.devices()
    assert check.verdict == "wrong"
    assert check.advice == "JAX does not start: RuntimeError: no backend"


def test_not_installed_at_all(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    assert doctor._stated("Requires-Dist") == []
    assert doctor.python().advice == "hpcjax is not installed"
    assert [check.part for check in doctor.packages()] == list(doctor._SHOWN)
    assert not list(doctor.extras())


@pytest.mark.parametrize("verdict", ["ok", "missing"])
def test_only_wrong_is_unhealthy(verdict):
    assert doctor.healthy((doctor.Check(part="x", found="", verdict=verdict),))
