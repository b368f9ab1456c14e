"""Blocks as examples of the training loop."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from hpcjax import data, graphs, metrics, models, train
from hpcjax.core.errors import ConfigError
from hpcjax.data.block_source import BlockMaker, BlockSampler
from hpcjax.data.record_source import as_records
from hpcjax.runs import overrides
from hpcjax.runs.training import TrainingConfig
from tests.train import tiny

SOURCE = data.CommunityGraphConfig(vertices=120, degree=6.0, classes=3)
CONFIG = data.SampledGraphConfig(source=SOURCE, fanouts=(3, 2), block=16, spare=1.0)


def leaves(batch):
    return jax.tree.leaves(batch)


@pytest.fixture(scope="module")
def loaded():
    return CONFIG.load()


def test_an_epoch_has_each_vertex_once_in_a_new_order(loaded):
    assert len(loaded.train) == 4  # 60 vertices in blocks of 16
    orders = []
    for epoch in range(3):
        made = [loaded.train.make(4 * epoch + place, 5) for place in range(4)]
        orders.append(np.concatenate([b.vertices[b.hop_offsets[-2] :] for b in made]))
    assert not np.array_equal(orders[0], orders[1])
    numbers = set(SOURCE.load().train.numbers)
    assert all(len(each) == 60 and set(each) == numbers for each in orders)
    batch = loaded.train.sample(0, 4, 5, (0, 1))
    assert batch["scored"].sum(1).tolist() == [16, 16, 16, 12]
    np.testing.assert_array_equal(
        batch["y"][batch["scored"] > 0], loaded.train._maker.labels[orders[0]]
    )


def test_a_block_is_drawn_for_its_seed_its_epoch_and_its_place(loaded):
    own = loaded.train
    sampler = BlockSampler(own._maker, lambda _, draw: draw, own._vertices, 0.0)
    assert sampler.make(4 * 2 + 3, 5) == graphs.Draw(5, 2, 3)


def test_shards_have_the_blocks_of_the_whole_batch(loaded):
    whole = loaded.train.sample(3, 4, 1, (0, 1))
    parts = [loaded.train.sample(3, 4, 1, (index, 2)) for index in range(2)]
    for all_, *each in zip(leaves(whole), *map(leaves, parts), strict=True):
        np.testing.assert_array_equal(all_, np.concatenate(each))
    again = CONFIG.load().train.sample(3, 4, 2, (0, 1))
    assert not np.array_equal(again["y"], whole["y"])


def test_a_block_above_the_ladder_climbs_it_and_is_refused_between_processes():
    few = data.SampledGraphConfig(source=SOURCE, fanouts=(3, 2), block=16, spare=0.0)
    blocks = few.load().train
    rows = [blocks.sample(n, 1, 0, (0, 1))["x"].senders.shape[1] for n in range(40)]
    assert len(set(rows)) == 2
    assert max(rows) / min(rows) == pytest.approx(2**0.5, rel=0.05)
    large = int(np.argmax(rows))
    with pytest.raises(ConfigError, match=r"raise dataset\.spare=0\.0"):
        blocks.sample(large // 2, 2, 0, (large % 2, 2))


def test_validation_has_one_shape_and_fixed_draws(loaded):
    source = loaded.validation
    assert len(source) == 2
    both = source.gather(np.arange(2))
    one = source.gather(np.array([1]))
    for whole, part in zip(leaves(both), leaves(one), strict=True):
        np.testing.assert_array_equal(whole[1:], part)
    every = data.SampledGraphConfig(
        source=SOURCE, fanouts=(3, 2), block=16, evaluate="all"
    ).load()
    x = every.validation.gather(np.arange(2))["x"]
    assert set(np.unique(x.weights)) == {0, 1}  # every list is whole


def test_validation_of_whole_neighbourhoods_scores_what_the_whole_graph_does():
    """Its last block is not full, and its last batch has a block too few."""
    config = dataclasses.replace(CONFIG, block=9, evaluate="all")
    totals, shared = [], None
    for dataset in (SOURCE.load(), config.load()):
        how = {"layer": "sage", "hidden": 4}
        model = models.gnn(dataset.inputs, 3, graph=dataset.graph, **how)
        params, state = shared = shared or model.init(jax.random.key(0))
        found = 0.0
        for batch in data.evaluation_batches(dataset.validation, 2):
            logits, _ = model.apply(params, state, batch["x"], train=False)
            told = metrics.label_totals(logits, batch)
            found += np.array([told.sums["loss"], told.sums["error"], told.count])
        totals.append(found)
    assert totals[0][2] == 24
    np.testing.assert_allclose(*totals, rtol=1e-5)


def test_sparse_features_travel_as_entries():
    rng = np.random.default_rng(0)
    dense = rng.random((30, 7)) * (rng.random((30, 7)) < 0.3)
    rows, columns = np.nonzero(dense)
    sparse = graphs.SparseRows(
        offsets=np.searchsorted(rows, np.arange(31)),
        columns=columns,
        values=dense[rows, columns],
        width=7,
    )
    ends = rng.integers(0, 30, (2, 90))
    graph = graphs.make_graph(*ends, 30, features=sparse)
    csr, targets = graphs.Csr.of(graph), np.array([3, 9])
    blocks = graphs.dense_blocks(csr, (2, 2), targets, graphs.Draw(0))
    maker = BlockMaker(graph, csr, np.zeros(30), 2)
    x = maker.batch([blocks], maker.sizes(blocks) + 5)["x"]
    entries = {name: each[0] for name, each in x.features.items()}
    found = graphs.make_dense(graphs.SparseRows(**entries, width=7))
    padded = graphs.pad_blocks(blocks, np.diff(x.hop_offsets), np.diff(x.edge_offsets))
    real = padded.vertices >= 0
    np.testing.assert_array_equal(found[real], dense[padded.vertices[real]])
    assert not found[~real].any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fanouts": (3, 0)}, r"fanouts\[1\] must be at least 1, or -1"),
        ({"fanouts": (-2,)}, r"fanouts\[0\] must be at least 1, or -1"),
        ({"fanouts": ()}, "there must be a fanout"),
        ({"block": 61}, "block must be at most the 60 training vertices"),
        ({"source": data.DigitsConfig()}, "source must be of vertices"),
    ],
)
def test_what_cannot_be_sampled_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        data.SampledGraphConfig(**{"source": SOURCE, **fields}).load()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"depth": 3}, "got 2 fanouts, model.depth=3"),
        ({"layer": "sgc"}, "allowed are model.layer=gcn, sage, gat, mlp, and gin"),
        ({"layer": "gin"}, "got gin with features of edges"),
    ],
)
def test_what_cannot_be_computed_of_blocks_is_refused(fields, words):
    ones = np.ones((2, 3), np.float32)
    graph = graphs.make_graph([0, 1], [1, 0], 2, features=ones, edge_features=ones)
    with pytest.raises(ConfigError, match=words):
        models.gnn((2, 16), 3, graph=graph, **fields)


def test_weighted_sums_are_unbiased(loaded):
    """Means of 400 draws, within five standard errors of the sum over all."""
    graph, labels = loaded.graph, loaded.train._maker.labels
    csr, every = graphs.Csr.of(graph), np.arange(graph.vertices)
    maker, values = BlockMaker(graph, csr, labels, graph.vertices), every + 1.0
    sums = []
    for position in range(400):
        blocks = graphs.dense_blocks(csr, (3,), every, graphs.Draw(0, 0, position))
        x = maker.batch([blocks], maker.sizes(blocks))["x"]
        sent = x.weights[0] * np.append(values, 0)[x.senders[0] - 1]
        rows = np.append(every, -1)
        assert x.hop_offsets[1] == 1  # a row that pads, then all vertices
        sums.append(np.bincount(x.receivers[0], sent, len(rows) + 1)[1:-1])
    exact = np.bincount(graph.receivers, values[graph.senders], graph.vertices)
    error = np.std(sums, 0) / 20
    assert (abs(np.mean(sums, 0) - exact) <= 5 * error + 1e-3).all()
    assert error.max() > 1


def test_nobody_can_say_what_a_sampler_will_read(loaded):
    with pytest.raises(ConfigError, match="take input=read_ahead"):
        as_records(loaded.train)


@pytest.mark.acceptance("marius", 11)
def test_devices_have_blocks_of_their_own_and_each_shape_is_compiled_once():
    """One device with two blocks, or two with one each: the same parameters."""
    config = data.SampledGraphConfig(source=SOURCE, fanouts=(3, 2), block=16, spare=0.0)
    dataset = config.load()
    model = models.gnn(dataset.inputs, 3, graph=dataset.graph, layer="sage", hidden=4)
    shapes = {
        leaves(dataset.train.sample(n, 2, 0, (0, 1))["x"])[0].shape for n in range(8)
    }
    assert len(shapes) == 2
    found = []
    for devices in (1, 2):
        task = train.supervised(model, optax.sgd(0.1), dataset)
        records = tiny.Records()
        settings = train.TrainConfig(steps=8, batch_size=2, eval_every=8)
        state = train.fit(
            task, settings, seed=0, mesh=task.mesh(devices), recorder=records
        )
        assert sum(record.get("shapes", 0) for record in records) == len(shapes)
        assert np.isfinite(records[-1].get("val_loss", 0))
        found.append(jax.device_get(state.params))
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=0, atol=1e-6), *found
    )


def test_a_misspelled_key_is_told_though_a_part_has_one_of_its_own_kind():
    with pytest.raises(ConfigError, match=r"unknown key 'dataset\.source\.vertexes'"):
        overrides.parse(
            TrainingConfig(dataset=CONFIG, model=models.GnnConfig()),
            {"dataset.source.vertexes": "3"},
        )


@pytest.mark.acceptance("graphsnapshot", 9)
@pytest.mark.parametrize(
    "policy",
    [
        graphs.FullBatch(),
        graphs.FullRefresh(period=3),
        graphs.OnTheFly(fetch="partial"),
        graphs.OnTheFly(refresh="full", period=3),
    ],
)
def test_batches_of_a_snapshot_go_on_where_they_were(policy):
    """Twenty of them, without a state of its own in a checkpoint."""
    sampler = data.SnapshotConfig(policy=policy, threshold=3)
    config = dataclasses.replace(CONFIG, sampler=sampler)
    made, again = config.load().train, config.load().train
    want = [made.sample(number, 2, 5, (0, 1)) for number in range(25)]
    figures = made.figures()
    alone = config.load().train
    alone.sample(0, 2, 5, (0, 1))
    few = alone.figures()  # of the batch, not of what sizes were probed with
    for position in (0, 1):
        again.make(position, 5)
    assert few == again.figures()
    assert figures["snapshot_bytes"] > 0 or policy == graphs.FullBatch()
    assert figures["read_entries"] > 0
    assert (figures["read_hits"] > 0) == (policy != graphs.FullBatch())
    for number in range(5, 25):
        found = again.sample(number, 2, 5, (0, 1))
        for one, other in zip(leaves(found), leaves(want[number]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_processes_share_a_snapshot_that_depends_on_none_and_validation_has_no_rows():
    sampler = data.SnapshotConfig(policy=graphs.FullRefresh(period=2), threshold=3)
    fcr = dataclasses.replace(CONFIG, sampler=sampler).load()
    whole = fcr.train.sample(3, 4, 1, (0, 1))
    parts = [fcr.train.sample(3, 4, 1, (index, 2)) for index in range(2)]
    for all_, *each in zip(leaves(whole), *map(leaves, parts), strict=True):
        np.testing.assert_array_equal(all_, np.concatenate(each))
    plain = dataclasses.replace(CONFIG, sampler=data.LayerwiseConfig()).load()
    seen = [held.validation.gather(np.arange(2)) for held in (fcr, plain)]
    for one, other in zip(*map(leaves, seen), strict=True):
        np.testing.assert_array_equal(one, other)
    fly = dataclasses.replace(
        CONFIG, sampler=data.SnapshotConfig(policy=graphs.OnTheFly())
    )
    with pytest.raises(ConfigError, match="or one process"):
        fly.load().train.sample(0, 2, 0, (0, 2))
