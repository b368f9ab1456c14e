"""The step of a training config as a result, against formulas and other readings."""

import contextlib
import dataclasses
import types
from unittest import mock

import numpy as np
import pytest

from hpcjax import averaging, perf, sharding
from hpcjax.core import ConfigError
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig, ExpertsConfig, MlpConfig, TransformerOptions
from hpcjax.optim import SgdConfig
from hpcjax.runs import code, outlines, plan, program
from hpcjax.runs.program import ProgramConfig
from hpcjax.sharding import ZeroConfig
from hpcjax.train.config import TrainConfig
from tests.conftest import REPOSITORY

SMALL = ProgramConfig(
    dataset=CharTextConfig(context=4),
    model=CausalLmConfig(depth=2, width=16, heads=2),
    optimizer=SgdConfig(lr=0.05, momentum=0.9),
    train=TrainConfig(batch_size=4, steps=2),
    taken=2,
)
ZERO = dataclasses.replace(SMALL, parallel=ZeroConfig(stage=3), devices=4)
MLP = ProgramConfig(
    model=MlpConfig(widths=(16,)), train=TrainConfig(batch_size=8), devices=2
)
DATA = REPOSITORY / ".cache/data"


def read(cfg, devices=1):
    """The figures; nothing but the devices and the data is the context's."""
    context = types.SimpleNamespace(mesh=sharding.data_mesh(devices), data_root=DATA)
    return program.run(cfg, context)


@pytest.fixture(scope="module")
def zero():
    return read(ZERO)


def test_kinds_are_those_of_which_what_rings_send_is_known():
    assert set(program.KINDS) < set(perf.KINDS)
    assert all(perf.sent_per_byte(kind, 4) for kind in program.KINDS)


def test_stage_3_holds_a_quarter_and_sends_three_times(zero):
    psi = float(zero["psi"])
    assert zero["state"] == pytest.approx(2 * psi / 4, rel=0.1)  # biases are whole
    assert zero["sent"].sum() == pytest.approx(3 * psi * 3 / 4, rel=0.1)
    assert zero["sent"].sel(axis="data").sum() == zero["sent"].sum()
    # A block has 16 arrays, of which 8 are biases, which are not gathered again.
    gathers = zero["arrays"].sel(axis="data", kind="all-gather", part="loop")
    scatters = zero["arrays"].sel(axis="data", kind="reduce-scatter", part="loop")
    assert (gathers, scatters) == (16 + 8, 16)
    looped = zero["sent"].sel(part="loop").sum()
    assert looped == SMALL.model.depth * zero["block"].sum() > 0
    asked = zero["asked"].sel(axis="data", kind="all-gather", part="loop")
    assert asked == gathers


def test_the_step_is_that_of_one_device_and_the_program_is_taken(zero):
    assert zero["distance"] < 1e-5
    assert zero["apart"] < 1e-5
    assert 0 < zero["loss"] < 10
    alone = read(dataclasses.replace(MLP, devices=0, taken=1), 1)
    assert alone["distance"] == alone["apart"] == 0
    assert alone["sent"].sum() == alone["asked"].sum() == 0


def test_one_parameter_that_is_not_finite_is_far_away():
    theirs = {"a": np.ones(2), "b": np.ones(2)}
    ours = theirs | {"b": np.array([1.0, np.nan])}
    found = program._compare([1.0], ours, [1.0], theirs)
    assert np.isnan(found["apart"])


def test_a_dry_run_reads_the_same_step():
    cfg = MLP
    with mock.patch.object(program, "compile_step", wraps=program.compile_step) as made:
        context = types.SimpleNamespace(mesh=None, data_root=DATA)
        found = program.run(cfg, context)
        text = {"model": "mlp", "model.widths": "[16]", "train.batch_size": "8"}
        given = text | {"train.steps": str(cfg.train.steps), "optimizer": "sgd"}
        planned = plan.plan_run("train/digits", given, root=REPOSITORY, devices=2)
    assert made.call_count == 2
    assert planned.collective_bytes == found["operands"].sum() > 0
    assert 4 * planned.parameters == found["psi"]
    assert set(found["part"].values[found["sent"].sum(("axis", "kind")) > 0]) == {
        "rest"
    }


@contextlib.contextmanager
def no_scatter():
    """Gradients that are scattered are those of the first device, times all."""
    from hpcjax.core import shards

    right = shards.sum_parts
    with mock.patch.object(shards, "sum_parts", lambda x, cuts: 2 * right(x, cuts)):
        yield


