"""Contractions as products of matrices, against addresses computed one by one."""

import itertools

import numpy as np
import pytest

from hpcjax import ir
from hpcjax.core.errors import ConfigError

SIZES = {"b": 2, "j": 3, "k": 2, "h": 2, "p": 3, "i": 4, "u": 5, "q": 3}
EINSUMS = (
    # Forward, with the stack of queries, keys and values and without.
    *("phi,ibj->phbj", "qphi,ibj->qphbj", "phbk,phbj->hbjk", "phbk,hbjk->phbj"),
    *("phi,phbj->bij", "bji,ui->bju", "bju,iu->bji"),
    # Backward.
    *("bji,iu->bju", "bji,bju->iu", "bju,ui->bji", "bju,bji->ui"),
    *("phi,bij->phbj", "phbj,bij->phi", "phbk,phbj->hbjk", "phbj,hbjk->phbk"),
    *("phbk,hbjk->phbj", "phbj,hbjk->phbk", "qphi,qphbj->ibj", "ibj,qphbj->qphi"),
)
COUNTS = {
    "phi,ibj->phbj": 32,
    "qphi,ibj->qphbj": 8,
    "phbk,phbj->hbjk": 128,
    "phbk,hbjk->phbj": 128,
    "phi,phbj->bij": 32,
    "bji,ui->bju": 16,
    "bju,iu->bji": 16,
    "bji,iu->bju": 16,
    "bji,bju->iu": 16,
    "bju,ui->bji": 16,
    "bju,bji->ui": 16,
    "phi,bij->phbj": 32,
    "phbj,bij->phi": 32,
    "phbj,hbjk->phbk": 128,
    "qphi,qphbj->ibj": 8,
    "ibj,qphbj->qphi": 8,
}


def addresses(term, letters):
    """Addresses of a term's elements in its buffer, with axes in another order."""
    shape = [SIZES[x] for x in term]
    own = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return own.transpose([term.index(x) for x in letters])


def steps(term, groups):
    """The distance of neighbours along each group in an order, None if it varies."""
    flat = addresses(term, "".join(groups)).reshape(
        [int(np.prod([SIZES[x] for x in group])) for group in groups]
    )
    found = []
    for axis in range(len(groups)):
        differences = np.unique(np.diff(flat, axis=axis))
        if len(differences) > 1:
            return None
        found.append(int(differences[0]))
    return found


def brute_force(einsum, outermost):
    """All orders in which each term is a batch of matrices by its addresses."""
    a, b, c = einsum.replace("->", ",").split(",")
    batch, summed = set(a) & set(b) & set(c), (set(a) & set(b)) - set(c)
    rows, columns = set(a) - set(b), set(b) - set(a)

    def fits(term, groups):
        first = [x for x in term if x in outermost]
        if not set(term[: len(first)]) <= set(outermost):
            return False
        own = [g for g in groups if g]
        distance = steps(term, own)
        # One of the last two groups, the matrix's own, must have neighbours.
        return distance is not None and 1 in distance[-2:]

    found = set()
    for orders in itertools.product(
        *(itertools.permutations(sorted(g)) for g in (batch, summed, rows, columns))
    ):
        r, s, m, n = ("".join(order) for order in orders)
        stored = [
            [t for t in map("".join, itertools.permutations(term)) if fits(t, groups)]
            for term, groups in ((a, (r, m, s)), (b, (r, s, n)), (c, (r, m, n)))
        ]
        found |= {f"{x},{y}->{z}" for x, y, z in itertools.product(*stored)}
    return found


@pytest.mark.acceptance("data-movement", 4)
@pytest.mark.parametrize("einsum", sorted(set(EINSUMS)))
def test_the_layouts_are_those_that_addresses_allow(einsum):
    outermost = "q" if "q" in einsum else ""
    found = {
        call.einsum for call in ir.gemm_layouts(einsum, SIZES, outermost=outermost)
    }
    assert found == brute_force(einsum, outermost)
    assert len(found) == COUNTS[einsum]


def matrix(buffer, number, stride, leading, rows, columns):
    """A matrix whose columns are contiguous, as a BLAS sees it."""
    view = np.lib.stride_tricks.as_strided(
        buffer[number * stride :],
        (rows, columns),
        (buffer.itemsize, leading * buffer.itemsize),
    )
    assert number * stride + (columns - 1) * leading + rows <= buffer.size
    assert leading >= rows
    return view


def blas(call, a, b, size):
    """What the call computes, with buffers in and a buffer out."""
    c = np.zeros(size)
    if call.swapped:
        a, b = b, a
    for number in range(call.batch):
        shape = (call.k, call.m) if call.trans_a else (call.m, call.k)
        first = matrix(a, number, call.stride_a, call.lda, *shape)
        shape = (call.n, call.k) if call.trans_b else (call.k, call.n)
        second = matrix(b, number, call.stride_b, call.ldb, *shape)
        result = matrix(c, number, call.stride_c, call.ldc, call.m, call.n)
        result[...] = (first.T if call.trans_a else first) @ (
            second.T if call.trans_b else second
        )
    return c


@pytest.mark.acceptance("data-movement", 4)
@pytest.mark.parametrize("einsum", [*sorted(set(EINSUMS)), "bij,bij->b", "bi,bij->bj"])
def test_every_layouts_call_computes_the_contraction(einsum):
    rng = np.random.default_rng(0)
    for call in ir.gemm_layouts(einsum, SIZES):
        a, b, _ = call.einsum.replace("->", ",").split(",")
        first, second = (rng.normal(size=[SIZES[x] for x in t]) for t in (a, b))
        want = np.einsum(call.einsum, first, second)
        got = blas(call, first.ravel(), second.ravel(), want.size)
        np.testing.assert_allclose(
            got.reshape(want.shape), want, rtol=1e-12, atol=1e-12
        )


@pytest.mark.acceptance("data-movement", 4)
def test_a_group_in_unequal_order_is_named():
    with pytest.raises(ConfigError, match="sum group i, j has another order in 'bji'"):
        ir.gemm("bij,bji->b", SIZES)
    ir.gemm("bij,bij->b", SIZES)


@pytest.mark.parametrize(
    ("einsum", "message"),
    [
        ("ibj,jk->ibk", ""),
        ("ibj,ik->bjk", ""),
        ("bij,jk->ibk", "rows group b, i has another order in 'ibk'"),
        ("ibj,kij->bk", "group i, j does not stand together in 'ibj'"),
        ("ijb,bjk->bik", "batch group b is last in 'ijb'"),
        ("ij,jk->k", r"sums letters of one operand alone: \['i'\]"),
        ("ij,jk->ikx", "is 'a,b->c' of letters"),
        ("ij->ji", "is 'a,b->c' of letters"),
        ("iz,zk->ik", r"axes without a size: \['z'\]"),
    ],
)
def test_what_is_no_product_of_matrices_is_told(einsum, message):
    if not message:
        assert ir.gemm(einsum, SIZES).einsum == einsum
        return
    with pytest.raises(ConfigError, match=message):
        ir.gemm(einsum, SIZES)
