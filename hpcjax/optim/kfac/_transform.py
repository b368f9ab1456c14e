"""K-FAC as a link of a chain: running factors, cached decompositions, kl-clip."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from hpcjax.collectives import pack_triangle, unpack_triangle
from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import Axes, axis_names, vary
from hpcjax.optim import option_checks
from hpcjax.optim.full_precision import check_real, statistics_dtype
from hpcjax.optim.kfac import _blocks, config
from hpcjax.optim.kfac._blocks import Plan
from hpcjax.optim.kfac._distribution import AXES, Distribution
from hpcjax.optim.kfac._pipefisher import PipeFisherState
from hpcjax.optim.kfac._placement import Local, Shared

Statistics = Mapping[str, Mapping[str, jax.Array]]
ADAPT_EVERY = 5


class Curvature(NamedTuple):
    """What a training loop must know to give K-FAC its statistics.

    Attributes:
      plan: the layers to observe.
      fisher: at which labels, see `kfac.differentiate`.
      distribution: who does what, None for everyone everything.
      data_axis: the axis of the batch where there is no distribution.
    """

    plan: Plan
    fisher: config.Fisher = "empirical"
    distribution: Distribution | None = None
    data_axis: str = "data"

    @property
    def axes(self) -> Axes:
        """The mesh axes over which gradients and factors are averaged."""
        return self.data_axis if self.distribution is None else AXES

    def scale(
        self, learning_rate: optax.ScalarOrSchedule, **options: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Returns `scale_by_kfac` of this plan on these axes."""
        return scale_by_kfac(
            self.plan,
            learning_rate=learning_rate,
            axis_name=self.axes if self.distribution is None else None,
            distribution=self.distribution,
            **options,
        )


class KfacState(NamedTuple):
    """State of `scale_by_kfac`.

    Attributes:
      count: steps taken.
      due: whether the next update takes statistics.
      factors: running averages `{path: {"a": [depth, a, a], "g": [depth, g, g]}}`.
      decompositions: what was decomposed last; on a grid a `PerDevice` buffer.
      damping: γ.
      skipped: updates of factors or decompositions left out as not finite.
      metrics: logged scalars.
    """

    count: Int[Array, ""]
    due: Bool[Array, ""]
    factors: dict[str, dict[str, jax.Array]]
    decompositions: Any
    damping: Float[Array, ""]
    skipped: Int[Array, ""]
    metrics: dict[str, Float[Array, ""]]