def test_a_broken_step_is_far_away_and_the_next_one_is_not():
    place = f"{__name__}:no_scatter"
    cfg = dataclasses.replace(MLP, parallel=ZeroConfig(), taken=1)
    assert read(dataclasses.replace(cfg, broken=place))["apart"] > 1e-3
    assert read(cfg)["apart"] < 1e-5
    with mock.patch.object(code, "_digest", lambda places, reading: sorted(places)):
        assert place in code.of_run(dataclasses.replace(cfg, broken=place))


def test_depth_grows_by_groups_of_blocks():
    model = types.SimpleNamespace(compiled=None)
    tried = []

    def make(cfg, data_root, devices):
        tried.append((cfg.model.depth, cfg.taken, devices))
        return model

    experts = TransformerOptions(experts=ExpertsConfig(count=2, every=2))
    cfg = dataclasses.replace(
        SMALL, model=dataclasses.replace(SMALL.model, options=experts), memory=1000
    )
    with mock.patch.object(perf, "largest_model", lambda made, memory: made(3) or 3):
        assert program._find_deepest(cfg, DATA, 4, make) == 6
    assert tried == [(6, 0, 4)]


@pytest.mark.acceptance("how-to-train", 10)
def test_what_does_not_fit_is_told_with_the_stages_that_would():
    def make(cfg, data_root, devices):
        stage = getattr(cfg.parallel, "stage", 0)
        return types.SimpleNamespace(compiled=1000 // (1 + stage) * cfg.model.depth)

    cfg = dataclasses.replace(SMALL, parallel=None, memory=400)
    told = r"takes 1000 bytes: got memory=400.*fit: parallel.stage=2, parallel.stage=3"
    with (
        mock.patch.object(perf, "peak_memory", int),
        mock.patch.object(perf.meshes, "peak_memory", int),
        pytest.raises(ConfigError, match=told),
    ):
        program._find_deepest(cfg, DATA, 8, make)


@pytest.mark.slow
def test_the_deepest_model_that_fits():
    cfg = dataclasses.replace(SMALL, taken=0, memory=150_000)
    found = read(cfg)
    depths = (int(found["depth"]), int(found["depth"]) + 1)
    models = [dataclasses.replace(cfg.model, depth=depth) for depth in depths]
    steps = [
        program.compose(dataclasses.replace(cfg, model=model), DATA, 1)
        for model in models
    ]
    fits, not_fits = (perf.peak_memory(step.compiled) for step in steps)
    assert fits <= cfg.memory < not_fits


def test_rows_have_the_figures_that_were_asked_for():
    plain = {"psi", "state", "temporaries", "sent", "operands", "arrays", "asked"}
    plain |= {"block", "rounds"}
    assert set(outlines.declared(MLP.figures)) == plain
    every = dataclasses.replace(SMALL, memory=1)
    assert set(outlines.of_config(every).columns) == plain | {
        *("depth", "losses", "loss", "distance", "apart")
    }
    # Models of workers' own are not one device's.
    apart = dataclasses.replace(MLP, taken=1, averaging=averaging.EagerConfig())
    assert set(outlines.of_config(apart).columns) == plain | {"losses", "loss"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unnamed(ProgramConfig):
    """A config that knows no axis."""

    axes = ()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: dataclasses.replace(MLP, memory=1), "memory is that of a model with"),
        (lambda: read(dataclasses.replace(MLP, broken="os")), '"module:function"'),
        (
            lambda: read(dataclasses.replace(MLP, broken="hpcjax.runs:nothing")),
            "broken must be .*got 'hpcjax.runs:nothing'",
        ),
        (
            lambda: read(Unnamed(model=MLP.model, train=MLP.train, devices=2)),
            r"axis of the mesh must be one of \('several',\): got 'data'",
        ),
        (lambda: MLP.check_devices(3), None),
        (lambda: dataclasses.replace(MLP, devices=3).check_devices(1), "batch_size"),
    ],
)
def test_what_cannot_be_read_is_refused(make, told):
    if told is None:
        make()
        return
    with pytest.raises(ConfigError, match=told):
        make()


def test_counts_have_one_number_for_each_label(zero):
    for name in ("sent", "operands", "arrays", "asked"):
        assert zero[name].dims == ("axis", "kind", "part")
        assert np.isfinite(zero[name]).all()
    assert zero["axis"].values.tolist() == [*ProgramConfig.axes, "several"]
