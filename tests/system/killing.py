"""Runs by the real command, stopped at a step, and what is left of them."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

REPOSITORY = pathlib.Path(__file__).parents[2]
# What is started in the background may inherit that Ctrl-C is ignored.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from hpcjax.runs.cli import main
sys.exit(main())
"""
PATIENCE = 240


def environment() -> dict[str, str]:
    """Returns one to run a command in: it compiles as the suite, says its devices."""
    flags = os.environ["XLA_FLAGS"].split()
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flag for flag in flags if "device_count" not in flag),
    }


class Command:
    """`hpcjax run` of one config in its own process, eight simulated devices."""

    def __init__(self, root, config, overrides=(), *flags):
        self.root = root
        options = ["--devices", "8", "--root", str(root), *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "run", config, *overrides, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment(),
        )

    def finish(self) -> tuple[int, str]:
        """Waits; returns exit status and standard error."""
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, err

    def stop_after(self, step: int, delay: float, how: signal.Signals) -> None:
        """Sends a signal once the record of `step` is there, and `delay` seconds."""
        limit = time.monotonic() + PATIENCE
        while self.process.poll() is None and last_step(self.root) < step:
            assert time.monotonic() < limit, f"step {step} never came"
            time.sleep(0.005)
        time.sleep(delay)
        assert self.process.poll() is None, self.process.communicate()[1]
        self.process.send_signal(how)


def run_folder(root: pathlib.Path) -> pathlib.Path:
    """Returns the only run below `root`."""
    (config,) = (root / "runs").glob("*/config.json")
    return config.parent


def last_step(root: pathlib.Path) -> int:
    """Returns the last step recorded below `root`, -1 before there is one."""
    files = list((root / "runs").glob("*/metrics.jsonl"))
    lines = files[0].read_bytes().split(b"\n")[:-1] if files else []
    return json.loads(lines[-1])["step"] if lines else -1


def metrics(root: pathlib.Path) -> list[dict]:
    """Returns the records of the only run as written, without facts of sessions."""
    lines = (run_folder(root) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    plain = [
        {
            name: value
            for name, value in record.items()
            if "seconds" not in name and name != "shapes"
        }
        for record in records
    ]
    return [record for record in plain if set(record) != {"step"}]


def last_leaves(root: pathlib.Path) -> dict:
    """Returns the checksums of all leaves of the newest checkpoint."""
    manifest = checkpoints(root)[-1] / "MANIFEST.json"
    return json.loads(manifest.read_text())["body"]["leaves"]


def checkpoints(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the complete checkpoints of the only run, oldest first."""
    found = (run_folder(root) / "checkpoints").glob("*/MANIFEST.json")
    return sorted((path.parent for path in found), key=lambda path: int(path.name))


def flip_a_bit(checkpoint: pathlib.Path) -> None:
    """Flips one bit in the middle of the checkpoint's largest data file."""
    files = [p for p in checkpoint.rglob("*") if p.is_file() and p.suffix != ".json"]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
