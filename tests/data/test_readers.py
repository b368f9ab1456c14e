"""Readers against what was written, and against damaged files."""

import gzip
import json
import os
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import catalog, cifar10, digits, idx, source, text
from tests.data import writers

BYTES = {"max_examples": 40, "deadline": None}
FRESH = [hypothesis.HealthCheck.function_scoped_fixture]


def standardised(images, training):
    flat = training.reshape(-1, training.shape[-1]).astype(np.float64)
    return (images - flat.mean(0)) / flat.std(0)


@pytest.mark.acceptance("mixsize", 8)
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("pad", [0, 2])
def test_mnist_holds_what_was_written(tmp_path, suffix, pad):
    writers.write_mnist(tmp_path, 30, suffix=suffix)
    read = data.MnistConfig(pad=pad).load(tmp_path)
    images, labels = writers.pictures(30, (28, 28, 1), 10, 0)
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    batch = read.train.gather(np.arange(30))
    expected = standardised(padded, images)
    np.testing.assert_allclose(batch["x"], expected, atol=1e-5)
    np.testing.assert_array_equal(batch["y"], labels)
    assert read.inputs == (28 + 2 * pad, 28 + 2 * pad, 1)
    held_out, _ = writers.pictures(30, (28, 28, 1), 10, 1)
    got = read.validation.gather(np.array([7]))["x"]
    padded = np.pad(held_out, ((0, 0), (pad, pad), (pad, pad), (0, 0)))[7:8]
    np.testing.assert_allclose(got, standardised(padded, images), atol=1e-5)


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    writers.write_idx(tmp_path / "a.gz", values)
    (tmp_path / "a.gz").rename(tmp_path / "plain-name")
    np.testing.assert_array_equal(idx.read_idx(tmp_path / "plain-name", 2), values)


@pytest.mark.acceptance("mixsize", 8)
def test_cifar10_holds_what_was_written(tmp_path):
    writers.write_cifar10(tmp_path, 50)
    read = data.Cifar10Config().load(tmp_path)
    parts = [writers.pictures(10, (32, 32, 3), 10, seed) for seed in range(6)]
    training = np.concatenate([images for images, _ in parts[:5]])
    assert (len(read.train), len(read.validation)) == (50, 10)
    got = read.train.gather(np.arange(50))
    np.testing.assert_allclose(got["x"], standardised(training, training), atol=1e-5)
    np.testing.assert_array_equal(got["y"], np.tile(np.arange(10), 5))
    got = read.validation.gather(np.arange(10))["x"]
    np.testing.assert_allclose(got, standardised(parts[5][0], training), atol=1e-5)


def test_digits_are_those_that_scikit_learn_reads():
    from sklearn.datasets import load_digits

    expected, read = load_digits(), data.DigitsConfig(validation=0.25).load()
    parts = digits.split_by_class(expected.target.astype(np.int32), 0.25, seed=0)
    for part, chosen in zip((read.train, read.validation), parts, strict=True):
        np.testing.assert_array_equal(part.images[..., 0], expected.images[chosen])
        np.testing.assert_array_equal(part.labels, expected.target[chosen])


def test_digits_are_split_by_class():
    read = data.DigitsConfig(validation=0.25, split_seed=3).load()
    train, held_out = (
        part.gather(np.arange(len(part)))["y"] for part in (read.train, read.validation)
    )
    assert len(train) + len(held_out) == 1797
    for label in range(10):
        total = (train == label).sum() + (held_out == label).sum()
        assert (held_out == label).sum() == round(0.25 * total)
    x = read.train.gather(np.arange(len(train)))["x"].astype(np.float64)
    # A mean of n float32 values rounds to about eps; the sum runs in float64.
    assert abs(x.mean()) < 1e-6
    assert abs(x.std() - 1) < 1e-6


@hypothesis.given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
@hypothesis.settings(**BYTES)
def test_split_by_class_is_a_partition(counts, share, seed):
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    one, other = digits.split_by_class(labels, share, seed)
    both = np.sort(np.concatenate([one, other]))
    np.testing.assert_array_equal(both, np.arange(len(labels)))


