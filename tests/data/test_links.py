"""Links as examples: what is read, what an epoch has, what is resident."""

import dataclasses
import gzip
import itertools
import logging
import pathlib

import jax
import numpy as np
import pytest

from hpcjax import data, graphs
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import wordnet
from hpcjax.data.link_source import LinkSampler
from hpcjax.data.triples import Triples
from hpcjax.runs import directory

CUT = {"partitions": 8, "capacity": 4, "group": 2, "edges": 16, "negatives": 6}
ROOT = directory.data_root(pathlib.Path(__file__).parents[2])
ORDERS = ("memory", "beta", "comet", "one_fill")


def graph(entities=60, links=700):
    drawn = np.random.default_rng(0).integers([entities, 3, entities], size=(links, 3))
    train, valid, test = np.split(np.unique(drawn, axis=0).astype("i4"), [600, 640])
    return Triples(train, valid, test, entities, 3)


def sampler(order, **fields):
    return LinkSampler(graph(), data.LinksConfig(order=order, **{**CUT, **fields}))


def epoch(source, number, batch_size, seed=5):
    count = source.epoch_batches(batch_size)
    numbers = range(number * count, (number + 1) * count)
    return [source.sample(each, batch_size, seed, (0, 1)) for each in numbers]


def scored(batches):
    rows = [b["x"]["triples"][b["scored"] > 0] for b in batches]
    return [tuple(row) for row in np.concatenate(rows).tolist()]


