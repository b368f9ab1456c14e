"""A table of links that is on disk, moved by partitions: the run is that of memory."""

import contextlib
import dataclasses
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

from hpcjax import data, models, optim, train
from hpcjax.core import ConfigError, DataFormatError, trees
from hpcjax.runs import training
from hpcjax.runs.training import TrainingConfig
from hpcjax.train import RowCacheConfig, cached_table, disk_rows
from hpcjax.train.row_cache import list_row_leaves
from tests.train import tiny

STEPS, ENTITIES = 40, 60  # 57 have training links; of 8 partitions the last is shorter
DISK = RowCacheConfig(policy="partitions", store="disk", capacity=48)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of links."""
    folder, rng = tmp_path_factory.mktemp("links"), np.random.default_rng(0)
    for part, count in (("train", 300), ("valid", 12), ("test", 3)):
        rows = np.stack([rng.integers(most, size=count) for most in (ENTITIES, 3, 57)])
        lines = ["\t".join(f"{each}" for each in row) for row in rows.T]
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


def make(source, state, devices=1, **own):
    cut = {"partitions": 8, "capacity": 4, "group": 2, "edges": 16, "negatives": 6}
    config = TrainingConfig(
        dataset=data.LinksConfig(
            **{"source": str(source), "order": "comet"} | cut | own
        ),
        model=models.KgeConfig(width=4, spread=1.0),
        optimizer=optim.AdagradConfig(lr=0.1),
        state=state,
        train=train.TrainConfig(
            steps=STEPS, batch_size=2, eval_every=16, checkpoint_every=13
        ),
    )
    return config, training.task(config, source, devices)


def fit(source, state, folder=None, **given):
    """Trains, with pauses inside of states; returns what is told, and the end."""
    (config, made), records = make(source, state, **given), tiny.Records()
    mesh = made.mesh(given.get("devices", 1))
    own = {"seed": 0, "mesh": mesh, "recorder": records}
    with contextlib.ExitStack() as stack:
        length = config.train
        if folder is None:  # one checkpoint, at the end
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            length = dataclasses.replace(length, checkpoint_every=0)
        checkpoints = stack.enter_context(train.Checkpoints(pathlib.Path(folder)))
        last = train.fit(made, length, checkpoints=checkpoints, **own)
        leaves = trees.flatten(jax.device_get(dataclasses.replace(last, key=None)))
        if state is not None and state.store == "disk":
            rows = pathlib.Path(folder) / "rows"
            for path in list_row_leaves(leaves):
                assert len(leaves[path]) == 1  # what is saved has no table
                leaves[path] = np.asarray(data.RowFile(rows / path.replace("/", ".")))
    told = [
        (record["step"], name, record[name])
        for record in records
        for name in ("loss", "val_loss", "val_mrr", "val_hits10")
        if name in record
    ]
    return told, leaves, records


def check_same(found, wanted):
    """All in every bit, but sums over slices of the table to rounding."""
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        near = theirs[1] == "val_loss"
        assert ours[:2] == theirs[:2]
        assert ours[2] == (pytest.approx(theirs[2], rel=1e-6) if near else theirs[2])
    assert found[1].keys() == wanted[1].keys()
    for path, leaf in wanted[1].items():
        np.testing.assert_array_equal(found[1][path], leaf, err_msg=path)


@pytest.fixture(scope="module")
def whole(source):
    return fit(source, None)


@pytest.fixture(scope="module")
def ahead(source):
    """With two partitions of the next state on their way, and as many slots."""
    return fit(source, dataclasses.replace(DISK, prefetch=2))


@pytest.mark.acceptance("marius", 6)
@pytest.mark.acceptance("marius", 9)
def test_a_run_from_disk_is_that_of_memory_to_the_bit(source, whole, ahead, tmp_path):
    """Losses, ranks, table and Adagrad's sums, through pauses and validations."""
    found = fit(source, DISK, tmp_path)
    check_same(found, whole)
    rows = [found[1][path] for path in list_row_leaves(found[1])]
    assert {leaf.shape for leaf in rows} == {(60, 4)}
    assert np.array_equal(found[1]["step"], STEPS)
    check_same(ahead, whole)


class Killed(Exception):
    pass


class Fatal(tiny.Records):
    """Records that end a run at a step, as it is."""

    end = 30, Killed

    def write(self, record):
        if record["step"] == self.end[0]:
            raise self.end[1]
        super().write(record)


