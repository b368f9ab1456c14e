"""The examples of docs/hostcomm.md run."""

import pytest

from hpcjax import hostcomm
from tests import guides


def test_the_guide_runs(monkeypatch):
    """Its functions are of no module: here threads are the processes."""
    from tests.hostcomm.threads import in_threads

    def threads(function, processes, *, arguments, link):
        transports = hostcomm.connected(processes, link=link)
        return in_threads(function, transports, *arguments)

    monkeypatch.setattr(hostcomm, "launch", threads, raising=False)
    names = guides.run("hostcomm.md")
    mean = sum(n**2 for n in range(1000)) / 1000
    assert names["results"] == [(pytest.approx(mean), 32)] * 4
    assert names["answers"] == {1: [0, 1, 2], 2: [0, 2, 4]}
    assert names["sums"] == [[1.0, 3.0, 5.0]] * 2
    for weights, _ in names["found"]:
        assert weights == pytest.approx([-10.0] * 3)
    assert names["trace"].staleness().max() <= 4
    assert names["woken"] == [[(0, False), (1, True)]] * 3
    models = [model for model, _ in names["averaged"]]
    assert models == models[:1] * 4  # after a round of all
    assert not names["late"][4::5].any()
