"""Programs as examples: parts, labels, unions, and what is kept or refused."""

import dataclasses
import functools
import logging

import jax
import numpy as np
import optax
import pytest

from hpcjax import data, metrics, models, train
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import program_source
from hpcjax.ir import programs
from hpcjax.ir.programs import analyses
from tests.ir.programs.modules import FIB, real
from tests.train import tiny

CONFIG = data.ProgramsConfig(
    task="data_dependence", limit=20, block=4, steps=20, spare=1.0
)


@functools.cache
def loaded():
    return CONFIG.load()


def test_a_union_has_the_labels_of_its_graphs_and_one_root_of_each():
    own = loaded()
    batch = own.train.sample(0, 2, 0, (0, 1))
    x, y = batch["x"], batch["y"]
    assert set(x) == set(own.objective.inputs)
    assert all(each.dtype == np.int32 for each in [*x.values(), y])
    assert (x["selected"].sum(1) == 4).all()
    made = own.train.make(0, 0)
    count = made.vertices
    np.testing.assert_array_equal(batch["scored"][0], np.arange(y.shape[1]) < count)
    np.testing.assert_array_equal(y[0, :count], made.features[:, 2])
    assert not y[0, count:].any()
    # What pads is an edge of the last vertex, which nothing else has.
    pads = x["senders"][0, len(made.senders) :]
    assert (pads == y.shape[1] - 1).all()
    assert x["texts"].max() < own.tables[0]


def test_an_example_is_what_the_analysis_says_of_its_root():
    graph = programs.from_llvm_ir(FIB)
    for edges, flow in (("no_data", 1), ("no_control", 0), ("cdfg", 2)):
        config = dataclasses.replace(CONFIG, task="reachability", edges=edges)
        examples, parts, words, _ = program_source.make_examples(config, [graph] * 5)
        assert [len(part) for part in parts] == [10, 0, 0]  # equal files, one part
        for example in examples:
            text, selected, labels = example.features.T
            (root,) = np.flatnonzero(selected)
            found = programs.reachability(graph, root)
            kept = 13 if edges == "cdfg" else 27
            np.testing.assert_array_equal(labels, found.values[:kept])
            assert words[text[root]] == graph.texts[root]
            assert flow not in example.edge_type


def test_no_graph_is_in_two_parts_and_steps_are_bounded():
    made = [*real()]
    parts = program_source.split_files(made, 0)
    assert sorted(n for part in parts for n in part) == list(range(len(made)))
    assert [len(part) for part in parts] == [12, 4, 4]
    few = dataclasses.replace(CONFIG, steps=4)
    numbers = [len(program_source.make_examples(c, made)[0]) for c in (few, CONFIG)]
    assert 0 < numbers[0] < numbers[1]


def test_graphs_are_made_once_and_damage_is_told(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.ll").write_text(FIB)
    root = tmp_path / "data"
    read = functools.partial(program_source.read_graphs, str(folder), "ssa", None, root)
    (first,) = read().values()
    monkeypatch.setattr(programs, "from_llvm_ir", None)
    (again,) = read().values()
    assert again.texts == first.texts
    for name in ("kinds", "functions", "flow", "position", "source", "target"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))
        assert getattr(again, name).dtype == np.int32
    (kept,) = root.rglob("*.npz")
    kept.write_bytes(kept.read_bytes()[:-30])
    with pytest.raises(DataFormatError, match=r"damaged: .* delete it"):
        read()


def test_what_llvm_cannot_read_is_left_out_and_told(tmp_path, caplog):
    (tmp_path / "a.ll").write_text(FIB)
    (tmp_path / "b.ll").write_text("define")
    read = functools.partial(program_source.read_graphs, str(tmp_path), "ssa")
    with caplog.at_level(logging.WARNING):
        assert len(read(None, None)) == 1
    assert "1 of 2 files are left out, the first being b.ll: LLVM" in caplog.text
    (tmp_path / "a.ll").unlink()
    with pytest.raises(DataFormatError, match=r"LLVM can read none of 1 files: b\.ll"):
        read(None, None)


def test_only_an_analysis_without_an_end_leaves_an_example_out(monkeypatch):
    def make(error):
        def refuse(graph, root):
            raise error("no")

        every = {**programs.ANALYSES, "dominance": refuse}
        monkeypatch.setattr(programs, "ANALYSES", every)
        config = dataclasses.replace(CONFIG, task="dominance")
        return program_source.make_examples(config, [programs.from_llvm_ir(FIB)])[0]

    assert make(analyses.NotConverged) == []
    with pytest.raises(ConfigError, match="no"):
        make(ConfigError)


