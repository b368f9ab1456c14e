"""The check of types that `make test-all` puts on modules that state shapes."""

import beartype
import jax

check = beartype.beartype(
    conf=beartype.BeartypeConf(
        hint_overrides=beartype.FrozenDict({jax.Array: jax.typing.ArrayLike}),
        is_pep484_tower=True,
    )
)
