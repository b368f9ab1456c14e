"""The training experiment: what it refuses, and parts from outside."""

import dataclasses
import functools
import importlib.metadata
import io
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

from hpcjax import train
from hpcjax.averaging import LateConfig, LocalSgdConfig, SgpConfig, WagmaConfig
from hpcjax.collectives import OkTopkConfig, PowerSgdConfig
from hpcjax.compress import SharingConfig
from hpcjax.core import ConfigError, parts
from hpcjax.data import CharTextConfig, PhantomsConfig
from hpcjax.models import BertConfig, CausalLmConfig, MlpConfig, UNetConfig
from hpcjax.optim import (
    DynamicConfig,
    JorgeConfig,
    KfacConfig,
    LambConfig,
    PartialBackwardConfig,
)
from hpcjax.runs import config, discover, execute, launch, plan, training
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import ZeroConfig
from tests.runs import roots

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = {"train.steps": "2", "train.batch_size": "16", "model.widths": "[4]"}
WHOLE = {
    "optimizer": "jorge",
    "exchange": "ok_topk",
    "averaging": "wagma",
    "backward": "none",
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"model": CausalLmConfig()},
            "dataset=digits is classification, which model=causal_lm does not learn: "
            "take one of model=mlp, model=resnet, model=vgg, dataset=char_text, "
            "dataset=token_text",
        ),
        (
            {"dataset": PhantomsConfig(), "model": BertConfig()},
            "model=unet, model=cnn, model=locally_connected, model=smoe, "
            "dataset=masked_text",
        ),
        (
            {"exchange": OkTopkConfig(), "backward": PartialBackwardConfig()},
            "exchange=ok_topk and backward=partial both average the gradients: choose "
            "one, such as by backward=none",
        ),
        (
            {
                "optimizer": KfacConfig(),
                "averaging": WagmaConfig(workers=2, between="processes"),
            },
            "optimizer=kfac and averaging.between=processes both have a backward pass "
            "of their own: choose one, such as by averaging=none",
        ),
        (
            {"optimizer": KfacConfig(), "backward": PartialBackwardConfig()},
            "optimizer=kfac and backward=partial both have a backward pass of their",
        ),
        (
            {"exchange": OkTopkConfig(), "parallel": ZeroConfig()},
            "exchange=ok_topk and parallel=zero both average the gradients: choose "
            "one, such as by parallel=none",
        ),
        (
            {"averaging": WagmaConfig(), "parallel": ZeroConfig()},
            "averaging=wagma and parallel=zero both hold the parameters in a form of",
        ),
        (
            {"sparsity": DynamicConfig(), "parallel": ZeroConfig()},
            "sparsity=dynamic and parallel=zero both hold the parameters in a form of",
        ),
        (
            {"optimizer": KfacConfig(), "parallel": ZeroConfig()},
            "optimizer=kfac works with whole matrices, of which parallel=zero gives "
            "each device a part: choose another one, such as optimizer=sgd, adamw or "
            "lamb, or parallel=none",
        ),
    ],
)
def test_parts_that_cannot_go_together_are_refused_with_what_can(given, told):
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(**given)
    assert told in str(caught.value)


def test_a_plan_of_workers_in_processes_is_that_of_one_of_them():
    given = SMALL | {
        "averaging": "wagma",
        "averaging.between": "processes",
        "averaging.workers": "4",
    }
    one = plan.plan_run("train/digits", SMALL | {"train.batch_size": "4"})
    apart = plan.plan_run("train/digits", given)
    same = ("parameters", "state_bytes", "flops", "collective_bytes", "steps")
    for name in same:
        assert getattr(apart, name) == getattr(one, name)
    assert apart.epochs == pytest.approx(4 * one.epochs)
    assert (apart.processes, apart.files[-1]) == (4, "workers/")


def test_an_axis_that_the_mesh_does_not_have_is_refused_before_compiling(compilations):
    given = {"model": "resnet", "model.width": "2", "model.sync_axis": "modle"}
    told = r"model.sync_axis must be none or an axis of the run's mesh, {}: got 'modle'"
    apart = {"averaging": "wagma", "averaging.workers": "2"}
    for more, axes in (({}, "data"), (apart, "worker or data")):
        loaded = discover.load("train/digits", given | more, REPOSITORY)
        with pytest.raises(ConfigError, match=told.format(axes)):
            training.task(loaded.config, REPOSITORY / ".cache/data", 4)
    assert compilations == []


SYNCED = {"model": "resnet", "model.width": "2", "model.sync_axis": "data"}


def test_statistics_over_devices_need_passes_that_all_devices_take_alike():
    told = "sync_axis must be none where devices' backward passes.*sync_axis='data'"
    with pytest.raises(ConfigError, match=told):
        discover.load("train/digits", SYNCED | {"backward": "partial"}, REPOSITORY)


