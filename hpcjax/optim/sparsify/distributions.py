"""How the weights to keep are shared out over layers; importing loads no JAX.

Counts are computed on the host, in fractions, so that they are exact; a training step
only looks them up.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, NamedTuple

from hpcjax.core.config import Config, Within
from hpcjax.core.patterns import check_patterns
from hpcjax.core.structures import count_kept

Sparsity = Annotated[float, Within("[0, 1)")]
Ramp = Callable[[Fraction], Fraction]


def _are_sparsities(name: str, value: tuple[tuple[str, float], ...]) -> None:
    check_patterns(name, [pattern for pattern, _ in value])


class Layer(NamedTuple):
    """What a distribution is told of a layer.

    Attributes:
      units: the number of units, see `core.structures`; of weights, if unstructured.
      shape: of the parameter, `[..., inputs, outputs]`.
    """

    units: int
    shape: tuple[int, ...]


Layers = Mapping[str, Layer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Config):
    """Every layer has the same sparsity.

    Attributes:
      sparsity: share of the units that is removed.
    """

    sparsity: Sparsity = 0.9

    def counts(self, layers: Layers, ramp: Ramp) -> dict[str, int] | int:
        """Returns how many units each layer keeps, or how many all keep together.

        Args:
          layers: by name.
          ramp: gives the present sparsity for the final one.
        """
        sparsity = ramp(exact(self.sparsity))
        return {
            name: count_kept(layer.units, sparsity) for name, layer in layers.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErdosRenyi(Uniform):
    """Layers are the denser the smaller they are; the total is that of `sparsity`.

    The density of a layer is proportional to (Σ dims)/(Π dims), over all dimensions of
    its kernel, or over inputs and outputs alone. A layer that would be denser than
    dense is dense, and the others share the rest.

    Attributes:
      sparsity: of all layers together.
      kernel: whether the sides of a convolution's window count too (ERK).

    References:
      Evci et al., Rigging the Lottery, ICML 2020, §3; Mocanu et al., Nature
      Communications 2018.
    """

    kernel: bool = True

    def counts(self, layers: Layers, ramp: Ramp) -> dict[str, int]:
        """Returns how many units each layer keeps; the total is exact."""
        units = {name: layer.units for name, layer in layers.items() if layer.units}
        total = count_kept(sum(units.values()), ramp(exact(self.sparsity)))
        raw = {name: _density(layers[name].shape, self.kernel) for name in units}
        dense: set[str] = set()
        scale = Fraction(0)
        while len(dense) < len(units):
            rest = [name for name in units if name not in dense]
            left = total - sum(units[name] for name in dense)
            scale = left / sum((raw[n] * units[n] for n in rest), Fraction(0))
            largest = max(rest, key=lambda name: raw[name])
            if scale * raw[largest] <= 1:
                break
            dense.add(largest)
        shares = {
            name: Fraction(units[name])
            if name in dense
            else scale * raw[name] * units[name]
            for name in units
        }
        return dict.fromkeys(layers, 0) | _round_to_total(shares, units, total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Global(Uniform):
    """The units of the largest scores are kept, whatever layer they are in.

    Every layer keeps at least one.

    Attributes:
      sparsity: of all layers together.
    """

    def counts(self, layers: Layers, ramp: Ramp) -> int:
        """Returns how many units all layers keep together."""
        total = sum(layer.units for layer in layers.values())
        return max(count_kept(total, ramp(exact(self.sparsity))), len(layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lamp(Global):
    """As `Global`, with the scores of each layer made comparable.

    A score u becomes u² / Σ_{v ≥ u} v², over the scores v of its layer.

    References:
      Lee et al., Layer-adaptive Sparsity for the Magnitude-based Pruning, ICLR 2021.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRules(Config):
    """Each layer has the sparsity of the first rule that matches its path.

    Attributes:
      rules: `(regex, sparsity)` pairs.
    """

    rules: Annotated[tuple[tuple[str, Sparsity], ...], _are_sparsities] = ((".*", 0.9),)

    def counts(self, layers: Layers, ramp: Ramp) -> dict[str, int]:
        """Returns how many units each layer keeps.

        Raises:
          ConfigError: a rule that matches no layer, or a layer without a rule.
        """
        from hpcjax.core import trees

        chosen = trees.choose(self.rules, layers, "layer") if layers else {}
        return {
            name: count_kept(layer.units, ramp(exact(chosen[name])))
            for name, layer in layers.items()
        }


Distribution = Uniform | ErdosRenyi | Global | Lamp | ByRules


def exact(number: float) -> Fraction:
    """Returns the fraction that a number is written as.

    Examples:
      >>> exact(0.9)
      Fraction(9, 10)
    """
    return Fraction(str(number))


def _density(shape: Sequence[int], kernel: bool) -> Fraction:
    """Returns (Σ dims)/(Π dims), up to a factor the density of a layer."""
    dims = shape if kernel else shape[-2:]
    return Fraction(sum(dims), math.prod(dims))


def _round_to_total(
    shares: Mapping[str, Fraction], units: Mapping[str, int], total: int
) -> dict[str, int]:
    """Rounds shares to integers of a given sum, by largest remainder, none to zero."""
    kept = {name: max(1, math.floor(share)) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: kept[name] - shares[name])
    missing = total - sum(kept.values())
    # In turn: as a list, the turns of a large layer would fill the memory.
    for name in itertools.cycle(by_remainder):
        if missing <= 0:
            break
        if kept[name] < units[name]:
            kept[name] += 1
            missing -= 1
    # Layers that may not be empty have taken more than their shares.
    while missing < 0 and max(kept.values()) > 1:
        kept[max(kept, key=kept.__getitem__)] -= 1
        missing += 1
    return kept
