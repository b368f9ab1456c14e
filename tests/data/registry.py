"""Every data set at a small size, for tests that hold for all of them."""

from collections.abc import Callable, Mapping
from typing import Any

from hpcjax import data


def _tokens(corpus: str) -> Any:
    return data.TokenTextConfig(corpora=(corpus,), context=100, vocabulary=300)


REGISTRY: Mapping[str, Callable[[], Any]] = {
    "digits": lambda: data.DigitsConfig(limit=50),
    "mnist": lambda: data.MnistConfig(limit=50),
    "mnist-32": lambda: data.MnistConfig(limit=50, pad=2),
    "fashion-mnist": lambda: data.FashionMnistConfig(limit=50),
    "cifar10": lambda: data.Cifar10Config(limit=50),
    "image-folder": lambda: data.ImageFolderConfig(size=12, resize=14, limit=30),
    "tar-images": lambda: data.TarImagesConfig(size=12, resize=14, limit=30),
    "python-reference": lambda: data.CharTextConfig(context=9973),
    "kjv": lambda: data.CharTextConfig(corpus="kjv", context=500),
    "kjv-masked": lambda: data.MaskedTextConfig(
        corpus="kjv", context=300, vocabulary=60, copies=2, validation=0.3
    ),
    "text-masked": lambda: data.MaskedTextConfig(
        corpus="documents.txt", context=48, vocabulary=60, copies=1, validation=0.3
    ),
    "python-library": lambda: data.TokenTextConfig(
        corpora=("python-library",), context=3001, vocabulary=300, limit=15
    ),
    "kernel-docs": lambda: _tokens("kernel-docs"),
    "wordnet": lambda: _tokens("wordnet"),
    "wikitext-2": lambda: _tokens("wikitext-2"),
    "ptb": lambda: _tokens("ptb"),
    "c4": lambda: _tokens("c4"),
    "phantoms": lambda: data.PhantomsConfig(patients=6, slices=4, size=16),
    "phantoms-volumes": lambda: data.PhantomVolumesConfig(patients=6, depth=8, size=8),
    "universes": lambda: data.UniversesConfig(count=6, width=8, boxes=2),
    "heat": lambda: data.HeatConfig(size=8, runs=3, holdout_runs=2, steps=10),
    "lgg": lambda: data.MriSlicesConfig(size=12, validation=0.3),
    "lorenz96": lambda: data.Lorenz96Config(train=14, validation=3, members=3),
    "ens10-light": lambda: data.Ens10Config(members=3),
    "ens10-tiny": lambda: data.Ens10Config(
        name="ens10-tiny", target="z500", members=4, holdout="test", weights="cell_area"
    ),
    "rain-ibk": lambda: data.RainIbkConfig(members=5),
    "weather-file": lambda: data.WeatherFileConfig(
        path="weather-file/forecast.nc",
        truth="weather-file/truth.nc",
        target="t2m",
        members=3,
    ),
    "clicks": lambda: data.ClicksConfig(examples=60, tables=3, rows=20),
    "criteo": data.CriteoConfig,
    "cora": data.CoraConfig,
    "karate": data.KarateConfig,
    "digits-knn": lambda: data.KnnDigitsConfig(neighbours=3),
    "community-graph": lambda: data.CommunityGraphConfig(vertices=60, degree=4.0),
    "fincen": lambda: data.PropertyGraphConfig(information="labels", label="Country"),
    "text": lambda: data.CharTextConfig(corpus="sample.txt", context=500),
}
