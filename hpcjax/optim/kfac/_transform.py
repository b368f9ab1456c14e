"""K-FAC as an optax transform: running factors, cached decompositions, kl-clip."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from hpcjax.collectives import pack_triangle, unpack_triangle
from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import Axes, after, axis_names, require_axes, vary
from hpcjax.optim.full_precision import statistics_dtype
from hpcjax.optim.kfac import _blocks
from hpcjax.optim.kfac._blocks import Plan
from hpcjax.optim.kfac._distribution import AXES, Distribution
from hpcjax.optim.kfac._pipefisher import PipeFisherState
from hpcjax.optim.kfac._placement import Local, Shared
from hpcjax.optim.kfac._step_size import (
    ADAPT_EVERY,
    adapt_damping,
    inner_product,
    kl_clip,
)
from hpcjax.optim.kfac.options import Fisher, KfacOptions

Statistics = Mapping[str, Mapping[str, jax.Array]]


class Curvature(NamedTuple):
    """What a training loop needs to know to compute K-FAC's statistics.

    Attributes:
      plan: the layers to observe.
      fisher: the labels at which statistics are taken, see `kfac.differentiate`.
      distribution: how devices share the work; None lets each do all of it.
      data_axis: the mesh axis of the batch if there is no distribution.
    """

    plan: Plan
    fisher: Fisher = "empirical"
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
      due: whether the next update uses statistics.
      factors: running averages `{path: {"a": [depth, a, a], "g": [depth, g, g]}}`. For
        a plan without layers one empty array, so that `optax.tree_map_params` cannot
        mistake it for a tree of parameters.
      decompositions: the last decompositions, likewise; on a grid a `PerDevice` buffer.
      damping: γ.
      skipped: how many updates of factors or decompositions were not finite, and
        therefore skipped.
      metrics: logged scalars.
    """

    count: Int[Array, ""]
    due: Bool[Array, ""]
    factors: Any
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
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients by the Kronecker-factored Fisher matrix.

    For a layer with gradient M, [a, g], and running factors A, G the update is (A⊗G +
    γI)⁻¹ applied to M, times ν = min(1, √(κ / |Σ η² ⟨update, M⟩|)). Parameters outside
    the plan keep their gradient. Factors are updated every `factor_update_steps` steps
    and decomposed every `inv_update_steps`.

    Keywords of `update`: `taps`, the statistics from `kfac.statistics_of`, is required,
    and is `{}` in steps that take none, see `kfac.statistics_due`: a step that should
    have taken some counts as skipped; `loss_terms` is the number of terms of this
    device's mean loss, its examples or scored tokens; `loss_scale` is the factor by
    which loss scaling has enlarged the gradients; `value` and `value_fn` are the loss
    and the function `params -> loss` of
    this batch, for adaptive damping.

    Expects gradients averaged over the devices, but statistics of each device's own
    part of the batch, and returns identical updates on every member of the axes.

    Args:
      chosen: the layers, from `kfac.plan`.
      learning_rate: η of the kl-clip: the rate that a later link of the chain applies.
      axis_name: mesh axis, or axes, over which factors are averaged; every device then
        decomposes everything. None for one device.
      distribution: shares the work over the grid of axes `kfac.AXES` instead.
      **options: the fields of `KfacOptions`.

    Raises:
      ConfigError: an option out of its range, or both axis_name and distribution; at
        init for a parameter in no block that no rule of the plan leaves out.
      ValueError: taps are missing at an update; names the layers.
      ConfigError: an update outside of `shard_map` over the axes, or of state that was
        not entered, see `core.per_device`.

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
    checks.require_has("what kfac.plan returns", ("blocks", "skip"), chosen=chosen)
    chosen_options = KfacOptions.of(options, scale_by_kfac)
    checks.require_float32(learning_rate=learning_rate)
    if axis_name is not None and distribution is not None:
        raise ConfigError("give axis_name or distribution, not both")
    method = _Kfac(chosen, chosen_options, learning_rate, axis_name, distribution)

    def init(params):
        _blocks.check_parameters(chosen, params)
        return method.part(params).init(params)

    def update(updates, state, params=None, **extra_args):
        return method.part(updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


class _Kfac:
    """`init` and `update` of `scale_by_kfac`, with what they have in common."""

    def __init__(
        self,
        chosen: Plan,
        options: KfacOptions,
        learning_rate: optax.ScalarOrSchedule,
        axis_name: Axes | None,
        distribution: Distribution | None,
    ) -> None:
        self.plan, self.options, self.rate = chosen, options, learning_rate
        self.axis_name, self.distribution = axis_name, distribution
        if distribution is None:
            self.axes = None if axis_name is None else axis_names(axis_name)
            self.placement = Local(chosen, options)
        else:
            self.axes = AXES
            self.placement = Shared(chosen, options, distribution)

    def part(self, tree: Any) -> "_Kfac":
        """Returns the same method for the parameters that `optax.masked` has left."""
        plan = _blocks.part_of(self.plan, tree)
        if plan == self.plan:
            return self
        return _Kfac(plan, self.options, self.rate, self.axis_name, self.distribution)

    def init(self, params: Any) -> KfacState:
        """Returns the state before the first step."""
        leaves = trees.flatten(params)
        first = [leaves[block.params[0]] for block in self.plan.blocks[:1]]
        dtype = statistics_dtype(first[0].dtype if first else "float32")
        factor_dtype = self.options.factor_dtype or dtype
        inv_dtype = self.options.inv_dtype or dtype

        def identity(n: int, depth: int) -> jax.Array:
            return jnp.broadcast_to(jnp.eye(n, dtype=factor_dtype), (depth, n, n))

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
            factors=factors or jnp.zeros(0),
            decompositions=self.placement.init(inv_dtype) if factors else jnp.zeros(0),
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
        if not self.plan.blocks:
            return updates, state
        dtype = state.damping.dtype
        if self.axes is not None:
            require_axes(self.axes, "K-FAC's update")
        # Statistics do not need the gradients, whose exchange comes first.
        earlier = () if self.axes is None else updates
        if _blocks.withholds(taps):
            factors, lost = after(state.factors, earlier), state.due
        else:
            statistics = _blocks.check_statistics(self.plan, taps, state.factors)
            statistics = after(statistics, earlier)
            scale = self.g_scale(loss_terms, loss_scale, dtype)
            factors, lost = self.update_factors(state, statistics, scale)
        kept, failed = self.update_decompositions(state, factors)
        leaves = trees.flatten(updates)
        raw = {
            unit: matrix.astype(dtype)
            for unit, matrix in _blocks.to_matrices(self.plan, leaves).items()
        }
        preconditioned = self.placement.precondition(kept, raw, state.damping)
        rate = self.rate(state.count) if callable(self.rate) else self.rate
        rate = jnp.asarray(rate, dtype)
        inner, unit_size = inner_product(preconditioned, raw)
        nu = kl_clip(inner, rate * unit_size, self.options.kl_clip)
        clipped = {unit: nu * matrix for unit, matrix in preconditioned.items()}
        new = leaves | _blocks.from_matrices(self.plan, clipped, leaves)
        new = trees.unflatten(updates, new)
        damping = state.damping
        if self.options.adaptive_damping:
            step = nu * rate
            # The model m(Δ) = gᵀΔ + Δᵀ(F + γI)Δ/2 at Δ = −step · (F + γI)⁻¹ g, with the
            # inner product s = gᵀ(F + γI)⁻¹ g: both terms are multiples of s.
            predicted = -(step - step**2 / 2) * inner * unit_size**2
            trial = self.take_step(params, new, rate)
            damping = self.adapt(state, trial, predicted, value, value_fn)
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

    def g_scale(self, loss_terms: Any, loss_scale: Any, dtype: Any) -> jax.Array:
        """Returns the number by which G of this device's statistics is multiplied.

        Its mean loss over n terms has gradients gᵢ/n, so that the G of the taps is 1/n²
        times the second moment of gᵢ, the gradients of single terms. `"per_example"`
        undoes this with n². `"mean_loss"` is the G of the mean over all N terms of all
        devices, with gradients gᵢ/N: a factor (n/N)². Loss scaling multiplies gradients
        by L, and G by L².
        """
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

    def update_factors(
        self, state: KfacState, statistics: Any, scale: jax.Array
    ) -> tuple[dict[str, dict[str, jax.Array]], jax.Array]:
        """Returns the running factors, and whether one was not finite and skipped."""
        decay = jnp.asarray(self.options.factor_decay, state.damping.dtype)
        if self.options.factor_ramp:
            number = jnp.maximum(state.count, 1).astype(decay.dtype)
            decay = jnp.minimum(1 - 1 / number, decay)

        def refresh(old: Any, statistics: Any, scale: Any) -> tuple[Any, Any]:
            batch = {
                path: {"a": each["a"], "g": each["g"] * scale}
                for path, each in statistics.items()
            }
            # Cast first: `factor_dtype` is also the dtype of the all-reduce.
            batch = self.average(
                jax.tree.map(lambda f, o: f.astype(o.dtype), batch, old)
            )
            new, lost = {}, []
            for path, each in batch.items():
                finite = jnp.stack([jnp.isfinite(f).all() for f in each.values()]).all()
                lost.append(~finite)
                new[path] = {
                    side: jnp.where(
                        finite, _blend(old[path][side], factor, decay), old[path][side]
                    )
                    for side, factor in each.items()
                }
            return new, jnp.stack(lost).any()

        def keep(old: Any, statistics: Any, scale: Any) -> tuple[Any, Any]:
            return old, jnp.zeros((), bool)

        return jax.lax.cond(state.due, refresh, keep, state.factors, statistics, scale)

    def average(self, factors: Any) -> Any:
        """Returns the mean of factors over the devices."""
        if self.axes is None:
            return factors
        if not self.options.symmetry_aware:
            return jax.lax.pmean(vary(factors, self.axes), self.axes)
        packed = jax.tree.map(pack_triangle, factors)
        mean = jax.lax.pmean(vary(packed, self.axes), self.axes)
        return jax.tree.map(lambda p, f: unpack_triangle(p, f.shape[-1]), mean, factors)

    def update_decompositions(
        self, state: KfacState, factors: Any
    ) -> tuple[Any, jax.Array]:
        """Returns decompositions, computed anew if due or never computed before."""

        def refresh(kept: Any, factors: Any) -> tuple[Any, Any]:
            new, finite = self.placement.refresh(kept, factors, state.damping)
            return new, ~finite

        def keep(kept: Any, factors: Any) -> tuple[Any, Any]:
            return kept, jnp.zeros((), bool)

        old = state.decompositions
        due = state.count % self.options.inv_update_steps == 0
        due = due | ~self.placement.valid(old)
        return jax.lax.cond(due, refresh, keep, old, factors)

    def take_step(self, params: Any, new: Any, rate: jax.Array) -> Any:
        """Returns the parameters after a step of the preconditioned layers only."""
        if params is None:
            raise ValueError("adaptive_damping needs params in update: got None")
        inside = {path for block in self.plan.blocks for path in block.params}
        moved, updates = trees.flatten(params), trees.flatten(new)
        for path in inside:
            moved[path] = (moved[path] - rate * updates[path]).astype(moved[path].dtype)
        return trees.unflatten(params, moved)

    def adapt(
        self,
        state: KfacState,
        trial: Any,
        predicted: jax.Array,
        value: Any,
        value_fn: Callable[[Any], Any] | None,
    ) -> jax.Array:
        """Returns the next step's damping, changed every `ADAPT_EVERY` steps."""
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


def _blend(old: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    """Returns α·old + (1 − α)·new, computed in α's precision."""
    blend = decay * old.astype(decay.dtype) + (1 - decay) * new.astype(decay.dtype)
    return blend.astype(old.dtype)


def states(tree: Any) -> list[KfacState]:
    """Returns every `KfacState` in an optimizer's state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, KfacState))
    return [node for node in nodes if isinstance(node, KfacState)]


def statistics_due(state: Any) -> Any:
    """Returns whether the next update uses statistics, for `kfac.make_taps(active=)`.

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
    """Returns the state with empty decompositions, as after a load without them.

    The next update computes them from the current factors. Training continues, but not
    bit for bit as it would have with the old ones.
    """
    empty = jax.tree.map(jnp.zeros_like, state.decompositions)
    return state._replace(decompositions=empty)


def memory_usage(state: Any) -> dict[str, int]:
    """Returns the bytes of `"factors"` and `"decompositions"` on the first device.

    They are read from the arrays' shards.
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
