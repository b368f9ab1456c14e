"""Checkpoints: what goes in comes out, and damage of any kind is noticed."""

import logging
import pathlib
import random
import shutil
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hpcjax.core import per_device, trees
from hpcjax.core.errors import CheckpointCorrupt, ConfigError, DataFormatError, DiskFull
from hpcjax.core.per_device import PerDevice
from hpcjax.train import checkpoint, checkpoint_files
from hpcjax.train.checkpoint import Checkpoints
from tests import full_disk


class Residual(NamedTuple):
    value: PerDevice


def make_mesh(devices=8):
    return jax.make_mesh(
        (devices,),
        ("data",),
        devices=jax.devices()[:devices],
        axis_types=(AxisType.Auto,),
    )


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for path, leaf in trees.flatten(wanted).items():
        assert bits(trees.flatten(got)[path]) == bits(leaf), path
        if isinstance(leaf, jax.Array):
            other = trees.flatten(got)[path]
            assert other.dtype == leaf.dtype
            assert other.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def make_state(mesh, seed=0):
    """Params, optax state, a per-device residual and a typed key, placed on `mesh`."""
    rng = np.random.default_rng(seed)
    params = {
        "dense": {"kernel": rng.standard_normal((6, 5)), "bias": np.zeros(5)},
        "odd/name %": {"half": rng.standard_normal(3)},
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    params["odd/name %"]["half"] = params["odd/name %"]["half"].astype(jnp.bfloat16)
    gradient = jax.tree.map(jnp.ones_like, params)
    with jax.numpy_dtype_promotion("standard"):
        optimizer = optax.inject_hyperparams(optax.adam)(1e-3)
        _, opt_state = optimizer.update(gradient, optimizer.init(params), params)
    count = mesh.shape["data"]
    residual = jnp.asarray(rng.standard_normal((count, 4, 3)), jnp.float32)
    state = {
        "params": params,
        "opt_state": (opt_state, Residual(PerDevice(value=residual, axis="data"))),
        "key": jax.random.key(seed),
        "empty": jnp.zeros((0, 3)),
        "step": jnp.int32(seed),
    }
    return place(state, mesh)


def place(state, mesh):
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), per_device.specs(state))
    return jax.tree.map(jax.device_put, state, shardings)


def shapes(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=3)
    yield made
    made.close()


def save(checkpoints, step, state, extra=None):
    checkpoints.save(step, state, extra or {})
    checkpoints.wait()


@pytest.mark.quick("False")
@pytest.mark.parametrize("abstract", [True, False])
def test_round_trip_keeps_every_bit_type_and_place(checkpoints, abstract):
    state = make_state(make_mesh())
    save(checkpoints, 7, state, {"seconds": 0.1, "names": ["a"]})
    like = shapes(state) if abstract else state
    restored = checkpoints.restore(like)
    assert_same(restored.state, state)
    assert restored.step == 7
    assert restored.extra == {"seconds": 0.1, "names": ["a"]}
    residual = restored.state["opt_state"][1]
    assert isinstance(residual, Residual)
    assert residual.value.axis == "data"
    jax.random.normal(restored.state["key"])  # a usable key


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_batches_of_keys_of_each_implementation(checkpoints, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    save(checkpoints, 1, {"keys": keys})
    restored = checkpoints.restore({"keys": keys}).state["keys"]
    assert restored.dtype == keys.dtype
    assert bits(restored) == bits(keys)


def test_awkward_leaves(checkpoints):
    payload_nan = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)
    state = {
        "a": {"0": np.arange(3), "0.0": np.float64(0.1)},
        "a/0.0.0": np.full((4, 4), -0.0, np.float32),
        "nan": payload_nan,
        "bool": np.array([True, False]),
        "complex": np.ones(2, np.complex64),
        "fp8": np.arange(4).astype(jnp.float8_e4m3fn),
        "int": 3,
        "float": 0.1,
        "flag": True,
    }
    save(checkpoints, 1, state)
    restored = checkpoints.restore(state).state
    assert_same(restored, state)
    assert [type(x) for x in jax.tree.leaves(restored)] == [
        type(x) for x in jax.tree.leaves(state)
    ]


