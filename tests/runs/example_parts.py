"""A part as a package of one's own has it."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalvingConfig:
    """Moves by half of the gradient.

    Attributes:
      share: of the gradient.
    """

    share: float = 0.5

    def make(self, steps):
        import optax

        return optax.sgd(self.share)


PARTS = {"optimizer": {"halving": "tests.runs.example_parts:HalvingConfig"}}
