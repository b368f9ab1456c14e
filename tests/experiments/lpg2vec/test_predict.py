"""Predictions go back into the store that they were learnt from."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from experiments.lpg2vec import predict
from experiments.lpg2vec.predict import Config
from hpcjax.core import ConfigError
from hpcjax.data import PropertyGraphConfig
from hpcjax.graphs import lpg
from hpcjax.runs import cli


def small():
    """Shops and people; what a shop sells says how much."""
    n, rng = 60, np.random.default_rng(0)
    sells = rng.integers(0, 2, n)
    shop = np.arange(n) % 3 > 0
    vertices = pd.DataFrame(
        {
            "_id": np.arange(n),
            "_labels": [("Shop",) if each else ("Person",) for each in shop],
            "sells": pd.Series(
                [
                    ["tea", "cake"][s] if b else None
                    for s, b in zip(sells, shop, strict=True)
                ],
                dtype=object,
            ),
            "income": np.where(shop, 10.0 * sells + rng.random(n), np.nan),
        }
    )
    ends = rng.integers(0, n, (2, 80))
    edges = pd.DataFrame({"_start": ends[0], "_end": ends[1], "_type": "VISITS"})
    return lpg.PropertyGraph(vertices, edges)


def arguments(store, **more):
    given = {
        "dataset.source": store.path,
        "dataset.target": "income",
        "dataset.label": "Shop",
        "dataset.bins": 2,
        "write": "guess",
        "steps": 30,
        "optimizer.lr": 0.1,
        "model.dropout": 0,
        **more,
    }
    return [f"{key}={value}" for key, value in given.items()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "database"])
def test_predictions_are_written_and_read_again(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("small.csv" if kind == "csv" else "small.lbdb")
    store = lpg.CsvStore(path) if kind == "csv" else lpg.LadybugStore(path)
    store.save(small())
    command = ["run", "lpg2vec/predict:mlp", *arguments(store)]
    assert cli.main(command) == 0
    after = store.read()
    shops = after.vertices[after.with_label("Shop")]
    assert set(shops["guess"].dropna()) == set(shops["guess"])
    assert (shops["guess_confidence"].astype(float) > 0.5).all()
    rich = shops["income"].astype(float) > 5
    found = pd.crosstab(rich, shops["guess"])
    assert (found.max(axis=1) == found.sum(axis=1)).all()
    people = after.vertices[after.with_label("Person")]
    assert people["guess"].isna().all()
    assert cli.main(command) != 0  # the key is there
    assert cli.main([*command, "overwrite=true"]) == 0


def test_predictions_need_a_label_and_a_store_that_can_be_written():
    with pytest.raises(ConfigError, match="of the vertices of one label"):
        Config(write="guess")
    installed = PropertyGraphConfig(label="Filing")
    with pytest.raises(ConfigError, match=r"must be there, and writable: .*fincen"):
        predict._check_writing(Config(write="guess", dataset=installed), small())


@pytest.mark.parametrize("there", ["guess", "guess_confidence"])
def test_keys_that_are_there_are_kept(there, tmp_path):
    graph = small()
    graph = lpg.PropertyGraph(graph.vertices.assign(**{there: 1.0}), graph.edges)
    store = lpg.CsvStore(tmp_path / "small.csv")
    store.save(graph)
    dataset = PropertyGraphConfig(source=str(store.path), label="Shop", target="income")
    cfg = Config(dataset=dataset, write="guess")
    with pytest.raises(ConfigError, match=f"overwrite=true: got key='{there}'"):
        predict._check_writing(cfg, graph)
    predict._check_writing(dataclasses.replace(cfg, overwrite=True), graph)


@pytest.mark.parametrize("target", ["guess", "guess_confidence"])
def test_a_target_is_never_overwritten(target):
    dataset = PropertyGraphConfig(label="Shop", target=target)
    with pytest.raises(ConfigError, match="over what they are of: got write='guess'"):
        Config(dataset=dataset, write="guess", overwrite=True)