def test_another_archive_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.bz2").write_bytes(b"no")
    monkeypatch.setattr(program_source, "_POJ104", tmp_path / "a.bz2")
    with pytest.raises(DataFormatError, match=r"a\.bz2: expected the archive with"):
        program_source.read_texts("poj104")


def test_positions_that_are_too_high_are_told_once(caplog):
    graph = programs.from_llvm_ir(FIB)
    far = dataclasses.replace(graph, position=graph.position + 1023)
    examples, *_ = program_source.make_examples(
        dataclasses.replace(CONFIG, task="reachability"), [far]
    )
    assert max(int(e.edge_features.max()) for e in examples) == 1023
    assert caplog.text.count("are above 1023, which they are taken for") == 1


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"edges": "cdfg"}, ConfigError, "instructions alone"),
        ({"block": 4000}, ConfigError, "as many examples to train on as block"),
        ({"source": "/nowhere"}, DataMissing, "no folder with files .ll at /nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_refused(fields, error, words):
    with pytest.raises(error, match=words):
        dataclasses.replace(CONFIG, limit=3, **fields).load()


def test_f1_is_of_the_sums_of_parts():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 40, 2)).astype("f4")
    y, scored = rng.integers(0, 2, (2, 3, 40))
    batch = {"y": y, "scored": scored.astype("f4"), "weight": np.array([1.0, 0, 1])}
    told = metrics.positive_totals(logits, batch)
    kept = (scored > 0) & (np.arange(3) != 1)[:, None]
    guessed = logits.argmax(-1)
    assert told.count == kept.sum()
    assert told.sums["true"] == (guessed * y)[kept].sum()
    assert told.sums["predicted"] == guessed[kept].sum()
    assert told.sums["actual"] == y[kept].sum()
    wanted = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, y[..., None], -1
    ).squeeze(-1)
    np.testing.assert_allclose(told.sums["loss"], wanted[kept].sum(), rtol=1e-5)


def test_of_the_first_five_are_the_largest_and_equal_ones_say_nothing():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (3, 6, 9)).astype("f4")  # with many ties
    y, scored = rng.integers(0, [[[9]], [[2]]], (2, 3, 6))
    batch = {"y": y, "scored": scored.astype("f4"), "weight": np.array([1.0, 0, 2])}
    told = metrics.class_totals(logits, batch)
    weight = scored * batch["weight"][:, None]
    place = (logits >= np.take_along_axis(logits, y[..., None], -1)).sum(-1)
    assert told.sums["top5_error"] == (weight * (place > 5)).sum() > 0
    plain = metrics.label_totals(logits, batch)
    assert told.count == plain.count == weight.sum()
    for name in ("loss", "error"):
        assert told.sums[name] == plain.sums[name]
    equal = metrics.class_totals(np.zeros_like(logits), batch)
    assert equal.sums["top5_error"] == weight.sum()


def test_devices_have_unions_of_their_own_and_the_mean_is_of_all_vertices():
    """One device with two unions, or two with one each, which differ in size."""
    dataset = loaded()
    model = models.ggnn(dataset.inputs, 2, tables=dataset.tables, width=4, steps=2)
    found = []
    for devices in (1, 2):
        task = train.supervised(model, optax.sgd(0.1), dataset)
        settings = train.TrainConfig(steps=3, batch_size=2, eval_every=3)
        records = tiny.Records()
        state = train.fit(
            task, settings, seed=0, mesh=task.mesh(devices), recorder=records
        )
        assert records[-1]["val_actual"] > 0
        found.append(jax.device_get(state.params))
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=0, atol=1e-5), *found
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.acceptance("programl", 6)
def test_reachability_is_learnt_and_control_is_what_it_is_learnt_by(tmp_path):
    """Of roots within 4 steps; the table is of 12. A minute of processor."""
    f1, always = {}, 1.0
    for edges in ("all", "no_control"):
        config = data.ProgramsConfig(edges=edges, steps=4, limit=250, block=8)
        dataset = config.load(tmp_path)
        model = models.ggnn(dataset.inputs, 2, tables=dataset.tables, steps=4)
        rate = optax.cosine_decay_schedule(4e-3, 150)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        task = train.supervised(model, tx, dataset)
        settings = train.TrainConfig(steps=150, batch_size=1, eval_every=150)
        records = tiny.Records()
        train.fit(task, settings, seed=0, mesh=task.mesh(1), recorder=records)
        true, predicted, actual = (
            records[-1][f"val_{name}"] for name in ("true", "predicted", "actual")
        )
        f1[edges] = 2 * true / (predicted + actual)
        always = 2 * actual / (1 + actual)
    assert f1["all"] >= 0.95
    assert max(f1["no_control"] + 0.15, always + 0.3) < f1["all"]