@pytest.mark.parametrize("state", [np.arange(3.0), {}, {"none": jnp.zeros((0,))}])
def test_trees_without_names_or_data(checkpoints, state):
    save(checkpoints, 1, state)
    assert_same(checkpoints.restore(state).state, state)


def test_values_that_cannot_be_saved_are_refused(checkpoints):
    with pytest.raises(ConfigError, match="'name' must be an array"):
        checkpoints.save(1, {"name": "text"}, {})
    with pytest.raises(ConfigError, match="same path"):
        checkpoints.save(1, {"a": {"b": 1}, "a/b": 2}, {})
    with pytest.raises(ConfigError, match="JSON"):
        checkpoints.save(1, {"a": 1}, {"x": object()})
    with pytest.raises(ConfigError, match="negative"):
        checkpoints.save(-1, {"a": 1}, {})
    with pytest.raises(ConfigError, match="keep"):
        Checkpoints(pathlib.Path("unused"), keep=0)
    assert checkpoints.steps() == []


def test_donated_buffers_do_not_reach_the_checkpoint(checkpoints):
    mesh = make_mesh()
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    state = jax.device_put(jnp.arange(4096.0), NamedSharding(mesh, PartitionSpec()))
    wanted = np.array(state)
    checkpoints.save(1, state, {})
    for _ in range(5):
        state = overwrite(state)
    restored = checkpoints.restore(state)
    np.testing.assert_array_equal(restored.state, wanted)
    again = overwrite(checkpoints.restore(state).state)  # nor does a restored one
    np.testing.assert_array_equal(again, -np.ones_like(wanted))
    for shard in again.addressable_shards:
        np.testing.assert_array_equal(shard.data, -1)
    checkpoints.verify(1)


def test_other_trees_are_listed_not_fallen_back_from(checkpoints):
    state = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2, jnp.int32)}
    save(checkpoints, 1, state)
    save(checkpoints, 2, state)
    with pytest.raises(ConfigError, match=r"lacks \['c'\].*beyond.*\['b'\]"):
        checkpoints.restore({"a": state["a"], "c": state["b"]})
    like = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    with pytest.raises(ConfigError) as caught:
        checkpoints.restore(like)
    assert "a: saved float32[2, 3], asked for float32[3, 2]" in str(caught.value)
    assert "b: saved int32[2], asked for float32[2]" in str(caught.value)
    key = {"key": jax.random.key(0)}
    save(checkpoints, 3, key)
    with pytest.raises(ConfigError, match=r"key<fry>\[2\], asked for uint32\[2\]"):
        checkpoints.restore({"key": jnp.zeros(2, jnp.uint32)})


def test_a_step_asked_for_is_that_step_or_an_error(checkpoints):
    for step in (1, 2):
        save(checkpoints, step, {"a": jnp.float32(step)})
    assert checkpoints.restore({"a": jnp.float32(0)}, step=1).step == 1
    with pytest.raises(ConfigError, match=r"step 9.*\[1, 2\]"):
        checkpoints.restore({"a": jnp.float32(0)}, step=9)
    with pytest.raises(ConfigError, match="step 9"):
        checkpoints.verify(9)
    damage_delete(*data_files(checkpoints, 1)[:1])
    with pytest.raises(CheckpointCorrupt, match="step 1"):
        checkpoints.restore({"a": jnp.float32(0)}, step=1)


def test_nothing_saved_is_a_config_error(checkpoints):
    with pytest.raises(ConfigError, match="no checkpoint"):
        checkpoints.restore({})


def data_files(checkpoints, step):
    root = checkpoints._path(step)
    return sorted(path for path in root.rglob("*") if path.is_file())


def damage_flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def damage_delete(path, draw=None):
    path.unlink()


def damage_half(path, draw):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(path, draw):
    path.write_bytes(b"")


