"""A model in stages, in the loop: its numbers, its bytes, its checkpoints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, data, models, optim, perf, sharding, train
from hpcjax.core import ConfigError, trees
from hpcjax.models import BLOOM, GPT2, LLAMA, CausalLmConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import PipelineConfig, ZeroConfig
from hpcjax.train.config import TrainConfig
from hpcjax.train.step import list_guarded
from tests.train import hlo_order

CONTEXT, TOKENS, ROWS = 4, 8, 16
GPT = CausalLmConfig(depth=4, width=8, heads=2)
# So small that the gradient's norm is more in every step.
SGD = optim.SgdConfig(lr=0.5, momentum=0.9, clip_norm=0.1)
DEEP = PipelineConfig(stages=4, micro_batches=4)
WIDE = PipelineConfig(stages=2, micro_batches=2, schedule="gpipe", tensor=2)
MODELS = {
    "llama": dataclasses.replace(GPT, options=LLAMA, kv_heads=2, mlp_width=12),
    "bloom": dataclasses.replace(GPT, options=BLOOM, remat="full"),
    "untied": dataclasses.replace(
        GPT, options=dataclasses.replace(GPT2, tied_head=False), remat="dots"
    ),
}


@functools.cache
def task(parallel, devices, model=GPT, optimizer=SGD, compute="float32"):
    own = data.noise_tokens(2 * ROWS, CONTEXT, TOKENS, seed=0)
    made = model.make((CONTEXT,), TOKENS, core.Policy(compute=compute))
    method = train.compose(
        made,
        own,
        optimizer,
        parallel=parallel,
        batch_size=ROWS,
        steps=2,
        devices=devices,
    )
    return train.supervised(made, method, own)


def batch(number, mesh):
    """Rows of which some count double, and all of one micro-batch not at all."""
    rows = task(None, 1).dataset.train.gather(np.arange(ROWS) + ROWS * number)
    weight = np.arange(ROWS, dtype=np.float32) // 2 % 3
    return sharding.place_batch({**rows, "weight": weight}, mesh)


@functools.cache
def program(parallel, devices, *more):
    made = task(parallel, devices, *more)
    mesh = made.mesh(devices)
    step = train.train_step(made, mesh, train.state_shapes(made, mesh))
    return step.lower(train.state_shapes(made, mesh), batch(0, mesh)).compile()


@functools.cache
def trained(parallel, devices, *more):
    """Parameters after two steps, the last loss, and sums of a validation."""
    made = task(parallel, devices, *more)
    mesh = made.mesh(devices)
    state = train.init_state(made, 0, mesh)
    for number in range(2):
        state, metrics = program(parallel, devices, *more)(state, batch(number, mesh))
    score = train.eval_step(made, mesh)
    totals = score(state.params, state.model_state, batch(0, mesh))
    sums = {name: float(value) for name, value in totals.sums.items()}
    return trees.flatten(jax.device_get(state.params)), float(metrics["loss"]), sums


def check(parallel, *more, rtol=1e-5):
    ours, loss, sums = trained(parallel, 8, *more)
    theirs, wanted, whole = trained(None, 1, *more)
    least = 1e-3 * np.sqrt(sum(np.sum(leaf**2) for leaf in theirs.values()))
    for path, leaf in theirs.items():
        error = np.linalg.norm(ours[path] - leaf) / max(np.linalg.norm(leaf), least)
        assert error <= rtol, path
    assert loss == pytest.approx(wanted, rel=rtol)
    assert sums == pytest.approx(whole, rel=rtol)


@pytest.mark.acceptance("axonn-myelin", 2)
@pytest.mark.parametrize("parallel", [DEEP, WIDE], ids=["deep", "wide"])
def test_a_pipeline_trains_as_one_device(parallel):
    check(parallel)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_is_in_a_stage(name):
    schedule = "zero_bubble_h1" if name == "untied" else "one_f_one_b"
    check(dataclasses.replace(WIDE, schedule=schedule), MODELS[name])


@pytest.mark.slow
def test_products_may_be_of_low_precision():
    check(DEEP, GPT, SGD, "bfloat16", rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [DEEP, WIDE], ids=["deep", "wide"])
def test_lamb_scales_each_layer_by_itself(parallel):
    lamb = optim.LambConfig(lr=0.1, eps=1e-3, clip_norm=0.1, stacked=GPT.stacks)
    check(parallel, GPT, lamb)


def permuted(parallel):
    """Bytes that a device passes on in a step."""
    rows = ROWS // (8 // (parallel.stages * parallel.tensor)) // parallel.micro_batches
    ticks = 2 * (parallel.micro_batches + parallel.stages - 1)
    # Of two stages, one exchange goes both ways.
    directions = 1 if parallel.stages == 2 else 2
    return ticks * directions * 4 * rows * CONTEXT * GPT.width


@pytest.mark.acceptance("how-to-train", 3)
def test_a_step_sends_what_the_formula_says_and_nothing_else():
    made = task(DEEP, 8)
    mesh = made.mesh(8)
    state = train.state_shapes(made, mesh)
    sizes = {path: 4 * leaf.size for path, leaf in trees.flatten(state.params).items()}
    stack = sum(size for path, size in sizes.items() if path.startswith("blocks/"))
    rest, guarded = sum(sizes.values()) - stack, 4 * len(list_guarded(state))
    norm = scored = loss = 4  # the norm, of parts of the stack, is a sum and a maximum
    assert perf.bytes_by_axis(program(DEEP, 8), mesh) == {
        (("stage",), "collective-permute"): permuted(DEEP),
        (("data", "stage"), "all-reduce"): rest + loss + guarded,
        (("data",), "all-reduce"): stack // 4 + scored + loss,
        (("stage",), "all-reduce"): 2 * norm,
    }


@pytest.mark.acceptance("how-to-train", 3)
def test_two_stages_exchange_at_each_tick():
    sent = perf.bytes_by_axis(program(WIDE, 8), task(WIDE, 8).mesh(8))
    assert sent[("stage",), "collective-permute"] == permuted(WIDE)


@pytest.mark.parametrize("parallel", [DEEP, WIDE], ids=["deep", "wide"])
def test_all_devices_take_collectives_in_one_order(parallel):
    assert not hlo_order.swappable(program(parallel, 8).as_text())


def test_a_checkpoint_goes_to_zero_and_back(tmp_path):
    ways = (DEEP, ZeroConfig(stacked=GPT.stacks), DEEP)
    made = [task(parallel, 8) for parallel in ways]
    mesh = made[0].mesh(8)
    state, _ = program(DEEP, 8)(train.init_state(made[0], 0, mesh), batch(0, mesh))
    for number, own in enumerate(made[1:], start=1):
        with train.Checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(1, state, {})
            shapes = train.state_shapes(own, own.mesh(8))
            state = checkpoints.restore(shapes, mesh=own.mesh(8)).state
    state, metrics = program(DEEP, 8)(state, batch(1, mesh))
    wanted, loss, _ = trained(DEEP, 8)
    assert float(metrics["loss"]) == loss
    jax.tree.map(
        np.testing.assert_array_equal,
        trees.flatten(jax.device_get(state.params)),
        wanted,
    )


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_facts_are_those_of_the_formulas(schedule, stages):
    count, made = 8, GPT.make((CONTEXT,), TOKENS)
    facts = sharding.spread_blocks(
        made, getattr(sharding, schedule)(stages, count)
    ).facts
    assert facts["held_inputs"] == (count if schedule == "gpipe" else stages)
    assert facts["bubble"] == pytest.approx((stages - 1) / (count + stages - 1))
    assert facts["ticks"] == 2 * (count + stages - 1)


EXPERTS = models.TransformerOptions(experts=models.ExpertsConfig())
NARROW = models.TransformerOptions(embed_width=4)


@pytest.mark.acceptance("axonn-myelin", 10)
@pytest.mark.acceptance("how-to-train", 10)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 3}, r"divide the devices: got devices=8, stages=3, tensor=1"),
        ({"tensor": 8}, r"divide the devices: got devices=8, stages=2, tensor=8"),
        ({"stages": 8}, r"stages must divide the depth .*depth=4, stages=8"),
        ({"micro_batches": 3}, r"batch 16 is not a multiple of .* = 4 \* 3"),
        ({"tensor": 4}, r"tensor must divide kv_heads: got kv_heads=2, tensor=4"),
        ({"model": models.MlpConfig()}, r"core\.Model\.cut\), such as model=causal_lm"),
        ({"loss_chunk": 2}, r"model\.loss_chunk=none: got 2"),
        ({"pieces": 2}, r"model\.pieces=1: got 2"),
        ({"options": EXPERTS}, r"options\.experts=none: got ExpertsConfig"),
        ({"options": NARROW, "tensor": 2}, "keeps the width.* got project_in"),
        ({"optimizer": optim.ShampooConfig()}, r"works on elements and, by `cut`"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_in_stages_is_told(change, message):
    change = dict(change)
    optimizer, model = change.pop("optimizer", SGD), change.pop("model", GPT)
    of_model = {name for name in change if hasattr(GPT, name)}
    model = dataclasses.replace(model, **{name: change.pop(name) for name in of_model})
    with pytest.raises(ConfigError, match=message):
        task(PipelineConfig(**change), 8, model, optimizer)


def small(state=(), **cut):
    """Two blocks x → w x."""

    def init(key):
        del key
        return {"blocks": jnp.ones((2, 3)), "head": jnp.ones(3)}, dict(state)

    def same(params, x):
        del params
        return x

    made = core.Cut(same, lambda one, y: one * y, same, **cut)
    return core.Model(init, lambda params, state, x, **_: (x, state), cut=lambda: made)


@pytest.mark.acceptance("axonn-myelin", 10)
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (small, {"tensor": 2}, "language models alone: set tensor=1"),
        (small, {"data": 0}, "data must be an integer >= 1"),
        (lambda: small(state={"mean": 0.0}), {}, r"no state, .* got state=\['mean'\]"),
        (
            lambda: small(stack="block"),
            {},
            "'blocks', 'head'.*got 'block'.*mean 'blocks'",
        ),
    ],
    ids=["tensor", "data", "state", "stack"],
)
def test_a_model_of_ones_own_that_cannot_be_in_stages_is_told(make, options, message):
    with pytest.raises(ConfigError, match=message):
        sharding.spread_blocks(make(), sharding.gpipe(2, 2), **options)


def test_a_device_has_one_stage_and_all_devices_have_one():
    with pytest.raises(ConfigError, match="one stage: got schedule='interleaved'"):
        sharding.spread_blocks(small(), sharding.interleaved(2, 2, 2))
    with pytest.raises(ConfigError, match="spread over 2 devices: got devices=4"):
        sharding.spread_blocks(small(), sharding.gpipe(2, 2)).mesh_shape(4)


def test_of_two_backward_passes_none_is_dropped():
    spread = sharding.spread_blocks(small(), sharding.gpipe(2, 2))
    other = core.Optimization(optim.sgd(0.1), gradients=optim.whole_backward)
    with pytest.raises(ConfigError, match="both have a backward pass of their own"):
        optim.train_shards(other, spread, small(), 2)


@pytest.mark.acceptance("axonn-myelin", 10)
@pytest.mark.acceptance("how-to-train", 10)
@pytest.mark.parametrize(
    ("size", "passes", "message"),
    [
        (50, 1, r"global batch 50 is not a multiple of data \* micro_batches = 2 \* 8"),
        (64, 2, r"set train\.accumulate=1: got accumulate=2"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_told_before_anything_is_made(
    size, passes, message
):
    run = TrainingConfig(
        dataset=data.CharTextConfig(),
        model=GPT,
        parallel=PipelineConfig(stages=4, micro_batches=8),
        train=TrainConfig(batch_size=size, accumulate=passes),
    )
    with pytest.raises(ConfigError, match=message):
        run.check_devices(8)


def test_lamb_of_a_cut_stack_has_a_ratio_for_each_layer():
    params = {"blocks": jnp.array([[3.0, 4.0], [6.0, 8.0]]), "head": jnp.ones(2)}
    grads = jax.tree.map(lambda leaf: leaf / jnp.arange(1, 3), params)
    held = {"blocks": jax.sharding.PartitionSpec("stage")}
    lamb = optim.lamb(0.1, stacked=("^blocks",), clip_norm=0.1)

    def update(tx, grads, params):
        return tx.update(grads, tx.init(params), params)[0]

    specs = core.shards.spec_tree(held, params)
    cut = jax.shard_map(
        functools.partial(update, optim.update_shards(lamb, held, held=held, axes=())),
        mesh=sharding.make_mesh({"stage": 2}),
        in_specs=(specs, specs),
        out_specs=specs,
    )
    wanted = jax.jit(functools.partial(update, lamb))(grads, params)
    found = jax.jit(cut)(grads, params)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, wanted
    )
