"""A pipeline's schedule, run: loss and gradients of a step in one SPMD program.

A `lax.scan` over the ticks of `tick_table`; at each tick a device does its own op of a
`lax.switch`, then results go one place up and down the ring by `ppermute`, which stands
outside the switch: no branch that devices take differently holds a collective. So a
tick lasts as long as its slowest op anywhere, and activations travel at every tick,
needed or not: ticks × bytes of an activation × pairs of neighbours.

A backward pass finds the input of its stage in a buffer and repeats the forward pass
from it; nothing else is kept between ticks. For that reason the forward op of the last
stage, whose result goes nowhere, does nothing.

References:
  Huang et al., GPipe, NeurIPS 2019, section 2.3 (recomputation).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary
from hpcjax.sharding import ticks
from hpcjax.sharding.schedules import Schedule
from hpcjax.sharding.stages import STAGE_AXIS, STAGES, stage_rows, sum_replicas


class Visit(NamedTuple):
    """One micro-batch at one stage: what a stage function knows besides its input.

    Attributes:
      batch: the micro-batch's rows of the batch, on every stage. Keys for dropout may
        be among them, as `key_data`: the backward pass draws the same once more.
      stage: int32, which stage; to derive keys from.
      micro_batch: int32, which micro-batch.
      taps: for the layers of this stage, or None.
    """

    batch: Any
    stage: jax.Array
    micro_batch: jax.Array
    taps: Any = None


class Pipelined(NamedTuple):
    """What one step of a pipeline gives.

    Attributes:
      value: the mean over micro-batches of what `last` returns, float32 at least.
      grads: of that, with respect to the parameters, in their form.
      taps: gradient of the taps, a row for each part as in `grads["stages"]`: backward
        statistics, mean over micro-batches, formed of the gradients of `value`.
    """

    value: jax.Array
    grads: Any
    taps: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """A model cut into stages.

    All three are called with a `Visit` last and must not communicate over the pipeline.

    Attributes:
      first: `(params, visit) -> x`, before the first stage. The parameters are all but
        those of the stages.
      stage: `(params, x, visit) -> x` of the same shapes and dtypes; the parameters are
        those of the stage.
      last: `(params, x, visit) -> loss`, after the last stage, a mean over the
        micro-batch; the parameters as for `first`, so that both may use one table.
    """

    first: Callable[[Any, Visit], Any]
    stage: Callable[[Any, Any, Visit], Any]
    last: Callable[[Any, Any, Visit], Any]


def pipelined_value_and_grad(
    schedule: Schedule,
    functions: StageFunctions,
    *,
    axis_name: str = STAGE_AXIS,
    data_axis: str | None = None,
) -> Callable[..., Pipelined]:
    """Returns `(params, batch, taps=None) -> Pipelined`, for use inside `shard_map`.

    The result is that of gradients accumulated over micro-batches without a pipeline.
    Parameters are a dict: below `"stages"` one row for each part of `stage_rows`, split
    over `axis_name`; the others are replicated, and their gradients summed. The two
    replicas of Chimera exchange gradients, so both rows of a stage get the same.
    `stage_specs` says this to `shard_map`.

    `batch` is a tree of arrays, replicated over `axis_name` and split over `data_axis`,
    whose rows are cut into micro-batches in order. `taps` are those of one stage, the
    same for all; slots of zeros.

    Args:
      schedule: what runs where and in what order.
      functions: the model.
      axis_name: mesh axis of the pipeline, as long as the schedule has devices.
      data_axis: mesh axis over which the batch is split; everything is averaged.

    Raises:
      ConfigError: an invalid schedule, or devices with different numbers of stages; in
        use: no such axis, another number of devices or of stages, rows of the batch
        that differ, are none or that the micro-batches do not divide, a stage whose
        output is not like its input, or a loss that is no floating-point scalar.

    Examples:
      >>> from jax.sharding import PartitionSpec as P
      >>> from hpcjax import sharding
      >>> functions = StageFunctions(
      ...     first=lambda params, visit: visit.batch * params["scale"],
      ...     stage=lambda w, x, visit: x * w,
      ...     last=lambda params, x, visit: x.mean(),
      ... )
      >>> schedule = sharding.interleaved(2, 2, 2)  # two stages on one device
      >>> params = {"scale": jnp.ones(()), "stages": jnp.array([2.0, 3.0])}
      >>> specs = sharding.stage_specs(params)
      >>> step = jax.shard_map(
      ...     pipelined_value_and_grad(schedule, functions),
      ...     mesh=sharding.make_mesh({"stage": 1}),
      ...     in_specs=(specs, P()),
      ...     out_specs=Pipelined(P(), specs, None),
      ... )
      >>> found = step(params, jnp.ones(4))
      >>> float(found.value), found.grads["stages"].tolist()
      (6.0, [3.0, 2.0])
    """
    stage_rows(schedule)  # Refuses what cannot be one program.
    pipe = _Pipe(schedule, functions, axis_name, data_axis)

    def differentiate(params: Any, batch: Any, taps: Any = None) -> Pipelined:
        return pipe.run(params, batch, taps)

    return differentiate


class _Branch(NamedTuple):
    """An op that is compiled apart: its kind, and whether it is at either end."""

    kind: str
    first: bool
    last: bool


class _Carry(NamedTuple):
    """What a tick hands to the next one.

    Attributes:
      inbox: neighbours' results that wait, `[buffers + 1, ...]`; what the table puts
        nowhere goes into the last one.
      inputs: of stages, for the backward pass, likewise.
      slopes: gradients of stages' outputs, for `W` ops; () where there are none.
      value: sum of losses.
      sums: of the gradients: other parameters, stages' parameters, stages' taps.
    """

    inbox: Any
    inputs: Any
    slopes: Any
    value: Any
    sums: tuple[Any, Any, Any]


class _Pipe:
    def __init__(
        self,
        schedule: Schedule,
        functions: StageFunctions,
        axis_name: str,
        data_axis: str | None,
    ) -> None:
        self.schedule, self.functions = schedule, functions
        self.axis, self.data_axis = axis_name, data_axis
        self.axes = (axis_name,) if data_axis is None else (axis_name, data_axis)
        self.table = ticks.tick_table(schedule)
        self.split = schedule.splits_backward
        self.branches, self.rows = self._tables()

    def _tables(self) -> tuple[list[_Branch], dict[str, np.ndarray]]:
        """Returns the branches but idle, and all that a tick reads, [device, tick]."""
        table, end = self.table, self.schedule.stages - 1
        stages = [
            [part.stage for part in self.schedule.parts(device)]
            for device in range(self.schedule.devices)
        ]
        stage = np.take_along_axis(np.array(stages), table.chunk, axis=1)
        branch = np.zeros_like(table.op)
        branches: list[_Branch] = []
        for place in np.ndindex(branch.shape):
            kind, at = " FBW"[table.op[place]], int(stage[place])
            found = _Branch(kind, at == 0, at == end)
            if kind == " " or (kind == "F" and found.last):
                continue
            if found not in branches:
                branches.append(found)
            branch[place] = 1 + branches.index(found)

        def slots(buffer: np.ndarray, buffers: int, where: Any = True) -> np.ndarray:
            return np.where((buffer >= 0) & where, buffer, buffers).astype(np.int32)

        saved, inbox = table.saved_buffers, table.inbox_buffers
        return branches, {
            "branch": branch,
            "stage": stage.astype(np.int32),
            "micro_batch": table.micro_batch,
            "chunk": table.chunk,
            "read": slots(table.inbox, inbox),
            "from_below": slots(table.from_below, inbox),
            "from_above": slots(table.from_above, inbox),
            "saved": slots(table.saved, saved),
            "save_input": slots(table.saved, saved, table.op == ticks.FORWARD),
            "save_slope": slots(table.saved, saved, table.op == ticks.BACKWARD),
        }

    def run(self, params: Mapping[str, Any], batch: Any, taps: Any) -> Pipelined:
        self._check(params, batch)
        count = self.schedule.micro_batches
        batch = jax.tree.map(lambda b: b.reshape(count, -1, *b.shape[1:]), batch)
        rest = {name: value for name, value in params.items() if name != STAGES}
        # Gradients of replicated values would be summed by JAX, inside the switch.
        made = vary((rest, params[STAGES], taps, batch), self.axes)
        rest, stages, taps, batch = made
        shapes, loss = self._shapes(rest, stages, taps, batch)
        parts = len(self.schedule.parts(0))
        tap_rows = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct((parts, *t.shape), t.dtype), taps
        )
        saved, inbox = self.table.saved_buffers, self.table.inbox_buffers
        carry = _Carry(
            inbox=_buffers(shapes, inbox),
            inputs=_buffers(shapes, saved),
            slopes=_buffers(shapes, saved) if self.split else (),
            value=_wide_zeros(loss),
            sums=jax.tree.map(_wide_zeros, (rest, stages, tap_rows)),
        )
        device = jax.lax.axis_index(self.axis)
        rows = {name: jnp.asarray(row)[device] for name, row in self.rows.items()}
        branches = [functools.partial(self._idle, shapes)] + [
            functools.partial(self._branch, branch, self._seed(loss.dtype))
            for branch in self.branches
        ]
        tick = functools.partial(self._tick, branches, (rest, stages, taps), batch)
        carry, _ = jax.lax.scan(tick, vary(carry, self.axes), rows)
        return self._finished(carry, params, taps)

    def _tick(
        self, branches: Any, weights: Any, batch: Any, carry: _Carry, row: Any
    ) -> tuple[_Carry, None]:
        received = _take(carry.inbox, row["read"])
        inputs = _put(carry.inputs, row["save_input"], received)
        slopes = carry.slopes
        if self.split:
            slopes = _put(slopes, row["save_slope"], received)
        carry = carry._replace(inputs=inputs, slopes=slopes)
        result, value, sums = jax.lax.switch(
            row["branch"], branches, weights, batch, carry, received, row
        )
        inbox = carry.inbox
        for source, pairs in self._pairs().items():
            inbox = _put(inbox, row[source], self._sent(result, pairs))
        return carry._replace(inbox=inbox, value=value, sums=sums), None

    def _pairs(self) -> dict[str, list[tuple[int, int]]]:
        """Returns for both directions who sends to whom at some tick."""
        devices = self.schedule.devices
        steps = {"from_below": -1, "from_above": 1}
        found = {
            name: [
                ((device + step) % devices, device)
                for device, row in enumerate(getattr(self.table, name))
                if (row >= 0).any()
            ]
            for name, step in steps.items()
        }
        return {name: pairs for name, pairs in found.items() if pairs}

    def _sent(self, result: Any, pairs: list[tuple[int, int]]) -> Any:
        if self.schedule.devices == 1:
            return result
        return jax.tree.map(
            lambda leaf: jax.lax.ppermute(leaf, self.axis, pairs), result
        )

    def _idle(
        self, shapes: Any, weights: Any, batch: Any, carry: _Carry, *_: Any
    ) -> tuple[Any, Any, Any]:
        del weights, batch
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return vary(nothing, self.axes), carry.value, carry.sums

    def _branch(
        self,
        branch: _Branch,
        seed: jax.Array,
        weights: tuple[Any, Any, Any],
        batch: Any,
        carry: _Carry,
        received: Any,
        row: Any,
    ) -> tuple[Any, Any, Any]:
        """Returns the result for the neighbour, the sum of losses and of gradients."""
        rest, stages, taps = weights
        chunk, number = row["chunk"], row["micro_batch"]
        mine = rest, _take(stages, chunk), taps
        visit = Visit(_take(batch, number), row["stage"], number)
        forward = functools.partial(self._forward, branch, visit)
        if branch.kind == "F":
            return forward(mine, received), carry.value, carry.sums
        slope = received if branch.kind == "B" else _take(carry.slopes, row["saved"])
        y, pull = jax.vjp(forward, mine, _take(carry.inputs, row["saved"]))
        grads, below = pull(seed if branch.last else slope)
        value, sums = carry.value, carry.sums
        if branch.kind == "B" and branch.last:
            value = _add(value, y * seed)
        if branch.kind == "W" or not self.split:
            sums = (
                jax.tree.map(_add, sums[0], grads[0]),
                *(_add_at(sums[i], chunk, grads[i]) for i in (1, 2)),
            )
        return below, value, sums

    def _forward(self, branch: _Branch, visit: Visit, weights: Any, x: Any) -> Any:
        rest, part, taps = weights
        if branch.first:
            x = self.functions.first(rest, visit)
        x = self.functions.stage(part, x, visit._replace(taps=taps))
        return self.functions.last(rest, x, visit) if branch.last else x

    def _seed(self, loss: Any) -> jax.Array:
        """Returns what a micro-batch's loss counts in the value."""
        copies = 1 if self.data_axis is None else jax.lax.axis_size(self.data_axis)
        share = 1 / (self.schedule.micro_batches * copies)
        return vary(jnp.asarray(share, loss), self.axes)

    def _finished(self, carry: _Carry, params: Any, taps: Any) -> Pipelined:
        rest, stages, statistics = carry.sums
        value, rest = jax.lax.psum((carry.value, rest), self.axes)
        stages, statistics = sum_replicas(
            self.schedule, (stages, statistics), self.axis
        )
        count = self.schedule.micro_batches
        if self.data_axis is not None:
            stages, statistics = jax.lax.psum((stages, statistics), self.data_axis)
            count *= jax.lax.axis_size(self.data_axis)
        grads = jax.tree.map(
            lambda g, p: g.astype(p.dtype), {**rest, STAGES: stages}, dict(params)
        )
        statistics = jax.tree.map(
            lambda s, t: (s / count).astype(t.dtype), statistics, taps
        )
        return Pipelined(value, grads, statistics)

    def _check(self, params: Any, batch: Any) -> None:
        for axis in self.axes:
            try:
                jax.lax.axis_size(axis)
            except NameError:
                known = jax.sharding.get_abstract_mesh().axis_names
                raise ConfigError(
                    "axis_name and data_axis must be axes of the shard_map around: "
                    f"got {axis!r}, there are {known}"
                ) from None
        devices = jax.lax.axis_size(self.axis)
        if devices != self.schedule.devices:
            raise ConfigError(
                f"the schedule needs {self.schedule.devices} devices along axis "
                f"{self.axis!r}: got {devices}"
            )
        parts = len(self.schedule.parts(0))
        heads = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params.get(STAGES))}
        if heads != {(parts,)}:
            raise ConfigError(
                f"parameters below {STAGES!r} need {parts} rows on each device, see "
                f"stage_rows: got leaves with {sorted(heads)}"
            )
        count = self.schedule.micro_batches
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if len(rows) > 1 or any(
            not each or not each[0] or each[0] % count for each in rows
        ):
            raise ConfigError(
                "micro_batches must divide the rows of the batch, the same number in "
                f"every leaf and not 0: got {count}, leaves with {sorted(rows)}"
            )

    def _shapes(self, rest: Any, stages: Any, taps: Any, batch: Any) -> tuple[Any, Any]:
        """Returns the shapes of a stage's input and of the loss."""

        def all_of(rest: Any, stages: Any, taps: Any, batch: Any) -> Any:
            zero = jnp.zeros((), jnp.int32)
            visit = Visit(_take(batch, zero), zero, zero)
            x = self.functions.first(rest, visit)
            y = self.functions.stage(_take(stages, zero), x, visit._replace(taps=taps))
            loss = self.functions.last(rest, y, visit)
            if not isinstance(loss, jax.Array):
                raise ConfigError(
                    f"last must return a floating-point scalar: got {loss!r}"
                )
            return x, y, loss

        x, y, loss = jax.eval_shape(all_of, rest, stages, taps, batch)
        kinds = [
            jax.tree.map(lambda s: (s.shape, str(s.dtype)), each) for each in (x, y)
        ]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                "a stage's output must be like its input: got input "
                f"{kinds[0]}, output {kinds[1]}"
            )
        if not all(jnp.issubdtype(s.dtype, jnp.floating) for s in jax.tree.leaves(x)):
            raise ConfigError(f"stages pass on floating-point arrays: got {kinds[0]}")
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ConfigError(
                f"last must return a floating-point scalar: got {loss.dtype} of shape "
                f"{loss.shape}"
            )
        return x, loss


def _buffers(shapes: Any, count: int) -> Any:
    return jax.tree.map(lambda s: jnp.zeros((count + 1, *s.shape), s.dtype), shapes)


def _wide_zeros(leaf: Any) -> jax.Array:
    """Returns zeros to add gradients in, float32 at least."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def _take(tree: Any, place: jax.Array) -> Any:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), tree
    )


def _put(tree: Any, place: jax.Array, values: Any) -> Any:
    def put(leaf: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(leaf, value, place, 0)

    return jax.tree.map(put, tree, values)


def _add(total: jax.Array, value: jax.Array) -> jax.Array:
    return total + value.astype(total.dtype)


def _add_at(total: Any, place: jax.Array, values: Any) -> Any:
    return _put(total, place, jax.tree.map(_add, _take(total, place), values))
