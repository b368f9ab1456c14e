"""A mixture of experts on tensor, expert and data axes: numbers, bytes, places."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import chex
import jax
import numpy as np
import pytest

from hpcjax import core, cost, data, metrics, optim, perf, sharding, train
from hpcjax.core import ConfigError, compat, trees
from hpcjax.models import GPT2, LLAMA, CausalLmConfig, ExpertsConfig
from hpcjax.sharding import Layout, TedConfig

EXPERTS = ExpertsConfig(count=8, top_k=1, every=2, balance_weight=0.1)
OPTIONS = dataclasses.replace(GPT2, experts=EXPERTS, init_scale=0.2)
LM = CausalLmConfig(depth=2, width=16, heads=8, options=OPTIONS, remat="collectives")
# The gradient's norm is more than that in every step.
SGD = optim.SgdConfig(lr=0.5, momentum=0.9, clip_norm=0.1)
LR, ROWS, TIME, WORDS = 0.5, 8, 6, 24
ALONE = Layout()
LAYOUTS = [
    Layout(8 // (expert * col), expert, col)
    for col in (1, 2, 4, 8)
    for expert in (1, 2, 4, 8)
    if 8 % (expert * col) == 0
]


def with_experts(model=LM, **fields):
    options = dataclasses.replace(
        model.options, experts=dataclasses.replace(model.options.experts, **fields)
    )
    return dataclasses.replace(model, options=options)


LLAMA_LM = dataclasses.replace(
    with_experts(every=1, top_k=2),
    options=dataclasses.replace(LLAMA, experts=EXPERTS, init_scale=0.2),
    kv_heads=4,
    depth=2,
)
MODELS = {
    "llama": LLAMA_LM,
    "top_2": with_experts(top_k=2, every=1),
    "untied": dataclasses.replace(
        LM, options=dataclasses.replace(OPTIONS, tied_head=False), remat="full"
    ),
}


@dataclasses.dataclass
class Made:
    """A task and its mesh, and its step as JAX is asked for it."""

    task: Any
    mesh: Any
    lowered: Any

    @functools.cached_property
    def step(self):
        options = compat.quick_compilation("cpu")
        return self.lowered.compile(compiler_options=options)


@functools.cache
def made(layout, model=LM, optimizer=SGD, **options):
    own = data.noise_tokens(2 * ROWS, TIME, WORDS, seed=0)
    built = model.make(own.inputs, own.outputs)
    parallel = TedConfig(
        tensor=layout.col, expert=layout.expert, stacked=model.stacks, **options
    )
    devices = int(np.prod(layout))
    method = train.compose(
        built,
        own,
        optimizer,
        parallel=None if layout is ALONE else parallel,
        batch_size=ROWS,
        steps=2,
        devices=devices,
    )
    task = train.supervised(built, method, own)
    mesh = task.mesh(devices)
    state = train.state_shapes(task, mesh)
    lowered = train.train_step(task, mesh, state).lower(
        state, train.batch_shapes(task, ROWS, mesh)
    )
    return Made(task, mesh, lowered)


@functools.cache
def trained(layout, model=LM, optimizer=SGD, **options):
    """Parameters after two steps, and the last loss and what the routers add."""
    own = made(layout, model, optimizer, **options)
    state = train.init_state(own.task, 0, own.mesh)
    for number in range(2):
        rows = own.task.dataset.train.gather(np.arange(ROWS) + ROWS * number)
        state, found = own.step(state, sharding.place_batch(rows, own.mesh))
    figures = [float(found[name]) for name in ("loss", "added_loss")]
    return trees.flatten(jax.device_get(state.params)), figures


def check(layout, model=LM, optimizer=SGD, limit=1e-5, **options):
    ours, figures = trained(layout, model, optimizer, **options)
    theirs, wanted = trained(ALONE, model, optimizer)
    norms = {path: np.linalg.norm(leaf) for path, leaf in theirs.items()}
    least = 1e-3 * np.sqrt(sum(norm**2 for norm in norms.values()))
    for path, leaf in theirs.items():
        error = np.linalg.norm(ours[path] - leaf) / max(norms[path], least)
        assert error <= limit, path
    np.testing.assert_allclose(figures, wanted, rtol=1e-5)


def name(layout):
    return "x".join(map(str, layout))


@pytest.mark.quick("2x2x2")
@pytest.mark.acceptance("ted", 1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_every_layout_trains_as_one_device(layout):
    check(layout)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_block_is_cut_right(model):
    check(Layout(2, 2, 2), MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_adam_moves_as_on_one_device(zero):
    adam = optim.AdamWConfig(lr=1e-2, eps=1e-3)
    check(Layout(2, 2, 2), optimizer=adam, zero=zero)


@pytest.mark.acceptance("ted", 8)
def test_the_same_rows_on_every_device_give_the_gradients_of_these_rows():
    """An expert's gradient is the mean over all tokens, not over those of its copy."""
    own = made(Layout(2, 2, 2), optimizer=optim.SgdConfig(lr=LR), model=LM)
    rows = own.task.dataset.train.gather(np.arange(2))
    state = train.init_state(own.task, 0, own.mesh)
    before = jax.device_get(state.params)
    four = {key: np.tile(leaf, (4, 1)) for key, leaf in rows.items()}
    after, _ = own.step(state, sharding.place_batch(four, own.mesh))
    model = LM.make((TIME,), WORDS)

    @jax.jit
    @jax.grad
    def slopes(params):
        y, new = model.apply(params, {}, rows["x"], train=True)
        return metrics.cross_entropy(y, rows["y"]) + core.added_loss(new)

    wanted = trees.flatten(slopes(before))
    moved = jax.tree.map(
        lambda a, b: (a - b) / LR, before, jax.device_get(after.params)
    )
    for path, leaf in trees.flatten(moved).items():
        scale = max(np.abs(leaf).max(), 1e-3)
        np.testing.assert_allclose(leaf, wanted[path], atol=1e-4 * scale, err_msg=path)


