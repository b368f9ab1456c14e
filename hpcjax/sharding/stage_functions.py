"""A model cut into stages, as the functions that a pipeline runs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Visit(NamedTuple):
    """A micro-batch passing a stage: what stage functions know besides their input.

    Attributes:
      batch: the rows of the micro-batch, available at every stage. They may include
        keys for dropout as `key_data`; the recomputation then draws the same masks.
      stage: number of the stage, int32, from which keys can be derived.
      micro_batch: number of the micro-batch, int32.
      taps: taps for the layers of this stage, or None.
      sent: where a backward op encodes again, the code that the stage has sent, without
        its floating-point arrays; None in forward ops. Places that are chosen must be
        these: those of an output that was rounded otherwise would be others.
    """

    batch: Any
    stage: jax.Array
    micro_batch: jax.Array
    taps: Any = None
    sent: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """A model cut into stages, as three functions.

    They must not communicate over the pipeline's axis.

    Attributes:
      first: `(params, visit) -> x`, run before the first stage. Its parameters are all
        that do not belong to stages.
      stage: `(params, x, visit) -> x`, with output of the same shapes and dtypes as the
        input, and the parameters of one stage.
      last: `(params, x, visit) -> loss`, run after the last stage, a mean over the
        micro-batch. Its parameters are those of `first`, so that both may use a tied
        table.
      encode: `(params, y, visit) -> code`, what a stage sends up for its output, any
        tree of arrays; None sends the output. Its parameters are those of `first`.
      decode: `(params, code, visit) -> x`, the input of the next stage.
      coded: the first stage that is sent a code, at least 1.
      through: whether the slope of x is sent down and taken for that of y, as if it had
        not been encoded, so that encode and decode learn nothing; if not, the slope of
        the code's floating-point leaves is.
    """

    first: Callable[[Any, Visit], Any]
    stage: Callable[[Any, Any, Visit], Any]
    last: Callable[[Any, Any, Visit], Any]
    encode: Callable[[Any, Any, Visit], Any] | None = None
    decode: Callable[[Any, Any, Visit], Any] | None = None
    coded: int = 1
    through: bool = False
