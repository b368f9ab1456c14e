"""What a data set asks of a model, and how the model's outputs are scored; no JAX."""

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpcjax.core.config import find_function
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    from hpcjax.core.method import Batch, Totals

Better = Literal["low", "high", "neither"]
BETTER = typing.get_args(Better)
# What a record of the loop says besides, and how it tells validations.
_TAKEN = ("step", "added_loss", "nonfinite", "unscored", "stop")
_BAD = re.compile(r"\W|^val_|seconds$")


class Numbers(NamedTuple):
    """One array of an example, or of what a model puts out for it.

    Attributes:
      rank: number of its axes, without that of the examples.
      tokens: whether it holds numbers of things, such as words, rather than values.
    """

    rank: int
    tokens: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a data set; to call it scores a model's outputs.

    Attributes:
      name: of what is learned, such as "classification", for messages.
      inputs: what an example's "x" is: `Numbers`, or a mapping of them by name.
      outputs: what a model must put out for an example, likewise.
      score: a pure function `(outputs, batch) -> Totals`, or "module:function", which
        is imported when it is first wanted, and JAX with it.
      metrics: the names of its sums, and what of each is better. One is "loss".
      held_out: likewise, of further ones that it sums of held-out examples alone.
      classes: whether "y" are numbers of classes whose logits a model puts out, so that
        K-FAC may draw other ones.
    """

    name: str
    inputs: Any
    outputs: Any
    score: "str | Callable[[Any, Batch], Totals]"
    metrics: Mapping[str, Better]
    classes: bool = False
    held_out: Mapping[str, Better] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError if a record could not hold the metrics by their names."""
        every = {**self.metrics, **self.held_out}
        taken = [name for name in every if name in _TAKEN or _BAD.search(name)]
        if taken or "loss" not in self.metrics:
            raise ConfigError(
                f"metrics of {self.name} must hold 'loss' and be words, none of "
                f"{', '.join(_TAKEN)}, none that ends in seconds: got "
                f"{', '.join(every)}"
            )
        both = self.metrics.keys() & self.held_out.keys()
        if both:
            raise ConfigError(
                f"held_out of {self.name} must be further metrics: got "
                f"{', '.join(sorted(both))} in both"
            )
        unknown = set(every.values()) - set(BETTER)
        if unknown:
            raise ConfigError(
                f"metrics of {self.name} must be better {' or '.join(BETTER)}: got "
                f"{sorted(unknown)}"
            )

    def __call__(self, outputs: Any, batch: "Batch") -> "Totals":
        """Scores outputs.

        Raises:
          ConfigError: outputs that are not asked for, or sums of the score that do not
            have the names of `metrics`.
        """
        self.check_outputs(outputs)
        totals = self.find_score()(outputs, batch)
        asked = {*self.metrics}
        if set(totals.sums) not in (asked, asked | {*self.held_out}):
            also = f", and of held-out ones {sorted(self.held_out)}"
            raise ConfigError(
                f"the score of {self.name} must sum {sorted(self.metrics)}"
                f"{also if self.held_out else ''}: got "
                f"{sorted(totals.sums)}"
            )
        return totals

    def check_outputs(self, outputs: Any) -> None:
        """Raises ConfigError unless outputs are arrays of these names and axes.

        What stands for one array, such as the parts of logits, is taken as it is.
        """
        single = isinstance(self.outputs, Numbers)
        wanted = {"": self.outputs} if single else dict(self.outputs)
        if single:
            if not isinstance(outputs, tuple | Mapping) and not hasattr(
                outputs, "ndim"
            ):
                return
            given = {"": outputs}
        elif isinstance(outputs, Mapping):
            given = dict(outputs)
        else:
            given = {name: getattr(outputs, name, None) for name in wanted}
        axes = {name: getattr(leaf, "ndim", None) for name, leaf in given.items()}
        if axes != {name: 1 + each.rank for name, each in wanted.items()}:
            raise ConfigError(
                f"outputs for {self.name} must be {self.outputs}, beside the examples' "
                f"axis: got {_describe(outputs)}"
            )

    def maps(self, inputs: Any, outputs: Any) -> bool:
        """Says whether it asks for exactly these outputs of exactly these inputs."""
        return (self.inputs, self.outputs) == (inputs, outputs)

    def require_low(self, by: str) -> None:
        """Raises ConfigError if of a metric, or its validation, less is not better."""
        every = {**self.metrics, **self.held_out}
        better = every.get(by.removeprefix("val_"), "low")
        if better != "low":
            low = [name for name, each in every.items() if each == "low"]
            raise ConfigError(
                f"by must name what is better low: got by={by!r}, of which {better} "
                f"is; allowed of {self.name}: {', '.join(low)}, and these with val_"
            )

    def find_score(self) -> "Callable[[Any, Batch], Totals]":
        """Returns the function that scores."""
        if callable(self.score):
            return self.score
        return find_function(self.score)


def _describe(outputs: Any) -> str:
    """Returns the shape of an array, or the type of what is none."""
    return str(getattr(outputs, "shape", type(outputs).__name__))
