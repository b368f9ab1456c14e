"""The room is for processes that may not want JAX."""

import pathlib
import subprocess
import sys

import hpcjax.hostcomm


def test_no_module_loads_jax():
    folder = pathlib.Path(hpcjax.hostcomm.__path__[0])
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert "tcp" in names
    code = "; ".join(f"import hpcjax.hostcomm.{name}" for name in names)
    code += "; import sys; sys.exit('jax' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=folder.parents[1],
        timeout=60,
    )