def damage_swap(path, draw):
    others = [p for p in sorted(path.parent.rglob("*")) if p.is_file() and p != path]
    others = [p for p in others if p.read_bytes() != path.read_bytes()]
    others = others or [path.parents[1] / "MANIFEST.json"]
    other = draw.choice(others)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.slow
@pytest.mark.faults(7)
def test_every_damage_to_every_file_is_noticed(tmp_path, caplog):
    state = make_state(make_mesh())
    newer = make_state(make_mesh(), seed=1)
    checkpoints = Checkpoints(tmp_path / "original")
    save(checkpoints, 10, state)
    save(checkpoints, 20, newer)
    names = [
        path.relative_to(tmp_path / "original") for path in data_files(checkpoints, 20)
    ]
    draw = random.Random(0)
    kinds = [damage_flip] * 25 + [damage_delete, damage_half, damage_empty, damage_swap]
    cases = [(name, kind) for name in names for kind in kinds]
    assert len(cases) >= 200
    for name, kind in cases:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "original", copy)
        kind(copy / name, draw)
        damaged = Checkpoints(copy)
        caplog.clear()
        with caplog.at_level(logging.WARNING, checkpoint.__name__):
            restored = damaged.restore(shapes(state))
        assert restored.step == 10, (name, kind)
        assert len(caplog.records) == 1, (name, kind)
        assert "20" in caplog.text
        assert bits(restored.state["params"]["dense"]["kernel"]) == bits(
            state["params"]["dense"]["kernel"]
        )
        damaged.close()
        shutil.rmtree(copy)
    checkpoints.close()


def test_changed_numbers_with_right_files_name_the_leaf(checkpoints, monkeypatch):
    state = {"good": jnp.zeros(3), "bad": jnp.zeros(3)}
    save(checkpoints, 1, state)
    honest = checkpoint_files.load_arrays

    def lying(path, step):
        arrays = honest(path, step)
        return arrays | {"bad": arrays["bad"] + np.float32(1e-30)}

    monkeypatch.setattr(checkpoint_files, "load_arrays", lying)
    with pytest.raises(CheckpointCorrupt, match=r"step 1.*'bad'"):
        checkpoints.restore(state)
    with pytest.raises(CheckpointCorrupt, match="'bad'"):
        checkpoints.verify(1)


def test_examining_reads_all_and_changes_nothing(checkpoints):
    for step in (1, 2, 3):
        save(checkpoints, step, {"a": jnp.zeros(3)})
    damage_empty(data_files(checkpoints, 2)[0], None)
    directory = checkpoints._path(3).parent
    (directory / "3" / "MANIFEST.json").unlink()
    (directory / ".saving-4").mkdir()
    before = sorted(directory.rglob("*"))
    good, bad, foreign = checkpoint_files.examine_checkpoints(directory)
    assert good[0] == 1
    assert good[1] == checkpoints.verify(1)
    assert bad[0] == 2
    assert "step 2" in str(bad[1])
    assert isinstance(bad[1], CheckpointCorrupt)
    assert foreign == (3, None)
    assert sorted(directory.rglob("*")) == before


def test_no_good_checkpoint_left_names_all_of_them(checkpoints):
    for step in (1, 2):
        save(checkpoints, step, {"a": jnp.zeros(3)})
        damage_empty(data_files(checkpoints, step)[0], None)
    with pytest.raises(CheckpointCorrupt, match=r"step 2.*step 1"):
        checkpoints.restore({"a": jnp.zeros(3)})


def test_keeps_the_newest_and_what_is_verified(checkpoints, tmp_path):
    state = {"a": jnp.zeros(3)}
    for step in (1, 2, 3, 4, 30, 40):
        save(checkpoints, step, state)
    assert checkpoints.steps() == [4, 30, 40]
    for step in (30, 40):
        damage_empty(data_files(checkpoints, step)[0], None)
    assert checkpoints.restore(state).step == 4
    for step in (5, 6):  # bad ones with higher numbers must not push out good ones
        save(checkpoints, step, state)
    assert checkpoints.steps() == [4, 5, 6, 30, 40]
    assert checkpoints.restore(state).step == 6
    for step in (30, 50, 60):
        save(checkpoints, step, state)
    assert checkpoints.steps() == [30, 40, 50, 60]
    save(checkpoints, 70, state)
    assert checkpoints.steps() == [50, 60, 70]


