"""Which dtype is used where."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Dtypes of a model: parameters are kept in `param`, products run in `compute`.

    Sums, norms, softmax and losses are float32 whatever `compute` is.
    """

    param: str = "float32"
    compute: str = "float32"
    output: str = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if not jnp.issubdtype(jnp.dtype(name), jnp.floating):
                raise ValueError(f"{field.name} must be a floating dtype: got {name!r}")


def cast_floating(tree: Any, dtype: str) -> Any:
    """Casts the floating leaves of `tree`, leaves the others alone."""

    def cast(leaf: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)
