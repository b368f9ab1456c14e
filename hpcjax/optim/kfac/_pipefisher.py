"""PipeFisher: K-FAC with inverses that come as late as in the bubbles of a pipeline.

PipeFisher computes curvature and inverses in the idle times of a pipeline schedule,
which takes several steps. This module reproduces the numerical effect, stale inverses,
without the timing. A refresh takes `period` steps. Its curvature is that of all
micro-batches of its first step. The schedule says at which step's flush the inverse of
each factor is finished; it is used from that update on, until the next refresh has
replaced it. When within a refresh a micro-batch's share of the curvature is computed
does not matter, since its inputs and output gradients are saved until then.

Here an inverse is computed in the first step that uses it, so that no unfinished work
is part of the state. `cost.assign` computes the table of these steps, which is static.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import require_axes, vary, vary_like
from hpcjax.optim.full_precision import statistics_dtype
from hpcjax.optim.kfac import _blocks
from hpcjax.optim.kfac._blocks import Block, Plan
from hpcjax.optim.kfac._decomposition import SIDES, decompose, precondition
from hpcjax.optim.kfac._pipefisher_table import Table, Visible, make_table
from hpcjax.optim.kfac.options import KfacOptions


class PipeFisherState(NamedTuple):
    """State of `scale_by_pipefisher`.

    Attributes:
      count: steps taken.
      due: whether the next update uses statistics.
      curvature: factors of the current refresh, `{path: {"a": [depth, a, a], "g":
        ...}}`.
      inverses: the damped inverses in use, in the same form.
      skipped: `{path: {"a": int32 [depth], ...}}`, how often an inverse was not finite,
        so that the previous one was kept, or a refresh began without statistics.
    """

    count: Int[Array, ""]
    due: Bool[Array, ""]
    curvature: Any
    inverses: Any
    skipped: Any


def stage_plan(
    chosen: Plan, rows: int, *, skip: tuple[str, ...] = (), below: str = "stages"
) -> Plan:
    """Returns the plan of a pipeline's parameters from the plan of one stage's model.

    Args:
      chosen: the plan of a stage, from `kfac.plan`.
      rows: number of stages that are stacked, see `sharding.stage_rows`.
      skip: further regexes of parameters that keep their gradient, for those that
        belong to no stage.
      below: the key of the stages' parameters in the pipeline's.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> chosen = kfac.plan(models.mlp((4,), 4, widths=()))
      >>> [(block.path, block.depth) for block in stage_plan(chosen, 2).blocks]
      [('stages/head', 2)]
    """
    checks.require_has("what kfac.plan returns", ("blocks", "skip"), chosen=chosen)
    blocks = tuple(
        block._replace(
            path=f"{below}/{block.path}", depth=rows * block.depth, stacked=True
        )
        for block in chosen.blocks
    )
    return Plan(blocks, (*chosen.skip, *skip))


def scale_by_pipefisher(
    chosen: Plan,
    visible: Visible,
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    damping: ArrayLike = 1e-3,
    precision: Literal["default", "high", "highest"] = "highest",
    axis_name: str | None = None,
    sum_replicas: Callable[[Any], Any] | None = None,
    data_axis: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients by inverses that are as old as PipeFisher's.

    For a layer with gradient M, `[a, g]`, the update is (A + γI)⁻¹ M (G + γI)⁻¹ with
    Cholesky inverses of factors that may be from different steps. Step t, counted from
    1, is step j = (t − 1) mod `period` of a refresh. At j = 0 new curvature is taken.
    At step j the factors in `visible[j]` are inverted, and these inverses are
    used from this update on, so that their curvature is j to j + `period` − 1 steps
    old. Step 1 inverts all factors. There is no running average. With period 1 this is
    `scale_by_kfac` with `method="inverse"`, inverting at every step.

    `update` needs `taps=` and `loss_terms=` as `scale_by_kfac` does: statistics and
    number of loss terms of the whole batch, already averaged over devices, or with
    `data_axis` those of each device's part. Statistics may be nested:
    `{"stages": statistics}`. They are `{}` in steps that take none, see
    `kfac.statistics_due`; a refresh that begins without any keeps the curvature that it
    has, at first identities, and is counted in `skipped`.

    Works outside `shard_map` on all rows, or inside on those of a device.

    Args:
      chosen: the layers, all in stacks of one depth; from `stage_plan`, or `kfac.plan`
        of a model whose blocks are stacked.
      visible: for each step of a refresh the factors whose new inverses its flush is
        the first to use, as `FilledSchedule.visible`. Of a plan with n layers, layer j
        · n + i of a stage is layer i of the j-th block that the stage has.
      rows: (replica, stage) of each equal part of the stacks, in order; see
        `sharding.stage_rows`. Default: every stage once.
      damping: γ.
      precision: of the products that apply the inverses.
      axis_name: mesh axis over which the stacks are split; None if they are not.
      sum_replicas: adds up the rows of replicas, as `sharding.sum_replicas` of a
        schedule. With it each replica of a stage inverts and preconditions its share of
        the layers only; without it every row does all of its layers.
      data_axis: mesh axis over which statistics are averaged.

    Raises:
      ConfigError: factors missing, doubled or unknown in `visible`, steps that are not
        0, 1, …, stacks of different depths or that rows do not divide, an option out of
        its range; at init for a parameter in no block that no rule leaves out; at an
        update outside of `shard_map` over the axes, or on stacks that are not split
        over them.
      ValueError: statistics or loss_terms are missing at an update.

    References:
      Osawa, Li and Hoefler, PipeFisher, MLSys 2023, section 3.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> one = kfac.plan(models.mlp((2,), 2, widths=()))
      >>> visible = {0: [(0, 0, "A")], 1: [(0, 0, "B")]}
      >>> tx = scale_by_pipefisher(stage_plan(one, 1), visible)
      >>> params = {"head": {"kernel": jnp.ones((1, 2, 2)), "bias": jnp.ones((1, 2))}}
      >>> params, taps = {"stages": params}, {"a": jnp.eye(3), "g": 4 * jnp.eye(2)}
      >>> taps = {"stages": {"head": jax.tree.map(lambda f: f[None], taps)}}
      >>> updates, state = tx.update(params, tx.init(params), taps=taps, loss_terms=1)
      >>> updates["stages"]["head"]["bias"].round(3).tolist()
      [[0.25, 0.25]]
    """
    checks.require_has("what kfac.plan returns", ("blocks", "skip"), chosen=chosen)
    live: Any = damping  # May be traced, as `optax.inject_hyperparams` does.
    options = KfacOptions(
        method="inverse", damping=live, kl_clip=None, precision=precision
    )
    table = make_table(chosen, visible, rows)
    method = _PipeFisher(chosen, options, table, axis_name, sum_replicas, data_axis)

    def init(params):
        _blocks.check_parameters(chosen, params)
        return method.part(params).init(params)

    def update(updates, state, params=None, *, taps=None, loss_terms=None, **extra):
        del params, extra
        return method.part(updates).update(updates, state, taps, loss_terms)

    return optax.GradientTransformationExtraArgs(init, update)