def test_the_step_just_saved_is_kept_whatever_its_number(tmp_path):
    """As after going back to an earlier step."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30, 5):
            save(checkpoints, step, {"a": jnp.zeros(3)})
        assert checkpoints.steps() == [5, 20, 30]


def test_nothing_is_deleted_for_a_checkpoint_that_cannot_be_read_back(
    tmp_path, monkeypatch
):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, {"a": jnp.zeros(3)})

    def unreadable(self, step):
        raise CheckpointCorrupt("bad disk")

    monkeypatch.setattr(Checkpoints, "_read_verified", unreadable)
    checkpoints.save(2, {"a": jnp.zeros(3)}, {})
    with pytest.raises(CheckpointCorrupt, match="bad disk"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints.verify(1)
    checkpoints.close()


def test_a_step_saved_again_is_replaced(checkpoints):
    save(checkpoints, 5, {"a": jnp.zeros(3)})
    save(checkpoints, 5, {"a": jnp.ones(4)}, {"second": True})
    restored = checkpoints.restore({"a": jnp.zeros(4)})
    np.testing.assert_array_equal(restored.state["a"], np.ones(4))
    assert restored.extra == {"second": True}
    assert [p.name for p in checkpoints._directory.iterdir()] == ["5"]


def test_leftovers_are_removed_and_half_replaced_steps_put_back(tmp_path):
    first = Checkpoints(tmp_path)
    save(first, 5, {"a": jnp.zeros(3)})
    first.close()
    (tmp_path / "5").rename(tmp_path / ".replaced-5")
    for name in (".saving-5", ".saving-6.orbax-checkpoint-tmp", ".parts-6"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    second = Checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert second.restore({"a": jnp.ones(3)}).step == 5
    second.close()


@pytest.mark.faults(16)
def test_errors_of_the_background_surface_once(checkpoints, monkeypatch):
    save(checkpoints, 1, {"a": jnp.zeros(3)})
    commit = Checkpoints._commit

    def failing(self, step, leaves, extra):
        raise RuntimeError("in the background")

    monkeypatch.setattr(Checkpoints, "_commit", failing)
    checkpoints.save(2, {"a": jnp.zeros(3)}, {})
    with pytest.raises(RuntimeError, match="background"):
        checkpoints.save(3, {"a": jnp.zeros(3)}, {})
    monkeypatch.setattr(Checkpoints, "_commit", commit)
    save(checkpoints, 4, {"a": jnp.zeros(3)})
    assert checkpoints.steps() == [1, 4]
    assert not list(checkpoints._directory.glob(".*"))


@pytest.mark.faults(18)
@pytest.mark.parametrize("where", ["save", "wait_until_finished"])
def test_a_full_disk_says_so_and_harms_nothing(checkpoints, monkeypatch, where):
    save(checkpoints, 1, {"a": jnp.zeros(3)})
    honest = getattr(ocp.AsyncCheckpointer, where)

    def full(self, *args, **kwargs):
        honest(self, *args, **kwargs)
        raise ValueError("RESOURCE_EXHAUSTED: ... [No space left on device]")

    monkeypatch.setattr(ocp.AsyncCheckpointer, where, full)
    with pytest.raises(DiskFull, match="bytes free"):
        save(checkpoints, 2, {"a": jnp.zeros(3)})
    monkeypatch.undo()
    checkpoints._orbax.wait_until_finished()
    assert checkpoints.restore({"a": jnp.zeros(3)}).step == 1
    save(checkpoints, 2, {"a": jnp.zeros(3)})
    assert checkpoints.steps() == [1, 2]


@pytest.mark.faults(18)
@pytest.mark.parametrize("stage", full_disk.STAGES)
def test_a_checkpoint_without_room_for_its_manifest_is_none(checkpoints, stage):
    save(checkpoints, 1, {"a": jnp.zeros(3)})
    with (
        full_disk.no_room("MANIFEST.json", stage) as failed,
        pytest.raises(DiskFull, match="bytes free"),
    ):
        save(checkpoints, 2, {"a": jnp.ones(3)})
    assert failed
    assert [path.name for path in checkpoints._directory.iterdir()] == ["1"]
    assert checkpoints.restore({"a": jnp.zeros(3)}).step == 1
    save(checkpoints, 2, {"a": jnp.ones(3)})
    assert checkpoints.steps() == [1, 2]


@pytest.mark.faults(18)
def test_a_state_that_does_not_fit_is_not_begun(checkpoints, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=9))
    with pytest.raises(DiskFull, match="9 bytes free, 12 needed"):
        save(checkpoints, 1, {"a": jnp.zeros(3)})
    assert not list(checkpoints._directory.iterdir())


@pytest.mark.faults(8)
@pytest.mark.parametrize("nested", [False, True])
def test_foreign_checkpoints_need_trust(checkpoints, nested, caplog):
    tree = {"dense": {"kernel": np.arange(6.0).reshape(2, 3)}, "step": np.int32(3)}
    path = checkpoints._path(9) / "default" if nested else checkpoints._path(9)
    with ocp.StandardCheckpointer() as writer:
        writer.save(path, tree)
    assert checkpoints.steps() == []
    with pytest.raises(CheckpointCorrupt, match="trust"):
        checkpoints.restore(tree)
    restored = checkpoints.restore(tree, trust=True)
    assert_same(restored.state, tree)
    assert (restored.step, restored.extra) == (9, {})
    save(checkpoints, 3, tree)
    with caplog.at_level(logging.WARNING, checkpoint.__name__):
        assert checkpoints.restore(tree).step == 3
    assert "without MANIFEST.json: [9]" in caplog.text


def test_ours_without_manifest_restores_with_trust(checkpoints):
    state = {"a/b": jnp.arange(3.0), "key": jax.random.key(1)}
    save(checkpoints, 2, state)
    (checkpoints._path(2) / "MANIFEST.json").unlink()
    assert_same(checkpoints.restore(state, trust=True).state, state)


def test_what_is_trusted_does_not_stand_in_for_lost_records(checkpoints):
    """Without a manifest nobody knows which records belong to it."""
    state = {"a": jnp.zeros(3)}
    for step in (1, 2, 3):
        save(checkpoints, step, state, {"step": step})
    (checkpoints._path(2) / "MANIFEST.json").unlink()

    known = []

    def check(extra):
        if extra["step"] not in known:
            raise DataFormatError("records are missing")

    with pytest.raises(DataFormatError, match=r"missing; .*step 2.*gap"):
        checkpoints.restore(state, trust=True, check=check)
    known.append(1)
    assert checkpoints.restore(state, trust=True, check=check).step == 1


@pytest.mark.parametrize("kind", ["mean", "reset", "refuse"])
def test_per_device_state_follows_the_device_count(checkpoints, kind):
    large, small = make_mesh(8), make_mesh(4)
    value = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)

    def state(mesh, value):
        return place({"r": PerDevice(value=value, axis="data", resize=kind)}, mesh)

    save(checkpoints, 1, state(large, value))
    like = shapes(state(small, np.zeros((4, 5), np.float32)))
    if kind == "refuse":
        with pytest.raises(ConfigError, match="8 devices"):
            checkpoints.restore(like, mesh=small)
        return
    down = checkpoints.restore(like, mesh=small).state
    assert down["r"].value.shape == (4, 5)
    assert down["r"].value.sharding.spec == PartitionSpec("data")
    save(checkpoints, 2, down)
    up = checkpoints.restore(shapes(state(large, value))).state["r"].value
    assert up.shape == (8, 5)
    mean = value.mean(0) if kind == "mean" else np.zeros(5)
    np.testing.assert_allclose(np.asarray(up).mean(0), mean, atol=1e-6)