def test_limits_are_nested_and_leave_the_scale_alone(tmp_path):
    writers.write_mnist(tmp_path, 60)
    read = {n: data.MnistConfig(limit=n).load(tmp_path) for n in (10, 20, None)}
    assert [len(part.train) for part in read.values()] == [10, 20, 60]
    rows = {
        n: {row.tobytes() for row in part.train.gather(np.arange(len(part.train)))["x"]}
        for n, part in read.items()
    }
    assert rows[10] < rows[20] < rows[None]
    assert len(data.MnistConfig(limit=10**6).load(tmp_path).train) == 60


def test_pooled_images_are_means_of_blocks(tmp_path):
    writers.write_mnist(tmp_path, 12)
    whole = data.MnistConfig().load(tmp_path).train.images
    pooled = data.MnistConfig(pool=7, pad=1).load(tmp_path)
    assert pooled.inputs == (6, 6, 1)
    for image, small in zip(whole, pooled.train.images, strict=True):
        for row, column in ((0, 0), (1, 3), (3, 2)):
            block = image[7 * row : 7 * row + 7, 7 * column : 7 * column + 7]
            assert small[1 + row, 1 + column] == np.round(block.mean())
    assert not pooled.train.images[:, 0].any()


def test_text_can_be_put_together_again(tiny_root):
    read = data.CharTextConfig(corpus="sample.txt", context=100).load(tiny_root)
    whole = (tiny_root / "text" / "sample.txt").read_text(encoding="utf-8")
    cut = len(whole) - round(0.1 * len(whole))
    vocabulary = sorted(set(whole[:cut]))
    assert read.outputs == len(vocabulary) + 1
    letters = ["\0", *vocabulary]
    for part, expected in ((read.train, whole[:cut]), (read.validation, whole[cut:])):
        codes = part.gather(np.arange(len(part)))
        joined = "".join(letters[code] for code in codes["x"].ravel())
        assert joined == expected[: len(joined)]
        assert len(expected) - len(joined) <= 100
        after = "".join(letters[code] for code in codes["y"].ravel())
        assert after == expected[1 : len(after) + 1]


@hypothesis.given(st.text(), st.sets(st.characters(codec="utf-8")))
@hypothesis.settings(**BYTES)
def test_codes_are_places_in_the_vocabulary(words, known):
    hypothesis.assume(words.isprintable())
    vocabulary = sorted(known)
    codes = text.encode(words, vocabulary)
    expected = [vocabulary.index(c) + 1 if c in known else 0 for c in words]
    assert codes.tolist() == expected


def test_the_vocabulary_knows_only_the_training_part(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "own.txt").write_text("ab" * 90 + "z" * 20)
    read = data.CharTextConfig(corpus="own.txt", context=9).load(tmp_path)
    assert read.outputs == 3
    assert set(read.validation.gather(np.arange(2))["x"].ravel()) == {0}


def test_the_reference_is_that_of_this_python():
    topics = pytest.importorskip("pydoc_data.topics").topics
    read = text.read_corpus(pathlib.Path("unused"), "python-reference")
    assert len(read) == sum(len(part) + 1 for part in topics.values()) - 1


# Damaged files.


@pytest.mark.faults(9)
@hypothesis.given(st.data())
@hypothesis.settings(suppress_health_check=FRESH, **BYTES)
def test_any_cut_of_an_idx_file_is_noticed(tmp_path, data):
    suffix = data.draw(st.sampled_from(["", ".gz"]))
    path = tmp_path / f"values{suffix}"
    writers.write_idx(path, np.arange(24).reshape(2, 3, 4))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataFormatError, match="values"):
        idx.read_idx(path, 3)


@pytest.mark.faults(9)
@hypothesis.given(st.integers(0, 15), st.integers(1, 255))
@hypothesis.settings(suppress_health_check=FRESH, **BYTES)
def test_any_flip_in_an_idx_header_is_noticed(tmp_path, place, flip):
    path = tmp_path / "values"
    writers.write_idx(path, np.arange(24).reshape(2, 3, 4))
    content = bytearray(path.read_bytes())
    content[place] ^= flip
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match="offset"):
        idx.read_idx(path, 3)