def scale_by_kfac(
    chosen: Plan,
    *,
    learning_rate: optax.ScalarOrSchedule = 0.1,
    axis_name: Axes | None = None,
    distribution: Distribution | None = None,
    **options: Unpack[config.KfacKeywords],
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients by the Kronecker-factored Fisher matrix.

    For a layer with gradient M, [a, g], and running factors A, G the update is
    (A⊗G + γI)⁻¹ applied to M, times ν = min(1, √(κ / |Σ η² ⟨update, M⟩|)); parameters
    outside the plan keep their gradient. At each step: factors (every
    `factor_update_steps`), decompositions (every `inv_update_steps`), precondition.

    `update` needs `taps=`, the statistics of `kfac.statistics_of`, and takes
    `loss_terms=`, how many terms the mean loss of this device divides by (its examples,
    or scored tokens); `loss_scale=`, by which gradients are too large; `value=` and
    `value_fn=`, loss and `params -> loss` on this batch, for adaptive damping.

    Expects gradients averaged over the devices, but statistics of each device's own
    part of the batch, and returns identical updates on every member of the axes.

    Args:
      chosen: the layers, from `kfac.plan`.
      learning_rate: η of the kl-clip: the live rate that follows in the chain.
      axis_name: mesh axis, or axes, over which factors are averaged; every device then
        decomposes everything. None for one device.
      distribution: shares the work over the grid of axes `kfac.AXES` instead.
      **options: the fields of `KfacOptions`.

    Raises:
      ConfigError: an option out of its range, or both axis_name and distribution; at
        init for a parameter in no block that no rule of the plan leaves out.
      ValueError: taps are missing at an update; names the layers.

    References:
      Martens and Grosse, ICML 2015; Pauloski et al., SC 2021, §2.1.3 and §3.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> tx = scale_by_kfac(kfac.plan(models.mlp((2,), 2, widths=())))
      >>> params = {"head": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
      >>> taps = {"head": {"a": jnp.eye(3), "g": jnp.eye(2)}}
      >>> updates, state = tx.update(params, tx.init(params), taps=taps, loss_terms=1)
      >>> [round(update, 3) for update in updates["head"]["bias"].tolist()]
      [0.129, 0.129]
    """
    keywords = option_checks.keyword_options(options)
    chosen_options = config.KfacOptions(**keywords)
    checks.require_float32(learning_rate=learning_rate)
    if axis_name is not None and distribution is not None:
        raise ConfigError("give axis_name or distribution, not both")
    made = _Kfac(chosen, chosen_options, learning_rate, axis_name, distribution)

    def update(updates, state, params=None, **extra_args):
        return made.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(made.init, update)


class _Kfac:
    def __init__(
        self,
        chosen: Plan,
        options: config.KfacOptions,
        learning_rate: optax.ScalarOrSchedule,
        axis_name: Axes | None,
        distribution: Distribution | None,
    ) -> None:
        self.plan, self.options, self.rate = chosen, options, learning_rate
        if distribution is None:
            self.axes = None if axis_name is None else axis_names(axis_name)
            self.placement = Local(chosen, options)
        else:
            self.axes = AXES
            self.placement = Shared(chosen, options, distribution)

    def init(self, params: Any) -> KfacState:
        check_real(params)
        _blocks.check_covered(self.plan, params)
        leaves = trees.flatten(params)
        dtype = statistics_dtype(leaves[self.plan.blocks[0].params[0]].dtype)
        kept = self.options.factor_dtype or dtype

        def identity(n: int, depth: int) -> jax.Array:
            return jnp.broadcast_to(jnp.eye(n, dtype=kept), (depth, n, n))

        factors = {
            block.path: {
                "a": identity(block.a, block.depth),
                "g": identity(block.g, block.depth),
            }
            for block in self.plan.blocks
        }
        damping = jnp.asarray(self.options.damping, dtype)
        return KfacState(
            count=jnp.zeros((), jnp.int32),
            due=jnp.ones((), bool),
            factors=factors,
            decompositions=self.placement.init(dtype),
            damping=damping,
            skipped=jnp.zeros((), jnp.int32),
            metrics={
                "kfac_nu": jnp.ones((), dtype),
                # Not the same buffer twice: the state may be donated.
                "kfac_damping": jnp.asarray(self.options.damping, dtype),
            },
        )

    def update(
        self,
        updates: Any,
        state: KfacState,
        params: Any = None,
        *,
        taps: Statistics | None = None,
        loss_terms: Any = None,
        loss_scale: Any = None,
        value: Any = None,
        value_fn: Callable[[Any], Any] | None = None,
        **extra_args: Any,
    ) -> tuple[Any, KfacState]:
        del extra_args
        dtype = state.damping.dtype
        statistics = self.checked(taps)
        scale = self.g_scale(loss_terms, loss_scale, dtype)
        factors, lost = self.factors(state, statistics, scale)
        kept, failed = self.decompositions(state, factors)
        leaves = trees.flatten(updates)
        found = {
            unit: matrix.astype(dtype)
            for unit, matrix in _blocks.to_matrices(self.plan, leaves).items()
        }
        made = self.placement.precondition(kept, found, state.damping)
        rate = self.rate(state.count) if callable(self.rate) else self.rate
        rate = jnp.asarray(rate, dtype)
        inner = jnp.stack([jnp.vdot(made[unit], found[unit]) for unit in found]).sum()
        nu = kl_clip(inner, rate, self.options.kl_clip)
        clipped = {unit: nu * matrix for unit, matrix in made.items()}
        new = leaves | _blocks.from_matrices(self.plan, clipped, leaves)
        new = trees.unflatten(updates, new)
        damping = state.damping
        if self.options.adaptive_damping:
            step = nu * rate
            predicted = -(step - step**2 / 2) * inner
            trial = self.trial(params, new, rate)
            damping = self.adapted(state, trial, predicted, value, value_fn)
        count = jnp.asarray(optax.safe_increment(state.count))
        return new, KfacState(
            count=count,
            due=count % self.options.factor_update_steps == 0,
            factors=factors,
            decompositions=kept,
            damping=damping,
            skipped=state.skipped + (lost | failed).astype(jnp.int32),
            metrics={"kfac_nu": nu, "kfac_damping": damping},
        )

    def checked(self, taps: Statistics | None) -> dict[str, dict[str, jax.Array]]:
        """Returns the statistics as `[depth, n, n]` after checking that all came."""
        given = taps or {}
        missing = [b.path for b in self.plan.blocks if b.path not in given]
        if missing:
            raise ValueError(
                f"taps are missing for layers {missing}: pass "
                "taps=kfac.statistics_of(gradient of the taps) to update"
            )
        found = {}
        for block in self.plan.blocks:
            sizes = {"a": block.a, "g": block.g}
            shapes = {side: given[block.path][side].shape for side in sizes}
            if any(shapes[side][-2:] != (n, n) for side, n in sizes.items()):
                raise ValueError(
                    f"statistics of {block.path!r} must be [{block.a}, {block.a}] and "
                    f"[{block.g}, {block.g}]: got {shapes}"
                )
            found[block.path] = {
                side: given[block.path][side].reshape(block.depth, n, n)
                for side, n in sizes.items()
            }
        return found

    def g_scale(self, loss_terms: Any, loss_scale: Any, dtype: Any) -> jax.Array:
        """Returns what this device's G, formed of the mean loss, is multiplied by."""
        if self.options.g_scale == "per_example":
            if loss_terms is None:
                raise ValueError(
                    "g_scale='per_example' needs loss_terms=, the number of terms that "
                    "the mean loss divides by: got None"
                )
            scale = jnp.asarray(loss_terms, dtype)
        else:
            terms = jnp.asarray(1 if loss_terms is None else loss_terms, dtype)
            whole = terms
            if self.axes is not None:
                whole = jax.lax.psum(vary(terms, self.axes), self.axes)
            scale = terms / whole
        if loss_scale is not None:
            scale = scale / jnp.asarray(loss_scale, dtype)
        return scale**2

    def factors(
        self, state: KfacState, statistics: Any, scale: jax.Array
    ) -> tuple[dict[str, dict[str, jax.Array]], jax.Array]:
        """Returns the running factors, and whether some were left as not finite."""
        decay = jnp.asarray(self.options.factor_decay, state.damping.dtype)
        if self.options.factor_ramp:
            number = jnp.maximum(state.count, 1).astype(decay.dtype)
            decay = jnp.minimum(1 - 1 / number, decay)

        def refresh(old: Any, statistics: Any, scale: Any) -> tuple[Any, Any]:
            found = {
                path: {"a": each["a"], "g": each["g"] * scale}
                for path, each in statistics.items()
            }
            found = self.averaged(
                jax.tree.map(lambda f, o: f.astype(o.dtype), found, old)
            )
            new, lost = {}, []
            for path, each in found.items():
                finite = jnp.stack([jnp.isfinite(f).all() for f in each.values()]).all()
                lost.append(~finite)
                new[path] = {
                    side: jnp.where(
                        finite, _mixed(old[path][side], factor, decay), old[path][side]
                    )
                    for side, factor in each.items()
                }
            return new, jnp.stack(lost).any()

        def keep(old: Any, statistics: Any, scale: Any) -> tuple[Any, Any]:
            return old, jnp.zeros((), bool)

        return jax.lax.cond(state.due, refresh, keep, state.factors, statistics, scale)

    def averaged(self, factors: Any) -> Any:
        """Returns the mean of factors over the devices, exchanged in one all-reduce."""
        if self.axes is None:
            return factors
        if not self.options.symmetry_aware:
            return jax.lax.pmean(vary(factors, self.axes), self.axes)
        packed = jax.tree.map(pack_triangle, factors)
        mean = jax.lax.pmean(vary(packed, self.axes), self.axes)
        return jax.tree.map(lambda p, f: unpack_triangle(p, f.shape[-1]), mean, factors)

    def decompositions(self, state: KfacState, factors: Any) -> tuple[Any, jax.Array]:
        """Returns decompositions, new ones where they are due or were never made."""

        def refresh(kept: Any, factors: Any) -> tuple[Any, Any]:
            new, finite = self.placement.refresh(kept, factors, state.damping)
            return new, ~finite

        def keep(kept: Any, factors: Any) -> tuple[Any, Any]:
            return kept, jnp.zeros((), bool)

        old = state.decompositions
        due = state.count % self.options.inv_update_steps == 0
        due = due | ~self.placement.valid(old)
        return jax.lax.cond(due, refresh, keep, old, factors)

    def trial(self, params: Any, new: Any, rate: jax.Array) -> Any:
        """Returns the parameters after a step of the preconditioned layers alone."""
        if params is None:
            raise ValueError("adaptive_damping needs params in update: got None")
        inside = {path for block in self.plan.blocks for path in block.params}
        moved, updates = trees.flatten(params), trees.flatten(new)
        for path in inside:
            moved[path] = (moved[path] - rate * updates[path]).astype(moved[path].dtype)
        return trees.unflatten(params, moved)

    def adapted(
        self,
        state: KfacState,
        trial: Any,
        predicted: jax.Array,
        value: Any,
        value_fn: Callable[[Any], Any] | None,
    ) -> jax.Array:
        """Returns the damping for the next step; asks `value_fn` every few steps."""
        if value is None or value_fn is None:
            raise ValueError(
                "adaptive_damping needs value= and value_fn= in update: got "
                f"value={value}, value_fn={value_fn}"
            )

        def mean(loss: Any) -> Any:
            if self.axes is None:
                return loss
            return jax.lax.pmean(vary(loss, self.axes), self.axes)

        def move(damping: jax.Array) -> jax.Array:
            gained = mean(value_fn(trial)) - mean(value)
            return adapt_damping(damping, gained, predicted)

        due = (state.count + 1) % ADAPT_EVERY == 0
        return jax.lax.cond(due, move, lambda damping: damping, state.damping)


def kl_clip(
    inner: Float[Array, ""], rate: Float[Array, ""], bound: float | None
) -> Float[Array, ""]:
    """Returns ν = min(1, √(κ / |η² s|)), 1 for s = 0 and without a bound.

    NaN for a NaN.

    Args:
      inner: s, the inner product of preconditioned and raw gradients over all layers.
      rate: η, the learning rate.
      bound: κ, or None.

    Examples:
      >>> float(kl_clip(jnp.float32(-4.0), jnp.float32(1.0), 1.0))
      0.5
    """
    if bound is None:
        return jnp.ones_like(inner)
    size = jnp.abs(inner * rate**2)
    nu = jnp.sqrt(bound / jnp.where(size == 0, 1, size))
    return jnp.where(size == 0, 1, jnp.minimum(1, nu)).astype(inner.dtype)


def adapt_damping(
    damping: Float[Array, ""], gained: Float[Array, ""], predicted: Float[Array, ""]
) -> Float[Array, ""]:
    """Returns γ ω where the model told the loss's change well, γ / ω where badly.

    With ρ = gained / predicted and ω = (19/20)⁵: smaller for ρ > 3/4, larger for
    ρ < 1/4 or a change that is not finite; kept within [1e-8, 1e3].

    Args:
      damping: γ.
      gained: change of the loss by the step, negative where it fell.
      predicted: change by the quadratic model.

    References:
      Martens and Grosse, ICML 2015, §6.5.

    Examples:
      >>> damping, change = jnp.float32(1.0), jnp.float32(-1.0)
      >>> round(float(adapt_damping(damping, change, change)), 4)
      0.7738
    """
    omega = (19 / 20) ** ADAPT_EVERY
    ratio = gained / predicted
    bad = ~jnp.isfinite(ratio) | (ratio < 0.25)
    factor = jnp.where(bad, 1 / omega, jnp.where(ratio > 0.75, omega, 1.0))
    return jnp.clip(damping * factor, 1e-8, 1e3).astype(damping.dtype)


def _mixed(old: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    """Returns α·old + (1 − α)·new, computed in α's precision."""
    mixed = decay * old.astype(decay.dtype) + (1 - decay) * new.astype(decay.dtype)
    return mixed.astype(old.dtype)


def states(tree: Any) -> list[KfacState]:
    """Returns every `KfacState` in an optimizer's state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, KfacState))
    return [node for node in nodes if isinstance(node, KfacState)]


def statistics_due(state: Any) -> Any:
    """Says whether the next update takes statistics: `active` of `kfac.make_taps`.

    Args:
      state: the state of any chain with `scale_by_kfac` or `scale_by_pipefisher` in it;
        may be traced.

    Raises:
      ValueError: there is none in it.
    """
    kinds = KfacState, PipeFisherState
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    found = [node.due for node in nodes if isinstance(node, kinds)]
    if not found:
        raise ValueError("there is no state of K-FAC in this optimizer's state")
    return jnp.any(jnp.stack(found))


def without_decompositions(state: KfacState) -> KfacState:
    """Returns the state as after a load without decompositions.

    The next update makes them from the current factors, so that training goes on
    finite but not bit for bit as before.
    """
    empty = jax.tree.map(jnp.zeros_like, state.decompositions)
    return state._replace(decompositions=empty)


def memory_usage(state: Any) -> dict[str, int]:
    """Returns the bytes that K-FAC keeps on the first device, by what they are for.

    Read from the arrays' shards: `"factors"` and `"decompositions"`.
    """

    def local(tree: Any) -> int:
        return sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves(tree)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        )

    found = states(state)
    return {
        "factors": sum(local(each.factors) for each in found),
        "decompositions": sum(local(each.decompositions) for each in found),
    }