def begin(source, folder, records, steps=STEPS):
    """Trains from disk up to where records end it."""
    config, made = make(source, DISK)
    own = {"seed": 0, "mesh": made.mesh(1), "recorder": records}
    with train.Checkpoints(folder) as checkpoints:
        config = dataclasses.replace(config.train, steps=steps)
        train.fit(made, config, checkpoints=checkpoints, **own)


def test_a_killed_run_goes_on_to_the_same_bits(source, whole, tmp_path):
    """Rows that were written after the last checkpoint are none of its.

    Without that one those of the one before are gone: an error, which costs no row.
    """
    with pytest.raises(Killed):
        begin(source, tmp_path, Fatal())
    (tmp_path / "26").rename(tmp_path.with_name("aside"))
    with pytest.raises(DataFormatError, match=r"partition . of state 3: found other"):
        begin(source, tmp_path, tiny.Records())
    tmp_path.with_name("aside").rename(tmp_path / "26")
    told, leaves, _ = fit(source, DISK, tmp_path)
    assert told[0][0] == 27
    check_same(([*filter(lambda x: x[0] <= 26, whole[0]), *told], leaves), whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [27, 39])
def test_a_process_that_is_killed_loses_no_row(source, whole, tmp_path, step):
    """By SIGKILL: what it has flushed is there, of all files the same state."""
    code = (
        "import pathlib; from tests.train import test_links_on_disk as t; "
        f"t.Fatal.write = lambda self, x: x['step'] == {step} and "
        "__import__('os').kill(__import__('os').getpid(), 9); "
        f"t.begin(pathlib.Path({str(source)!r}), pathlib.Path({str(tmp_path)!r}), "
        "t.Fatal())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    told, leaves, _ = fit(source, DISK, tmp_path)
    first = told[0][0]
    assert first == 27  # the step after the last one that was saved
    check_same(([*filter(lambda x: x[0] < first, whole[0]), *told], leaves), whole)


def test_a_checkpoint_whose_rows_are_lost_is_refused(source, tmp_path):
    table = tmp_path / "rows" / "params.table"
    table.parent.mkdir()
    (table.parent / ".params.table.x").touch()  # of a process that was killed
    begin(source, tmp_path, tiny.Records(), 2)
    assert not [*table.parent.glob(".*")]
    ((_, manifest),) = train.examine_checkpoints(tmp_path)
    told = dict(train.examine_rows(tmp_path, manifest))
    assert {*told.values()} == {"float32 [60, 4], state 3"}
    assert {*told} == {f"rows/{path.name}" for path in table.parent.iterdir()}
    kept = table.read_bytes()
    for spoil in (table.unlink, lambda: table.write_bytes(kept[:-1])):
        spoil()
        with pytest.raises(DataFormatError, match=r"are lost: no|bytes: found"):
            begin(source, tmp_path, tiny.Records())
    with data.RowFile.build(table, [np.ones((60, 5))], (60, 5), "f8", 8) as other:
        other.flush()
    with pytest.raises(DataFormatError, match=r"expected float32 \[60, 4\]: found"):
        begin(source, tmp_path, tiny.Records())


def test_a_run_with_its_table_in_memory_does_not_go_on_from_disk(source, tmp_path):
    made = make(source, None)[1]
    with train.Checkpoints(tmp_path) as kept:
        kept.save(2, train.init_state(made, 0, made.mesh(1)), {})
    with pytest.raises(DataFormatError, match="saved with the table, which is not on"):
        begin(source, tmp_path, tiny.Records())


def test_no_program_makes_the_whole_table():
    """Neither the first state nor a partition's rows grow with ten million."""
    shapes = {"triples": (8, 3), "negatives": (2, 4)}
    model = models.kge(shapes, 10**7, tables=(10**7, 3), width=64)
    tx = optim.AdagradConfig(lr=0.1).make(1)
    init = cached_table._without_rows(lambda p: (p, tx.init(p)))
    like = {"params/table": jax.ShapeDtypeStruct((10**7, 64), "float32")}
    own = disk_rows.DiskRows(model, lambda p: (p, tx.init(p)), like, 512)
    key = jax.random.key(0)
    first = jax.jit(lambda key: init(model.init(key)[0]))
    for made in (first.lower(key), own._draw.lower(key, np.uint32(0))):
        used = made.compile().memory_analysis()
        assert used.temp_size_in_bytes + used.output_size_in_bytes < 10**7


@pytest.mark.acceptance("marius", 7)
def test_rows_that_are_moved_are_those_of_the_orders_swaps(source, ahead):
    records = ahead[2]
    sampler = make(source, DISK)[1].dataset.train
    states = [{*sampler.resident(n, 2, 0).tolist()} for n in range(STEPS)]
    assert 2 * sampler.epoch_batches(2) < STEPS
    sizes = np.minimum(sampler.partition_rows, 60 - sampler.partition_rows * np.r_[:8])
    wanted = sum(
        sizes[[*new - old]].sum()
        for old, new in zip([set(), *states], states, strict=False)
    )
    for way in ("rows_fetched", "rows_evicted"):
        assert sum(record.get(way, 0) for record in records) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lookahead", "lru"])
@pytest.mark.parametrize("store", ["disk", "memory"])
def test_rows_of_links_are_cached_by_any_policy(policy, store, source, whole):
    state = RowCacheConfig(policy=policy, store=store, lookahead=2, piece=7)
    told, leaves, _ = fit(source, state)
    np.testing.assert_allclose(
        [each[2] for each in told], [each[2] for each in whole[0]], rtol=1e-5
    )
    np.testing.assert_allclose(
        leaves["params/table"], whole[1]["params/table"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"edges": 4, "negatives": 2}])
