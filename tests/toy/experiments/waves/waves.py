"""Waves on a ring, drawn batch by batch, and a stencil that learns to move them."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from hpcjax import core, data
from hpcjax.core.config import Config, Size

FIELD = {"height": core.Numbers(rank=1), "mask": core.Numbers(rank=1)}


def squares(outputs: Any, batch: Any) -> core.Totals:
    """Sums over fields of the mean squared error, where the mask is 1."""
    import jax.numpy as jnp

    weight = batch.get("weight", jnp.ones(len(batch["y"])))
    errors = batch["x"]["mask"] * (outputs - batch["y"]) ** 2
    error = errors.sum(1) / batch["x"]["mask"].sum(1)
    sums = {"loss": (weight * error).sum(), "close": (weight * (error < 0.1)).sum()}
    return core.Totals(sums, weight.sum())


@dataclasses.dataclass(frozen=True)
class Waves:
    """Random sines, and the same one place further on; see `data.Sampler`."""

    size: int
    count: int = 64

    def __len__(self) -> int:
        return self.count

    def gather(self, indices: np.ndarray) -> data.Batch:
        """Returns the waves of these numbers."""
        draws = np.stack([np.random.default_rng(int(n)).random(2) for n in indices])
        places = 2 * np.pi * np.arange(self.size) / self.size
        phase = (1 + draws[:, :1] * 4).astype(int) * places + 2 * np.pi * draws[:, 1:]
        height = np.sin(phase).astype(np.float32)
        moved, mask = np.roll(height, 1, axis=1), np.ones_like(height)
        return {"x": {"height": height, "mask": mask}, "y": moved}


class Drawn(Waves):
    """Waves that no epoch repeats: an example is a function of its place and a seed."""

    def sample(
        self, number: int, batch_size: int, seed: int, shard: tuple[int, int]
    ) -> data.Batch:
        """Returns the shard's rows of a batch."""
        index, count = shard
        places = np.arange(batch_size).reshape(count, -1)[index] + number * batch_size
        return self.gather((seed + 1) * 1_000_000 + places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WavesConfig(Config):
    """Waves.

    Attributes:
      size: places of the ring.
    """

    objective: ClassVar[core.Objective] = core.Objective(
        name="forecast",
        inputs=FIELD,
        outputs=core.Numbers(rank=1),
        score=squares,
        metrics={"loss": "low", "close": "high"},
    )
    smoke: ClassVar[dict[str, str]] = {"size": "8"}

    size: Size = 32

    def load(self, root: Any = None) -> data.Dataset:
        """Returns the waves; the root is not used."""
        del root
        shapes = {"height": (self.size,), "mask": (self.size,)}
        train, held = Drawn(self.size), Waves(self.size)
        return data.Dataset(train, held, shapes, self.size, self.objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StencilConfig(Config):
    """A linear stencil.

    Attributes:
      width: how many neighbours it sees.
    """

    width: Size = 3

    @classmethod
    def takes(cls, objective: core.Objective) -> bool:
        """Says whether it is of such fields."""
        return objective.maps(FIELD, core.Numbers(rank=1))

    def make(self, inputs: Any, outputs: int, policy: Any = None) -> core.Model:
        """Builds it: y[i] = Σ_j w[j] x[i + j − width // 2]."""
        import jax.numpy as jnp

        del inputs, outputs, policy

        def apply(params: Any, state: Any, x: Any, **_: Any) -> Any:
            moved = [
                jnp.roll(x["height"], self.width // 2 - j, 1) for j in range(self.width)
            ]
            return jnp.einsum("j,jbi->bi", params["w"], jnp.stack(moved)), state

        return core.Model(lambda key: ({"w": jnp.zeros(self.width)}, {}), apply)
