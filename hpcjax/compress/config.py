"""What quantization can be told; importing this module imports no JAX."""

import dataclasses

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSpec:
    """The values that weights may take, 2^bits of them for each group of a column.

    Attributes:
      bits: 2, 3, 4 or 8.
      symmetric: about zero; otherwise from the least to the largest weight, zero
        always among the values.
      group_size: inputs that share a scale and a zero point; None for all of them.
      mse: shrinks each range to the one of 80 with the least Σ|w − q|^2.4.
      ternary: least, zero and largest weight only; `bits` then says how they are
        stored.
      reference: the published code's symmetric range, which wastes half of it on a
        column without negative weights.
    """

    bits: int = 4
    symmetric: bool = False
    group_size: int | None = None
    mse: bool = False
    ternary: bool = False
    reference: bool = False

    def __post_init__(self) -> None:
        rule = f"bits must be one of {BITS}"
        checks.require(self.bits in BITS, rule, bits=self.bits)
        if self.group_size is not None:
            checks.require_count(1, group_size=self.group_size)
        if self.ternary and (self.mse or self.symmetric):
            raise ConfigError(
                "ternary takes neither mse nor symmetric: got "
                f"mse={self.mse}, symmetric={self.symmetric}"
            )

    @property
    def levels(self) -> int:
        """The largest integer."""
        return 2 if self.ternary else 2**self.bits - 1

    def groups(self, inputs: int, name: str = "the kernel") -> int:
        """Returns how many groups `inputs` inputs of a kernel have.

        Raises:
          ConfigError: the groups do not divide them.
        """
        size = self.group_size or inputs
        if inputs % size:
            raise ConfigError(
                f"{name}: group_size must divide the inputs: got group_size={size}, "
                f"inputs={inputs}"
            )
        return inputs // size


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqOptions:
    """How GPTQ goes through the inputs of a matrix.

    Attributes:
      damping: share of the Hessian's mean diagonal that is added to it.
      act_order: takes inputs by falling diagonal of the Hessian.
      static_groups: fits every group's grid to the weights as they are before the
        first step, so that groups are of neighbouring inputs also with `act_order`.
      block: inputs whose updates are applied to the rest at once; changes no result.
    """

    damping: float = 0.01
    act_order: bool = False
    static_groups: bool = False
    block: int = 128

    def __post_init__(self) -> None:
        _check_elimination(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """How many weights of a matrix SparseGPT sets to zero.

    Attributes:
      sparsity: share of the weights of each block of inputs.
      pattern: (n, m) sets n of every m neighbouring inputs of an output to zero
        instead.
      damping: share of the Hessian's mean diagonal that is added to it.
      block: inputs among which weights are chosen together.
    """

    sparsity: float = 0.5
    pattern: tuple[int, int] | None = None
    damping: float = 0.01
    block: int = 128

    def __post_init__(self) -> None:
        _check_elimination(self)
        rule = "sparsity must be in [0, 1)"
        checks.require(0 <= self.sparsity < 1, rule, sparsity=self.sparsity)
        if self.pattern is not None:
            good = isinstance(self.pattern, tuple) and len(self.pattern) == 2
            good = good and all(isinstance(number, int) for number in self.pattern)
            good = good and 0 < self.pattern[0] < self.pattern[1]
            rule = "pattern must be two integers (n, m) with 0 < n < m"
            checks.require(good, rule, pattern=self.pattern)

    def check_inputs(self, inputs: int, name: str) -> None:
        """Raises ConfigError if a pattern does not fit into so many inputs."""
        if self.pattern is not None and inputs % self.pattern[1]:
            raise ConfigError(
                f"{name}: the pattern's m must divide the inputs: got "
                f"pattern={self.pattern}, inputs={inputs}"
            )


def _check_elimination(options: "GptqOptions | PruneOptions") -> None:
    checks.require_finite(0.0, damping=options.damping)
    checks.require_count(1, block=options.block)
