import subprocess
import sys

from hpcjax.core import environment


def test_a_child_imports_what_we_can(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("print('found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = subprocess.check_output(
        [sys.executable, "-m", "only_here"], env=environment.child(), text=True
    )
    assert told == "found\n"
    assert environment.child(JAX_PROCESS_ID="3")["JAX_PROCESS_ID"] == "3"


def test_what_travels_to_another_machine(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("HPCJAX_DATA", "/data")
    taken = environment.portable()
    assert (taken["JAX_PLATFORMS"], taken["HPCJAX_DATA"]) == ("cpu", "/data")
    assert taken["PYTHONPATH"]
    assert all(
        name.startswith("JAX_") or name in ("PYTHONPATH", "HPCJAX_DATA", "XLA_FLAGS")
        for name in taken
    )


def test_simulated_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert not environment.simulates()
    four = environment.simulated(4)["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", four)
    assert environment.simulates()
    # XLA takes the last of two.
    assert environment.simulated(2)["XLA_FLAGS"].split() == [
        four,
        four.replace("4", "2"),
    ]


def test_a_member_is_found_by_connect():
    assert environment.member("there:12", 4, 0) == {
        "JAX_COORDINATOR_ADDRESS": "there:12",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "0",
    }
