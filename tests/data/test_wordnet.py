"""WordNet's pointers, and WordNet as a property graph."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from hpcjax import graphs
from hpcjax.core import ConfigError
from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data import PropertyGraphConfig, wordnet
from hpcjax.graphs import lpg
from hpcjax.runs import directory
from tests.data import writers

ROOT = directory.data_root(pathlib.Path(__file__).parents[2])
LINES = {
    "noun": [
        "00001740 03 n 01 entity 0 002 ~ 00001930 n 0000 + 00001740 v 0102 | a thing",
        '00001930 05 n 02 dog 0 house_dog 1 001 @ 00001740 n 0000 | barks; "a dog"',
    ],
    "verb": [
        "00001740 29 v 02 be 0 exist 1 001 ^ 00002000 v 0000 01 + 02 00 | live",
        "00002000 38 v 01 go 0 000 02 + 01 00 + 02 00 | move",
    ],
    "adj": ["00003000 44 s 01 gone(p) 0 001 < 00002000 v 0101 | past"],
    "adv": ["00001740 02 r 01 there 0 002 ! 00001740 r 0101 ;c 00001930 n 0000 | by"],
}


def write(root, **changed):
    (root / "wordnet").mkdir(exist_ok=True)
    for speech, lines in {**LINES, **changed}.items():
        text = "".join(f"{line}  \n" for line in lines)
        path = root / "wordnet" / f"data.{speech}"
        path.write_text(writers.WORDNET_HEAD + text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path)
    return tmp_path


def test_pointers_are_of_sets_or_of_words(root):
    names = [each.name for each in wordnet.read_all(root)]
    found = wordnet.read_pointers(root)
    every = [
        (symbol, names[sender], names[receiver], *words)
        for symbol, sender, receiver, words in zip(
            found.symbols, found.senders, found.receivers, found.words, strict=True
        )
    ]
    assert every == [
        ("~", "noun:00001740", "noun:00001930", 0, 0),
        ("+", "noun:00001740", "verb:00001740", 1, 2),
        ("@", "noun:00001930", "noun:00001740", 0, 0),
        ("^", "verb:00001740", "verb:00002000", 0, 0),
        ("<", "adj:00003000", "verb:00002000", 1, 1),
        ("!", "adv:00001740", "adv:00001740", 1, 1),
        (";c", "adv:00001740", "noun:00001930", 0, 0),
    ]


def test_the_graph_has_sets_and_the_pointers_between_them(root):
    graph = wordnet.read_graph(root)
    rows = graph.vertices.set_index("_id")
    assert rows["_labels"].tolist() == [
        *[("noun",)] * 2,
        *[("verb",)] * 2,
        ("adj",),
        ("adv",),
    ]
    assert rows.loc["noun:00001930", "words"] == ["dog", "house dog"]
    assert rows.loc["noun:00001930", "gloss"] == 'barks; "a dog"'
    assert rows["lexicographer"].tolist() == [
        *("noun.Tops", "noun.animal", "verb.body", "verb.motion", "adj.ppl", "adv.all")
    ]
    assert graph.edges["_type"].tolist() == ["~", "@", "^", ";c"]
    assert graph.edges.iloc[3, :2].tolist() == ["adv:00001740", "noun:00001930"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("001 ^", "002 ^", "expected a count of pointers, .*found '002 [\\^] 00002000"),
        ("001 ^", "x ^", "expected a count of pointers"),
        ("001 ^", "001 ?", "expected a count of pointers"),
        (" v 0000", " x 0000", "expected a count of pointers"),
        (" v 0000", " v 00g0", "expected a count of pointers"),
        ("00002000 v", "2000 v", "expected a count of pointers"),
        ("00002000 v", "00002001 v", "a pointer to verb:00002001, which is no set"),
        ("00001740 29", "00001740 45", "expected offset, file, words and a gloss"),
        (" 001 ^ 00002000 v 0000 01 + 02 00", "", "expected a count of pointers"),
    ],
)
def test_a_damaged_line_is_named(root, old, new, message):
    first, second = LINES["verb"]
    assert old in first
    write(root, verb=[second, first.replace(old, new)])
    with pytest.raises(DataFormatError, match=rf"data\.verb: line 3: {message}"):
        wordnet.read_graph(root)


WORDNET = {"source": "wordnet", "target": "lexicographer"}


def test_the_lexicographer_is_predicted_and_is_no_feature(tmp_path):
    writers.write_wordnet(tmp_path)
    held = PropertyGraphConfig(**WORDNET, buckets=16, information="edges").load(
        tmp_path
    )
    assert (len(held.train), len(held.validation), held.outputs) == (200, 80, 2)
    # Four parts of speech, glosses and words; nothing of the two files.
    assert held.graph.features.shape == (400, 4 + 16 + 16)
    assert held.graph.edge_features.shape == (800, 2)
    config = PropertyGraphConfig(**WORDNET)
    spec = config.specify(config.read(tmp_path))
    assert [(each.key, each.kind) for each in spec.keys] == [
        ("gloss", "text"),
        ("words", "text"),
    ]
    told = PropertyGraphConfig(**WORDNET, keys=("gloss", "lexicographer"))
    with pytest.raises(ConfigError, match="target 'lexicographer' cannot be a feature"):
        told.load(tmp_path)


def test_wordnet_must_be_somewhere(tmp_path):
    config = PropertyGraphConfig(**WORDNET)
    with pytest.raises(ConfigError, match="below a data root: got root=None"):
        config.load()
    with pytest.raises(DataMissing, match="hpcjax data fetch wordnet"):
        config.load(tmp_path)


@pytest.fixture(scope="module")
def whole():
    if not (ROOT / "wordnet/data.noun").exists():
        pytest.skip("wordnet is not here: hpcjax data fetch wordnet")
    return wordnet.read_graph(ROOT)


LARGE = PropertyGraphConfig(**WORDNET, buckets=2048)


@pytest.mark.slow
def test_wordnet_has_what_is_published(whole):
    found = wordnet.read_pointers(ROOT)
    assert (len(found.symbols), len(np.unique(found.symbols))) == (377_592, 26)
    assert len(whole.vertices) == 117_659
    assert len(whole.edges) == 285_348
    assert whole.edges["_type"].nunique() == 22
    files = whole.vertices["lexicographer"].value_counts()
    assert (len(files), files["adj.all"]) == (45, 14435)
    # A pointer and its reverse are both there.
    counts = whole.edges["_type"].value_counts()
    for one, other in (("@", "~"), ("#p", "%p"), (";c", "-c")):
        assert counts[one] == counts[other]


@pytest.mark.slow
@pytest.mark.acceptance("lpg2vec", 3)
def test_features_of_wordnet_are_sparse_and_multiply_as_dense_ones(whole):
    encoded = lpg.fit(LARGE.specify(whole), whole, np.arange(1000)).transform(whole)
    features = encoded.features
    count, width = features.shape
    assert width == 4 + 2 * 2048
    arrays = features.offsets, features.columns, features.values
    assert sum(each.nbytes for each in arrays) <= 0.05 * 4 * count * width
    kernel = np.random.default_rng(0).normal(size=(width, 3)).astype(np.float32)
    found = np.asarray(graphs.project(features, kernel))
    for rows in np.array_split(np.arange(count), 40):
        at = features.offsets[rows[0]], features.offsets[rows[-1] + 1]
        dense = np.zeros((len(rows), width), np.float32)
        own = np.diff(features.offsets[rows[0] : rows[-1] + 2])
        places = np.repeat(np.arange(len(rows)), own), features.columns[slice(*at)]
        dense[places] = features.values[slice(*at)]
        np.testing.assert_allclose(found[rows], dense @ kernel, atol=1e-5)


PEAK = """
import dataclasses, pathlib, resource, sys
import jax
import numpy as np
from hpcjax import graphs
from hpcjax.graphs import lpg
from tests.data.test_wordnet import LARGE
root, keys, buckets, width = sys.argv[1:]
how = {"keys": tuple(keys.split()), "buckets": int(buckets)}
config = dataclasses.replace(LARGE, **how)
whole = config.read(pathlib.Path(root))
fitted = lpg.fit(config.specify(whole), whole, np.arange(1000))
jax.devices()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
features = fitted.transform(whole).features
if int(width):
    kernel = np.ones((features.width, int(width)), np.float32)
    jax.jit(graphs.project)(features, kernel).block_until_ready()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(1024 * grown / (4 * np.prod(features.shape)))
