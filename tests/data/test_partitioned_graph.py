"""Blocks of a graph in files: those of memory, and of what is resident."""

import dataclasses
import os
import pathlib
import resource
import sys

import jax
import numpy as np
import optax
import pytest

from hpcjax import data, graphs, models, train
from hpcjax.core.errors import ConfigError, DataFormatError, DiskFull
from tests.train import tiny

SOURCE = data.CommunityGraphConfig(vertices=120, degree=6.0, classes=3, labelled=40)
GIVEN = {"source": SOURCE, "fanouts": (3, 2), "block": 16, "spare": 1.0}
MEMORY = data.SampledGraphConfig(**GIVEN)
CONFIG = data.PartitionedGraphConfig(**GIVEN, partitions=9, capacity=9)
FEW = dataclasses.replace(CONFIG, capacity=5)  # of which three are of training


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.acceptance("marius", 9)
@pytest.mark.parametrize("relabel", ["random", "given", "classes"])
@pytest.mark.parametrize(
    "sampler", [data.DenseConfig(replace=True), data.LayerwiseConfig()]
)
def test_all_partitions_give_the_batches_of_memory_to_the_bit(root, relabel, sampler):
    memory = dataclasses.replace(MEMORY, sampler=sampler).load()
    own = dataclasses.replace(CONFIG, sampler=sampler, relabel=relabel).load(root)
    for number in (0, 1, 2, 7):
        for shard in ((0, 1), (1, 2)):
            assert_same(*(x.train.sample(number, 2, 5, shard) for x in (memory, own)))
    every = np.arange(len(memory.validation))
    assert_same(*(x.validation.gather(every) for x in (memory, own)))


@pytest.mark.parametrize("evaluate", ["sampled", "all"])
def test_vertices_that_nobody_knows_are_held_out_as_in_memory(root, evaluate):
    """A hop that finds no new vertex, and partitions that have none."""
    source = dataclasses.replace(SOURCE, degree=0.5)
    own = {"source": source, "block": 1, "evaluate": evaluate}
    memory = dataclasses.replace(MEMORY, **own).load()
    few = dataclasses.replace(CONFIG, **own, partitions=50, capacity=50).load(root)
    every = np.arange(len(memory.validation))
    blocks = memory.validation.gather(every)
    assert (blocks["x"].degrees[:, -2] == 0).any()  # the target's row, before a pad
    assert_same(blocks, few.validation.gather(every))
    assert_same(*(x.train.sample(5, 2, 5, (0, 1)) for x in (memory, few)))


def closed(config, root=None):
    """A graph in memory whose vertices to train on know each other alone."""
    whole = SOURCE.load()
    own, graph = np.isin(np.arange(120), whole.train.numbers), whole.graph
    kept = own[graph.senders] == own[graph.receivers]
    ends = graph.senders[kept], graph.receivers[kept]
    return whole._replace(graph=graphs.make_graph(*ends, 120, features=graph.features))


@pytest.mark.acceptance("marius", 9)
def test_a_part_that_is_closed_gives_the_batches_of_memory(root, monkeypatch):
    monkeypatch.setattr(data.KarateConfig, "load", closed)  # which cannot stream
    for source, same in ((data.KarateConfig(), True), (SOURCE, False)):
        own = {"source": source, "fanouts": (-1, -1)}
        memory = dataclasses.replace(MEMORY, **own).load()
        few = dataclasses.replace(FEW, **own).load(root)
        for number in (0, 3, 1):
            both = [x.train.sample(number, 1, 5, (0, 1)) for x in (memory, few)]
            if same:
                assert_same(*both)
            else:
                assert both[0]["x"].weights.sum() > both[1]["x"].weights.sum()