class _PipeFisher:
    """`init` and `update` of `scale_by_pipefisher`, with what they have in common."""

    def __init__(
        self,
        chosen: Plan,
        options: KfacOptions,
        table: Table,
        axis_name: str | None,
        sum_replicas: Callable[[Any], Any] | None,
        data_axis: str | None,
    ) -> None:
        if sum_replicas is not None and axis_name is None:
            raise ConfigError("sum_replicas needs axis_name: replicas are on devices")
        self.plan, self.options, self.table = chosen, options, table
        self.axis, self.sum_replicas = axis_name, sum_replicas
        self.data_axis = data_axis

    def part(self, tree: Any) -> "_PipeFisher":
        """Returns a copy for the parameters that `optax.masked` has left in `tree`."""
        part = copy.copy(self)
        part.plan = _blocks.part_of(self.plan, tree)
        return part

    def init(self, params: Any) -> PipeFisherState:
        """Returns the state before the first step."""
        leaves = trees.flatten(params)

        def identities(block: Block) -> dict[str, jax.Array]:
            kernel = leaves[block.params[0]]
            depth, dtype = kernel.size // block.words[0], statistics_dtype(kernel.dtype)
            return {
                side: jnp.broadcast_to(jnp.eye(n, dtype=dtype), (depth, n, n))
                for side, n in zip(SIDES, (block.a, block.g), strict=True)
            }

        inverses: Any = {block.path: identities(block) for block in self.plan.blocks}
        # Without layers one empty array, which `optax.tree_map_params` cannot mistake
        # for a tree of parameters.
        inverses = inverses or jnp.zeros((0, 0))
        return PipeFisherState(
            count=jnp.zeros((), jnp.int32),
            due=jnp.ones((), bool),
            # Copies: the state may be donated.
            curvature=jax.tree.map(jnp.copy, inverses),
            inverses=inverses,
            skipped=jax.tree.map(lambda f: jnp.zeros(f.shape[:1], jnp.int32), inverses),
        )

    def update(
        self, updates: Any, state: PipeFisherState, taps: Any, loss_terms: Any
    ) -> tuple[Any, PipeFisherState]:
        """Returns preconditioned updates and the next state."""
        if not self.plan.blocks:
            return updates, state
        leaves, inverses, skipped, results = trees.flatten(updates), {}, {}, {}
        self.check_place(state, leaves)
        begins = state.count % self.table.period == 0
        missed = jnp.zeros((), jnp.int32)
        if _blocks.withholds(taps):
            curvature, missed = state.curvature, begins.astype(jnp.int32)
        else:
            # Statistics may be given in every step; they are used at j = 0 alone.
            curvature = jax.tree.map(
                lambda new, old: jnp.where(begins, new, old),
                self.statistics(taps, loss_terms, state.curvature),
                state.curvature,
            )
        for block in self.plan.blocks:
            path = block.path
            inverses[path], lost = self.refresh_inverses(
                path, state.count, curvature[path], state.inverses[path]
            )
            skipped[path] = jax.tree.map(
                lambda old, new: old + new + missed, state.skipped[path], lost
            )
            results[path] = self.precondition_stack(block, inverses[path], leaves)
        if self.sum_replicas is not None:
            results = self.sum_shares(self.sum_replicas, results)
        new = leaves | {
            path: part
            for block in self.plan.blocks
            for path, part in _parts(block, results[block.path], leaves).items()
        }
        count = jnp.asarray(optax.safe_increment(state.count))
        return trees.unflatten(updates, new), PipeFisherState(
            count=count,
            due=count % self.table.period == 0,
            curvature=curvature,
            inverses=inverses,
            skipped=skipped,
        )

    def check_place(
        self, state: PipeFisherState, leaves: Mapping[str, jax.Array]
    ) -> None:
        """Raises ConfigError unless axes and stacks here are those of this transform.

        Args:
          state: of which each stack must have this device's layers.
          leaves: gradients by path, likewise.
        """
        for axis in (self.axis, self.data_axis):
            if axis is not None:
                require_axes(axis, "PipeFisher's update")
        devices = 1 if self.axis is None else jax.lax.axis_size(self.axis)
        for block in self.plan.blocks:
            here = len(self.table.mine[block.path]) // devices
            found = {
                "state": len(state.curvature[block.path]["a"]),
                "gradients": leaves[block.params[0]].size // block.words[0],
            }
            if set(found.values()) != {here}:
                raise ConfigError(
                    f"stacks of {block.path!r} must have {here} layers here: got "
                    f"{found}; inside shard_map over the stages pass axis_name, and "
                    "specifications such as sharding.stage_specs((params, state))"
                )

    def statistics(self, taps: Any, loss_terms: Any, like: Any) -> Any:
        """Returns statistics in the form of `like`, with G of single examples.

        The taps saw gradients of a mean over `loss_terms` terms, each 1/`loss_terms` of
        the gradient of its term; G is quadratic in them.
        """
        statistics = _blocks.check_statistics(self.plan, taps, like)
        if loss_terms is None:
            raise ValueError(
                "update needs loss_terms=, how many terms the mean loss divides by: "
                "got None"
            )
        for path, each in statistics.items():
            dtype = like[path]["g"].dtype
            scale = jnp.asarray(loss_terms, dtype) ** 2
            statistics[path] = {
                "a": each["a"].astype(dtype),
                "g": each["g"].astype(dtype) * scale,
            }
        if self.data_axis is not None:
            statistics = jax.lax.pmean(vary(statistics, self.data_axis), self.data_axis)
        return statistics

    def refresh_inverses(
        self, path: str, count: jax.Array, curvature: Any, old: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns a stack's inverses, and for each whether a new one was not finite."""
        inverses, lost = {}, {}
        for side in SIDES:
            step = self.rows_here(self.table.steps[path][side])
            due = (step == count % self.table.period) | (count == 0)
            if self.sum_replicas is not None:
                due &= self.rows_here(self.table.mine[path])
            # A loop instead of `vmap`, which would turn the `cond` in `inverse` into a
            # `select` and invert all factors in every step.
            inverses[side], lost[side] = jax.lax.map(
                functools.partial(self.inverse, side),
                (due, curvature["a"], curvature["g"], old[side]),
            )
        return inverses, lost

    def inverse(self, side: str, layer: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (F + γI)⁻¹ of one factor if due and finite, else the old inverse.

        Args:
          side: which factor.
          layer: (whether it is due, A, G, the old inverse); `decompose` wants both.
        """

        def make(a: jax.Array, g: jax.Array, old: jax.Array) -> tuple[Any, Any]:
            factors, damping = {"a": a, "g": g}, self.options.damping
            items = decompose(self.options, factors, damping, (side,))
            new = items[f"inverse_{side}"]
            finite = jnp.isfinite(new).all()
            return jnp.where(finite, new, old), (~finite).astype(jnp.int32)

        def keep(a: jax.Array, g: jax.Array, old: jax.Array) -> tuple[Any, Any]:
            return old, vary_like(jnp.zeros((), jnp.int32), old)

        return jax.lax.cond(layer[0], make, keep, *layer[1:])

    def precondition_stack(
        self, block: Block, inverses: Mapping[str, jax.Array], leaves: Any
    ) -> Float[Array, "depth a g"]:
        """Preconditions a stack of matrices; zeros for those of another replica."""
        matrices = _matrices(block, leaves).astype(inverses["a"].dtype)

        def make(a: jax.Array, g: jax.Array, matrix: jax.Array) -> jax.Array:
            items = {"inverse_a": a, "inverse_g": g}
            return precondition(self.options, items, matrix, self.options.damping)

        def keep(a: jax.Array, g: jax.Array, matrix: jax.Array) -> jax.Array:
            return jnp.zeros_like(matrix)

        if self.sum_replicas is None:
            return jax.vmap(make)(inverses["a"], inverses["g"], matrices)
        mine = self.rows_here(self.table.mine[block.path])
        return jax.lax.map(
            lambda each: jax.lax.cond(each[0], make, keep, *each[1:]),
            (mine, inverses["a"], inverses["g"], matrices),
        )

    def sum_shares(
        self, sum_replicas: Callable[[Any], Any], shares: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns the matrices of all layers, from shares with zeros for the others."""
        shape = -1, self.table.layers_per_row
        rows = {path: m.reshape(*shape, *m.shape[1:]) for path, m in shares.items()}
        total = sum_replicas(rows)
        return {path: total[path].reshape(m.shape) for path, m in shares.items()}

    def rows_here(self, column: np.ndarray) -> jax.Array:
        """Returns the entries of a table's column that belong to this device's rows."""
        rows = jnp.asarray(column)
        if self.axis is None:
            return rows
        size = jax.lax.axis_size(self.axis)
        return rows.reshape(size, -1)[jax.lax.axis_index(self.axis)]


def _matrices(
    block: Block, leaves: Mapping[str, jax.Array]
) -> Float[Array, "depth a g"]:
    """Returns [kernel; bias] of those layers of a stack that this device has."""
    kernel, *bias = (leaves[path] for path in block.params)
    parts = [kernel.reshape(-1, block.a - len(bias), block.g)]
    parts += [each.reshape(-1, 1, block.g) for each in bias]
    return jnp.concatenate(parts, axis=1)


def _parts(
    block: Block, whole: Float[Array, "depth a g"], like: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns gradients by path from a stack of matrices."""
    kernel, *bias = block.params
    rows = block.a - len(bias)
    parts = {kernel: whole[:, :rows]} | dict.fromkeys(bias, whole[:, rows:])
    return {
        path: part.reshape(like[path].shape).astype(like[path].dtype)
        for path, part in parts.items()
    }
