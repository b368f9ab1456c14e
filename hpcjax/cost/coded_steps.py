"""When codes between the stages of a pipeline pay, as models and clusters grow.

T = T_comp + T_comm without a codec, T_comp + T_encdec + T_comm(code) with one. Compute
grows with the square of the width and messages with the width: at a fixed number of
stages the gain vanishes, and stays if the number grows with the width.

References:
  Bian, Li, Wang, Xing and Venkataraman, Does Compressing Activations Help Model
  Parallel Training?, MLSys 2024.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from hpcjax.core import checks

if TYPE_CHECKING:
    from hpcjax.compress import Codec


class CodedCosts(NamedTuple):
    """What a stage and its link cost, in seconds.

    Attributes:
      flop: α, of a floating-point operation.
      byte: β, of a byte that is sent.
      number: γ, of a number that is encoded and decoded, and its slope.
      least: c, of a message, however small.
    """

    flop: float
    byte: float
    number: float
    least: float = 0.0

    def message(self, count: float) -> float:
        """Returns the seconds of a message of so many bytes, max(c, β count)."""
        return max(self.least, self.byte * count)


class CodedStep(NamedTuple):
    """Seconds of a micro-batch in a stage, and between it and the next one.

    Attributes:
      compute: T_comp.
      plain: messages both ways without a codec.
      coding: T_encdec.
      coded: messages both ways with it.
    """

    compute: float
    plain: float
    coding: float
    coded: float

    @property
    def speedup(self) -> float:
        """How many times as fast as without a codec it is."""
        return (self.compute + self.plain) / sum(self._replace(plain=0.0))


def compressed_step(
    width: int,
    codec: "Codec",
    costs: CodedCosts,
    *,
    rows: int,
    time: int,
    layers: int,
    stages: int,
    passes: int = 4,
    dtype: Any = "float32",
) -> CodedStep:
    """Returns what a micro-batch of a transformer takes, forward and backward.

    A layer's forward pass has 24 r h² (1 + s/(6h)) operations for r rows.

    Args:
      width: h.
      codec: of what stages send each other.
      costs: as measured.
      rows: r, tokens of a micro-batch.
      time: s, tokens of a sequence.
      layers: of the whole model.
      stages: nodes, of equally many layers; one sends nothing.
      passes: what all passes compute, in forward passes: 3, or 4 if the backward pass
        computes the forward pass again.
      dtype: of activations.

    Raises:
      ConfigError: counts or costs that are none, stages that do not divide the layers,
        or a width that the codec does not take.

    Examples:
      >>> from hpcjax.compress import Autoencoder
      >>> costs = CodedCosts(flop=1e-13, byte=8e-8, number=1e-10)
      >>> step = {"rows": 512, "time": 512, "layers": 24, "stages": 4}
      >>> [
      ...     round(compressed_step(h, Autoencoder(), costs, **step).speedup, 1)
      ...     for h in (1024, 4096, 16384)
      ... ]
      [7.4, 3.5, 1.7]
    """
    checks.require_count(1, width=width, rows=rows, time=time)
    checks.require_count(1, layers=layers, stages=stages, passes=passes)
    checks.require_finite(0.0, **costs._asdict())
    rule = "stages must divide the layers"
    checks.require(layers % stages == 0, rule, layers=layers, stages=stages)
    forward = 24 * rows * width**2 * (1 + time / (6 * width))
    compute = costs.flop * passes * forward * layers / stages
    if stages == 1:
        return CodedStep(compute, 0.0, 0.0, 0.0)
    from hpcjax.compress import Identity

    shape = rows, width
    plain, coded = (
        costs.message(each.wire_bytes(shape, dtype, where="pipeline"))
        + costs.message(each.slope_bytes(shape, dtype))
        for each in (Identity(), codec)
    )
    return CodedStep(compute, plain, costs.number * rows * width, coded)
