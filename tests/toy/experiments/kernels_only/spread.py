"""Data-parallel training in which devices share out the kernels, and what breaks it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

from hpcjax import core, sharding
from hpcjax.core.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsConfig(Config):
    """Each device holds a part of the rows of each kernel, and all of each bias."""

    claims: ClassVar[tuple[str, ...]] = ("mean", "parameters")

    def build(self, setup: core.RunShape) -> core.Parallel:
        """Returns how the model of a run is spread."""
        import jax
        from jax.sharding import PartitionSpec

        shapes, _ = jax.eval_shape(setup.model.init, jax.random.key(0))
        paths = core.trees.flatten(shapes)
        held = {p: PartitionSpec("data") for p in paths if p.endswith("kernel")}
        split = functools.partial(_split, held=held)
        return core.Parallel(lambda devices: {"data": devices}, held, held, split)


def _split(model: core.Model, held: Any) -> core.Model:
    return sharding.split_model(model, held)


@contextlib.contextmanager
def doubled() -> Iterator[None]:
    """Gradients count twice."""
    import jax

    right = _split

    def wrong(model: core.Model, held: Any) -> core.Model:
        def apply(params: Any, *given: Any, **options: Any) -> Any:
            twice = jax.tree.map(lambda p: 2 * p - jax.lax.stop_gradient(p), params)
            return model.apply(twice, *given, **options)

        return right(model._replace(apply=apply), held)

    globals()["_split"] = wrong
    try:
        yield
    finally:
        globals()["_split"] = right