@pytest.mark.slow
def test_a_network_with_statistics_over_devices_is_cut_into_stages():
    given = SYNCED | {"backward": "pipedream"}
    config = discover.load("train/digits", given, REPOSITORY).config
    assert training.task(config, REPOSITORY / ".cache/data", 4).method.facts["held"] > 0


def test_a_resumed_run_may_wait_longer_for_a_step_and_not_take_larger_ones():
    cfg = TrainingConfig()

    def changed(**changes):
        return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))

    config.check_resumable(cfg, changed(stall_seconds=600.0, steps=900, keep=5))
    for old, new in ((None, 3), (3, 1), (1, None)):
        ways = [stage and ZeroConfig(stage=stage) for stage in (old, new)]
        spread = [dataclasses.replace(cfg, parallel=way) for way in ways]
        config.check_resumable(*spread)
    with pytest.raises(ConfigError, match=r"train.batch_size: 128 -> 64"):
        config.check_resumable(cfg, changed(batch_size=64))


def test_parts_of_one_kind_of_data_go_together():
    TrainingConfig(dataset=CharTextConfig(), model=CausalLmConfig())
    TrainingConfig(dataset=PhantomsConfig(), model=UNetConfig())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LocalSgdConfig(workers=3).count(4, shared=False), "must divide the 4"),
        (lambda: LocalSgdConfig(workers=4).count(4, shared=True), "at most 2"),
        (lambda: WagmaConfig(group_size=3), "must be a power of two"),
        (lambda: WagmaConfig(late=LateConfig(), warm_start=1), "give no late"),
        (lambda: SgpConfig(warm_start=1), "warm_start must be 0"),
        (lambda: WagmaConfig(tau=0), "tau must be"),
        (lambda: LateConfig(delay=-1.0), "delay must be finite and >= 0"),
        (lambda: PartialBackwardConfig(k=3, cuts=(1,)), "cuts must be k - 1 or none"),
    ],
)
def test_averages_that_cannot_be_are_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_workers_share_the_devices_out():
    assert LocalSgdConfig().count(4, shared=False) == 4
    assert LocalSgdConfig().count(4, shared=True) == 2
    assert LocalSgdConfig().count(1, shared=True) == 1
    assert LocalSgdConfig(workers=2).count(8, shared=True) == 2


def test_a_models_stacks_are_told_to_every_part_that_asks():
    stacks = CausalLmConfig.stacks
    assert training.with_stacks(JorgeConfig(), stacks).stacked == stacks
    assert training.with_stacks(PowerSgdConfig(), stacks).stacked == stacks
    inside = training.with_stacks(KfacConfig(base=LambConfig()), stacks)
    assert inside.base.stacked == stacks
    own = JorgeConfig(stacked=("^mine/",))
    assert training.with_stacks(own, stacks) == own
    assert training.with_stacks(None, stacks) is None


@pytest.mark.slow
def test_a_whole_combination_is_planned_run_and_resumed(tmp_path):
    small = SMALL | WHOLE | {"train.checkpoint_every": "1"}
    planned = plan.plan_run("train/digits", small, root=tmp_path, devices=4)
    assert planned is not None
    # Models are averaged, and within each pair of devices entries are exchanged.
    assert planned.collective_bytes > 4 * planned.parameters
    short = execute.run("train/digits", small, root=tmp_path, devices=4, quiet=True)
    longer = small | {"train.steps": "3"}
    whole = execute.run("train/digits", longer, root=tmp_path, devices=4, quiet=True)
    resumed = execute.run(
        f"runs/{short.id}/config.json",
        {"train.steps": "3"},
        root=tmp_path,
        resume=short.id,
        devices=4,
        quiet=True,
    )
    left, right = (run.dataset["loss"].values for run in (whole, resumed))
    assert left.tolist() == right.tolist()


SPREAD = {
    "model": "causal_lm",
    "model.width": "16",
    "dataset": "char_text",
    "dataset.context": "4",
    "parallel": "zero",
}


def test_a_plan_tells_what_a_device_holds_and_sends_along_which_axis():
    small = {key: text for key, text in SMALL.items() if key.startswith("train.")}
    planned = plan.plan_run("train/digits", small | SPREAD, devices=4)
    assert planned is not None
    kernel = 4 * planned.parameters  # float32, and as much momentum
    assert planned.state_bytes == pytest.approx(2 * kernel / 4, rel=0.02)
    assert set(planned.sent) == {
        "all-gather over data",
        "all-reduce over data",
        "reduce-scatter over data",
    }
    assert planned.sent["reduce-scatter over data"] == kernel
    assert sum(planned.sent.values()) == planned.collective_bytes
    told = io.StringIO()
    rich.console.Console(file=told, width=200).print(plan.render_plan(planned))
    assert "reduce-scatter over data" in told.getvalue()