def in_blocks(program, mesh, merged=("all-reduce",)):
    """Arrays that collectives in loops take, by axes and kind, and their bytes."""
    count: Counter[Any] = Counter()
    size: Counter[Any] = Counter()
    for each in perf.collectives(program):
        if each.times > 1 or not each.bounded:
            key = perf.axes_of(each, mesh), each.kind
            count[key] += each.operands if each.kind in merged else 1
            size[key] += each.bytes
    return count, size


COL, EXPERT = (("col",), "all-reduce"), (("expert",), "all-to-all")
GATHER = ("col",), "all-gather"


def deep(**fields):
    return dataclasses.replace(with_experts(every=1), depth=3, **fields)


@pytest.mark.acceptance("ted", 2, 3)
def test_what_jax_is_asked_to_send():
    """Of a block 12 arrays in a recomputed one, 8 where what came is kept."""
    layout = Layout(2, 2, 2)
    whole, kept = (
        {
            once: in_blocks(own.lowered, own.mesh)
            for once in (False, True)
            for own in [made(layout, deep(remat=remat), drop_duplicates=once)]
        }
        for remat in ("full", "collectives")
    )
    for once in (False, True):
        assert (whole[once][0][COL], whole[once][0][EXPERT]) == (6, 6)
        assert (kept[once][0][COL], kept[once][0][EXPERT]) == (4, 4)
    assert (whole[True][0][GATHER], kept[True][0][GATHER]) == (6, 4)
    assert GATHER not in kept[False][0]
    assert kept[True][1][EXPERT] * 2 == kept[False][1][EXPERT]
    # Nor does the backward pass ask again for what routers have in common.
    means = ("data", "expert"), "all-reduce"
    plain = made(layout, deep(remat="none"))
    assert kept[True][0][means] == in_blocks(plain.lowered, plain.mesh)[0][means]


