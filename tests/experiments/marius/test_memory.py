"""A graph of more than a gigabyte is trained on in half of its bytes; minutes."""

import importlib
import sys
import types

import pytest


@pytest.mark.slow
@pytest.mark.acceptance("marius", 8)
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /proc")
def test_files_come_to_an_end_where_memory_does_not(tmp_path):
    configs = importlib.import_module("configs.marius.memory")
    run = importlib.import_module("experiments.marius.memory").run
    ctx = types.SimpleNamespace(data_root=tmp_path)
    files, memory = (run(each, ctx) for each in (configs.base, configs.memory))
    assert files["graph_bytes"] >= 1e9
    assert files["limit"] <= 0.5 * files["graph_bytes"]
    assert files["ended"] == 1
    assert 0 < files["resident"] <= 0.25
    assert files["peak"] > 0
    assert (memory["ended"], memory["refused"]) == (0, 1)
