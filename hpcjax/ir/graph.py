"""A program as a graph of operators with the tensors between them, and what it moves.

A word is an element of a tensor, whatever its dtype. An operator reads each of its
inputs and writes each of its outputs once: what caches keep between operators is not
counted, and neither are views, which only rename a tensor's elements.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import networkx as nx

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest

# "statistical" is the paper's statistical normalisation, reductions and what is mapped
# by their results. A "view" moves nothing. What is "outside" stands for other parts of
# a network between an output and an input, so that no path is missed, and is not
# counted.
Kind = Literal[
    "contraction", "statistical", "elementwise", "movement", "view", "outside"
]
COUNTED: tuple[Kind, ...] = ("contraction", "statistical", "elementwise", "movement")
Masks = Literal["stored", "recomputed"]
MASKS = ("stored", "recomputed")


class Tensor(NamedTuple):
    """An array between operators.

    Attributes:
      shape: its sizes.
      axes: a letter for each axis, as in an einsum; empty if they have no names.
      mask: whether it is a dropout mask, which can be drawn again from its seed.
    """

    shape: tuple[int, ...]
    axes: str = ""
    mask: bool = False

    @property
    def words(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


class Operator(NamedTuple):
    """A node of the graph.

    Attributes:
      name: unique in its graph.
      kind: its class.
      inputs: names of the tensors it reads.
      outputs: names of the tensors it writes.
      flops: floating-point operations of one execution.
      space: what it iterates over: two operators can share a loop if these are equal.
      reduced: the axes of `space` that it sums over, or takes the largest of.
      einsum: what a contraction computes, of its first two inputs.
      times: executions in a run of the program.
      volumes: words that it moves of each input, then of each output; empty if it moves
        whole tensors.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: int = 0
    space: tuple[Any, ...] = ()
    reduced: tuple[Any, ...] = ()
    einsum: str = ""
    times: int = 1
    volumes: tuple[int, ...] = ()

    def volume_of(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns the words that it moves of each tensor."""
        names = (*self.inputs, *self.outputs)
        words = self.volumes or [tensors[name].words for name in names]
        return dict(zip(names, words, strict=True))


class Moved(NamedTuple):
    """Work and movement, of one operator or of several; all executions are counted.

    Attributes:
      flops: floating-point operations.
      read: words.
      written: words.
    """

    flops: int = 0
    read: int = 0
    written: int = 0

    @property
    def words(self) -> int:
        """Words read and written."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Operations for each word."""
        return self.flops / self.words if self.words else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataflow:
    """Operators in an order in which they can be executed, and their tensors.

    Attributes:
      operators: each behind those whose outputs it reads.
      tensors: by name.
      outputs: names of the tensors that must exist at the end.
    """

    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    outputs: frozenset[str]

    @functools.cached_property
    def producers(self) -> dict[str, str]:
        """The operator that writes each tensor, if one does."""
        return {t: each.name for each in self.operators for t in each.outputs}

    @functools.cached_property
    def graph(self) -> nx.DiGraph:
        """Names of operators, with an edge from a producer to each consumer."""
        graph = nx.DiGraph()
        graph.add_nodes_from(each.name for each in self.operators)
        graph.add_edges_from(
            (self.producers[tensor], each.name)
            for each in self.operators
            for tensor in each.inputs
            if tensor in self.producers
        )
        return graph

    def operator(self, name: str) -> Operator:
        """Returns an operator.

        Raises:
          ConfigError: there is none of that name; names the nearest.
        """
        names = {each.name: each for each in self.operators}
        if name not in names:
            raise ConfigError(f"no operator {name!r}{nearest(name, names)}")
        return names[name]

    def consumers(self, tensor: str) -> set[str]:
        """Returns the names of the operators that read a tensor."""
        return {each.name for each in self.operators if tensor in each.inputs}

    def moved(self, name: str, masks: Masks = "stored") -> Moved:
        """Returns an operator's work and words; nothing for views.

        Args:
          name: of the operator.
          masks: whether dropout masks are written and read as words, or drawn again
            where they are used.
        """
        checks.require_choice("masks", masks, MASKS)
        each = self.operator(name)
        if each.kind not in COUNTED:
            return Moved()

        volumes = each.volume_of(self.tensors)

        def words(names: Iterable[str]) -> int:
            drawn = masks != "stored"
            kept = {n for n in names if not (drawn and self.tensors[n].mask)}
            return each.times * sum(volumes[name] for name in kept)

        return Moved(each.times * each.flops, words(each.inputs), words(each.outputs))

    def by_kind(self, masks: Masks = "stored") -> dict[Kind, Moved]:
        """Returns work and words of each class of operators."""
        return {kind: self._total(masks, kind) for kind in COUNTED}

    def total(self, masks: Masks = "stored") -> Moved:
        """Returns work and words of all operators."""
        return self._total(masks, *COUNTED)

    def _total(self, masks: Masks, *kinds: Kind) -> Moved:
        rows = [self.moved(o.name, masks) for o in self.operators if o.kind in kinds]
        return Moved(*(sum(column) for column in zip(*rows, strict=True)))


def movement(flow: Dataflow, masks: Masks = "stored") -> int:
    """Returns the words that all operators of a program read and write.

    Examples:
      >>> from hpcjax import ir
      >>> words = movement(ir.encoder_layer(ir.encoder_sizes()))
      >>> words // 2**20
      1160
    """
    return flow.total(masks).words


def mue(
    least_words: float, moved_words: float, bandwidth: float, peak_bandwidth: float
) -> float:
    """Returns the memory usage efficiency in percent, Q/D · B/B̂ · 100.

    Args:
      least_words: Q, what an operator must read and write however it is implemented.
      moved_words: D, what was moved.
      bandwidth: B, at which it was moved.
      peak_bandwidth: B̂.

    Raises:
      ConfigError: a value that is not positive.

    References:
      Ivanov et al., Data Movement Is All You Need, MLSys 2021, §4.

    Examples:
      >>> mue(20, 40, 600e9, 900e9)
      33.333333333333336
    """
    values = {
        "least_words": least_words,
        "moved_words": moved_words,
        "bandwidth": bandwidth,
        "peak_bandwidth": peak_bandwidth,
    }
    checks.require_positive(**values)
    return 100 * least_words / moved_words * bandwidth / peak_bandwidth