@pytest.mark.slow
@pytest.mark.acceptance("ted", 2, 3)
@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(1, 2, 4)], ids=name)
@pytest.mark.parametrize("remat", ["full", "collectives"])
def test_what_is_compiled_sends_the_words_of_the_formula(layout, remat):
    model = deep(remat=remat)
    sizes: dict[bool, Any] = {}
    for once in (False, True):
        own = made(layout, model, drop_duplicates=once)
        count, sizes[once] = in_blocks(own.step, own.mesh)
        again = remat == "full"
        assert count[COL] + count[EXPERT] == (12 if again else 8)
        assert count[GATHER] == (0, 4 + 2 * again)[once]
        tokens = ROWS * TIME // (layout.data * layout.expert)
        words = cost.ted_volume(
            tokens, 16, 8 * tokens, layout, drop_duplicates=once, remat=remat
        )
        for (axes, kind), size in sizes[once].items():
            # Not the router's means, over all axes of the batch.
            if axes == ("col",) or (axes, kind) == EXPERT:
                part = perf.sent_per_byte(kind, own.mesh.shape[axes[0]])
                words[axes[0]] -= size * part / 4
        assert words == pytest.approx({"col": 0, "expert": 0}, abs=1e-6)
    assert sizes[True][EXPERT] * layout.col == sizes[False][EXPERT]
    check(layout, model, drop_duplicates=True)
    ours, theirs = (trained(layout, model, drop_duplicates=o)[0] for o in (True, False))
    for path, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[path], atol=1e-6, err_msg=path)


@pytest.mark.acceptance("ted", 9)
def test_each_moment_is_on_one_device_of_those_that_hold_copies():
    layout = Layout(2, 2, 2)
    own = made(layout, optimizer=SGD)
    shapes = train.state_shapes(own.task, own.mesh)
    moments = {
        path: leaf
        for path, leaf in trees.flatten(shapes.opt_state).items()
        if "/experts/" in path
    }
    assert moments
    places = {device: at for at, device in np.ndenumerate(own.mesh.devices)}
    for path, leaf in moments.items():
        found = leaf.sharding.devices_indices_map(leaf.shape)
        for expert in range(layout.expert):
            for col in range(layout.col):
                copies = [
                    str(index)
                    for device, index in found.items()
                    if places[device][1:] == (expert, col)
                ]
                assert len(set(copies)) == layout.data, path


@pytest.mark.acceptance("ted", 7)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, id=name(each), marks=[pytest.mark.slow] * slow)
        for each, slow in (
            (Layout(2, 2, 2), 0),
            (Layout(8, 1, 1), 1),
            (Layout(1, 2, 4), 1),
            (Layout(1, 8, 1), 1),
        )
    ],
)
def test_memory_is_that_of_the_compiled_step(layout):
    own = made(layout)
    model = LM.make((TIME,), WORDS)
    # Parameters in float32, and a moment of each.
    sizes = {"held": 4, "stepped": 4, "stacked": LM.stacks}
    wanted = cost.ted_memory(model, layout, **sizes)
    batch = 2 * 4 * ROWS * TIME / (layout.data * layout.expert)
    found = perf.argument_memory(own.step) - batch
    assert found == pytest.approx(wanted, rel=0.01)
    if layout.expert > 1:
        gathered = cost.ted_memory(model, layout._replace(expert=1), **sizes)
        assert gathered > 1.2 * wanted


@pytest.mark.acceptance("ted", 7)
def test_the_formulas_figures_are_the_papers():
    found = [
        cost.ted_memory_asymptotic(6.7e9, 16, tensor, 16, 128) / 2**30
        for tensor in (1, 2, 4, 8)
    ]
    np.testing.assert_allclose(found, [28.5, 16.0, 9.75, 6.63], atol=0.05)
    largest = cost.largest_base(found[2] * 2**30, 16, 4, 16, 128)
    assert largest == pytest.approx(6.7e9)


