"""What every data set promises, checked over the registry."""

import dataclasses
import functools
import inspect
import itertools
import json

import numpy as np
import pytest
from grain.experimental import assert_equal_output_after_checkpoint

from hpcjax import data
from hpcjax.core import parts, trees
from hpcjax.core.errors import ConfigError, DataMissing
from hpcjax.data import catalog
from tests.data.registry import REGISTRY

BATCH = 12


@pytest.fixture(params=REGISTRY, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def dataset(name, tiny_root):
    return REGISTRY[name]().load(tiny_root)


class Limited:
    """The first batches of a stream, as grain's checker wants them."""

    def __init__(self, stream, count, threads):
        self.stream, self.count, self.threads = stream, count, threads

    def __iter__(self):
        return LimitedIterator(self.stream.iterate(threads=self.threads), self.count)


class LimitedIterator:
    def __init__(self, inner, count):
        self.inner, self.count = inner, count

    def __iter__(self):
        return self

    def __next__(self):
        if self.inner.position >= self.count:
            self.inner.close()
            raise StopIteration
        return next(self.inner)

    def get_state(self):
        state = self.inner.get_state()
        assert len(json.dumps(state)) < 64 * 1024
        return json.loads(json.dumps(state))

    def set_state(self, state):
        self.inner.set_state(state)


def check_dates(dataset):
    """The first dates of forecasts with members, which are no classes."""
    shapes = dataset.inputs
    for source in (dataset.train, dataset.validation):
        batch = source.gather(np.arange(2))
        assert set(batch) == {"x", "y", "area", "efi", "scale", "spread", "asked"}
        for value in trees.flatten(batch).values():
            assert value.dtype == np.float32
            assert np.isfinite(value).all()
        got = {name: each.shape for name, each in batch["x"].items()}
        assert got == {name: (2, *shape) for name, shape in shapes.items()}
        grid = shapes["fields"][:2]
        for name in ("y", "area", "efi", "spread"):
            assert batch[name].shape == (2, *grid)
        assert batch["scale"].shape == (2,)
        assert (np.abs(batch["efi"]) <= 1).all()


def check_clicks(dataset):
    """The first clicks, of numbers and rows of tables."""
    first = np.cumsum([0, *dataset.tables])
    for source in (dataset.train, dataset.validation):
        batch = source.gather(np.arange(2))
        got = {name: (each.shape, each.dtype) for name, each in batch["x"].items()}
        assert got == {
            "dense": ((2, *dataset.inputs["dense"]), np.float32),
            "ids": ((2, len(dataset.tables)), np.int32),
        }
        assert (first[:-1] <= batch["x"]["ids"]).all()
        assert (batch["x"]["ids"] < first[1:]).all()
        assert batch["y"].dtype == np.int32
        assert set(batch["y"]) <= {0, 1}


def check_fields(dataset):
    """The first fields and those that follow, which are no classes."""
    for source in (dataset.train, dataset.validation):
        batch = source.gather(np.arange(4))
        assert set(batch) == {"x", "y"}
        assert batch["x"].shape == (4, *dataset.inputs)
        assert batch["y"].shape == (4, *dataset.inputs[:2], dataset.outputs)
        for value in batch.values():
            assert value.dtype == np.float32
            assert np.isfinite(value).all()


def check_numbers(dataset):
    for source in (dataset.train, dataset.validation):
        batch = source.gather(np.arange(4))
        assert batch["x"].shape == (4, *dataset.inputs)
        assert batch["y"].shape == (4, dataset.outputs)
        for value in batch.values():
            assert value.dtype == np.float32
            assert np.isfinite(value).all()


def test_shapes_types_and_ranges(dataset):
    if dataset.objective.name == "regression":
        check_numbers(dataset)
        return
    if dataset.objective.name == "fields":
        check_fields(dataset)
        return
    if dataset.objective.name == "postprocessing":
        check_dates(dataset)
        return
    if dataset.objective.name == "clicks":
        check_clicks(dataset)
        return
    for source in (dataset.train, dataset.validation):
        assert len(source) > 0
        batch = source.gather(np.arange(min(4, len(source))))
        rows = min(4, len(source))
        name = dataset.objective.name
        extra = {"scored", "order"} if name == "masked" else set()
        assert set(batch) == {"x", "y"} | extra
        assert batch["x"].shape == (rows, *dataset.inputs)
        assert batch["y"].dtype == np.int32
        assert batch["y"].min() >= 0
        assert batch["y"].max() < dataset.outputs
        if name == "language":
            assert batch["x"].dtype == np.int32
            assert batch["y"].shape == batch["x"].shape
            assert batch["x"].max() < dataset.outputs
            np.testing.assert_array_equal(batch["x"][:, 1:], batch["y"][:, :-1])
        elif name == "vertices":
            assert batch["x"].dtype == np.int32
            assert batch["x"].max() < dataset.graph.vertices
            assert batch["y"].shape == (rows,)
        elif name == "masked":
            assert batch["x"].dtype == np.int32
            assert batch["y"].shape == batch["scored"].shape == batch["x"].shape[:2]
            assert batch["x"][..., 0].max() < dataset.outputs
            assert batch["scored"].dtype == np.float32
            assert (batch["scored"].sum(1) >= 1).all()
            assert set(batch["order"]) <= {0, 1}
        else:
            space = dataset.inputs[:-1] if "segmentation" in name else ()
            assert batch["x"].dtype == np.float32
            assert np.isfinite(batch["x"]).all()
            assert batch["y"].shape == (rows, *space)


@pytest.mark.parametrize("index", [-1, 10**9])
def test_gather_refuses_numbers_outside(dataset, index):
    with pytest.raises(IndexError, match="indices must be in"):
        dataset.train.gather(np.array([0, index]))


@pytest.mark.faults(5)
@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_restart_anywhere_gives_the_same_rest(dataset, threads):
    stream = data.batches(dataset.train, BATCH, seed=5)
    count = len(dataset.train) // BATCH + 3  # into the second epoch
    assert_equal_output_after_checkpoint(Limited(stream, count, threads))


def test_random_access_equals_iteration(dataset):
    stream = data.batches(dataset.train, BATCH, seed=1)
    with stream.iterate(start=2) as iterator:
        for number, batch in zip(range(2, 5), iterator, strict=False):
            seen = trees.flatten(batch)
            for key, value in trees.flatten(stream[number]).items():
                np.testing.assert_array_equal(value, seen[key])


def test_shards_put_together_are_the_global_batch(dataset):
    whole = data.batches(dataset.train, BATCH, seed=1)[3]
    for count in (2, 4):
        parts = [
            data.batches(dataset.train, BATCH, seed=1, shard=(index, count))[3]
            for index in range(count)
        ]
        for key, value in trees.flatten(whole).items():
            joined = np.concatenate([trees.flatten(part)[key] for part in parts])
            np.testing.assert_array_equal(joined, value)


def test_each_epoch_holds_each_example_once_and_is_shuffled_anew(dataset):
    size = len(dataset.train)
    stream = data.batches(dataset.train, BATCH, seed=3)
    count = 3 * size // BATCH + 1
    order = np.concatenate([stream.indices(number) for number in range(count)])
    epochs = [order[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    for one, other in itertools.combinations(epochs, 2):
        assert not np.array_equal(one, other) or size < 4


def test_whole_counts_every_example_once(dataset):
    source = dataset.validation
    direct = trees.flatten(source.gather(np.arange(len(source))))
    kept = {key: [] for key in direct}
    for batch in data.evaluation_batches(source, BATCH):
        assert batch["weight"].shape == (BATCH,)
        assert batch["weight"].dtype == np.float32
        flat = trees.flatten(batch)
        for key, values in kept.items():
            assert flat[key].shape[0] == BATCH
            values.append(flat[key][batch["weight"] == 1])
    for key, values in kept.items():
        np.testing.assert_array_equal(np.concatenate(values), direct[key])


def test_loading_twice_gives_the_same_bytes(name, dataset, tiny_root):
    again = REGISTRY[name]().load(tiny_root)
    every = np.arange(len(dataset.train))
    second = trees.flatten(again.train.gather(every))
    for key, value in trees.flatten(dataset.train.gather(every)).items():
        np.testing.assert_array_equal(value, second[key])


def test_missing_data_names_file_command_and_licence(name, tmp_path):
    settings = REGISTRY[name]()
    same = ("-32", "-masked", "-knn", "-volumes")
    known = catalog.CATALOG[functools.reduce(str.removesuffix, same, name)]
    if known.ships:
        settings.load(tmp_path)
        return
    with pytest.raises(DataMissing) as raised:
        settings.load(tmp_path)
    message = str(raised.value)
    assert known.how in message
    assert known.licence in message
    assert str(tmp_path / known.name) in message


def test_every_config_and_entry_is_registered(tiny_root):
    used = {type(make()) for make in REGISTRY.values()}
    # Their training parts draw batches themselves: test_sampled_graph, test_links,
    # test_partitioned_graph, test_programs, test_mixed_sizes.
    used |= {data.SampledGraphConfig, data.PartitionedGraphConfig}
    used |= {data.LinksConfig, data.ProgramsConfig}
    # test_partitioned of train.
    used |= {data.MixedSizesConfig, data.PartitionedVerticesConfig}
    every = parts.classes("dataset").values()  # those of papers have tests of their own
    assert used == {each for each in every if each.__module__.startswith("hpcjax.")}
    sets = {name for name, entry in catalog.CATALOG.items() if not entry.weights}
    sets -= {"sst-anomaly"}  # a field, of which nothing is an example
    assert sets - {"wn18rr", "nations", "kinships", "umls"} <= set(REGISTRY)
    for entry in sets:
        assert catalog.is_present(entry, tiny_root)


def test_fields_of_the_augmentation_equal_its_factorys():
    parameters = inspect.signature(data.crop_flip).parameters
    expected = {name: each.default for name, each in parameters.items()}
    fields = dataclasses.fields(data.CropFlipConfig)
    assert {field.name: field.default for field in fields} == expected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: data.DigitsConfig(validation=1.0), "validation must be in"),
        (
            lambda: data.DigitsConfig(split_seed=-1),
            "split_seed must be an integer >= 0",
        ),
        (lambda: data.DigitsConfig(limit=0), "limit must be an integer >= 1"),
        (lambda: data.MnistConfig(pad=-1), "pad must be an integer >= 0"),
        (lambda: data.FashionMnistConfig(limit=0), "limit must be an integer >= 1"),
        (lambda: data.Cifar10Config(limit=0), "limit must be an integer >= 1"),
        (lambda: data.ImageFolderConfig(size=0), "size must be an integer >= 1"),
        (lambda: data.ImageFolderConfig(size=300), "resize must be at least size"),
        (
            lambda: data.ImageFolderConfig(std=(1.0, 0.0, 1.0)),
            r"std\[\d\] must be .* > 0",
        ),
        (lambda: data.ImageFolderConfig(name="../x"), "name may hold only"),
        (lambda: data.CharTextConfig(context=0), "context must be an integer >= 1"),
        (lambda: data.CharTextConfig(validation=0.0), "validation must be in"),
        (lambda: data.CharTextConfig(corpus="/etc/passwd"), "corpus may hold only"),
        (lambda: data.TokenTextConfig(vocabulary=256), "vocabulary must be .* >= 257"),
        (lambda: data.TokenTextConfig(corpora=()), "corpora must name at least one"),
        (lambda: data.TokenTextConfig(corpora=("../x",)), r"corpora\[0\] may hold"),
        (lambda: data.MaskedTextConfig(context=4), "context must be an integer >= 5"),
        (lambda: data.MaskedTextConfig(mask_rate=1.0), "mask_rate must be in"),
        (lambda: data.MaskedTextConfig(copies=0), "copies must be an integer >= 1"),
        (lambda: data.MaskedTextConfig(vocabulary_file="/v"), "vocabulary_file may"),
        (lambda: data.PhantomsConfig(patients=1), "patients must be an integer >= 2"),
        (lambda: data.PhantomsConfig(noise=-1.0), "noise must be finite and >= 0"),
        (lambda: data.MriSlicesConfig(name="a/b"), "name may hold only"),
        (
            lambda: data.MriSlicesConfig(std=(0.0, 1.0, 1.0)),
            r"std\[\d\] must be .* > 0",
        ),
        (lambda: data.CropFlipConfig(pad=-1), "pad must be an integer >= 0"),
        (lambda: data.Ens10Config(members=1), "members must be an integer >= 2"),
        (lambda: data.Ens10Config(name="../x"), "name may hold only"),
        (lambda: data.Ens10Config(weights="area"), "weights must be"),
        (lambda: data.Lorenz96Config(train=1), "train must be an integer >= 4"),
        (lambda: data.WeatherFileConfig(validation=0.0), "validation must be in"),
        (
            lambda: data.WeatherFileConfig(holdout="test"),
            "holdout must be 'validation'",
        ),
    ],
)
def test_configs_refuse_what_cannot_be(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_weights_of_a_source_are_kept_in_validation():
    class Weighted(type(data.DigitsConfig(limit=5).load().validation)):
        def gather(self, indices):
            batch = super().gather(indices)
            return {**batch, "weight": (indices % 2).astype(np.float32)}

    source = data.DigitsConfig(limit=5).load().train
    weighted = Weighted(source.images, source.labels, source.mean, source.std)
    (batch,) = data.evaluation_batches(weighted, 8)
    assert batch["weight"].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