@pytest.mark.faults(9)
def test_flips_inside_gzip_are_noticed(tmp_path):
    path = tmp_path / "values.gz"
    writers.write_idx(path, np.arange(200) % 7)
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match="whole gzip stream"):
        idx.read_idx(path, 1)


def test_more_bytes_than_the_header_says_are_noticed(tmp_path):
    path = tmp_path / "values"
    writers.write_idx(path, np.arange(5))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataFormatError, match=r"offset 13: expected 5 bytes.*more"):
        idx.read_idx(path, 1)


def test_a_header_asking_for_terabytes_is_refused(tmp_path):
    path = tmp_path / "values"
    path.write_bytes(bytes((0, 0, 8, 3)) + b"\xff" * 12)
    with pytest.raises(DataFormatError, match="expected 1 to"):
        idx.read_idx(path, 3)


def test_mnist_parts_that_do_not_fit_together_are_refused(tmp_path):
    writers.write_mnist(tmp_path, 20)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    writers.write_idx(labels, np.zeros(19))
    with pytest.raises(DataFormatError, match=r"expected 20 labels.*found 19"):
        data.MnistConfig().load(tmp_path)
    writers.write_idx(labels, np.where(np.arange(20) == 4, 10, 1))
    with pytest.raises(DataFormatError, match=r"record 4 at offset 12.*below 10.*10"):
        data.MnistConfig().load(tmp_path)
    images = tmp_path / "mnist" / "train-images-idx3-ubyte"
    writers.write_idx(images, np.zeros((20, 27, 28)))
    with pytest.raises(DataFormatError, match="expected images of 28x28, found 27x28"):
        data.MnistConfig().load(tmp_path)
    images.unlink()
    with pytest.raises(DataMissing, match="hpcjax data fetch mnist"):
        data.MnistConfig().load(tmp_path)


def test_images_without_variation_are_refused(tmp_path):
    writers.write_mnist(tmp_path, 20)
    images = tmp_path / "mnist" / "train-images-idx3-ubyte"
    writers.write_idx(images, np.full((20, 28, 28), 9))
    with pytest.raises(DataFormatError, match="expected bytes that vary, found only 9"):
        data.MnistConfig().load(tmp_path)


@pytest.mark.faults(9)
@hypothesis.given(st.integers(0, 2 * cifar10.RECORD - 1))
@hypothesis.settings(suppress_health_check=FRESH, **BYTES)
def test_any_cut_inside_a_cifar_record_is_noticed(tmp_path, size):
    path = tmp_path / "batch.bin"
    path.write_bytes(bytes(size))
    if size == cifar10.RECORD:
        assert len(cifar10.read_cifar10(path)[1]) == 1
        return
    with pytest.raises(DataFormatError, match=f"record {size // cifar10.RECORD} at"):
        cifar10.read_cifar10(path)


def test_cifar_files_of_unequal_length_or_bad_label_are_refused(tmp_path):
    writers.write_cifar10(tmp_path)
    path = tmp_path / "cifar10" / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[: -cifar10.RECORD])
    with pytest.raises(
        DataFormatError, match=r"data_batch_3.bin: record 12: expected 1"
    ):
        data.Cifar10Config().load(tmp_path)
    at = 2 * cifar10.RECORD
    path.write_bytes(content[:at] + b"\x0a" + content[at + 1 :])
    with pytest.raises(DataFormatError, match=f"record 2 at offset {at}.*found 10"):
        data.Cifar10Config().load(tmp_path)
    path.unlink()
    with pytest.raises(DataMissing, match="data_batch_3"):
        data.Cifar10Config().load(tmp_path)