def test_devices_share_links_from_disk(source, own):
    """They send the mean of the cache, or where it is less that of their rows."""
    runs = [fit(source, state, devices=2, **own) for state in (None, DISK)]
    runs.append(fit(source, DISK, **own))
    for run in runs[1:]:
        np.testing.assert_allclose(
            [each[2] for each in run[0]], [each[2] for each in runs[0][0]], rtol=1e-4
        )
        table, wanted = (found[1]["params/table"] for found in (run, runs[0]))
        np.testing.assert_allclose(table, wanted, rtol=1e-4, atol=1e-6)


def test_the_numbers_of_a_batch_are_put_back_where_they_were(source):
    batch = make(source, DISK)[1].dataset.train.sample(0, 2, 0, (0, 1))
    x = batch["x"]
    ids = cached_table._row_numbers(x, np)
    wanted = [
        np.concatenate([t[:, ::2].ravel(), n.ravel()])
        for t, n in zip(*x.values(), strict=True)
    ]
    np.testing.assert_array_equal(ids, wanted)
    told = cached_table._with_ids(batch, ids + 100)["x"]
    np.testing.assert_array_equal(told["negatives"], x["negatives"] + 100)
    np.testing.assert_array_equal(
        told["triples"] - x["triples"], [[[100, 0, 100]] * 16] * 2
    )


def test_what_has_no_partitions_or_no_room_is_refused(source):
    small = dataclasses.replace(DISK, capacity=31)
    with pytest.raises(ConfigError, match="at least 32, for the resident partitions"):
        make(source, small)
    clicks = TrainingConfig(
        dataset=data.ClicksConfig(examples=40, tables=2, rows=9),
        model=models.DlrmConfig(width=4, bottom=(5,), top=(6,)),
        optimizer=optim.RowAdagradConfig(),
        state=RowCacheConfig(policy="partitions"),
    )
    with pytest.raises(ConfigError, match="needs examples in an order of partitions"):
        training.task(clicks, source, 1)


def test_partitions_are_chosen_by_memory(source):
    """1,920 bytes of rows and 3,600 of links in 8 partitions, of which 2 fit."""
    state = dataclasses.replace(DISK, capacity=None)
    own = {"memory": 1500.0, "row_bytes": 32, "disk_block": 50}
    made = make(source, state, **own)[1]
    sampler = made.dataset.train
    assert (sampler.capacity, sampler.partition_rows) == (2, 8)
    assert made.method.facts["cache_rows"] == 16
    whole = make(source, state, **own | {"memory": 1e6})[1].dataset.train
    assert (whole.capacity, whole.partition_rows) == (1, 60)
    for wrong, told in (
        ({"memory": 500.0}, "two partitions and their edges, of at most 8: got"),
        ({"row_bytes": 16}, "row_bytes must be the 32 bytes of a row: got"),
        ({"order": "memory"}, "memory is of order=beta and comet"),
    ):
        with pytest.raises(ConfigError, match=told):
            make(source, state, **own | wrong)
