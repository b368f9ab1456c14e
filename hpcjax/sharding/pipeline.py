"""Pipeline parallelism: loss and gradients of a step by a schedule, in one program.

The program is a `lax.scan` over the ticks of `tick_table`. At each tick every device
runs its op, a branch of a `lax.switch`, and then sends the result to both neighbours in
the ring by `ppermute`. The collective is outside the switch: all devices must run it,
and they take different branches. A tick therefore lasts as long as its slowest op on
any device, and activations are sent at every tick, needed or not: ticks × bytes of an
activation × pairs of neighbours.

A backward op finds the input of its stage in a buffer and recomputes the forward pass
from it; nothing else is stored between ticks. The forward op of the last stage, whose
result nobody receives, does nothing.

Where stages send codes, up go codes and down their slopes, each with buffers of its own
and between its own devices: stages before the first that is sent one get inputs whole.

References:
  Huang et al., GPipe, NeurIPS 2019, section 2.3 (recomputation).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary, vary_like
from hpcjax.sharding._payloads import DOWN, UP, Payloads, check_codes
from hpcjax.sharding._pipeline_plan import Branch, plan_program
from hpcjax.sharding.schedules import Schedule
from hpcjax.sharding.stage_functions import StageFunctions, Visit
from hpcjax.sharding.stages import STAGE_AXIS, STAGES, stage_rows, sum_replicas


class Pipelined(NamedTuple):
    """The results of one step of a pipeline.

    Attributes:
      value: the mean loss over micro-batches, in float32 or better.
      grads: its gradients, a tree like the parameters.
      taps: gradient of the taps, with a row for each part as in `grads["stages"]`: the
        backward statistics of gradients of `value`, averaged over micro-batches.
    """

    value: jax.Array
    grads: Any
    taps: Any


def pipelined_value_and_grad(
    schedule: Schedule,
    functions: StageFunctions,
    *,
    axis_name: str = STAGE_AXIS,
    data_axis: str | None = None,
) -> Callable[..., Pipelined]:
    """Returns `(params, batch, taps=None) -> Pipelined`, for use inside `shard_map`.

    The result equals gradients accumulated over micro-batches without a pipeline.
    Parameters are a dict. Below `"stages"` they have a row for each part of
    `stage_rows` and are split over `axis_name`; all others are replicated, and their
    gradients summed over the pipeline. The two replicas of Chimera exchange gradients,
    so that both rows of a stage get the same. `stage_specs` returns the corresponding
    specifications for `shard_map`.

    `batch` is a tree of arrays, replicated over `axis_name` and split over `data_axis`,
    whose rows are cut into micro-batches in order. `taps` are the taps of one stage,
    with slots of zeros, which serve for all stages.

    Args:
      schedule: which op runs where, and in what order.
      functions: the model.
      axis_name: mesh axis of the pipeline, with as many devices as the schedule.
      data_axis: mesh axis over which the batch is split and results are averaged.

    Raises:
      ConfigError: the schedule is invalid, or its devices hold different numbers of
        stages; codes with a schedule of several stages on a device, or `coded` that is
        none of its stages behind the first. When called: an axis is not in the mesh;
        the number of devices or stages is not the schedule's; leaves of the batch
        differ in rows or have none, or the number of micro-batches does not divide
        them; a stage's output, or what decodes, is not like its input; no slope passes
        a code; or the loss is not a floating-point scalar.

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
      >>> result = step(params, jnp.ones(4))
      >>> float(result.value), result.grads["stages"].tolist()
      (6.0, [3.0, 2.0])
    """
    stage_rows(schedule)  # Raises if the schedule cannot be one SPMD program.
    check_codes(schedule, functions)
    pipe = _Pipe(schedule, functions, axis_name, data_axis)

    def differentiate(params: Any, batch: Any, taps: Any = None) -> Pipelined:
        return pipe.run(params, batch, taps)

    return differentiate


class _Carry(NamedTuple):
    """The carry of the scan over ticks.

    Attributes:
      inbox: results of neighbours that have not been used yet, `[places + 1, ...]`; the
        last place takes what nobody uses.
      inputs: inputs of stages, kept for the backward ops, likewise.
      slopes: gradients of stages' outputs, kept for `W` ops, likewise; () without
        these.
      sent: what is kept of codes that were sent, likewise.
      value: sum of losses so far.
      sums: sums of gradients so far: of other parameters, stages' parameters, and taps.
    """

    inbox: Any
    inputs: Any
    slopes: Any
    sent: Any
    value: Any
    sums: tuple[Any, Any, Any]


class _Pipe:
    """The program of `pipelined_value_and_grad`."""

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
        self.payloads = Payloads(functions, self.axes)
        self.plan = plan_program(schedule, self.payloads.coded)
        self.split = schedule.splits_backward

    def run(self, params: Mapping[str, Any], batch: Any, taps: Any) -> Pipelined:
        """Returns loss and gradients of a step, inside `shard_map`."""
        self._check(params, batch)
        count = self.schedule.micro_batches
        batch = jax.tree.map(lambda b: b.reshape(count, -1, *b.shape[1:]), batch)
        rest = {name: value for name, value in params.items() if name != STAGES}
        # The gradient of a replicated value is an all-reduce, which JAX would put into
        # the branches of the switch, where devices would wait for each other for ever.
        # Marked as varying, gradients stay local and are summed once, after the scan.
        varying = vary((rest, params[STAGES], taps, batch), self.axes)
        rest, stages, taps, batch = varying
        shapes, loss = self._shapes(rest, stages, taps, batch)
        parts = len(self.schedule.parts(0))
        tap_rows = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct((parts, *t.shape), t.dtype), taps
        )
        saved, inbox = self.plan.saved_buffers, self.plan.inbox_buffers
        up, down = (self.payloads.going(way, shapes) for way in (UP, DOWN))
        carry = _Carry(
            inbox=_buffers(shapes, inbox),
            inputs=_buffers(up, saved),
            slopes=_buffers(down, saved) if self.split else (),
            sent=_buffers(self.payloads.kept(shapes), saved),
            value=_wide_zeros(loss),
            # Typed like the parameters, for what is cut over further axes differs.
            sums=jax.tree.map(
                vary_like,
                jax.tree.map(_wide_zeros, (rest, stages, tap_rows)),
                (rest, stages, taps),
            ),
        )
        device = jax.lax.axis_index(self.axis)
        rows = {name: jnp.asarray(row)[device] for name, row in self.plan.rows.items()}
        branches = [functools.partial(self._idle, shapes)] + [
            functools.partial(self._branch, branch, self._seed(loss.dtype), shapes)
            for branch in self.plan.branches
        ]
        tick = functools.partial(self._tick, branches, (rest, stages, taps), batch)
        carry, _ = jax.lax.scan(tick, vary(carry, self.axes), rows)
        return self._average(carry, params, taps)

    def _tick(
        self, branches: Any, weights: Any, batch: Any, carry: _Carry, row: Any
    ) -> tuple[_Carry, None]:
        """Runs one tick: read the inbox, run an op, exchange results.

        What arrives can be read from the next tick on, as `tick_table` assumes.
        """
        received = _take(carry.inbox, row["read"])
        up, down = (self.payloads.going(way, received) for way in (UP, DOWN))
        inputs = _put(carry.inputs, row["save_input"], up)
        slopes = carry.slopes
        if self.split:
            slopes = _put(slopes, row["save_slope"], down)
        carry = carry._replace(inputs=inputs, slopes=slopes)
        result, value, sums = jax.lax.switch(
            row["branch"], branches, weights, batch, carry, received, row
        )
        inbox = self.payloads.exchange(
            result,
            self.plan.pairs,
            carry.inbox,
            lambda source, inbox, came: _put(inbox, row[source], came),
            self._send,
        )
        sent = _put(carry.sent, row["save_input"], self.payloads.kept(result))
        return carry._replace(inbox=inbox, sent=sent, value=value, sums=sums), None

    def _send(self, result: Any, pairs: list[tuple[int, int]]) -> Any:
        """Returns what the neighbour has computed at this tick, zeros without one."""
        if self.schedule.devices == 1:
            return result
        return jax.tree.map(
            lambda leaf: jax.lax.ppermute(leaf, self.axis, pairs), result
        )

    def _idle(
        self, shapes: Any, weights: Any, batch: Any, carry: _Carry, *_: Any
    ) -> tuple[Any, Any, Any]:
        """The branch of a device that has no op at this tick."""
        del weights, batch
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return vary(nothing, self.axes), carry.value, carry.sums

    def _branch(
        self,
        branch: Branch,
        seed: jax.Array,
        shapes: Any,
        weights: tuple[Any, Any, Any],
        batch: Any,
        carry: _Carry,
        received: Any,
        row: Any,
    ) -> tuple[Any, Any, Any]:
        """Runs one op; returns its result for a neighbour, and the sums of the carry.

        `F` sends the stage's output up, `B` the gradient of its input down.
        """
        rest, stages, taps = weights
        chunk, number = row["chunk"], row["micro_batch"]
        mine = rest, _take(stages, chunk), taps
        visit = Visit(_take(batch, number), row["stage"], number)
        if branch.encodes and branch.kind != "F":
            visit = visit._replace(sent=_take(carry.sent, row["saved"]))
        pay, forward = self.payloads, functools.partial(self._forward, visit)
        if branch.kind == "F":
            made = forward(branch, mine, pay.given(branch, pay.going(UP, received)))
            return pay.wrap(branch, UP, made, shapes), carry.value, carry.sums
        slope = pay.going(DOWN, received)
        if branch.kind == "W":
            slope = _take(carry.slopes, row["saved"])
        given = pay.given(branch, _take(carry.inputs, row["saved"]))
        forward, given = pay.split(
            branch,
            forward,
            lambda code: self.payloads.decode(rest, code, visit),
            given,
        )
        # `B` and `W` of a micro-batch both recompute the forward pass. Where they are
        # split, XLA removes the gradients of weights, which are not used, from `B`.
        y, pull = jax.vjp(forward, mine, given)
        grads, below = pull(seed if branch.last else pay.slope(branch, slope))
        value, sums = carry.value, carry.sums
        if branch.kind == "B" and branch.last:
            # y is the loss here, `last` being part of the last stage.
            value = _add(value, y * seed)
        if branch.kind == "W" or not self.split:
            sums = (
                jax.tree.map(_add, sums[0], grads[0]),
                *(_add_at(sums[i], chunk, grads[i]) for i in (1, 2)),
            )
        return pay.wrap(branch, DOWN, below, shapes), value, sums

    def _forward(self, visit: Visit, branch: Branch, weights: Any, x: Any) -> Any:
        """Applies a stage, with `first` before or `last` after it at the ends."""
        rest, part, taps = weights
        if branch.first:
            x = self.functions.first(rest, visit)
        if branch.decodes:
            x = self.payloads.decode(rest, x, visit)
        x = self.functions.stage(part, x, visit._replace(taps=taps))
        if branch.encodes:
            return self.payloads.encode(rest, x, visit)
        return self.functions.last(rest, x, visit) if branch.last else x

    def _seed(self, loss: Any) -> jax.Array:
        """Returns a micro-batch's weight in the mean, the cotangent of its loss."""
        copies = 1 if self.data_axis is None else jax.lax.axis_size(self.data_axis)
        share = 1 / (self.schedule.micro_batches * copies)
        return vary(jnp.asarray(share, loss), self.axes)

    def _average(self, carry: _Carry, params: Any, taps: Any) -> Pipelined:
        """Adds up the devices' sums, and returns them in the parameters' dtypes."""
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
        # Losses were weighted by `_seed`, so gradients are means already. Statistics do
        # not scale with the loss in this way: these were summed, and are divided here.
        statistics = jax.tree.map(
            lambda s, t: (s / count).astype(t.dtype), statistics, taps
        )
        return Pipelined(value, grads, statistics)

    def _check(self, params: Any, batch: Any) -> None:
        """Raises ConfigError unless mesh, parameters and batch fit the schedule."""
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
        """Returns the shapes of what is sent and of the loss, checked."""

        def run_once(rest: Any, stages: Any, taps: Any, batch: Any) -> Any:
            zero = jnp.zeros((), jnp.int32)
            visit = Visit(_take(batch, zero), zero, zero)
            x = self.functions.first(rest, visit)
            y = self.functions.stage(_take(stages, zero), x, visit._replace(taps=taps))
            loss = self.functions.last(rest, y, visit)
            if not isinstance(loss, jax.Array):
                raise ConfigError(
                    f"last must return a floating-point scalar: got {loss!r}"
                )
            code = out = None
            if self.payloads.coded is not None:
                code = self.payloads.encode(rest, y, visit)
                out = self.payloads.decode(rest, code, visit)
            return x, y, loss, code, out

        x, y, loss, code, out = jax.eval_shape(run_once, rest, stages, taps, batch)
        kinds = [
            jax.tree.map(lambda s: (s.shape, str(s.dtype)), each)
            for each in (x, y, y if out is None else out)
        ]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                "a stage's output must be like its input: got input "
                f"{kinds[0]}, output {kinds[1]}"
            )
        if kinds[2] != kinds[0]:
            raise ConfigError(
                "what decodes must be like a stage's input: got input "
                f"{kinds[0]}, decoded {kinds[2]}"
            )
        if not all(jnp.issubdtype(s.dtype, jnp.floating) for s in jax.tree.leaves(x)):
            raise ConfigError(f"stages pass on floating-point arrays: got {kinds[0]}")
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ConfigError(
                f"last must return a floating-point scalar: got {loss.dtype} of shape "
                f"{loss.shape}"
            )
        return self.payloads.shapes(x, code), loss


def _buffers(shapes: Any, count: int) -> Any:
    """Returns `count` empty places, and one more for what nobody uses."""
    return jax.tree.map(lambda s: jnp.zeros((count + 1, *s.shape), s.dtype), shapes)


def _wide_zeros(leaf: Any) -> jax.Array:
    """Returns zeros for sums of gradients, in float32 or better."""
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
