"""Chooses the implementation of an operation: one rule for all kernels."""

import functools
import logging
from typing import NamedTuple

from hpcjax.core import checks
from hpcjax.core.errors import UnsupportedOp
from hpcjax.kernels._triton import launch

log = logging.getLogger(__name__)

KERNEL, INTERPRETED = "triton", "interpreted"
# What each operation has besides its kernel; "auto" takes the first one where the
# kernel does not run.
OPERATIONS = {
    "bias_activation_dropout": ("reference",),
    "clustered_attention": ("blocked", "reference"),
    "dropout_residual_norm": ("reference",),
    "quantized_matmul": ("reference",),
    "sddmm": ("reference",),
    "select_above": ("reference",),
    "softmax_dropout": ("reference",),
    "spmm": ("reference",),
}


class Choice(NamedTuple):
    """What computes an operation.

    Attributes:
      operation: its name in this room.
      implementation: what "auto" takes.
      reason: why.
    """

    operation: str
    implementation: str
    reason: str


def choose(
    operation: str,
    implementation: str,
    *,
    unsupported: str | None = None,
    slower: str | None = None,
) -> str:
    """Returns the implementation that runs; what is named is never replaced.

    Args:
      operation: one of `OPERATIONS`.
      implementation: a name; "auto" for the kernel wherever it can run and is expected
        to be the fastest, which is logged once.
      unsupported: why the kernel cannot take the arguments; None if it can.
      slower: why the kernel is not expected to be the fastest for them.

    Raises:
      ConfigError: an unknown implementation.
      UnsupportedOp: a kernel that is named cannot run here, or not with the arguments.
    """
    others = OPERATIONS[operation]
    allowed = ("auto", KERNEL, INTERPRETED, *others)
    checks.require_choice("implementation", implementation, allowed)
    if implementation == "auto":
        chosen = _choose_here(operation, unsupported or slower)
        _log_choice(chosen)
        return chosen.implementation
    if implementation in (KERNEL, INTERPRETED):
        interpreted = implementation == INTERPRETED
        problem = unsupported or launch.find_problem(interpreted=interpreted)
        if problem:
            raise UnsupportedOp(
                f"{operation}, implementation={implementation!r}: {problem}"
            )
    return implementation


def choices_here() -> tuple[Choice, ...]:
    """Returns what "auto" takes for each operation on this machine, and why.

    Arguments that a kernel does not take are not known here. Starts JAX's devices.
    """
    return tuple(_choose_here(operation) for operation in OPERATIONS)


def _choose_here(operation: str, problem: str | None = None) -> Choice:
    problem = launch.find_problem() or problem
    chosen = OPERATIONS[operation][0] if problem else KERNEL
    return Choice(operation, chosen, problem or "the device is a gpu")


@functools.cache
def _log_choice(choice: Choice) -> None:
    log.info("%s takes implementation=%r: %s", *choice)