@pytest.mark.acceptance("marius", 4)
@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_epoch_has_each_link_once_in_a_new_order(order, batch_size):
    source = sampler(order)
    states = {"memory": 1, "beta": 10, "comet": 6}[order]
    assert source.epoch_batches(batch_size) == -(-600 // (16 * batch_size)) + states - 1
    made = [scored(epoch(source, number, batch_size)) for number in range(2)]
    for each in made:
        assert sorted(each) == sorted(map(tuple, graph().train.tolist()))
    assert made[0] != made[1]


@pytest.mark.acceptance("marius", 5)
def test_groups_of_comet_are_drawn_for_each_epoch():
    config = data.LinksConfig(order="comet", **CUT)
    states = [config.draw(1, number).states for number in range(6)]
    for one, other in itertools.combinations(states, 2):
        assert not np.array_equal(one, other)
    np.testing.assert_array_equal(config.draw(1, 2).states, states[2])


@pytest.mark.parametrize("order", ORDERS[1:])
def test_all_of_a_batch_is_resident_and_filled_up_with_what_is(order):
    source, size = sampler(order, by_degree=0.5), 8
    seen = set()
    for batch in epoch(source, 3, 2):
        ends = batch["x"]["triples"][..., ::2]
        assert ends.shape == (2, 16, 2)
        parts = {*(ends // size).ravel(), *(batch["x"]["negatives"] // size).ravel()}
        assert len(parts) <= 4
        seen.add(frozenset(parts))
    if order == "one_fill":
        every = {scored_ for b in epoch(source, 0, 2) for scored_ in scored([b])}
        assert len(frozenset.union(*seen)) == 4
        later = {each for b in epoch(source, 4, 2) for each in scored([b])}
        assert every == later


def test_negatives_are_of_their_example_uniform_or_by_degree():
    links = graph()
    skewed = links._replace(train=links.train // [6, 1, 6] * [6, 1, 6])
    told = {}
    for share in (0.0, 1.0):
        config = data.LinksConfig(negatives=50, by_degree=share, edges=64)
        source = LinkSampler(skewed, config)
        drawn = [source.sample(n, 2, 0, (0, 1))["x"]["negatives"] for n in range(60)]
        every = np.stack(drawn)
        assert not np.array_equal(every[0, 0], every[0, 1])
        assert not np.array_equal(every[0, 0, 0], every[0, 0, 1])
        told[share] = np.bincount(every.ravel(), minlength=60) / every.size
    degrees = np.bincount(skewed.train[:, ::2].ravel(), minlength=60)
    np.testing.assert_allclose(told[0.0], 1 / 60, atol=5e-3)
    np.testing.assert_allclose(told[1.0], degrees / degrees.sum(), atol=1.5e-2)


def test_known_negatives_are_hidden_on_request():
    source = sampler("memory", filtered=True, negatives=20)
    known = set(map(tuple, graph().train.tolist()))
    batch = source.sample(3, 2, 0, (0, 1))
    count = 0
    for row, side, edge, place in np.ndindex(batch["hidden"].shape):
        head, relation, tail = batch["x"]["triples"][row, edge].tolist()
        wrong = int(batch["x"]["negatives"][row, side, place])
        made = (head, relation, wrong) if side == 0 else (wrong, relation, tail)
        assert batch["hidden"][row, side, edge, place] == (made in known)
        count += made in known
    assert count
    assert "hidden" not in sampler("memory").sample(3, 2, 0, (0, 1))


def test_shards_have_the_examples_of_the_whole_batch():
    source = sampler("comet")
    whole = source.sample(9, 4, 1, (0, 1))
    parts = [source.sample(9, 4, 1, (index, 2)) for index in range(2)]
    for all_, *each in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
        np.testing.assert_array_equal(all_, np.concatenate(each))
    other = source.sample(9, 4, 2, (0, 1))
    assert not np.array_equal(other["x"]["triples"], whole["x"]["triples"])


def test_held_out_links_come_with_all_known_answers(tiny_root):
    config = data.LinksConfig(source="nations", edges=16, negatives=4)
    links, loaded = config.read(tiny_root), config.load(tiny_root)
    assert loaded.tables == (14, 5)
    known = {tuple(t) for part in links[:3] for t in part.tolist()}
    batch = loaded.validation.gather(np.arange(2))
    assert batch["scored"].sum() == len(links.valid) == 20
    np.testing.assert_array_equal(
        batch["x"]["triples"][batch["scored"] > 0], links.valid
    )
    for (head, relation, tail), given in zip(
        links.valid.tolist(), batch["known"][batch["scored"] > 0], strict=True
    ):
        assert {*given[0]} - {14} == {
            t for t in range(14) if (head, relation, t) in known
        }
        assert {*given[1]} - {14} == {
            h for h in range(14) if (h, relation, tail) in known
        }
    test = dataclasses.replace(config, holdout="test").load(tiny_root)
    assert test.validation.gather(np.arange(2))["scored"].sum() == 30


def test_permuted_numbers_are_the_same_graph(tiny_root):
    plain = data.LinksConfig(source="umls", permuted=False).read(tiny_root)
    moved = data.LinksConfig(source="umls").read(tiny_root)
    order = np.full(14, -1)
    order[plain.train[:, 0]] = moved.train[:, 0]
    order[plain.train[:, 2]] = moved.train[:, 2]
    assert sorted(order) == list(range(14))
    assert (order != np.arange(14)).any()
    for one, other in zip(plain[:3], moved[:3], strict=True):
        np.testing.assert_array_equal(order[one[:, ::2]], other[:, ::2])
        np.testing.assert_array_equal(one[:, 1], other[:, 1])


def test_wordnets_links_are_its_pointers_without_inverse_ones(tiny_root):
    links = data.LinksConfig(source="wordnet", permuted=False).read(tiny_root)
    # Each of 400 sets points to the first noun (0); antonyms are left out.
    assert (links.entities, links.relations) == (400, 1)
    assert [len(each) for each in links[:3]] == [320, 40, 40]
    every = sorted(np.concatenate(links[:3]).tolist())
    assert every == [[each, 0, 0] for each in range(400)]
    other = data.LinksConfig(source="wordnet", permuted=False, split_seed=1)
    assert not np.array_equal(other.read(tiny_root).test, links.test)


@pytest.mark.acceptance("marius", 10)
@pytest.mark.slow
def test_wordnet_has_the_figures_of_the_specification():
    if not data.is_present("wordnet", ROOT):
        pytest.skip("wordnet is not here: hpcjax data fetch wordnet")
    links = data.LinksConfig(source="wordnet").read(ROOT)
    assert [len(each) for each in links[:3]] == [215_070, 3000, 3000]
    assert (links.entities, links.relations) == (117_659, 15)
    found = wordnet.read_pointers(ROOT)
    edges = np.stack([found.senders, found.receivers], 1)
    assert len(edges) == 377_592
    biases, groups = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        moved = rng.permutation(links.entities)[edges]
        both = graphs.beta(16, 4, rng), graphs.comet(64, 16, 8, rng)
        counts = [
            graphs.incident_counts(each, moved, links.entities, 64) for each in both
        ]
        biases.append([graphs.edge_permutation_bias(each).max() for each in counts])
        groups.append(
            [
                np.average(graphs.effective_groups(each), weights=each.sum(1))
                for each in counts
            ]
        )
    less = -np.diff(biases)
    assert less.min() > 0
    assert less.mean() >= 0.03
    assert (np.divide(*np.transpose(groups)[::-1]) >= 1.15).all()


def write(folder, train, valid="a\tr\tb\n", test="b\tr\ta\n"):
    (folder / "train.txt.gz").write_bytes(gzip.compress(train.encode()))
    (folder / "valid.txt").write_text(valid)
    (folder / "test.txt").write_text(test)
    return data.LinksConfig(source=str(folder), edges=2, negatives=2)


GOOD = "a\tr\tb\nb\ts\tc\n"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((GOOD + "a\tr\n",), r"train.txt.gz: line 3: expected head, relation and tail"),
        ((GOOD + "a\tr\tb\tc\n",), r"line 3: expected head.*found 'a\\tr\\tb\\tc'"),
        ((GOOD, "a\tr\tb\n\n"), r"valid.txt: line 2: expected head"),
        (
            (GOOD, "a\tr\tb\na\tq\tb\nc\tq\tb\n"),
            r"valid.txt: line 2: .*'q', and 2 such",
        ),
        ((GOOD, "a\tr\tb\n", ""), r"test.txt: line 1: expected a line, found an empty"),
    ],
)
def test_files_of_another_form_are_refused_with_their_line(tmp_path, parts, words):
    with pytest.raises(DataFormatError, match=words):
        write(tmp_path, *parts).load(tmp_path)


def test_entities_without_a_training_link_are_counted_and_told(tmp_path, caplog):
    config = write(tmp_path, GOOD, "a\tr\tb\nx\tr\ty\n")
    with caplog.at_level(logging.WARNING):
        assert config.load(tmp_path).tables == (5, 2)
    assert "valid.txt: 2 ends of links are entities" in caplog.text
    assert "first in line 2" in caplog.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"order": "comet", "capacity": 8}, "two groups must be resident"),
        ({"order": "comet", "partitions": 60}, "group must divide partitions"),
        ({"order": "beta", "capacity": 1}, "capacity must be at least 2"),
        ({"by_degree": 1.5}, "by_degree must be in"),
        ({"negatives": 0}, "negatives must be an integer >= 1"),
    ],
)
def test_configs_refuse_what_cannot_be(fields, words):
    with pytest.raises(ConfigError, match=words):
        data.LinksConfig(**fields)


