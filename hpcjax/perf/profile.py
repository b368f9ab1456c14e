"""The time of a compiled program by kind of operation, from a profile."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

# Instances of an operation differ in their suffix: "loop_add_fusion.3.clone.1".
_INSTANCE = re.compile(r"(\.(\d+|clone))+$")


def seconds_by_operation(
    thunk: Callable[[], Any], *, calls: int = 3
) -> dict[str, float]:
    """Profiles a thunk and returns the seconds of each kind of operation in one call.

    Operations that run at the same time, on several cores or streams, each count in
    full, so that the sum may exceed the elapsed time.

    Args:
      thunk: returns the arrays to wait for. It is called once before the profile, so
        that no compilation is profiled.
      calls: number of profiled calls; the seconds are their mean.

    Returns:
      Seconds by the name of an HLO operation without its number, such as
      "loop_add_fusion" or "custom-call"; longest first.

    Examples:
      >>> import jax.numpy as jnp
      >>> matrix = jnp.ones((256, 256))
      >>> program = jax.jit(lambda x: jnp.tanh(x @ x))
      >>> all(s > 0 for s in seconds_by_operation(lambda: program(matrix)).values())
      True
    """
    jax.block_until_ready(thunk())
    seconds: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(thunk())
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    for event in line.events:
                        # Only executed HLO operations have this statistic; events of
                        # the Python and runtime threads do not.
                        operation = dict(event.stats).get("hlo_op")
                        if operation and event.duration_ns:
                            name = _INSTANCE.sub("", str(operation))
                            seconds[name] += event.duration_ns * 1e-9 / calls
    return dict(seconds.most_common())
