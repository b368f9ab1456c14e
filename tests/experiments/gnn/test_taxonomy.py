"""What the table of parallelisms tells of layers that train, and of others."""

from experiments.gnn import taxonomy


def test_a_refusal_is_told_with_its_layer_and_what_composes_is_traced():
    found = taxonomy._try(taxonomy.Config(devices=2), "sgc", "features")
    assert found["refusal"].startswith("model.layer=sgc propagates")
    assert (found["tick"], found["named"]) == (0, 1)
    found = taxonomy._try(taxonomy.Config(devices=2), "gcn", "stale")
    assert [found[name] for name in ("tick", "traced", "own")] == [1, 1, 1]
    said = "allowed are model.layer=gcn, sage: got "
    assert taxonomy._names(said + "gat", "gat")
    assert not taxonomy._names(said, "gcn")
    assert not taxonomy._names(said + "g_gcn", "gcn")
    assert taxonomy._names("layer must be another: got layer='sgc'", "sgc")
    # Of parts that are told of other devices the step is no step, and says no layer.
    found = taxonomy._try(taxonomy.Config(devices=2, composed_for=1), "gcn", "vertex")
    assert [found[name] for name in ("tick", "traced", "named")] == [1, 0, 0]
