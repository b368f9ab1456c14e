"""What the table of parallelisms tells of layers that train, and of others."""

from experiments.gnn import taxonomy


def test_a_refusal_is_told_with_its_layer_and_what_composes_is_traced():
    found = taxonomy._try(taxonomy.Config(devices=2), "sgc", "features")
    assert found["refusal"].startswith("model.layer=sgc propagates")
    assert (found["tick"], found["named"]) == (0, 1)
    found = taxonomy._try(taxonomy.Config(devices=2), "gcn", "stale")
    assert [found[name] for name in ("tick", "traced", "own")] == [1, 1, 1]
    # Of parts that are told of other devices the step is no step, and says no layer.
    found = taxonomy._try(taxonomy.Config(devices=2, composed_for=1), "gcn", "vertex")
    assert [found[name] for name in ("tick", "traced", "named")] == [1, 0, 0]
