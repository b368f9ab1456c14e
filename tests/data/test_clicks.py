"""Clicks: Criteo's form, and drawn ones."""

import gzip
import tracemalloc

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import clicks
from tests.data import writers


def line(label="1", numbers=("",) * 13, names=("",) * 26):
    return "\t".join([label, *numbers, *names])


def written(tmp_path, lines, end="\n"):
    (tmp_path / "criteo").mkdir(exist_ok=True)
    path = tmp_path / "criteo/train.txt"
    path.write_bytes((end.join(lines) + end).encode())
    return path


@pytest.mark.acceptance("bagpipe", 8)
def test_a_line_is_numbers_as_logarithms_and_categories(tmp_path):
    numbers = ("0", "-2", "", "7", *("1",) * 9)
    names = ("0000000a", "", "ffffffff", *("1",) * 23)
    path = written(tmp_path, [line("0", numbers, names), line()], end="\r\n")
    labels, dense, categories, missing = clicks.read_criteo(path)
    assert labels.tolist() == [0, 1]
    expected = [0, 0, 0, np.log(8), *[np.log(2)] * 9]
    np.testing.assert_allclose(dense, [expected, [0] * 13], rtol=1e-6)
    assert categories[0].tolist() == [10, 0, 2**32 - 1, *[1] * 23]
    assert missing.tolist() == [2, 2**26 - 1]


@pytest.mark.acceptance("bagpipe", 8)
def test_categories_of_training_have_rows_and_others_share_one(tmp_path):
    names = [("a", *("",) * 25), ("b", *("",) * 25), ("a", *("1",) * 25), ("c",) * 26]
    written(tmp_path, [line(names=each) for each in names])
    made = data.CriteoConfig(validation=0.25).load(tmp_path)
    assert made.tables == (3, *[3] * 25)  # "a" and "b"; "" and "1"; and row 0
    first = np.cumsum([0, *made.tables[:-1]])
    ids = made.train.gather(np.arange(3))["x"]["ids"] - first
    assert ids[:, 0].tolist() == [1, 2, 1]
    assert ids[:, 1].tolist() == [1, 1, 2]
    held = made.validation.gather(np.array([0]))["x"]["ids"] - first
    assert not held.any()


@pytest.mark.parametrize("known", [1, 30, 5000])
def test_numbers_of_categories_are_those_of_sorted_sets(known, monkeypatch):
    monkeypatch.setattr(clicks, "_BLOCK", 1000)
    rng = np.random.default_rng(0)
    given = rng.integers(0, 41, (5000, 2)) * 10**8
    given[given > 39 * 10**8] = 2**32 - 1
    given[rng.random(given.shape) < 0.1] = -1
    given[:known, 1] = -1
    made = given.clip(min=0).astype(np.uint32)
    missing = ((given < 0) @ [1, 2]).astype(np.uint32)
    tables = clicks.number_categories(made, missing, known)
    for before, after, rows in zip(given.T, made.T, tables, strict=True):
        numbers = {x: at for at, x in enumerate(sorted({*before[:known]}), start=1)}
        assert after.tolist() == [numbers.get(x, 0) for x in before]
        assert rows == len(numbers) + 1


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [None, 1000])
def test_an_example_takes_200_bytes_while_it_is_read(buckets, tmp_path):
    lines, count = writers.criteo_lines(500), 250_000
    rng = np.random.default_rng(0)
    column = rng.integers(0, 2**32, count)  # most examples have their own
    kept = [each.rsplit("\t", 1)[0] for each in lines]
    written(tmp_path, (f"{kept[n % 500]}\t{own:x}" for n, own in enumerate(column)))
    tracemalloc.start()
    made = data.CriteoConfig(buckets=buckets).load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(made.train) + len(made.validation) == count
    assert peak < 200 * count


def test_categories_are_hashed_into_tables_of_one_size(tmp_path):
    path = written(tmp_path, writers.criteo_lines(20))
    made = data.CriteoConfig(buckets=7, limit=12, validation=0.5).load(tmp_path)
    assert made.tables == (7,) * 26
    names = [each.split("\t")[14:] for each in path.read_text().split("\n")[:6]]
    hashed = [[(int(x or "-1", 16) + 1) % 7 for x in each] for each in names]
    ids = made.train.gather(np.arange(6))["x"]["ids"]
    np.testing.assert_array_equal(ids, hashed + 7 * np.arange(26))
    assert (len(made.train), len(made.validation)) == (6, 6)
    with pytest.raises(ConfigError, match=r"< 2\*\*31: got rows=2600000000"):
        data.CriteoConfig(buckets=10**8).load(tmp_path)


def test_a_gzipped_file_is_the_same(tmp_path):
    lines = writers.criteo_lines(20)
    path = written(tmp_path, lines)
    packed = path.with_suffix(".txt.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for one, other in zip(
        clicks.read_criteo(path), clicks.read_criteo(packed), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.acceptance("bagpipe", 8)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (line() + "\t", "line 2: expected 40 columns, found 41"),
        ("", "line 2: expected 40 columns, found 1"),
        (line("2"), "line 2: expected the label 0 or 1, found '2'"),
        (line(numbers=("1.5",) * 13), r"line 2: expected an integer .*'1\.5'"),
        (line(numbers=("1_0",) * 13), r"line 2: expected an integer .*'1_0'"),
        (line(numbers=("1" * 400,) * 13), r"line 2: expected an integer of at most 18"),
        (line(names=("xyz",) * 26), "line 2: expected categories of .* found 'xyz'"),
        (line(names=("0x1f",) * 26), "line 2: expected categories of .* found '0x1f'"),
        (line(names=("f" * 9,) * 26), "line 2: expected categories of at most 8"),
        (line(names=("-1",) * 26), "line 2: expected categories of at most 8"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, wrong, message):
    path = written(tmp_path, [line(), wrong, line()])
    with pytest.raises(DataFormatError, match=f"train.txt: {message}"):
        clicks.read_criteo(path)


def test_files_that_are_no_text_or_too_short_are_refused(tmp_path):
    path = written(tmp_path, [line()])
    with pytest.raises(DataFormatError, match="expected two examples, found 1"):
        data.CriteoConfig().load(tmp_path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(DataFormatError, match="expected lines of text"):
        clicks.read_criteo(path)
    packed = path.with_suffix(".txt.gz")
    packed.write_bytes(gzip.compress(b"1\n")[:-4])
    with pytest.raises(DataFormatError, match="expected"):
        clicks.read_criteo(packed)


def test_drawn_clicks_are_as_uneven_as_asked_and_can_be_learned():
    made = data.ClicksConfig(examples=20_000, tables=4, rows=500, hot=0.02).load()
    batch = made.train.gather(np.arange(len(made.train)))
    counts = np.bincount(batch["x"]["ids"].ravel(), minlength=sum(made.tables))
    for table in np.split(np.sort(counts.reshape(4, 500))[:, ::-1], 4):
        share = table[0, :10].sum() / table.sum()
        assert 0.915 < share < 0.93  # 0.92, and a fiftieth of the rest
    assert 0.4 < batch["y"].mean() < 0.6
    # The mean of labels differs between rows by far more than by chance.
    rows = np.bincount(batch["x"]["ids"][:, 0], batch["y"], 500)[:500]
    hot = np.argsort(-counts[:500])[:10]
    means = rows[hot] / counts[:500][hot]
    assert means.std() > 3 * np.sqrt(0.25 / counts[hot].min())


def test_one_example_is_not_enough():
    with pytest.raises(ConfigError, match=r"two examples.*examples=1"):
        data.ClicksConfig(examples=1)