def test_a_first_state_without_links_and_keys_that_wrap_are_refused():
    alone = graph()._replace(train=np.array([[0, 0, 59]], np.int32))
    fields = {"partitions": 8, "capacity": 2, "negatives": 2}
    source = LinkSampler(alone, data.LinksConfig(order="one_fill", **fields))
    refused = 0
    for seed in range(5):
        held = data.LinksConfig(order="one_fill", **fields).draw(seed, 0).states[0]
        if not {0, 7} <= {*held.tolist()}:
            refused += 1
            with pytest.raises(ConfigError, match="first state of order=one_fill"):
                source.sample(0, 1, seed, (0, 1))
    assert refused
    wide = alone._replace(entities=2**31, relations=2)
    with pytest.raises(ConfigError, match=r"entities² · relations below 2\*\*63"):
        LinkSampler(wide, data.LinksConfig(filtered=True))


def test_more_negatives_than_are_resident_and_missing_files_are_refused(
    tiny_root, tmp_path
):
    small = {"source": "nations", "order": "beta", "partitions": 7, "capacity": 2}
    with pytest.raises(ConfigError, match="got negatives=5, resident=4"):
        data.LinksConfig(negatives=5, **small).load(tiny_root)
    data.LinksConfig(negatives=4, **small).load(tiny_root)
    with pytest.raises(DataMissing, match=r"put train.txt.*wn18rr"):
        data.LinksConfig().load(tmp_path)
    with pytest.raises(DataMissing, match="hpcjax data fetch nations"):
        data.LinksConfig(source="nations").load(tmp_path)
    with pytest.raises(DataMissing, match="did you mean 'nations'"):
        data.LinksConfig(source="nation").load(tmp_path)
