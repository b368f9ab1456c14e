"""What stores give back is compared with what they were given, cell by cell."""

import types

import numpy as np
import pandas as pd
import pytest

from experiments.lpg2vec import store, tables
from tests.data import writers


def test_cells_are_compared_in_any_order():
    one = pd.DataFrame({"_id": [1, 2, 3], "k": ["a", None, ["x", "y"]]}, dtype=object)
    moved = one.iloc[[2, 0, 1]][["k", "_id"]]
    assert store.count_differing(one, moved) == 0
    other = moved.assign(k=[["x", "z"], "a", None])
    assert store.count_differing(one, other) == 1
    assert store.count_differing(one, one.assign(_id=["1", 2, 3])) > 0
    assert store.count_differing(one, one.iloc[:2]) == 6
    assert store.count_differing(one.assign(k2=0), one) == 9


@pytest.mark.slow
def test_a_graph_and_its_predictions_come_back_and_a_change_is_seen(tmp_path):
    writers.write_wordnet(tmp_path, 20)
    cfg = store.Config()
    found = store.run(cfg, types.SimpleNamespace(data_root=tmp_path))
    assert found["kept"].values.tolist() == ["ladybug", "csv", "altered"]
    assert found["cells"].values.tolist() == [0, 0, 1]
    assert found["predictions"].values.tolist() == [0, 0, 1]
    assert found["features"] == 4 + 2 * 2048
    assert (found[list(store.SECONDS)].to_array() > 0).all()
    # A sentence of 40 and one of 30 letters have some 70 of 4,100 columns.
    assert 0.01 < found["bytes"] < 0.1
    table = tables.store({"WordNet": found.expand_dims("seed")})
    assert table["row"].values.tolist() == ["ladybug", "csv", "altered"]
    assert np.isnan(table["load"].values).tolist() == [False, False, True]
    assert table["predictions"].values.tolist() == [0, 0, 1]
