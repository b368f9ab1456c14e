"""Functions as graphs and back: the interpreter, the lowering and JAX agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from experiments.sdfg import programs
from hpcjax import ir
from hpcjax.core.errors import ConfigError

RNG = np.random.default_rng(0)
X, Q = (jnp.asarray(RNG.normal(size=(n, 6)), "float32") for n in (4, 6))
B, W = X[0] + 1, Q[:, :3]
KEY = jax.random.key(1)


def norm(x, r, b):
    v = x + r
    c = v - v.mean(-1, keepdims=True)
    return c * lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-6) * b + b


def sweep(x):
    c = x[1:-1, 1:-1]
    v = 0.2 * (c + x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])
    return lax.dynamic_update_slice(x, v, (1, 1))


def attention(x, w):
    h = (x @ w).reshape(4, 3, 1).transpose(1, 0, 2)
    s = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", h, h))
    return jnp.einsum("hqk,hkd->qhd", s, h).reshape(4, 3)


def carried(x):
    def body(c, r):
        return (c[1], c[0] + r), (c[0], r.reshape(2, 3).T)

    return lax.scan(body, (B, B), x, reverse=True)


def nested(x):
    def body(c, r):
        return lax.scan(lambda d, s: (d + s * r, s), c, x)[0], c[::-1]

    return lax.scan(body, B, x)


def special(x):
    y = 1 + x * x
    found = (lax.erf(x), lax.erfc(x), lax.erf_inv(x / 9), lax.lgamma(y), lax.digamma(y))
    return *found, jnp.round(2 * x), jnp.round(jnp.arange(-5, 6) / 2)


def windows(x):
    sizes = {"window_dimensions": (2, 3), "window_strides": (2, 2), "padding": "SAME"}
    whole = (9 * x).astype(int)
    return (
        lax.reduce_window(x, -jnp.inf, lax.max, **sizes),
        lax.reduce_window(whole, np.iinfo(whole.dtype).max, lax.min, **sizes),
        lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 2), "VALID", None, (2, 1)),
    )


def narrow_windows(x):
    """Those whose padding has values that others' has not, and sums that wrap."""

    def window(kind, first, values):
        whole = np.asarray(first, values.dtype)
        return lax.reduce_window(values, whole, kind, (2, 3), (2, 1), "SAME")

    whole = jnp.round(9 * x)
    int32, uint32 = np.iinfo("int32"), np.iinfo("uint32")
    return (
        window(lax.max, False, x > 9),
        window(lax.min, True, x < 9),
        window(lax.max, int32.min, whole.astype(int32.dtype)),
        window(lax.min, uint32.max, jnp.abs(whole).astype(uint32.dtype)),
        window(lax.add, 0, jnp.full((4, 6), 60, "int8")),
        window(lax.add, 0, whole.astype("bfloat16")),
        window(lax.max, -448, x.astype("float8_e4m3fn")),
        window(lax.max, -np.inf, jnp.where(x > 1, jnp.nan, x)),
        lax.reduce_window(x[0, 0], 0.0, lax.add, (), (), "VALID"),
    )


