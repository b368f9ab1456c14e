"""What accuracies are measured by: tables of counts, a network of fewer branches."""

import collections
import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest
import xarray as xr

from experiments.mpcompress import boundaries, floors, tables
from hpcjax.data import CharTextConfig
from hpcjax.runs import discover
from hpcjax.runs.tables import judge
from tests.conftest import REPOSITORY
from tests.experiments import rows
from tests.train import test_codecs

discover.activate(REPOSITORY)  # whose papers list parts, too

TEXT = "the quick brown fox, the lazy dog; that is all there is to it.\n" * 9


def test_tables_tell_the_most_frequent_character(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/own.txt").write_text(TEXT)
    dataset = CharTextConfig(corpus="own.txt", context=5, validation=0.2)
    cut = len(TEXT) - round(0.2 * len(TEXT))
    counted, told = (
        list(itertools.pairwise(part))[: (len(part) - 1) // 5 * 5]
        for part in (TEXT[:cut], TEXT[cut:])
    )
    for known in (0, 1):
        counts = collections.defaultdict(collections.Counter)
        for before, after in counted:
            counts[before * known][after] += 1
        # Of characters that are as frequent the first by code.
        best = {
            before: min(each, key=lambda c: (-each[c], c))
            for before, each in counts.items()
        }
        wrong = np.mean([best[before * known] != after for before, after in told])
        cfg = floors.Config(dataset=dataset, known=known)
        context = types.SimpleNamespace(data_root=tmp_path)
        assert floors.run(cfg, context)["val_error"] == wrong


def test_what_is_left_out_is_a_network_of_fewer_branches():
    """That of kernels of zeros from the same layer on."""
    (run, shapes, tokens), (plain, *_) = (
        test_codecs.apply(
            dataclasses.replace(test_codecs.CONFIG, codec=codec), train=True
        )
        for codec in (floors.LeftOut(start=1), None)
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes
    )
    ours, whole = run(params, tokens), plain(params, tokens)
    for layer, name in (("attention", "output"), ("mlp", "down")):
        params["blocks"][layer][name]["kernel"][1:] = 0
    np.testing.assert_allclose(ours, plain(params, tokens), rtol=1e-4, atol=1e-4)
    assert abs(ours - whole).max() > 0.1


def build(table, likely):
    """The table of errors by row; those of others are a codec's that loses nothing."""
    return table.reduce(
        {
            name: rows.run(
                {"eval_step": [1, 2]},
                seeds=own.seeds,
                val_error=("eval_step", [1, likely.get(name, 0.55)]),
            )
            for name, own in table.tier("cpu").runs.items()
        }
    )


def made(**errors):
    """That of layers."""
    likely = {
        tables.UNIGRAM: 0.82,
        tables.BIGRAM: 0.69,
        tables.THROUGH + tables.HALF: 0.8,
        tables.AUTO + tables.HALF: 0.5599,
        tables.LEFT: 0.5698,
    }
    lossy = {name + tables.EVERY: 0.64 for name in tables._LOSSY}
    return build(tables.LAYERS, likely | lossy | errors)


def failing(found, table=tables.LAYERS):
    return {v.name for v in judge(table.tier("cpu"), found) if not v.holds}


@pytest.mark.parametrize(
    ("errors", "failed"),
    [
        ({}, set()),
        ({tables.PLAIN: 0.6}, {"learnt", "last half", "8 bits"}),
        ({tables.THROUGH + tables.HALF: 0.6}, {"slope"}),
        ({tables.TOP + tables.HALF: 0.57}, {"last half"}),
        ({tables.TOP + tables.EVERY: 0.59}, {"all layers"}),
        ({tables.LEFT: 0.6}, {"left out"}),
    ],
)
def test_claims_fail_for_what_they_deny(errors, failed):
    assert failing(made(**errors)) == failed


@pytest.mark.parametrize(
    ("errors", "failed"),
    [
        ({}, set()),
        ({tables.PLAIN: 0.6}, {"learnt", "quantized"}),
        ({tables.FOUR: 0.57}, {"quantized"}),
        ({tables.AUTO: 0.78}, {"autoencoder"}),
        ({tables.RANDOM: 0.78}, {"Random-k"}),
        ({tables.RANDOM: 0.7}, {"Random-k", "chance"}),
        ({tables.WIDE: 0.58}, {"A2"}),
    ],
)
def test_claims_between_stages_fail_for_what_they_deny(errors, failed):
    likely = {tables.UNIGRAM: 0.81, tables.BIGRAM: 0.66, tables.AUTO: 0.64}
    likely |= {tables.TOP: 0.78, tables.MANY: 0.75, tables.RANDOM: 0.8}
    found = build(tables.ACCURACY, likely | errors)
    assert failing(found, tables.ACCURACY) == failed


@pytest.mark.parametrize(
    ("errors", "failed"),
    [
        ({}, set()),
        ({tables.PLAIN: 0.6}, {"learnt", "grid", "quantized"}),
        ({tables.WHOLE: 0.5475}, {"grid"}),
        ({tables.FOUR: 0.57}, {"quantized"}),
        ({tables.AUTO: 0.78}, {"autoencoder"}),
        ({tables.WIDE: 0.58}, {"A2"}),
    ],
)
def test_claims_on_a_grid_fail_for_what_they_deny(errors, failed):
    likely = {tables.UNIGRAM: 0.81, tables.BIGRAM: 0.66}
    likely |= {tables.AUTO: 0.64, tables.WIDE: 0.56, tables.TOP: 0.78}
    found = build(tables.GRID, likely | errors)
    assert failing(found, tables.GRID) == failed


def test_intervals_are_two_standard_errors_wide():
    found = tables._errors(xr.DataArray([1.0, 2.0, 3.0]), "rise")
    wide = 2 / np.sqrt(3)
    assert found == pytest.approx(
        {"rise": 2, "rise_low": 2 - wide, "rise_high": 2 + wide}
    )


@pytest.mark.parametrize("table", ["layers", "stages"])
def test_entries_send_the_bytes_of_the_autoencoder(table):
    sent = set()
    for variant in ("autoencoder", "topk", "randomk"):
        cfg = discover.load(f"mpcompress/{table}:{variant}", {}, REPOSITORY).config
        where = "pipeline" if table == "stages" else "tensor"
        rows = cfg.train.batch_size // getattr(cfg.parallel, "micro_batches", 1)
        shape = rows, cfg.dataset.context, cfg.model.width
        sent.add(cfg.codec.wire_bytes(shape, "float32", 2, where))
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("variant", "devices", "overrides", "ticks", "up", "down"),
    [
        # 2 × 64 × 64 numbers of a micro-batch; ticks 2 (2 + 2 − 1).
        ("", 2, {}, 6, 8192 + 128, 32768),
        (":topk", 2, {}, 6, 8 * 192, 4 * 192),
        ("", 4, {}, 6, 4096 + 128, 16384),  # copies have half of the rows
        ("", 4, {"parallel.tensor": "2"}, 6, 8192 + 128, 32768),
        (":autoencoder", 2, {"compute": "bfloat16"}, 6, 2 * 384, 2 * 384),
        (":autoencoder", 2, {"parallel.schedule": "zero_bubble_h1"}, 7, 1536, 1536),
    ],
)
def test_what_is_permuted_is_told_of_one_device(
    variant, devices, overrides, ticks, up, down
):
    config = f"mpcompress/boundaries{variant}"
    cfg = discover.load(config, overrides, REPOSITORY).config
    told = boundaries.told(cfg, devices)
    assert told == {"wire": ticks * up, "slopes": ticks * down}