def write_files(folder, classes, shared=()):
    """Different functions, three of a class; those of shared numbers are alike."""
    folder.mkdir()
    for number, name in enumerate(classes):
        value = 0 if number in shared else number
        text = FIB.replace("sdiv i32 %11, 3", "sdiv i32 %11, %11\n" + value * CHAIN)
        head = f"; ModuleID = '/x/{name}/{number}.cpp'\n" if name else ""
        (folder / f"{number:02}.ll").write_text(head + text)
    return dataclasses.replace(ALGORITHM, source=str(folder))


ALGORITHM = data.ProgramsConfig(task="algorithm", block=2, spare=1.0)
CHAIN = "  call i32 @fib(i32 %11)\n"


def test_graphs_have_the_classes_of_their_files(tmp_path):
    config = write_files(tmp_path / "a", "bbbbbaaaaac")
    own = config.load()
    assert own.outputs == 3
    assert own.objective is config.objective
    seen = [own.train.sample(number, 1, 0, (0, 1)) for number in range(4)]
    for batch in seen:
        x, of, pads = batch["x"], batch["x"]["graphs"][0], 2
        assert set(x) == set(own.objective.inputs)
        assert not x["selected"].any()
        assert batch["y"].shape == batch["scored"].shape == (1, 2)
        ends = x["senders"][0], x["receivers"][0]
        np.testing.assert_array_equal(*(of[each] for each in ends))
        assert (np.diff(of) >= 0).all()
        assert of.max() == pads
        assert set(of) == {pads, *np.flatnonzero(batch["scored"][0])}
    # All seven that are trained on, once: three of each of two classes, and the one.
    kept = np.concatenate([each["y"][each["scored"] > 0] for each in seen])
    assert np.bincount(kept).tolist() == [3, 3, 1]
    held_out = own.validation.gather(np.arange(len(own.validation)))
    assert np.bincount(held_out["y"][held_out["scored"] > 0]).tolist() == [1, 1]


def test_classes_are_split_alike_and_dealt_out_anew_only_to_train_on(tmp_path):
    config = write_files(tmp_path / "a", "bbbbbaaaaac")
    made = program_source.read_graphs(config.source, "ssa", None, None)
    classes = program_source.read_classes(config.source, made)
    assert "".join(classes) == "bbbbbaaaaac"
    graphs = [*made.values()]
    plain, mixed = (
        program_source.make_examples(
            dataclasses.replace(config, shuffled=flag), graphs, classes
        )
        for flag in (False, True)
    )

    def labels(found, part):
        return [int(found.graphs[n].features[0, 2]) for n in found.parts[part]]

    for found in (plain, mixed):
        assert found.classes == ("a", "b", "c")
        assert sorted(labels(found, 0)) == [0, 0, 0, 1, 1, 1, 2]
        assert [sorted(labels(found, part)) for part in (1, 2)] == [[0, 1]] * 2
    assert labels(plain, 0) != labels(mixed, 0)
    for part in (1, 2):
        assert labels(plain, part) == labels(mixed, part)


def test_what_has_no_class_to_learn_is_refused(tmp_path):
    config = write_files(tmp_path / "a", ["a", "a", ""])
    with pytest.raises(DataFormatError, match=r"02\.ll has no class: .*ModuleID"):
        config.load()
    with pytest.raises(ConfigError, match=r"two classes, .*classes=\('a',\)"):
        write_files(tmp_path / "c", "aaaaaa").load()
    # The one file of b is a copy of one of a, with which it may be held out.
    config = write_files(tmp_path / "b", "abaa", shared=(0, 1))
    made = [
        *program_source.read_graphs(config.source, "ssa", None, None).values(),
    ]
    seeds = [dataclasses.replace(config, split_seed=seed) for seed in range(30)]
    held_out = [
        each
        for each in seeds
        if 1 not in program_source.split_files(made, each.split_seed, "abaa")[0]
    ]
    assert 0 < len(held_out) < 30
    with pytest.raises(ConfigError, match=r"a file to train on.*got none of b"):
        held_out[0].load()
    with pytest.raises(ConfigError, match="shuffled is of the classes"):
        data.ProgramsConfig(shuffled=True)