# Functions with what is opaque in them.
FUNCTIONS = {
    "softmax": (lambda x, b: jax.nn.softmax(x + b) * x, X, B),
    "norm": (norm, X, X, B),
    "sweeps": (lambda x: sweep(sweep(x)), Q),
    "attention": (attention, X, W),
    "gradient": (jax.grad(lambda w, x: (jax.nn.gelu(x @ w) ** 2).sum()), W, X),
    "relu gradient": (jax.grad(lambda w, x: jax.nn.relu(x @ w).sum()), W, X),
    "silu": (jax.nn.silu, X),
    "special": (special, X),
    "windows": (windows, X),
    "narrow windows": (narrow_windows, X),
    "large numbers": (
        lambda n: (n ^ np.uint32(0x9E3779B9), jnp.maximum(n.astype(int), -(2**31))),
        jnp.arange(3, dtype="uint32"),
    ),
    "narrow quotient": (lambda x: x / 3 + x**-1, X.astype("bfloat16")),
    "stack": (lambda x: jnp.stack([*jnp.unstack(2 * x, axis=1), x[:, 0]], 1), X),
    "logsumexp": (jax.nn.logsumexp, X),
    "variance": (lambda x: jnp.var(x, 0), X),
    "sines": (lambda x: jnp.sin(x) + jnp.cos(x) * jnp.tanh(x) - jnp.arctan(x), X),
    "roots": (lambda x: jnp.sqrt(jnp.abs(x)) + jnp.cbrt(x) + jnp.exp2(x), X),
    "logs": (lambda x: jnp.log1p(jnp.abs(x)) + jnp.expm1(x) + jnp.log(x * x), X),
    "powers": (lambda x: x**3 + x**-1 + jnp.abs(x) ** 1.5, X),
    "rounding": (lambda x: jnp.floor(x) + jnp.ceil(x) + jnp.sign(x), X),
    "where": (lambda x: jnp.where(x > 0, x, -2 * x).clip(-1, 1), X),
    "bools": (lambda x: (x > 0) & ~(x > 1) | (x < -1) ^ (x == 0), X),
    "reductions": (lambda x: (x.prod(0), x.min(1), (x > 0).all(0), (x > 0).any()), X),
    "converted": (lambda x: (3 * x).astype(int) + jnp.arange(6), X),
    "bits": (lambda x: (x << 2 | 1) >> 1, jnp.arange(-3, 3)),
    "broadcast": (lambda x, b: jnp.broadcast_to(b, x.shape) @ x.T, X, B),
    "einsum": (lambda x, w: jnp.einsum("ij,jk->ki", x[::2], w), X, W),
    "flip": (lambda x: jnp.flip(x, 0)[::2, 1:], X),
    "flipped product": (lambda x, w: x[:, ::-1] @ w, X, W),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0), X),
    "interior pad": (lambda x: lax.pad(x, 0.0, ((1, 0, 1), (0, 2, 2))), X),
    "edges": (lambda x: jnp.pad(x, 1, mode="edge"), X),
    "concatenate": (lambda x: jnp.concatenate([x, x.T.reshape(4, 6), x[:1]]), X),
    "empty": (lambda x: jnp.concatenate([x[:0], x]), X),
    "merge": (lambda x: (2 * x).reshape(24) * jnp.arange(24), X),
    "regroup": (lambda x: (2 * x).T.reshape(3, 8) + 1, X),
    "split": (lambda x: jnp.split(x, 2)[1] - jnp.split(x, 3, 1)[0][:2, :1], X),
    "triangle": (lambda x, w: jnp.tril(x) @ w, X, W),
    "scan": (lambda x: lax.scan(lambda c, r: (c / 2 + r, (c * r)[::-1]), B, x), X),
    "carried": (carried, X),
    "nested scan": (nested, X),
    "remat": (jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()), X),
    "same": (lambda x: (x, x, 2 * x, jnp.ones(3), x.T), X),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(
            x[None, None], w[None, None], (1, 1), "SAME"
        ),
        X,
        W,
    ),
}
OPAQUE = {
    "random_unwrap": (lambda k: jax.random.key_data(k)[0] * 0 + 1, KEY),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X),
    "while": (lambda x: lax.while_loop(lambda c: c.sum() < 9, jnp.exp, x), X),
    "gather": (lambda x: x[jnp.array([1, 0, 2])] + 1, X),
    "scatter-add": (lambda x: x.at[jnp.array([1, 1])].add(1.0), X),
    "sort": (jnp.sort, X),
    "cumsum": (lambda x: jnp.cumsum(x, 0), X),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "random_bits": (lambda k: jax.random.normal(jax.random.split(k)[1], (3,)), KEY),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), X),
    "nextafter": (lambda x: lax.nextafter(x, x + 1), X),
    "round": (lambda x: lax.round(2 * x), X),
    "div": (lambda x: x // 2 % 3, jnp.arange(-3, 3)),
}
EVERY = FUNCTIONS | OPAQUE


@pytest.fixture(scope="module")
def read():
    return {name: ir.from_jax(fn, *args) for name, (fn, *args) in EVERY.items()}


def assert_close(found, wanted):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.shape(one) == other.shape
        scale = max(1.0, float(np.abs(np.asarray(other)).astype(float).max(initial=0)))
        scale *= np.asarray(other).dtype.kind not in "biu"
        np.testing.assert_allclose(
            np.asarray(one, "float64"), np.asarray(other, "float64"), 0, 1e-6 * scale
        )


def run_all(**columns):
    """Runs all functions of some mappings in one program."""
    args = {name: args for name, (_, *args) in EVERY.items()}

    def whole(a):
        return [{n: f(*a[n]) for n, f in own.items()} for own in columns.values()]

    # LLVM would take most of the test's time.
    quick = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(whole).lower(args).compile(compiler_options=quick)
    return dict(zip(columns, compiled(args), strict=True))


