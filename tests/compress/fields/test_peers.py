"""SZ3, cosines and EOFs: what their bytes decode to, and that they are the least."""

import builtins

import numpy as np
import pytest
from scipy import fft

from hpcjax import data
from hpcjax.compress import fields
from hpcjax.core.errors import UnsupportedOp


@pytest.fixture(scope="module")
def values():
    waves = data.make_waves(10, 6).to_numpy()
    return waves + np.random.default_rng(0).normal(0, 0.1, waves.shape).astype("f")


def test_the_largest_cosines_are_kept(values):
    found = fft.dctn(values, norm="ortho")
    least = np.sort(np.abs(found).ravel())[-30]
    expected = fft.idctn(np.where(np.abs(found) >= least, found, 0), norm="ortho")
    decoded = fields.dct_decode(fields.dct_encode(values, 30))
    np.testing.assert_allclose(decoded, expected, atol=2e-3 * np.abs(values).max())


def test_gaps_of_any_length_are_counted():
    found = np.zeros((3, 4, 200))
    found.ravel()[[0, 255, 510, 511, 2000]] = [5, 4, 3, 2, 1]
    values = fft.idctn(found, norm="ortho").astype(np.float32)
    decoded = fields.dct_decode(fields.dct_encode(values, 5))
    np.testing.assert_allclose(decoded, values, atol=1e-4)
    whole = fields.dct_decode(fields.dct_encode(values, 10**6))
    np.testing.assert_allclose(whole, values, atol=1e-4)


def test_eofs_are_the_nearest_of_their_rank(values):
    weights = np.linspace(0.2, 1, 6)[:, None]
    root = np.sqrt(np.broadcast_to(weights, (6, 12))).ravel()
    u, s, v = np.linalg.svd(values.reshape(10, -1) * root, full_matrices=False)
    expected = (u[:, :2] * s[:2]) @ v[:2] / root
    decoded = fields.eof_decode(fields.eof_encode(values, weights, 2))
    np.testing.assert_allclose(decoded.reshape(10, -1), expected, atol=5e-3)
    size = len(fields.eof_encode(values, weights, 2))
    assert size > 2 * 2 * (10 + 72) * 0.7  # float16 of both, hardly compressed


def test_nothing_is_compressed_to_nothing():
    zeros = np.zeros((4, 3, 6), np.float32)
    assert not fields.dct_decode(fields.dct_encode(zeros, 2)).any()
    assert not fields.eof_decode(fields.eof_encode(zeros, np.ones((3, 1)), 1)).any()


@pytest.mark.parametrize("algorithm", ["INTERP_LORENZO", "LORENZO_REG"])
def test_sz3_keeps_its_bound(values, algorithm):
    pytest.importorskip("pysz")
    content = fields.sz3_encode(values, 0.1, algorithm)
    error = np.abs(fields.sz3_decode(content, values.shape) - values).max()
    assert 0.01 * np.ptp(values) < error <= 0.1001 * np.ptp(values)
    assert len(content) < values.nbytes / 3


def test_without_sz3_the_extra_is_named(values, monkeypatch):
    real = builtins.__import__

    def refuse(name, *given, **more):
        if name == "pysz":
            raise ImportError(name)
        return real(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedOp, match=r"pip install 'hpcjax\[fields\]'"):
        fields.sz3_encode(values, 0.1)
