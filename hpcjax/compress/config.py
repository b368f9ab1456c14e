"""Configs of quantization and pruning; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, Any

from hpcjax.core import checks
from hpcjax.core.config import Config, NotNegative, Size, Within
from hpcjax.core.errors import ConfigError

BITS = (2, 3, 4, 8)


def _is_stored(name: str, value: Any) -> None:
    checks.require(value in BITS, f"{name} must be one of {BITS}", **{name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSpec(Config):
    """The grid of values that weights may take, see `fit_grid`.

    Every output has a grid of 2^bits values for each group of its inputs.

    Attributes:
      bits: 2, 3, 4 or 8.
      symmetric: a grid symmetric about zero; otherwise it spans the smallest to the
        largest weight. In either case, zero is one of the values.
      group_size: number of neighbouring inputs that share a scale and a zero point;
        None for all.
      mse: shrinks the range, to the one of 80 candidates with the least Σ|w − q|^2.4.
      ternary: only the smallest weight, zero and the largest weight; `bits` is then the
        storage of each.
      reference: uses the symmetric range of the published code, half of which is unused
        for outputs without negative weights.
    """

    bits: Annotated[int, _is_stored] = 4
    symmetric: bool = False
    group_size: Size | None = None
    mse: bool = False
    ternary: bool = False
    reference: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = not (self.ternary and (self.mse or self.symmetric))
        rule = "ternary takes neither mse nor symmetric"
        checks.require(plain, rule, mse=self.mse, symmetric=self.symmetric)

    @property
    def levels(self) -> int:
        """The largest integer of the grid, from 0."""
        return 2 if self.ternary else 2**self.bits - 1

    def groups(self, inputs: int, name: str = "the kernel") -> int:
        """Returns the number of groups of a kernel's inputs.

        Raises:
          ConfigError: the group size does not divide the inputs.
        """
        size = self.group_size or inputs
        if inputs % size:
            raise ConfigError(
                f"{name}: group_size must divide the inputs: got group_size={size}, "
                f"inputs={inputs}"
            )
        return inputs // size


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqOptions(Config):
    """How GPTQ goes through the inputs of a matrix.

    Attributes:
      damping: this share of the Hessian's mean diagonal is added to its diagonal.
      act_order: quantizes inputs in order of decreasing diagonal of the Hessian.
      static_groups: fits the grids of all groups to the original weights, so that even
        with `act_order` a group consists of neighbouring inputs.
      block: number of inputs after which their updates are applied to all later inputs;
        affects the time but not the result.
    """

    damping: NotNegative = 0.01
    act_order: bool = False
    static_groups: bool = False
    block: Size = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneOptions(Config):
    """How many weights of a matrix SparseGPT sets to zero.

    Attributes:
      sparsity: share of the weights of each block of inputs.
      pattern: (n, m): instead, n of every m neighbouring inputs of an output.
      damping: this share of the Hessian's mean diagonal is added to its diagonal.
      block: number of inputs among whose weights those to remove are chosen.
    """

    sparsity: Annotated[float, Within("[0, 1)")] = 0.5
    pattern: tuple[Size, Size] | None = None
    damping: NotNegative = 0.01
    block: Size = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = self.pattern is None or self.pattern[0] < self.pattern[1]
        rule = "pattern must be two integers (n, m) with n < m"
        checks.require(rising, rule, pattern=self.pattern)

    def check_inputs(self, inputs: int, name: str) -> None:
        """Raises ConfigError if the pattern's m does not divide `inputs`."""
        if self.pattern is not None and inputs % self.pattern[1]:
            raise ConfigError(
                f"{name}: the pattern's m must divide the inputs: got "
                f"pattern={self.pattern}, inputs={inputs}"
            )
