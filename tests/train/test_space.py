"""Samples that are cut in space, in the loop: what is learned is one device's."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from hpcjax import averaging, data, optim, perf, sharding, train
from hpcjax.collectives import OkTopkConfig, PowerSgdConfig
from hpcjax.core import ConfigError, trees
from hpcjax.core.varying import vary
from hpcjax.models import (
    CosmoFlowConfig,
    MlpConfig,
    ResNetConfig,
    UNetConfig,
)
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import SpatialConfig
from hpcjax.train.step import step_input

ROWS = 4
SGD = optim.SgdConfig(lr=0.1, momentum=0.9)
PHANTOMS = data.PhantomsConfig(patients=4, slices=4, size=16)
UNET = UNetConfig(depth=1, width=2)
RESNET = ResNetConfig(depth=8, width=2, shortcut="B", sync_axis="data")
UNIVERSES = data.UniversesConfig(count=12, width=16)
CUBES = data.UniversesConfig(count=12, width=8)
COSMOFLOW = CosmoFlowConfig(width_divisor=16)
MLPERF = CosmoFlowConfig(variant="mlperf", width_divisor=32)
CUBE = SpatialConfig(depth=2, height=2, width=2)
BOTH, ROWS_ALONE = SpatialConfig(height=2, width=2), SpatialConfig(height=4)


@functools.cache
def dataset(name):
    own = {
        "phantoms": PHANTOMS,
        "universes": UNIVERSES,
        "cubes": CUBES,
    }.get(name)
    return own.load() if own else data.noise_images(8, (8, 8, 1), 3)


def task(model, own, parallel, devices, optimizer=SGD, passes=1, **parts):
    cut = parallel.cut_model(model, own.objective) if parallel else model
    made = cut.make(own.inputs, own.outputs)
    method = train.compose(
        made,
        own,
        optimizer,
        parallel=parallel,
        batch_size=ROWS,
        steps=4,
        devices=devices,
        **parts,
    )
    gradients = optim.accumulate(method.gradients, passes)
    return train.supervised(made, method._replace(gradients=gradients), own)


def trained(made, devices, steps=2):
    """The program, the state after some steps, and the scores of a validation."""
    mesh = made.mesh(devices)
    state = train.init_state(made, 0, mesh)
    like = train.state_shapes(made, mesh), train.batch_shapes(made, ROWS, mesh)
    step = train.train_step(made, mesh, like[0]).lower(*like).compile()
    for number in range(steps):
        rows = made.dataset.train.gather(np.arange(ROWS) + ROWS * number)
        placed = sharding.place_batch(rows, mesh, made.method.batch)
        state, _ = step(state, placed)
    rows["weight"] = np.array([1, 0, 1, 1], "f4")
    placed = sharding.place_batch(rows, mesh, made.method.batch)
    scores = train.eval_step(made, mesh)(state.params, state.model_state, placed)
    return step, jax.device_get((state.params, state.model_state, scores.means()))


# Two blocks along each side; and four rows of blocks, which the last stage gathers.
# CosmoFlow gathers thin blocks, and drops what one device drops.
CASES = {
    "unet": (UNET, "phantoms", BOTH),
    "resnet": (RESNET, "noise", ROWS_ALONE),
    "mlperf": (MLPERF, "cubes", SpatialConfig(depth=8)),
    "cosmoflow": (COSMOFLOW, "universes", CUBE),
}
SLOW = {"resnet", "cosmoflow", "mlperf"}


@pytest.mark.acceptance("hybrid3dcnn", 3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES],
)
def test_what_is_learned_is_what_one_device_learns(name):
    model, examples, parallel = CASES[name]
    own = dataset(examples)
    _, theirs = trained(task(model, own, None, 1), 1)
    step, ours = trained(task(model, own, parallel, 8), 8)
    for path, leaf in trees.flatten(theirs).items():
        np.testing.assert_allclose(
            trees.flatten(ours)[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path
        )
    kinds = [each.kind for each in perf.collectives(step)]
    assert ("all-gather" in kinds) == (name != "unet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        (optim.JorgeConfig(update_every=1), {}),
        (optim.ShampooConfig(), {}),
        (SGD, {"exchange": OkTopkConfig(density=1.0)}),
        (SGD, {"exchange": PowerSgdConfig(rank=64)}),
        (SGD, {"passes": 2}),
    ],
)
def test_other_optimizers_and_exchanges_go_on(optimizer, parts):
    own = dataset("phantoms")
    _, ours = trained(task(UNET, own, BOTH, 8, optimizer, **parts), 8)
    _, theirs = trained(task(UNET, own, None, 1, optimizer), 1)
    for path, leaf in trees.flatten(theirs[0]).items():
        np.testing.assert_allclose(
            trees.flatten(ours[0])[path], leaf, rtol=1e-4, atol=1e-4, err_msg=path
        )


@pytest.mark.acceptance("hybrid3dcnn", 9)
def test_blocks_that_are_too_thin_are_told_by_the_layer():
    made = task(
        UNetConfig(depth=3, width=2), dataset("phantoms"), SpatialConfig(height=8), 8
    )
    mesh = made.mesh(8)
    like = train.state_shapes(made, mesh), train.batch_shapes(made, ROWS, mesh)
    with pytest.raises(ConfigError, match="at pool_1: use fewer devices along space_h"):
        train.train_step(made, mesh, like[0]).lower(*like)


def test_what_cannot_be_cut_is_refused():
    own = dataset("phantoms")
    for wrong, match in (
        ({"model": MlpConfig(), "dataset": data.DigitsConfig()}, "MlpConfig cannot be"),
        ({"parallel": SpatialConfig(depth=2)}, "2 dimensions have no depth"),
        (
            {"model": UNetConfig(space=("space_h", None)), "parallel": None},
            "what parallel=spatial sets",
        ),
    ):
        given = {"model": UNET, "dataset": PHANTOMS, "parallel": BOTH}
        with pytest.raises(ConfigError, match=match):
            TrainingConfig(**given | wrong)
    for parallel, devices, model, match in (
        (SpatialConfig(height=3), 3, UNET, "divide the 16 points"),
        (BOTH, 6, UNET, "must divide the devices"),
        (BOTH, 8, ResNetConfig(), "need shortcut='B'"),
    ):
        with pytest.raises(ConfigError, match=match):
            task(model, own, parallel, devices)
    for optimizer, parts in (
        (optim.KfacConfig(), {}),
        (SGD, {"backward": optim.PartialBackwardConfig()}),
        (SGD, {"averaged": averaging.LocalSgdConfig()}),
    ):
        with pytest.raises(ConfigError, match="one model with plain gradients"):
            task(RESNET, dataset("noise"), ROWS_ALONE, 8, optimizer, **parts)


def key_of(x, mesh):
    """The key of a device's pass over its rows, as the loop gives it to a model."""
    state = types.SimpleNamespace(key=jax.random.key(0), step=0, model_state={})
    alone = types.SimpleNamespace(model=None, objective=None)
    return step_input(alone, state, {"x": x}, jax.numpy.ones(()), mesh).key


