"""The contract under a real `mpirun`, where there is one; a clear message without."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest

from hpcjax.core import environment
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import MpiTransport

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
MISSING = [
    *([] if importlib.util.find_spec("mpi4py") else ["mpi4py"]),
    *([] if shutil.which("mpirun") else ["mpirun"]),
]


@pytest.mark.processes
@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {MISSING}")
@pytest.mark.parametrize("what", ["keep_the_contract", "learn_of_an_end", "miss_one"])
def test_ranks_of_mpirun(what):
    open_mpi = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    command = [sys.executable, "-m", "tests.hostcomm.mpi_ranks", what]
    done = subprocess.run(
        ["mpirun", "-n", "3", *command],
        cwd=ROOT,
        env=environment.child(**open_mpi),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Ranks may write into each other's lines.
    assert done.stdout.count("well") == 3


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"MPI and mpi4py: install .*hpcjax\[mpi\]"):
        MpiTransport()
