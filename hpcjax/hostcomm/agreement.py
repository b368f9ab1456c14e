"""Settings that all ranks must share, compared when they start."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.collectives import allgatherv
from hpcjax.hostcomm.mailbox import Tag
from hpcjax.hostcomm.transport import Transport


def require_same(transport: Transport, settings: Mapping[str, Any], tag: Tag) -> None:
    """Raises ConfigError unless all ranks have the same settings; all call it.

    Args:
      transport: ours.
      settings: of what JSON can hold.
      tag: of the messages.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> with connected(1)[0] as alone:
      ...     require_same(alone, {"seed": 0}, Tag("settings"))
    """
    text = np.frombuffer(json.dumps(settings).encode(), np.uint8)
    for rank, got in enumerate(allgatherv(transport, text, tag=tag)):
        theirs = json.loads(got.tobytes())
        for name in {**settings, **theirs}:
            rule = f"{name} must be the same in all ranks, rank {rank}'s is not"
            pair = theirs.get(name), settings.get(name)
            checks.require(pair[0] == pair[1], rule, theirs=pair[0], ours=pair[1])


def fingerprint(model: np.ndarray, structure: str) -> dict[str, str]:
    """Returns what `require_same` needs to compare models without sending them.

    Args:
      model: the numbers.
      structure: what they are, such as paths and shapes.

    Examples:
      >>> sorted(fingerprint(np.zeros(2), "w"))
      ['initial parameters (their hash)', 'tree of parameters']
    """
    digest = hashlib.sha256(np.ascontiguousarray(model).tobytes()).hexdigest()
    return {"tree of parameters": structure, "initial parameters (their hash)": digest}