@pytest.mark.slow
def test_a_spread_run_goes_on_in_other_ways_on_other_devices(tmp_path):
    small = {key: text for key, text in SMALL.items() if key.startswith("train.")}
    small |= SPREAD | {"train.checkpoint_every": "1"}
    run = functools.partial(execute.run, "train/digits", root=tmp_path, quiet=True)
    whole = run(small | {"train.steps": "5"}, devices=8)
    first = run(small, devices=8)
    ways = (({"parallel.stage": "1"}, 4), ({"parallel": "none"}, 1), ({}, 8))
    for steps, (change, devices) in enumerate(ways, 3):
        given = {key: text for key, text in small.items() if key != "parallel"}
        given |= {"parallel": "zero"} | change | {"train.steps": str(steps)}
        last = run(given, resume=first.id, devices=devices)
    assert last.id == first.id
    np.testing.assert_allclose(last.dataset["loss"], whole.dataset["loss"], rtol=1e-5)


def test_parts_change_in_one_place_and_name_themselves_in_json():
    loaded = discover.load("train/digits", WHOLE, REPOSITORY)
    written = json.loads(json.dumps(config.to_json(loaded.config)))
    assert written["values"]["exchange"]["type"] == "ok_topk"
    assert written["values"]["backward"] is None
    assert config.from_json(written) == loaded.config
    with pytest.raises(ConfigError, match="belongs to exchange=gtopk"):
        discover.load("train/digits", {"exchange.exact_residual": "true"}, REPOSITORY)
    with pytest.raises(ConfigError, match=r"optimizer.*lr must be finite"):
        discover.load("train/digits", {"optimizer.lr": "-1"}, REPOSITORY)


MINE = pathlib.Path(__file__).with_name("example_parts.py").read_text()


@pytest.fixture
def own_root(tmp_path):
    roots.write(tmp_path, "experiments/mine/optimizer.py", MINE)
    listing = "PARTS = {'optimizer': {'halving': 'experiments.mine.optimizer:%s'}}\n"
    roots.write(tmp_path, "experiments/mine/parts.py", listing % "HalvingConfig")
    yield tmp_path
    discover.activate(REPOSITORY)


def test_a_part_of_a_users_root_is_in_every_config(own_root):
    root = own_root
    changes = SMALL | {"optimizer": "halving", "optimizer.share": "0.25"}
    done = execute.run("train/digits", changes, root=root, quiet=True)
    assert done.dataset.sizes["step"] == 2
    assert "halving" in parts.classes("optimizer")
    discover.activate(REPOSITORY)
    assert "halving" not in parts.classes("optimizer")
    with pytest.raises(ConfigError, match="optimizer must be sgd"):
        discover.load("train/digits", {"optimizer": "halving"}, REPOSITORY)


@pytest.mark.parametrize(
    ("listing", "told"),
    [
        ("PARTS = {'optimiser': {}}", "no kind 'optimiser'; did you mean 'optimizer'"),
        ("PARTS = {'optimizer': {'sgd': 'experiments.mine.optimizer:X'}}", "two opt"),
        ("PARTS = {'optimizer': {'new': 'experiments.mine.optimizer:X'}}", "is not at"),
        ("PARTS = {'optimizer': {'new': 'os:getcwd'}}", "must be a config dataclass"),
        ("THINGS = {}", "must define PARTS"),
    ],
)
def test_a_listing_that_cannot_be_is_told(own_root, listing, told):
    root = own_root
    roots.write(root, "experiments/mine/parts.py", listing)
    with pytest.raises(ConfigError, match=told):
        discover.load("train/digits", {}, root)