"""


@pytest.mark.slow
@pytest.mark.acceptance("lpg2vec", 3)
@pytest.mark.parametrize(
    ("keys", "buckets", "width"),
    # A layer also has a row of its outputs for each entry: 9.4 million with glosses.
    [("gloss words", 2048, 0), ("words", 4096, 16)],
)
def test_no_more_than_a_quarter_of_the_dense_features_is_held(
    whole, keys, buckets, width
):
    command = [sys.executable, "-c", PEAK, str(ROOT), keys, str(buckets), str(width)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(found.stdout) <= 0.25


@pytest.mark.slow
@pytest.mark.acceptance("lpg2vec", 4)
def test_predictions_of_all_of_wordnet_come_back_from_a_database(whole, tmp_path):
    store = lpg.LadybugStore(tmp_path / "wordnet.lbdb")
    store.save(whole)
    rng = np.random.default_rng(0)
    guesses = rng.permutation(whole.vertices["lexicographer"].to_numpy())
    ids = whole.vertices["_id"].to_numpy()
    for label in ("adj", "adv", "noun", "verb"):
        own = whole.with_label(label)
        store.write(label, "guess", ids[own], guesses[own])
    read = store.read().vertices.set_index("_id").loc[ids]
    np.testing.assert_array_equal(read["guess"], guesses)
    assert (read["guess"] != read["lexicographer"]).mean() > 0.9
    assert read["gloss"].tolist() == whole.vertices["gloss"].tolist()
