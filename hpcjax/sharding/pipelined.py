"""A model in stages, each with some of its blocks, trained by a pipeline."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from hpcjax.core import checks, shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import whole_batch
from hpcjax.core.method import DATA_AXIS, Parallel, PassResult, StepInput
from hpcjax.core.model import Between, Cut, Model
from hpcjax.core.scored import divide
from hpcjax.core.shards import Part, Specs
from hpcjax.core.varying import vary
from hpcjax.sharding.cuts import cut_decoder
from hpcjax.sharding.pipeline import pipelined_value_and_grad
from hpcjax.sharding.schedules import Schedule
from hpcjax.sharding.stage_functions import StageFunctions, Visit
from hpcjax.sharding.stages import STAGE_AXIS, STAGES
from hpcjax.sharding.tensor3d import COL_AXIS, RULES, check_layers
from hpcjax.sharding.ticks import IDLE, tick_table


def spread_blocks(
    model: Model, schedule: Schedule, *, data: int = 1, tensor: int = 1
) -> Parallel:
    """Returns how a pipeline trains a model, with each stage on `tensor` devices.

    A stage holds its share of the stack of blocks, cut over `"stage"`, and all other
    parameters. Gradients come averaged, and are those of accumulation over the
    micro-batches, by whatever schedule. Validation passes the whole batch through one
    stage after the other: each device computes as much as one that has all blocks, and
    keeps its own alone.

    Args:
      model: one with a `cut`, and an empty state.
      schedule: with one stage on each device, as `gpipe` has.
      data: devices of each stage that share out the batch.
      tensor: devices that share the matrices of a stage, of a language model whose
        layers keep the width.

    Raises:
      ConfigError: a model that cannot be cut, or sizes that stages or `tensor` do not
        divide.

    References:
      Singh and Bhatele, AxoNN, IPDPS 2022.
    """
    if model.cut is None:
        raise ConfigError(
            "parallel=pipeline takes models that are cut into a stack of blocks and "
            "what is around it (core.Model.cut), such as model=causal_lm without "
            "sharing: got another"
        )
    checks.require_count(1, data=data, tensor=tensor)
    cut, devices = model.cut(), data * schedule.stages * tensor
    single = schedule.devices == schedule.stages and schedule.replicas == 1
    checks.require(single, "each device has one stage", schedule=schedule.name)
    shapes, state = jax.eval_shape(model.init, jax.random.key(0))
    rule = "a model in stages has no state, such as running statistics"
    checks.require(not jax.tree.leaves(state), rule, state=sorted(state))
    checks.require_choice("the stack of core.Cut", cut.stack, tuple(shapes))
    sizes = {DATA_AXIS: data, STAGE_AXIS: schedule.stages, COL_AXIS: tensor}
    held = _cut_parameters(model, cut, shapes, sizes)
    table = tick_table(schedule)
    split = _Split(cut, schedule, held)

    def mesh_shape(count: int) -> dict[str, int]:
        rule = f"the model was spread over {devices} devices"
        checks.require(count == devices, rule, devices=count)
        return sizes

    return Parallel(
        mesh_shape,
        held,
        held,
        split.apply_to,
        axes=(),
        facts={
            "ticks": float(table.op.shape[1]),
            "bubble": float(np.mean(table.op == IDLE)),
            "held_inputs": float(table.saved_buffers),
        },
        gradients=split.differentiate,
    )


def _cut_parameters(
    model: Model, cut: Cut, shapes: Any, sizes: Mapping[str, int]
) -> Specs:
    """Returns how the stack is cut over stages, and matrices over `col`."""
    found: dict[str, PartitionSpec] = {}
    tensor = sizes[COL_AXIS]
    if tensor > 1:
        if model.decoder is None:
            raise ConfigError("tensor cuts language models alone: set tensor=1")
        check_layers(shapes, "parallel=pipeline with tensor")
        rules = {name: axis for name, axis in RULES.items() if axis == COL_AXIS}
        names = {COL_AXIS: "tensor"}
        found |= cut_decoder(model.decoder, shapes, rules, sizes, names)
    for path, leaf in trees.flatten({cut.stack: shapes[cut.stack]}).items():
        rule = "stages must divide the depth of the model"
        stages, depth = sizes[STAGE_AXIS], leaf.shape[0]
        checks.require(depth % stages == 0, rule, depth=depth, stages=stages)
        inner = found.get(path, PartitionSpec(None))
        found[path] = PartitionSpec(STAGE_AXIS, *inner[1:])
    return {path: spec for path, spec in found.items() if any(spec)}


class _Split(NamedTuple):
    """What a device does with its part of a model, inside `shard_map`."""

    cut: Cut
    schedule: Schedule
    held: Specs

    def apply_to(self, model: Model) -> Model:
        """Returns the model that runs one stage after the other."""
        return model._replace(apply=self._apply)

    def _apply(self, params: Any, state: Any, x: Any, **_: Any) -> tuple[Any, Any]:
        rest = self._join(params)
        blocks = rest.pop(self.cut.stack)
        between = self.cut.between

        def visit(y: Any, stage: jax.Array) -> tuple[Any, None]:
            mine = lax.axis_index(STAGE_AXIS) == stage
            if between is None or between.skips:
                own = _run(self.cut, blocks, vary(y, STAGE_AXIS))
            else:
                own = self._pass_on(between, rest, blocks, y, stage)
            kept = jax.tree.map(lambda leaf: jnp.where(mine, leaf, 0), own)
            return lax.psum(kept, STAGE_AXIS), None

        stages = jnp.arange(self.schedule.stages)
        y = lax.scan(visit, self.cut.first(rest, x), stages)[0]
        return self.cut.last(rest, y), state

    def differentiate(self, one_pass: StepInput, params: Any, state: Any) -> PassResult:
        """Returns the loss and its gradients, averaged over the devices."""
        del state
        count, cut = self.schedule.micro_batches, self.cut
        # A micro-batch counts by what it scores, as those of `optim.accumulate` do.
        share = one_pass.share / count
        draw = None if cut.between is None else _draw_by(whole_batch(one_pass.key))

        def first(rest: Any, visit: Visit) -> Any:
            return cut.first(self._join(rest), visit.batch["x"])

        def stage(blocks: Any, y: Any, visit: Visit) -> Any:
            own = self._join({cut.stack: blocks})[cut.stack]
            return _run(cut, own, y, draw(visit) if draw else None)

        def last(rest: Any, y: Any, visit: Visit) -> Any:
            outputs = cut.last(self._join(rest), y)
            totals = one_pass.objective(outputs, visit.batch)
            return divide(totals.sums, share)["loss"]

        functions = StageFunctions(first=first, stage=stage, last=last)
        if cut.between is not None and draw is not None:
            functions = self._encode(functions, cut.between, draw)
        differentiate = pipelined_value_and_grad(
            self.schedule, functions, data_axis=DATA_AXIS
        )
        rest = {name: own for name, own in params.items() if name != cut.stack}
        # A row for each stage of this device, which has one.
        rows = jax.tree.map(lambda leaf: leaf[None], params[cut.stack])
        found = differentiate({**rest, STAGES: rows}, dict(one_pass.batch))
        grads = dict(found.grads)
        grads[cut.stack] = jax.tree.map(lambda leaf: leaf[0], grads.pop(STAGES))
        extras = {"value": found.value, "step": one_pass.step}
        means = {"loss": found.value}
        return PassResult(grads, means, one_pass.model_state, extras)

    def _pass_on(
        self, between: Between, rest: Any, blocks: Any, y: Any, stage: jax.Array
    ) -> Any:
        """Returns what a stage makes in validation, by micro-batches, too."""
        count = self.schedule.micro_batches
        rule = "with a codec micro_batches must divide a device's rows in validation"
        checks.require(y.shape[0] % count == 0, rule, rows=y.shape[0], count=count)

        def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            y, number = part
            key = jax.random.fold_in(jax.random.key(0), number)
            code = between.encode(rest, y, stage, key)
            coded = between.decode(rest, code, y, stage)
            y = jnp.where(stage >= between.coded, coded, y)
            return _run(self.cut, blocks, vary(y, STAGE_AXIS), key)

        parts = y.reshape(count, -1, *y.shape[1:])
        return lax.map(one, (parts, jnp.arange(count))).reshape(y.shape)

    def _encode(
        self,
        functions: StageFunctions,
        between: Between,
        draw: Callable[[Visit], jax.Array],
    ) -> StageFunctions:
        """Returns stages that send codes."""

        def encode(rest: Any, y: Any, visit: Visit) -> Any:
            to = visit.stage + 1
            return between.encode(self._join(rest), y, to, draw(visit), visit.sent)

        def decode(rest: Any, code: Any, visit: Visit) -> Any:
            like = jax.eval_shape(functions.first, rest, visit)
            return between.decode(self._join(rest), code, like, visit.stage)

        return dataclasses.replace(
            functions,
            encode=encode,
            decode=decode,
            coded=between.coded,
            through=between.through,
        )

    def _join(self, params: Any) -> Any:
        """Returns parameters as layers compute with them, see `core.shards.Part`."""
        leaves = trees.flatten(params)
        for path, leaf in leaves.items():
            cuts = shards.list_cuts(self.held, path, leaf.ndim)
            kept = tuple(cut for cut in cuts if cut[1] != STAGE_AXIS)
            if kept:
                leaves[path] = Part(value=leaf, cuts=kept)
        return trees.unflatten(params, leaves)


def _draw_by(key: jax.Array) -> Callable[[Visit], jax.Array]:
    """Returns what makes the key of a micro-batch."""
    # Every branch of the program makes its key anew, for a key is used only once.
    bits, kind = jax.random.key_data(key), jax.random.key_impl(key)

    def draw(visit: Visit) -> jax.Array:
        own = jax.random.wrap_key_data(bits, impl=kind)
        return jax.random.fold_in(own, visit.micro_batch)

    return draw


def _run(cut: Cut, blocks: Any, y: Any, key: Any = None) -> Any:
    """Returns the output of blocks one after the other, with leaves `[blocks, ...]`.

    With a key sums are compressed, if the cut says so.
    """
    between = cut.between
    if key is None or between is None or between.give is None:
        return lax.scan(lambda y, one: (cut.block(one, y), None), y, blocks)[0]
    count = jax.tree.leaves(blocks)[0].shape[0]
    layers = lax.axis_index(STAGE_AXIS) * count + jnp.arange(count)
    with_codec = between.give(blocks, layers, key)

    def step(y: Any, one: Any) -> tuple[Any, None]:
        layer, own = one
        coded = functools.partial(cut.block, own)
        if between.start == 0:
            return coded(y), None
        # Devices that share the matrices of a stage take the same branch.
        plain = functools.partial(cut.block, shards.without_codecs(own))
        return lax.cond(layer >= between.start, coded, plain, y), None

    return lax.scan(step, y, (layers, with_codec))[0]