def residents(config, root, seed, epoch):
    """Vertices that are resident, by the numbers of partitions alone."""
    store = config.load(root).train._store
    parts = config.draw(3, seed, epoch)
    return np.isin(store.place // store.size, parts), store


@pytest.mark.parametrize("order", ["sequential", "one_fill"])
def test_neighbours_are_those_resident_and_others_are_drawn_for_each_epoch(root, order):
    config = dataclasses.replace(FEW, fanouts=(-1, -1), order=order)
    graph = SOURCE.load().graph
    sampler, states = config.load(root).train, []
    for epoch in (2, 0, 1):  # as a run that goes on would ask for them
        here, store = residents(config, root, 7, epoch)
        assert here[store.train].all()
        states.append(here.tolist())
        blocks = sampler.make(3 * epoch, 7)
        assert here[blocks.vertices].all()
        first = blocks.vertices[blocks.hop_offsets[1] :]
        known = np.isin(graph.receivers, first) & here[graph.senders]
        assert sorted(blocks.edge_ids) == np.flatnonzero(known).tolist()
        np.testing.assert_array_equal(blocks.features, graph.features[blocks.vertices])
    assert len({*map(str, states)}) == (3 if order == "sequential" else 1)
    assert config.draw(3, 8, 0).tolist() != config.draw(3, 7, 0).tolist()


@pytest.mark.acceptance("marius", 7)
def test_bytes_read_are_those_of_swaps_and_of_buckets(root):
    """Counted by the system as well, where it counts."""
    sampler, graph = FEW.load(root).train, SOURCE.load().graph
    counted, wanted, held = _bytes_by_the_system(), 0, set()
    for epoch in range(6):
        sampler.make(3 * epoch, 7)
        here, store = residents(FEW, root, 7, epoch)
        state = {*FEW.draw(3, 7, epoch).tolist()}
        rows = np.isin(store.place // store.size, [*(state - held)]).sum()
        edges = here[graph.senders] & here[graph.receivers]
        wanted += rows * 3 * 4 + edges.sum() * 12
        held = state
    told = sampler.figures()
    assert told["read_bytes"] == wanted
    assert told["graph_bytes"] == 120 * 3 * 4 + len(graph.senders) * 12
    assert told["resident_bytes"] < 0.6 * told["graph_bytes"]
    if counted is not None:
        assert _bytes_by_the_system() - counted >= wanted


def _bytes_by_the_system():
    if sys.platform != "linux":
        return None
    text = pathlib.Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


def test_rows_of_a_hash_are_the_same_in_pieces(root):
    wide = dataclasses.replace(SOURCE, width=7, held=20, holdout="test")
    whole, (held, rows) = wide.load(), wide.stream()
    features = whole.graph.features
    assert features.dtype == np.float32
    np.testing.assert_array_equal(rows(np.array([5, 99])), features[[5, 99]])
    labels = whole.train.labels
    mean = features.mean(0), features[labels == 1].mean(0)
    assert mean[1][1] > 0.8 > mean[0][1]
    assert abs(features - np.eye(7)[labels]).max() <= 0.55 * 3**0.5
    assert (features - np.eye(7)[labels]).std() == pytest.approx(0.55, rel=0.1)
    assert (len(held.train), len(held.validation)) == (40, 20)
    small = data.PartitionedGraphConfig(**{**GIVEN, "source": wide}, partitions=9)
    own = dataclasses.replace(small, capacity=9).load(root)
    memory = dataclasses.replace(MEMORY, source=wide).load()
    assert_same(*(x.train.sample(4, 2, 5, (0, 1)) for x in (memory, own)))


class Either:
    """A data set's training part that can be put in the place of another."""

    def __len__(self):
        return len(self.own)

    def sample(self, *args):
        return self.own.sample(*args)


@pytest.mark.acceptance("marius", 9)
def test_training_from_files_and_going_on_gives_the_parameters_of_memory(
    root, tmp_path
):
    whole, either = MEMORY.load(), Either()
    how = {"graph": CONFIG.load(root).graph, "layer": "sage", "hidden": 4}
    model = models.gnn(whole.inputs, 3, **how)
    task = train.supervised(model, optax.adam(0.01), whole._replace(train=either))
    files, found = train.Checkpoints(tmp_path), []
    length = train.TrainConfig(steps=4, batch_size=2, eval_every=4, checkpoint_every=2)
    common = {"seed": 0, "mesh": task.mesh(1), "checkpoints": files}
    for config in (MEMORY, CONFIG):
        either.own, records = config.load(root).train, tiny.Records()
        state = train.fit(task, length, **common, recorder=records)
        found.append((jax.device_get(state.params), [x["step"] for x in records]))
        files.forget_after(2)
    (memory, _), (own, steps) = found
    assert_same(memory, own)
    assert {3, 4} <= {*steps} <= {2, 3, 4}  # it went on


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"capacity": 2}, "capacity must be from .* got capacity=2, least=3"),
        ({"capacity": 10}, "capacity must be from .* partitions=9"),
        ({"partitions": 121, "capacity": 121}, "partitions must be at most the 120"),
        ({"block": 41}, "block must be at most the 40 training vertices"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_written(tmp_path, fields, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(CONFIG, **fields).load(tmp_path)
    assert not [*tmp_path.rglob("*")]


def test_no_root_widths_and_labels_that_do_not_fit_are_refused():
    for config in (CONFIG, dataclasses.replace(CONFIG, memory=1e6)):
        with pytest.raises(ConfigError, match="below a data root: got root=None"):
            config.load()
    with pytest.raises(ConfigError, match="width must be 0, or at least the 3 classes"):
        dataclasses.replace(SOURCE, width=2)
    with pytest.raises(ConfigError, match=r"vertices must be more than .* labelled=99"):
        dataclasses.replace(SOURCE, labelled=99)


def test_damaged_files_and_those_of_another_graph_are_told(tmp_path):
    CONFIG.load(tmp_path)
    wide = dataclasses.replace(SOURCE, classes=4)
    dataclasses.replace(CONFIG, source=wide).load(tmp_path)
    one, other = (x.parent for x in sorted(tmp_path.rglob("index.npz")))
    if len(np.load(other / "index.npz")["labels"]) and _width(one) == 4:
        one, other = other, one
    edges, index = ((one / name).read_bytes() for name in ("edges", "index.npz"))
    same = dataclasses.replace(CONFIG, source=dataclasses.replace(SOURCE, noise=0.1))
    features = (same._find(tmp_path) / "features").read_bytes()
    for name, content, words in (
        ("edges", edges[:-5], f"expected {len(edges)} bytes, found {len(edges) - 5}"),
        ("features", (other / "features").read_bytes(), r"\[120, 3\] .* \[120, 4\]"),
        ("features", features, "rows of another graph"),
        ("index.npz", b"PK", "damaged"),
        ("index.npz", index[: len(index) // 2], "damaged: File is not a zip"),
        ("index.npz", index[:400] + b"?" + index[401:], "damaged: Bad CRC"),
    ):
        kept = (one / name).read_bytes()
        (one / name).write_bytes(content)
        with pytest.raises(DataFormatError, match=words):
            CONFIG.load(tmp_path)
        (one / name).write_bytes(kept)
    (one / "edges").write_bytes(edges[:-1] + b"\x7f")
    with pytest.raises(DataFormatError, match="bucket 80 has other bytes"):
        CONFIG.load(tmp_path).train.make(0, 0)


def _width(folder):
    return np.load(folder / "index.npz")["form"][1]


def test_files_are_only_read_once_they_are_there(monkeypatch, tmp_path):
    """By flags: a root's permissions do not hold for everybody."""
    wanted, opened, flags = CONFIG.load(tmp_path).train.make(0, 0), os.open, []

    def told(path, flag, *mode, **given):
        flags.append(flag & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return opened(path, flag, *mode, **given)

    monkeypatch.setattr(os, "open", told)
    own = CONFIG.load(tmp_path)
    assert_same(own.train.make(0, 0), wanted)
    own.validation.gather(np.arange(1))
    assert {*flags} == {os.O_RDONLY}


def test_nothing_is_left_of_a_build_that_failed_or_was_killed(monkeypatch, tmp_path):
    def fail(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", fail)
        with pytest.raises(KeyboardInterrupt):
            CONFIG.load(tmp_path)
    assert [x.suffix for x in tmp_path.glob("*/*")] == [".lock"]
    folder = CONFIG._find(tmp_path)
    (folder / "index.npz").unlink()
    (folder / "edges").write_bytes(b"half")
    (folder / ".features.x").touch()  # of a process that has no end of its own
    CONFIG.load(tmp_path).train.make(0, 0)
    assert sorted(os.listdir(folder)) == ["edges", "features", "index.npz"]


def test_a_full_disk_is_told_and_what_is_there_is_made_again(tmp_path):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most[1]))
    try:
        with pytest.raises(DiskFull):
            CONFIG.load(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert [x.suffix for x in tmp_path.glob("*/*")] == [".lock"]
    assert len(CONFIG.load(tmp_path).train) == 3
    assert os.listdir(tmp_path) == ["partitioned_graphs"]
