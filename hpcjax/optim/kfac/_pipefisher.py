"""K-FAC whose inverses come late, as when they are made in the bubbles of a pipeline.

A refresh takes `period` steps. Its curvature is that of its first step, of all
micro-batches and nothing before; each factor's inverse is used from the flush of the
step at which the schedule has finished it, until the next one is there. When exactly
within the refresh a micro-batch's share was added cannot be seen in the result, because
inputs and output gradients are saved until then.

An inverse is made in the step that is the first to use it, so nothing is pending
between steps. The table of these steps is static; `perf.assign` makes one.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary, vary_like
from hpcjax.optim.full_precision import check_real, statistics_dtype
from hpcjax.optim.kfac import _blocks, config
from hpcjax.optim.kfac._blocks import Block, Plan
from hpcjax.optim.kfac._decomposition import SIDES, decompose, precondition

# A factor as schedules name it: stage, place of its layer in the stage, "A" or "B".
Visible = Mapping[int, Iterable[tuple[int, int, str]]]
_SIDES = {"A": "a", "B": "g"}


class PipeFisherState(NamedTuple):
    """State of `scale_by_pipefisher`.

    Attributes:
      count: steps taken.
      due: whether the next update takes statistics.
      curvature: of the refresh that goes on, `{path: {"a": [depth, a, a], "g": ...}}`.
      inverses: what is preconditioned with, damped, in the same form.
      skipped: `{path: {"a": int32 [depth], ...}}`, times that an inverse was not finite
        and the one before it was kept.
    """

    count: Int[Array, ""]
    due: Bool[Array, ""]
    curvature: dict[str, dict[str, jax.Array]]
    inverses: dict[str, dict[str, jax.Array]]
    skipped: dict[str, dict[str, jax.Array]]


def stage_plan(
    chosen: Plan, rows: int, *, skip: tuple[str, ...] = (), below: str = "stages"
) -> Plan:
    """Returns the plan of a pipeline's parameters from the plan of one stage's model.

    Args:
      chosen: of a stage, from `kfac.plan`.
      rows: how many of them are stacked, see `sharding.stage_rows`.
      skip: more regexes of parameters that keep their gradient: those of no stage.
      below: the key of the stages' parameters.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> chosen = kfac.plan(models.mlp((4,), 4, widths=()))
      >>> [(block.path, block.depth) for block in stage_plan(chosen, 2).blocks]
      [('stages/head', 2)]
    """
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
    damping: float = 1e-3,
    precision: Literal["default", "high", "highest"] = "highest",
    axis_name: str | None = None,
    sum_replicas: Callable[[Any], Any] | None = None,
    data_axis: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients by inverses that are as old as PipeFisher's.

    For a layer with gradient M, [a, g], the update is (A + γI)⁻¹ M (G + γI)⁻¹, with
    Cholesky inverses of factors from different steps: step t, from 1, is step
    j = (t − 1) mod `period` of a refresh. At j = 0 curvature is taken; the inverses in
    `visible[j]` are made of it and used from this update on, so that their curvature is
    j to j + `period` − 1 steps old. Step 1 makes all. No running average; with period 1
    it is `scale_by_kfac` with `method="inverse"` that inverts at every step.

    `update` needs `taps=` and `loss_terms=` as `scale_by_kfac` does, statistics and
    number of terms of the whole batch, already averaged over devices; or, with
    `data_axis`, of each device's part. They may be nested: `{"stages": statistics}`.

    Works on all rows at once, or inside `shard_map` on those of a device.

    Args:
      chosen: the layers, all in stacks of one depth; from `stage_plan`, or `kfac.plan`
        of a model whose blocks are stacked.
      visible: `FilledSchedule.visible`: for each step of a refresh the factors whose
        inverses its flush is the first to use. Layer j · n + i of a stage is layer i of
        the plan's n, in block j of those that the stage has of it.
      rows: replica and stage of each equal part of the stacks in order; see
        `sharding.stage_rows`. Default: every stage once.
      damping: γ.
      precision: of the products that apply the inverses.
      axis_name: mesh axis over which the stacks are split; None if they are not.
      sum_replicas: adds up the rows of replicas, `sharding.sum_replicas` of a schedule.
        With it replicas share their stages' layers out, each inverting and
        preconditioning its own; without it every row does all.
      data_axis: mesh axis over which statistics are averaged.

    Raises:
      ConfigError: factors missing, doubled or unknown in `visible`, steps that are not
        0, 1, …, stacks of different depths or that rows do not divide, an option out of
        its range; at init for a parameter in no block that no rule leaves out.
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
    options = config.KfacOptions(
        method="inverse", damping=damping, kl_clip=None, precision=precision
    )
    table = _table(chosen, visible, rows)
    made = _PipeFisher(chosen, options, table, axis_name, sum_replicas, data_axis)

    def update(updates, state, params=None, *, taps=None, loss_terms=None, **extra):
        del params, extra
        return made.update(updates, state, taps, loss_terms)

    return optax.GradientTransformationExtraArgs(made.init, update)


class _Table(NamedTuple):
    """When each inverse of a stack is made, and by which replica.

    Attributes:
      period: steps of a refresh.
      steps: `{path: {"a": int32 [depth], "g": ...}}`, the step of a refresh.
      mine: `{path: bool [depth]}`, whether the row's replica makes it when they share.
      layers_per_row: layers of a stack that each of the rows has.
    """

    period: int
    steps: dict[str, dict[str, np.ndarray]]
    mine: dict[str, np.ndarray]
    layers_per_row: int


def _table(
    chosen: Plan, visible: Visible, rows: Sequence[tuple[int, int]] | None
) -> _Table:
    steps = {factor: step for step, each in visible.items() for factor in each}
    period = len(visible)
    count = sum(len(tuple(each)) for each in visible.values())
    if not steps or set(visible) != set(range(period)) or count != len(steps):
        raise ConfigError(
            "visible must have every step of a refresh from 0 on and each factor once: "
            f"got steps {sorted(visible)}, {count} factors, {len(steps)} different"
        )
    if rows is None:
        rows = [(0, stage) for stage in range(1 + max(stage for stage, *_ in steps))]
    blocks, depths = chosen.blocks, {block.depth for block in chosen.blocks}
    depth = max(depths)
    if len(depths) != 1 or depth % len(rows):
        raise ConfigError(
            f"all layers must be in stacks of one depth that {len(rows)} rows divide: "
            f"got depths {[(block.path, block.depth) for block in blocks]}"
        )
    per = depth // len(rows)
    layers = {
        block.path: [
            (replica, stage, number * len(blocks) + place)
            for replica, stage in rows
            for number in range(per)
        ]
        for place, block in enumerate(blocks)
    }
    wanted = {
        (stage, layer, side)
        for each in layers.values()
        for _, stage, layer in each
        for side in _SIDES
    }
    if wanted != set(map(tuple, steps)):
        raise ConfigError(
            "visible must name the factors (stage, layer, side) of the plan: missing "
            f"{sorted(wanted - set(steps))}, unknown {sorted(set(steps) - wanted)}"
        )
    replicas = 1 + max(replica for replica, _ in rows)
    return _Table(
        period,
        {
            path: {
                name: np.array([steps[s, layer, side] for _, s, layer in each], "int32")
                for side, name in _SIDES.items()
            }
            for path, each in layers.items()
        },
        {
            path: np.array([layer % replicas == replica for replica, _, layer in each])
            for path, each in layers.items()
        },
        per,
    )


class _PipeFisher:
    def __init__(
        self,
        chosen: Plan,
        options: config.KfacOptions,
        table: _Table,
        axis_name: str | None,
        sum_replicas: Callable[[Any], Any] | None,
        data_axis: str | None,
    ) -> None:
        if sum_replicas is not None and axis_name is None:
            raise ConfigError("sum_replicas needs axis_name: replicas are on devices")
        self.plan, self.options, self.table = chosen, options, table
        self.axis, self.sum_replicas = axis_name, sum_replicas
        self.data_axis = data_axis

    def init(self, params: Any) -> PipeFisherState:
        check_real(params)
        _blocks.check_covered(self.plan, params)
        leaves = trees.flatten(params)

        def identities(block: Block) -> dict[str, jax.Array]:
            depth = _matrices(block, leaves).shape[0]
            dtype = statistics_dtype(leaves[block.params[0]].dtype)
            return {
                side: jnp.broadcast_to(jnp.eye(n, dtype=dtype), (depth, n, n))
                for side, n in zip(SIDES, (block.a, block.g), strict=True)
            }

        inverses = {block.path: identities(block) for block in self.plan.blocks}
        return PipeFisherState(
            count=jnp.zeros((), jnp.int32),
            due=jnp.ones((), bool),
            curvature=jax.tree.map(jnp.zeros_like, inverses),
            inverses=inverses,
            skipped=jax.tree.map(lambda f: jnp.zeros(f.shape[:1], jnp.int32), inverses),
        )

    def update(
        self, updates: Any, state: PipeFisherState, taps: Any, loss_terms: Any
    ) -> tuple[Any, PipeFisherState]:
        begins = state.count % self.table.period == 0
        curvature = jax.tree.map(
            lambda new, old: jnp.where(begins, new, old),
            self.statistics(taps, loss_terms, state.curvature),
            state.curvature,
        )
        leaves, inverses, skipped, made = trees.flatten(updates), {}, {}, {}
        for block in self.plan.blocks:
            path = block.path
            inverses[path], lost = self.inverted(
                path, state.count, curvature[path], state.inverses[path]
            )
            skipped[path] = jax.tree.map(jnp.add, state.skipped[path], lost)
            made[path] = self.preconditioned(block, inverses[path], leaves)
        if self.sum_replicas is not None:
            made = self.shared(self.sum_replicas, made)
        new = leaves | {
            path: part
            for block in self.plan.blocks
            for path, part in _parts(block, made[block.path], leaves).items()
        }
        count = jnp.asarray(optax.safe_increment(state.count))
        return trees.unflatten(updates, new), PipeFisherState(
            count=count,
            due=count % self.table.period == 0,
            curvature=curvature,
            inverses=inverses,
            skipped=skipped,
        )

    def statistics(self, taps: Any, loss_terms: Any, like: Any) -> Any:
        """Returns the statistics in the form of `like`, G of single gradients."""
        given = trees.flatten(taps or {})
        missing = [path for path in trees.flatten(like) if path not in given]
        if missing or loss_terms is None:
            raise ValueError(
                "update needs taps=, statistics of all layers, and loss_terms=, how "
                "many terms the mean loss divides by: got "
                f"loss_terms={loss_terms}, no statistics {missing}"
            )
        found = {}
        for path, factor in trees.flatten(like).items():
            new = given[path]
            if new.shape[-2:] != factor.shape[-2:] or new.size != factor.size:
                raise ValueError(
                    f"statistics {path!r} must be {factor.shape}: got {new.shape}"
                )
            new = new.reshape(factor.shape).astype(factor.dtype)
            scale = jnp.asarray(loss_terms, factor.dtype) ** 2
            found[path] = new * scale if path.endswith("/g") else new
        if self.data_axis is not None:
            found = jax.lax.pmean(vary(found, self.data_axis), self.data_axis)
        return trees.unflatten(like, found)

    def inverted(
        self, path: str, count: jax.Array, curvature: Any, old: Any
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the inverses of a stack, and which were not finite, int32 [depth]."""
        inverses, lost = {}, {}
        for side in SIDES:
            step = self.rows_here(self.table.steps[path][side], curvature[side])
            due = (step == count % self.table.period) | (count == 0)
            if self.sum_replicas is not None:
                due &= self.rows_here(self.table.mine[path], due)
            # One after another, so that those which are not due cost nothing.
            inverses[side], lost[side] = jax.lax.map(
                functools.partial(self.inverse, side),
                (due, curvature["a"], curvature["g"], old[side]),
            )
        return inverses, lost

    def inverse(self, side: str, layer: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (F + γI)⁻¹ of one factor where it is due and finite, else the old.

        Args:
          side: which factor.
          layer: whether it is due, A, G, and the old inverse.
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

    def preconditioned(
        self, block: Block, inverses: Mapping[str, jax.Array], leaves: Any
    ) -> Float[Array, "depth a g"]:
        """Returns matrices times their inverses, zero where another replica's."""
        found = _matrices(block, leaves).astype(inverses["a"].dtype)

        def make(a: jax.Array, g: jax.Array, matrix: jax.Array) -> jax.Array:
            items = {"inverse_a": a, "inverse_g": g}
            return precondition(self.options, items, matrix, self.options.damping)

        def keep(a: jax.Array, g: jax.Array, matrix: jax.Array) -> jax.Array:
            return jnp.zeros_like(matrix)

        if self.sum_replicas is None:
            return jax.vmap(make)(inverses["a"], inverses["g"], found)
        mine = self.rows_here(self.table.mine[block.path], found)
        return jax.lax.map(
            lambda each: jax.lax.cond(each[0], make, keep, *each[1:]),
            (mine, inverses["a"], inverses["g"], found),
        )

    def shared(
        self, sum_replicas: Callable[[Any], Any], made: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns the matrices of all layers on every replica."""
        shape = -1, self.table.layers_per_row
        rows = {path: m.reshape(*shape, *m.shape[1:]) for path, m in made.items()}
        total = sum_replicas(rows)
        return {path: total[path].reshape(m.shape) for path, m in made.items()}

    def rows_here(self, column: np.ndarray, like: jax.Array) -> jax.Array:
        """Returns the part of a table's column that is about this device."""
        rows = jnp.asarray(column)
        if self.axis is not None:
            size = jax.lax.axis_size(self.axis)
            rows = rows.reshape(size, -1)[jax.lax.axis_index(self.axis)]
        if len(rows) != len(like):
            raise ValueError(
                f"stacks must have {len(rows)} layers here: got {len(like)}; inside "
                "shard_map pass axis_name"
            )
        return rows


def _matrices(
    block: Block, leaves: Mapping[str, jax.Array]
) -> Float[Array, "depth a g"]:
    """Returns [kernel; bias] of all layers of a stack that are here."""
    kernel, *bias = (leaves[path] for path in block.params)
    parts = [kernel.reshape(-1, block.a - len(bias), block.g)]
    parts += [each.reshape(-1, 1, block.g) for each in bias]
    return jnp.concatenate(parts, axis=1)


def _parts(
    block: Block, whole: Float[Array, "depth a g"], like: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns `{path of parameter: gradient}` of a stack."""
    kernel, *bias = block.params
    rows = block.a - len(bias)
    parts = {kernel: whole[:, :rows]} | dict.fromkeys(bias, whole[:, rows:])
    return {
        path: part.reshape(like[path].shape).astype(like[path].dtype)
        for path, part in parts.items()
    }