@pytest.mark.acceptance("sdfg", 1)
def test_the_interpreter_the_lowering_and_jax_agree(read):
    # What is lowered is fused, so that one program tests both.
    fused = {n: p.rewrite(ir.simplify).rewrite(ir.fuse_maps) for n, p in read.items()}
    made = run_all(
        wanted={name: fn for name, (fn, *_) in EVERY.items()},
        lowered={name: program.to_jax() for name, program in fused.items()},
    )
    wanted, lowered = made["wanted"], made["lowered"]
    assert len(FUNCTIONS) >= 40 - len(OPAQUE)
    for name, (_, *args) in EVERY.items():
        made = read[name].interpret(*args)
        again = fused[name].interpret(*args, order="drawn")
        for found in (lowered[name], made, again):
            assert_close(found, wanted[name])
        kinds = {code.split()[0] for code in read[name].opaque}
        assert (name in kinds) if name in OPAQUE else not kinds, (name, kinds)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(lowered[name])]
        assert dtypes == [leaf.dtype for leaf in jax.tree.leaves(wanted[name])]


def test_a_program_by_node_is_the_function(read):
    program = read["sweeps"]
    assert_close(program.to_jax(by_node=True)(Q), jax.jit(FUNCTIONS["sweeps"][0])(Q))
    assert float(Q[0, 0]) == float(np.asarray(Q)[0, 0])  # Nothing of the caller's went.


@pytest.mark.parametrize("asked", ["highest", "BF16_BF16_F32_X3"])
def test_products_stay_as_exact_as_they_were(asked):
    fn = lambda x, w: jnp.dot(x, w, precision=asked)  # noqa: E731
    program = ir.from_jax(fn, X, W).rewrite(ir.fuse_maps)
    wanted, found = (jax.make_jaxpr(f)(X, W).eqns for f in (fn, program.to_jax()))
    assert wanted[0].params["precision"] is not None
    assert [e.params for e in found if "precision" in e.params] == [wanted[0].params]
    assert not program.opaque
    assert words(program) == ir.movement(program.dataflow()) == 24 + 18 + 12


def test_a_program_is_a_function_for_vmap_and_grad(read):
    xs = jnp.stack([X, 2 * X])
    pairs = {
        "norm": lambda f: jax.vmap(f, (0, None, None))(xs, X, B),
        "nested scan": lambda f: jax.grad(lambda x: (f(x)[1] ** 2).sum())(X),
    }
    both = {n: (FUNCTIONS[n][0], read[n].to_jax()) for n in pairs}
    made = jax.jit(lambda: [[pairs[n](f) for f in both[n]] for n in pairs])()
    for wanted, found in made:
        assert_close(found, wanted)


def drawn(seed):
    """Returns a program, what rules make of it, and arguments."""
    graph = programs.draw(seed)
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.integers(-9, 9, [size.constant for size in each.shape])
        for name, each in graph.arrays.items()
        if not each.transient
    }
    graphs = [graph]
    for rule in (ir.MapFusion, ir.MapReduceFusion, ir.MapTiling):
        for each in rule.matches(graph):
            try:
                graphs.append(graph.apply(each))
            except ir.CannotApply:
                continue
            break
    return graphs, inputs


@pytest.mark.parametrize(
    "seeds", [(0, 5), *(pytest.param([n], marks=pytest.mark.slow) for n in range(40))]
)
def test_drawn_programs_run_as_they_are_interpreted(seeds):
    every = [drawn(seed) for seed in seeds]
    made = jax.jit(
        lambda given: [
            [ir.to_jax(each)(inputs) for each in graphs]
            for (graphs, _), inputs in zip(every, given, strict=True)
        ]
    )([inputs for _, inputs in every])
    for (graphs, inputs), results in zip(every, made, strict=True):
        for each, found in zip(graphs, results, strict=True):
            for name, array in ir.interpret(each, inputs).items():
                np.testing.assert_array_equal(array.astype("float32"), found[name])


def words(program):
    return sum(edge.words for edge in program.graph.movement())


@pytest.mark.acceptance("sdfg", 7)
def test_fusion_saves_the_words_counted_by_hand():
    rows, size = 64, 32
    n = rows * size
    x, b = jnp.zeros((rows, size)), jnp.zeros(size)
    cases = {
        # By N: x, s; s; s, e; e; e, mask, result. By rows: max twice, sum twice, ...
        "softmax": (lambda x, b, m: jax.nn.softmax(x + b) * m, (x, b, x), 9 * n),
        "norm": (norm, (x, x, b), 9 * n),
    }
    for fn, args, wanted in cases.values():
        program = ir.from_jax(fn, *args)
        before = ir.movement(ir.dataflow(fn, *args))
        simple = program.rewrite(ir.simplify)
        after = words(simple.rewrite(ir.fuse_maps))
        assert wanted <= after <= wanted + 12 * rows + 4 * size
        assert words(simple) >= 13 * n
        assert before >= 13 * n