@pytest.mark.slow
def test_a_checkpoint_of_a_layout_goes_on_on_another(tmp_path):
    here, there = made(Layout(2, 2, 2)), made(Layout(1, 2, 4))
    state = train.init_state(here.task, 0, here.mesh)
    rows = here.task.dataset.train.gather(np.arange(ROWS))
    state, _ = here.step(state, sharding.place_batch(rows, here.mesh))
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        shapes = train.state_shapes(there.task, there.mesh)
        moved = checkpoints.restore(shapes, mesh=there.mesh).state
    _, ours = here.step(state, sharding.place_batch(rows, here.mesh))
    _, theirs = there.step(moved, sharding.place_batch(rows, there.mesh))
    assert float(theirs["loss"]) == pytest.approx(float(ours["loss"]), rel=1e-6)


@pytest.mark.acceptance("ted", 10)
@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        (Layout(1, 3, 1), LM, r"expert must divide experts: got experts=8, expert=3"),
        (Layout(1, 1, 3), LM, r"tensor must divide kv_heads: got kv_heads=8, tensor=3"),
        (
            Layout(1, 1, 4),
            dataclasses.replace(LM, mlp_width=18),
            r"tensor must divide mlp_width: got mlp_width=18, tensor=4",
        ),
        (Layout(1, 1, 8), LLAMA_LM, r"tensor must divide kv_heads: got kv_heads=4"),
        (
            Layout(2, 1, 1),
            CausalLmConfig(),
            "takes language models with experts: set model.options.experts=experts",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(layout, model, message):
    with pytest.raises(ConfigError, match=message):
        sharding.spread_experts(model.make((TIME,), WORDS), layout)


@pytest.mark.acceptance("ted", 10)
def test_devices_and_tokens_must_suffice():
    with pytest.raises(ConfigError, match="devices=8, tensor=3, expert=1"):
        Layout.of(8, tensor=3, expert=1)
    parallel = sharding.spread_experts(LM.make((TIME,), WORDS), Layout(2, 2, 2))
    with pytest.raises(ConfigError, match="spread over 8 devices"):
        parallel.mesh_shape(4)
    one = data.noise_tokens(2, 1, WORDS, seed=0)
    with pytest.raises(ConfigError, match="got tokens=1, tensor=4"):
        train.compose(
            LM.make((1,), WORDS),
            one,
            SGD,
            parallel=TedConfig(tensor=4, expert=2),
            batch_size=2,
            steps=1,
            devices=8,
        )


def test_a_vocabulary_that_devices_do_not_divide_is_on_all(caplog):
    with caplog.at_level("INFO"):
        model = LM.make((TIME,), WORDS + 1)
        held = sharding.spread_experts(model, Layout(1, 2, 2)).held
    assert not any(held["embed/table"])
    assert "the vocabulary is on all of 2 devices" in caplog.text
    assert "an expert has 32 inner features on a device" in caplog.text


@pytest.mark.slow
def test_passes_of_a_weighted_batch_add_up_to_one_device_s():
    model = with_experts(balance_weight=0.0, capacity_factor=8.0)
    weight = np.array([0, 0, 1, 2, 1, 0.5, 3, 1], np.float32)

    def step(layout, passes):
        task, mesh = made(layout, model).task, made(layout, model).mesh
        config = train.TrainConfig(batch_size=ROWS, accumulate=passes)
        task = train.accumulating(task, config, mesh)
        state = train.init_state(task, 0, mesh)
        rows = {**task.dataset.train.gather(np.arange(ROWS)), "weight": weight}
        program = train.train_step(task, mesh, state)
        state, metrics = program(state, sharding.place_batch(rows, mesh))
        return jax.device_get((state.params, metrics["loss"]))

    wanted = step(ALONE, 1)
    for layout in (Layout(2, 1, 2), Layout(1, 2, 2)):
        chex.assert_trees_all_close(step(layout, 2), wanted, rtol=1e-5, atol=1e-6)
