"""Where a program's time goes, by the compiler's operations."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

# "loop_add_fusion.3.clone.1" -> "loop_add_fusion"
_NUMBER = re.compile(r"(\.(\d+|clone))+$")


def seconds_by_operation(
    thunk: Callable[[], Any], *, calls: int = 3
) -> dict[str, float]:
    """Profiles calls and returns the seconds of each kind of operation in one of them.

    Operations are those of the compiled program, such as "loop_add_fusion" or
    "custom-call", numbers taken off; largest first. On several cores or streams the sum
    may be more than the time that passes.

    Args:
      thunk: returns what to wait for; called once before, so that nothing compiles.
      calls: how many are profiled.

    Examples:
      >>> import jax.numpy as jnp
      >>> matrix = jnp.ones((256, 256))
      >>> program = jax.jit(lambda x: jnp.tanh(x @ x))
      >>> all(s > 0 for s in seconds_by_operation(lambda: program(matrix)).values())
      True
    """
    jax.block_until_ready(thunk())
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(thunk())
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    for event in line.events:
                        operation = dict(event.stats).get("hlo_op")
                        if operation and event.duration_ns:
                            name = _NUMBER.sub("", str(operation))
                            found[name] += event.duration_ns * 1e-9 / calls
    return dict(found.most_common())
