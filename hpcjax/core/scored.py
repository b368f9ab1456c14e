"""What a batch scores, and what of it each device's loss is divided by."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import Array, Float

from hpcjax.core.errors import ConfigError
from hpcjax.core.method import Batch, Score
from hpcjax.core.model import Model
from hpcjax.core.varying import varying_axes


def count_scored(
    model: Model, objective: Score, params: Any, model_state: Any, batch: Batch
) -> Float[Array, ""]:
    """Returns the count of a batch's `Totals`, of which no output is computed.

    Args:
      model: pure functions `init` and `apply`.
      objective: `(outputs, batch) -> Totals`.
      params: what the model is applied to; only shapes matter.
      model_state: running statistics, likewise.
      batch: what is scored.

    Raises:
      ConfigError: the count is not of the batch alone. It would have to be known before
        the outputs are.
    """

    def outputs() -> Any:
        return model.apply(params, model_state, batch["x"], train=False)[0]

    def count(outputs: Any, batch: Batch) -> Array:
        return objective(outputs, batch).count

    given = jax.eval_shape(outputs), dict(batch)
    closed = jax.make_jaxpr(count)(*given)
    # Without what computes the sums, which is dead here.
    needed, used = partial_eval.dce_jaxpr(closed.jaxpr, [True])
    if any(used[: len(jax.tree.leaves(given[0]))]):
        raise ConfigError(
            "the count of a score must be of the batch alone, such as the sum of its "
            f"weights: got one that depends on the outputs, of {objective}"
        )
    pairs = zip(jax.tree.leaves(given), used, strict=True)
    (found,) = jaxpr_as_fun(closed.replace(jaxpr=needed))(
        *[leaf for leaf, kept in pairs if kept]
    )
    return found


def share_out(count: Float[Array, ""], axes: tuple[str, ...]) -> Float[Array, ""]:
    """Returns the mean count of devices: what each divides its sums by.

    With sums s_d and counts n_d on D devices, the mean over devices of
    s_d / (Σ n_d / D) is Σ s_d / Σ n_d, the mean of the whole batch: whoever averages
    gradients over devices need not know of counts.

    A count that cannot differ between devices, such as that of their labels where no
    example has a weight, is its own mean, and nothing is sent.

    Args:
      count: of this device, n_d; inside a `shard_map` with `check_vma=True`.
      axes: mesh axes over which the devices share the batch; none for one device.
    """
    differing = tuple(axis for axis in axes if axis in varying_axes(count))
    return jax.lax.pmean(count, differing) if differing else count


def divide(sums: dict[str, Array], share: Float[Array, ""]) -> dict[str, Array]:
    """Returns sums over a share; zeros where nothing is scored, not NaN."""
    safe = jnp.where(share > 0, share, 1)
    return {name: total / safe for name, total in sums.items()}
