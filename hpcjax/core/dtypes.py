"""Which dtype is used where."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Dtypes of a model: parameters are kept in `param`, products run in `compute`.

    Sums, norms, softmax and losses are float32 whatever `compute` is; of float64, norms
    are float64.
    """

    param: str = "float32"
    compute: str = "float32"
    output: str = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if not jnp.issubdtype(jnp.dtype(name), jnp.floating):
                raise ValueError(f"{field.name} must be a floating dtype: got {name!r}")