@pytest.mark.faults(9)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: lines[:-1], "expected the last verse to be Revelation 22:21"),
        (lambda lines: [*lines[:2], "{", *lines[3:]], "record 2: expected an object"),
        (lambda lines: [lines[0][:-9], *lines[1:]], "record 0: expected an object"),
        (lambda lines: ["[1]", *lines], "record 0: expected an object"),
        (lambda lines: ["[" * 10**6, *lines], "record 0: expected an object"),
        (
            lambda lines: [json.dumps({"text": 3, "citation": ""}), *lines],
            "expected 'text' and 'citation' to be strings, found 3",
        ),
        (
            lambda lines: [lines[0], '{"text": "ab\\ud800", "citation": ""}'],
            r"kjv.jsonl: record 1: character 2: .* lone surrogate U\+D800",
        ),
        (lambda lines: [], "record 0"),
    ],
)
def test_damaged_verses_are_refused(tmp_path, damage, words):
    writers.write_kjv(tmp_path, 5)
    path = tmp_path / "kjv" / "kjv.jsonl"
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(DataFormatError, match=words):
        data.CharTextConfig(corpus="kjv", context=10).load(tmp_path)


def test_text_that_is_no_utf8_or_too_short_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "own.txt"
    settings = data.CharTextConfig(corpus="own.txt", context=50)
    path.write_bytes(b"abc\xff")
    with pytest.raises(DataFormatError, match="offset 3: expected UTF-8, found 0xff"):
        settings.load(tmp_path)
    for length in (0, 40, 300):
        path.write_text("a" * length)
        with pytest.raises(DataFormatError, match="more than context=50 characters"):
            settings.load(tmp_path)
    path.write_text("a" * 100)
    most = data.CharTextConfig(corpus="own.txt", context=50, validation=0.999)
    with pytest.raises(DataFormatError, match="the training part, found 0 of 100"):
        most.load(tmp_path)


def test_lone_surrogates_have_no_code():
    with pytest.raises(DataFormatError, match=r"character 1: .* surrogate U\+DCFF"):
        text.encode("a\udcffb", ["a", "b"])


@pytest.mark.parametrize(
    ("make", "found"), [(pathlib.Path.mkdir, "a folder"), (os.mkfifo, "something else")]
)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mnist", data.MnistConfig()),
        ("fashion-mnist", data.FashionMnistConfig()),
        ("cifar10", data.Cifar10Config()),
        ("kjv", data.CharTextConfig(corpus="kjv")),
        ("text", data.CharTextConfig(corpus="own.txt")),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, name, config, make, found):
    (tmp_path / name).mkdir()
    for file in catalog.entry(name).files or ("own.txt",):
        make(tmp_path / name / file)
    with pytest.raises(
        DataFormatError, match=f"expected a regular file, found {found}"
    ):
        config.load(tmp_path)


@pytest.mark.parametrize(
    "corpus", ["kjb", "python_reference", "../own.txt", "a/b.txt", "", ".txt", "a..txt"]
)
def test_hostile_or_unknown_corpora_are_refused(tmp_path, corpus):
    with pytest.raises(ConfigError, match="corpus"):
        text.read_corpus(tmp_path, corpus)


def test_links_out_of_the_root_are_refused(tmp_path):
    root = tmp_path / "root"
    (root / "text").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("x" * 999)
    (root / "text" / "own.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ConfigError, match="leads out of"):
        text.read_corpus(root, "own.txt")
    writers.write_mnist(root, 20)
    labels = root / "mnist" / "t10k-labels-idx1-ubyte"
    labels.rename(root / "elsewhere")
    labels.symlink_to(root / "elsewhere")
    data.MnistConfig().load(root)
    (root / "elsewhere").rename(tmp_path / "elsewhere")
    labels.unlink()
    labels.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="t10k-labels-idx1-ubyte leads out of"):
        data.MnistConfig().load(root)


def test_statistics_equal_numpy_in_float64():
    images = np.random.default_rng(0).integers(0, 256, (9, 5, 4, 3)).astype(np.uint8)
    mean, std = source.statistics(images)
    flat = images.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-13)
    np.testing.assert_allclose(std, flat.std(0), rtol=1e-13)


def test_gzip_written_here_is_what_gzip_reads(tmp_path):
    writers.write_mnist(tmp_path, 10, suffix=".gz")
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    assert gzip.decompress(path.read_bytes())[:8] == b"\0\0\x08\x01\0\0\0\x0a"