def test_an_installed_package_adds_parts(monkeypatch):
    point = importlib.metadata.EntryPoint(
        "mine", "tests.runs.example_parts:PARTS", parts.GROUP
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    parts._installed.cache_clear()
    try:
        assert "halving" in parts.classes("optimizer")
    finally:
        monkeypatch.undo()
        parts._installed.cache_clear()
    assert "halving" not in parts.classes("optimizer")


@pytest.mark.parametrize(
    "options", [{"log": ("tensorboard",)}, {"distributed": True}, {"trust": True}]
)
def test_workers_in_processes_are_refused_what_they_do_not_take(options, tmp_path):
    apart = {"averaging.between": "processes", "averaging.workers": "2"}
    given = SMALL | {"averaging": "wagma"} | apart
    options |= {"resume": "any"} if "trust" in options else {}
    with pytest.raises(ConfigError, match="starts processes of its own"):
        execute.run("train/digits", given, root=tmp_path, **options)
    with pytest.raises(ConfigError, match="starts processes of its own"):
        launch.launch("train/digits", given, processes=2, root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_parameters_products_and_logits_have_the_dtypes_of_the_config(
    held, monkeypatch
):
    made, make = [], MlpConfig.make

    def spy(*arguments):
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(MlpConfig, "make", spy)
    cfg = TrainingConfig(param=held, compute="bfloat16", output=held)
    task = training.task(cfg, REPOSITORY)
    state = train.init_state(task, 0, task.mesh(1))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(held)}
    x = jnp.asarray(task.dataset.train.gather(np.arange(2))["x"])
    logits, _ = jax.eval_shape(
        lambda params: made[0].apply(params, {}, x, train=False), state.params
    )
    assert logits.dtype == held


MAKERS = [
    (kind, name)
    for kind in ("sharing", "sparsity")
    for name, cls in parts.classes(kind).items()
    if hasattr(cls, "apply_to")
]


@pytest.mark.parametrize(("kind", "name"), MAKERS)
def test_parts_that_make_parameters_keep_them_in_the_dtype_of_the_config(kind, name):
    made = parts.classes(kind)[name]()
    cfg = TrainingConfig(
        param="bfloat16", model=MlpConfig(widths=(8, 8)), **{kind: made}
    )
    task = training.task(cfg, REPOSITORY)
    shapes = train.state_shapes(task, task.mesh(1)).params
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


def test_seeds_share_a_task_unless_a_part_draws_by_them():
    plain = TrainingConfig(model=MlpConfig(widths=(4,)))

    def are_one(cfg, **changes):
        first = training.task(cfg, REPOSITORY)
        return training.task(dataclasses.replace(cfg, **changes), REPOSITORY) is first

    assert are_one(plain, seed=1)
    assert are_one(dataclasses.replace(plain, exchange=OkTopkConfig()), seed=1)
    assert not are_one(plain, optimizer=JorgeConfig())
    assert not are_one(plain, param="bfloat16")
    for part in (
        {"sparsity": DynamicConfig()},
        {"averaging": WagmaConfig(workers=1)},
        {"sharing": SharingConfig()},
    ):
        assert not are_one(dataclasses.replace(plain, **part), seed=1), part
    assert training.task(plain, REPOSITORY) is not training.task(plain, REPOSITORY, 2)


def test_a_part_that_asks_for_the_seed_in_a_program_is_told(tmp_path, monkeypatch):
    build = KfacConfig.build

    def late(self, setup):
        built = build(self, setup)

        def update(*arguments, **extras):
            setup.seed()
            return built.tx.update(*arguments, **extras)

        return built._replace(tx=optax.GradientTransformation(built.tx.init, update))

    monkeypatch.setattr(KfacConfig, "build", late)
    with pytest.raises(RuntimeError, match="when it is built"):
        execute.run("train/digits", SMALL | {"optimizer": "kfac"}, root=tmp_path)


@pytest.mark.slow
def test_a_run_with_parameters_of_half_the_size_is_resumed_bit_for_bit(tmp_path):
    small = SMALL | {"train.checkpoint_every": "1", "param": "bfloat16"}
    longer = small | {"train.steps": "4"}
    whole = execute.run("train/digits", longer, root=tmp_path, quiet=True)
    short = execute.run("train/digits", small, root=tmp_path, quiet=True)
    resumed = execute.run(
        f"runs/{short.id}/config.json",
        {"train.steps": "4"},
        root=tmp_path,
        resume=short.id,
        quiet=True,
    )
    left, right = (run.dataset["loss"].values for run in (whole, resumed))
    assert left.tolist() == right.tolist()
    assert left[-1] < left[0]


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"param must be .*'bfloat16'.*'float16'"):
        TrainingConfig(param="float16")


@pytest.mark.parametrize("augment", ["cropflip", "mixup"])
def test_an_augmented_run_is_resumed_bit_for_bit(tmp_path, augment):
    chosen = {**SMALL, "dataset.augment": augment, "dataset.limit": "40"}
    found = {}
    for name, steps in (("whole", (6,)), ("parts", (3, 6))):
        run = None
        for length in steps:
            run = execute.run(
                "train/digits",
                {**chosen, "train.steps": str(length)},
                root=tmp_path,
                resume=run and run.id,
                quiet=True,
            )
        found[name] = run.dataset["loss"].values.tolist()
    assert found["whole"] == found["parts"]
    assert len(found["whole"]) == 6


def test_a_shift_that_no_image_has_room_for_is_refused_before_compiling(tmp_path):
    chosen = {**SMALL, "dataset.augment": "cropflip", "dataset.augment.pad": "8"}
    with pytest.raises(ConfigError, match="pad must be below the side of the image"):
        execute.run("train/digits", chosen, root=tmp_path, quiet=True)