def test_slices_and_reshapes_move_nothing():
    part = ir.from_jax(lambda x: jnp.exp(x[1:, ::-1].T), X)
    assert words(part) == 2 * 18
    merged = ir.from_jax(lambda x: (2 * x).reshape(-1), X)
    assert words(merged.rewrite(ir.fuse_maps)) == 2 * 24


def test_a_window_reads_all_of_its_elements():
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "VALID")  # noqa: E731
    assert ir.from_jax(pool, X).words() == {"map": 4 * 9 + 9}
    large = lambda x: lax.reduce_window(x, 0.0, lax.add, (8, 8), (1, 1), "VALID")  # noqa: E731
    program = ir.from_jax(large, jnp.zeros((8, 9)))
    assert program.words() == {"opaque reduce_window_sum": 72 + 2}


def test_copies_are_told_from_maps_and_lone_tasklets():
    assert ir.from_jax(lambda x: x.T, X).words() == {"copy": 48}
    assert ir.from_jax(lambda x: x[0, 0] + 1, X).words() == {"map": 2}
    made = ir.Builder("copies")
    made.array("A", 4)
    made.array("B", 4)
    with made.map(i="0:4"):
        made.tasklet("to = of", of="A[i]", to="B[i]")
    with made.map(i="0:4"):
        made.tasklet("o = i", o="A[i]")
    found = [(each.kind, each.words) for each in made.build().movement()]
    assert found == [("copy", 4), ("copy", 4), ("map", 4)]


def test_words_of_scans_are_of_all_trips():
    def scan(length):
        xs = jax.ShapeDtypeStruct((length, 5), "float32")
        return words(
            ir.from_jax(lambda x: lax.scan(lambda c, r: (c + r, c), B[:5], x), xs)
        )

    assert scan(8) - scan(4) == scan(12) - scan(8) > 0


def test_opaque_words_are_reported(read):
    assert read["sort"].opaque_words() == 48
    assert read["sort"].words() == {"opaque sort": 48}
    assert read["split"].words() == {"map": 12 + 2 + 12}
    einsum = read["einsum"].words()
    assert einsum.pop("einsum") == 12 + 18 + 6
    whole = sum(edge.words for edge in read["einsum"].graph.movement())
    assert sum(einsum.values()) == whole - 36
    assert read["softmax"].opaque_words() == 0


def test_bad_input_is_named(read):
    with pytest.raises(ConfigError, match="must take and return arrays"):
        ir.from_jax(lambda: 1)
    with pytest.raises(ConfigError, match="donated"):
        ir.from_jax(jax.jit(jnp.sin, donate_argnums=0), X)
    with pytest.raises(ConfigError, match="arguments must be"):
        read["softmax"].to_jax()(X)
    with pytest.raises(ConfigError, match=r"shape \(4, 6\): got \(6, 6\)"):
        read["softmax"].to_jax()(Q, B)
    with pytest.raises(ConfigError, match="must keep container"):
        read["softmax"].rewrite(lambda _: read["scan"].graph)
    with pytest.raises(ConfigError, match="no function 'sort 1'"):
        ir.to_jax(read["sort"].graph)
    fused = read["norm"].rewrite(ir.fuse_maps).graph
    assert ir.replay(fused.history, read["norm"].graph) == fused
    with pytest.raises(ConfigError, match="history began with"):
        ir.replay(fused.history, read["softmax"].graph)


@pytest.mark.parametrize(("narrow", "wide"), [("int8", "int32"), ("bfloat16", "f4")])
def test_products_of_narrow_numbers_are_summed_in_wide_ones(narrow, wide):
    """100 products of 100 are no int8, and no bfloat16 to its last digit."""
    x = jnp.full((2, 101), 100, narrow)

    def multiply(x):
        return jax.lax.dot(x, x.T, preferred_element_type=wide)

    program = ir.from_jax(multiply, x)
    expected = np.full((2, 2), 101 * 100 * 100)
    for found in (program.to_jax()(x), program.interpret(x)):
        assert found.dtype == np.dtype(wide)
        np.testing.assert_array_equal(found, expected)