def test_draws_of_an_example_are_those_of_all_its_blocks():
    mesh = sharding.make_mesh({"data": 2, "space_h": 2, "space_w": 2})

    def places(x):
        return vary(key_of(x, mesh).rows, mesh.axis_names)

    cut = PartitionSpec("data", "space_h", "space_w")
    every = PartitionSpec(mesh.axis_names)
    found = jax.shard_map(places, mesh=mesh, in_specs=cut, out_specs=every)
    assert found(np.ones((4, 2, 2))).tolist() == [0, 1] * 4 + [2, 3] * 4


@pytest.mark.acceptance("hybrid3dcnn", 8)
def test_what_is_dropped_is_the_same_for_all_partitions():
    """Samples are all alike, so that outputs tell the masks of rows."""
    x, found = np.ones((4, 8, 8, 8, 1), "f4"), []
    own = CosmoFlowConfig(variant="mlperf", width_divisor=2)
    params, state = own.make(x.shape[1:], 4).init(jax.random.key(0))
    for counts in ((1, 1, 1), (2, 1, 2)):
        mesh = sharding.make_mesh(
            {"data": 2, **dict(zip(sharding.SPACE_AXES, counts, strict=True))}
        )
        whole = dataclasses.replace(own, space=sharding.SPACE_AXES)
        model = whole.make(x.shape[1:], 4)

        def outputs(params, x, model=model, state=state, mesh=mesh):
            y, _ = model.apply(params, state, x, train=True, key=key_of(x, mesh))
            return vary(y, mesh.axis_names)

        cut = PartitionSpec("data", *sharding.SPACE_AXES)
        mapped = jax.shard_map(
            outputs,
            mesh=mesh,
            in_specs=(PartitionSpec(), cut),
            out_specs=PartitionSpec(mesh.axis_names),
        )
        found.append(np.reshape(jax.jit(mapped)(params, x), (2, -1, 2, 4)))
    np.testing.assert_allclose(
        found[1], np.broadcast_to(found[0], found[1].shape), atol=1e-5
    )
    rows = found[0].reshape(4, 4)
    assert len(np.unique(np.round(rows, 3), axis=0)) == 4
