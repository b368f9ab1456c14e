"""The comparison with kfac-jax, as far as it needs no kfac-jax: messages and our side.

What kfac-jax itself gives is in the table `kaisa/kfac-jax`.
"""

import pathlib
import sys

import numpy as np
import pytest

from experiments.kaisa import peer_experiment, peer_side, peer_tables
from experiments.kaisa.peers import process
from hpcjax.core import ConfigError, DataMissing, HpcjaxError, ProcessLost
from tests.experiments import rows
from tests.oracles import kfac as oracle

SMALL = {
    "widths": (4,),
    "inputs": (6, 6, 1),
    "classes": 3,
    "batch_size": 5,
    "factor_update_steps": 1,
    "inv_update_steps": 3,
    "repetitions": 2,
}
ECHO = """
import multiprocessing.connection, os, sys
connection = multiprocessing.connection.Connection(int(sys.argv[1]))
while True:
    name, given = connection.recv()
    if name == "end":
        print("crumbs", file=sys.stderr)
        sys.exit(3)
    if name == "fail":
        connection.send((None, "a traceback"))
    else:
        connection.send(([*given, os.environ.get("PYTHONPATH", "")], ""))
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", "ours")
    with process.start(pathlib.Path(sys.executable), script, "make it") as peer:
        yield peer


def test_a_peer_answers_without_our_packages(echo):
    options, arrays, path = echo.ask("echo", {"a": 1}, {"x": np.ones(3)})
    assert (options, path) == ({"a": 1}, "")
    assert arrays["x"].sum() == 3


def test_a_peer_that_fails_answers_on_and_one_that_ends_is_lost(echo):
    with pytest.raises(HpcjaxError, match="'fail':\na traceback") as caught:
        echo.ask("fail")
    assert not isinstance(caught.value, ProcessLost)
    assert echo.ask("echo", 1) == [1, ""]
    with pytest.raises(ProcessLost, match="ended at 'end':\ncrumbs"):
        echo.ask("end")
    with pytest.raises(ProcessLost):
        echo.ask("echo")


def test_without_the_peer_the_command_that_makes_it_is_named(tmp_path):
    cfg = peer_experiment.Config(**SMALL, python=str(tmp_path / "python"))
    with pytest.raises(DataMissing, match=r"make \.cache/peers/kfac-jax"):
        peer_experiment.run(cfg, None)


def test_a_config_that_cannot_be_measured_is_refused():
    for wrong in ({"repetitions": 1}, {"damping": 0.0}, {"problem": "cnn"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            peer_experiment.Config(**{**SMALL, **wrong})


def convolved(x, kernel, bias):
    """Pre-activations of a 3x3 convolution of stride 2 with one zero on all sides."""
    size = -(-x.shape[1] // 2)
    rows = [
        [oracle.patch(each, 2 * i - 1, 2 * j - 1, (3, 3), 1) for i in range(size)
         for j in range(size)]
        for each in x
    ]  # fmt: skip
    flat = kernel.reshape(-1, kernel.shape[-1])
    return (np.array(rows) @ flat + bias).reshape(len(x), size, size, -1)


def layers_in_numpy(cfg, arrays):
    """Inputs and per-example output gradients of both layers, hidden one first."""
    first = "dense_0" if cfg.problem == "mlp" else "conv_0"
    named = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    x, labels = named["x"], arrays["y"]
    kernel, bias = named[f"{first}/kernel"], named[f"{first}/bias"]
    if cfg.problem == "mlp":
        x = x.reshape(len(x), -1)
        before = x @ kernel + bias
    else:
        before = convolved(x, kernel, bias)
    hidden = np.tanh(before).reshape(len(x), -1)
    logits = hidden @ named["head/kernel"] + named["head/bias"]
    slopes = oracle.softmax(logits) - np.eye(cfg.classes)[labels]
    inner = slopes @ named["head/kernel"].T * (1 - hidden**2)
    return {first: (x, inner.reshape(before.shape)), "head": (hidden, slopes)}


def expected(cfg, path, x, slopes):
    """A, G, the gradient and its preconditioned form, (outputs, inputs + 1)."""
    if path.startswith("conv"):
        a, g = oracle.conv_factors(x, slopes, (3, 3), 2, (1, 1), 1, True, False)
        size = range(slopes.shape[1])
        rows = np.array(
            [[oracle.patch(each, 2 * i - 1, 2 * j - 1, (3, 3), 1) for i in size
              for j in size] for each in x]
        ).reshape(-1, a.shape[0] - 1)  # fmt: skip
    else:
        a, g = oracle.dense_factors(x, slopes, True)
        rows = x
    wide = np.hstack([rows, np.ones((len(rows), 1))])
    gradient = slopes.reshape(len(rows), -1).T @ wide / cfg.batch_size
    if cfg.method == "eigen":
        made = oracle.solve_kronecker(a, g, gradient, cfg.damping)
    else:
        pi, root = oracle.pi(a, g), np.sqrt(cfg.damping)
        made = oracle.solve_factors(a, g, gradient, pi * root, root / pi)
    return a, g, gradient, made


def matrix(arrays, kind, path):
    kernel = arrays[f"{kind}/{path}/kernel"]
    flat = kernel.reshape(-1, kernel.shape[-1])
    return np.vstack([flat, arrays[f"{kind}/{path}/bias"][None]]).T


@pytest.mark.quick("mlp-inverse")
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("problem", ["mlp", "conv"])
def test_our_side_is_what_the_definitions_say(problem, method):
    cfg = peer_experiment.Config(**SMALL, problem=problem, method=method)
    side = peer_side.Side(cfg)
    found = side.curvature()
    for path, (x, slopes) in layers_in_numpy(cfg, side.arrays()).items():
        a, g, gradient, made = expected(cfg, path, x, slopes)
        for ours, theirs in (
            (found[f"a/{path}"], a),
            (found[f"g/{path}"], g),
            (matrix(found, "gradient", path), gradient),
            (matrix(found, "preconditioned", path), made),
        ):
            far = np.linalg.norm(ours - theirs)
            assert far <= 2e-5 * np.linalg.norm(theirs)


def test_the_exact_fisher_is_another_matrix():
    found = [
        peer_side.Side(peer_experiment.Config(**SMALL, fisher=fisher)).curvature()
        for fisher in ("empirical", "exact")
    ]
    np.testing.assert_allclose(found[0]["a/head"], found[1]["a/head"], rtol=1e-5)
    assert np.abs(found[0]["g/head"] - found[1]["g/head"]).max() > 1e-3


@pytest.mark.slow
def test_the_timed_steps_train_checked_or_not():
    cfg = peer_experiment.Config(**SMALL)
    side = peer_side.Side(cfg)
    plain, checked = (side.steps(3, check=check)() for check in (False, True))
    assert int(plain.step) == int(checked.step) == 3
    change = side.change(3)
    for path in ("dense_0/kernel", "head/bias"):
        layer, name = path.split("/")
        after = np.asarray(plain.params[layer][name])
        np.testing.assert_allclose(after, checked.params[layer][name], rtol=1e-6)
        added = after - side.arrays()[path]
        np.testing.assert_allclose(change[f"change/{path}"], added, atol=1e-7)
        assert np.abs(added).max() > 0


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("examples", [1, 5])
def test_its_conventions_are_taken_out(method, examples):
    """T before the product, and G and damping divided by N, are no other matrix."""
    rng = np.random.default_rng(0)
    positions, damping = 7, 0.3
    a, g = (np.cov(rng.standard_normal((n, 9))) for n in (4, 3))
    gradient = rng.standard_normal((3, 4))

    def solved(a, g, damping):
        if method == "eigen":
            return oracle.solve_kronecker(a, g, gradient, damping)
        pi, root = oracle.pi(a, g), np.sqrt(damping)
        return oracle.solve_factors(a, g, gradient, pi * root, root / pi)

    theirs = {
        "a/c": a / positions,
        "scale/c": np.float64(positions),
        "g/c": g / examples,
        "preconditioned/c/kernel": solved(a, g / examples, damping / examples),
        "gradient/c/kernel": gradient,
    }
    ours = {
        "a/c": a,
        "g/c": g,
        "preconditioned/c/kernel": solved(a, g, damping),
        "gradient/c/kernel": gradient,
    }
    brought = peer_experiment.in_our_terms(theirs, examples)
    found = peer_experiment.differences(ours, brought)
    assert found.keys() == {"a", "g", "preconditioned", "gradient"}
    assert max(found.values()) < 1e-12


def test_the_largest_difference_of_a_kind_counts():
    ones, zeros = np.ones(4), np.zeros(4)
    ours = {"a/x": ones, "a/y": 2 * ones, "g/x": zeros, "g/y": ones}
    theirs = {"a/x": ones, "a/y": ones, "g/x": zeros, "g/y": zeros}
    found = peer_experiment.differences(ours, theirs)
    assert found == {"a": 1.0, "g": np.inf}
    with pytest.raises(ValueError, match="g/y"):
        peer_experiment.differences(ours, {"a/x": ones, "a/y": ones, "g/x": zeros})


class Echo:
    """A peer whose K-FAC is ours."""

    def __init__(self, cfg):
        self.side = peer_side.Side(cfg)

    def ask(self, what, *given):
        found = getattr(self.side, what)(*given)
        if what == "change":
            return found
        return found | {f"scale/{k[2:]}": 1.0 for k in found if k.startswith("a/")}


@pytest.mark.slow
def test_the_controls_of_a_comparison_differ_where_all_else_is_the_same():
    cfg = peer_experiment.Config(**SMALL, fisher="exact")
    found = peer_experiment.compare(peer_side.Side(cfg), Echo(cfg), cfg)
    controls = {name: found.pop(name) for name in ("raw", "one_more")}
    assert max(found.values()) < 1e-6
    assert min(controls.values()) > 1e-3


def test_the_peer_is_told_the_same_problem():
    cfg = peer_experiment.Config(**{**SMALL, "problem": "conv"})
    side = peer_side.Side(cfg)
    told = cfg.request(side.model)
    assert [layer["kind"] for layer in told["layers"]] == ["conv", "dense"]
    assert told["layers"][0]["strides"] == (2, 2)
    assert told["damping"] == cfg.damping / 5
    exact = peer_experiment.Config(**SMALL, fisher="exact").request(side.model)
    assert (exact["damping"], exact["learning_rate"]) == (cfg.damping, cfg.lr)
    assert {"x", "y", "conv_0/kernel", "head/bias"} <= side.arrays().keys()


def runs_of(preconditioned=1e-5, change=1e-6, mlp=0.5, conv=0.2):
    """What runs of all rows might give, kfac-jax taking a second a step."""
    made = {}
    for row in peer_tables.KFAC_JAX.tiers["cpu"].runs:
        ours = mlp if row.startswith("mlp") else conv
        seconds = np.array([[1.0] * 3, [ours] * 3, [2 * ours] * 3])
        quantities = {"a": 1e-6, "g": 1e-6, "preconditioned": preconditioned}
        quantities |= {"change": change, "raw": 0.5, "one_more": 0.01}
        candidates = ["kfac-jax", "hpcjax", "hpcjax, checked"]
        made[row] = rows.run(
            {"quantity": list(quantities), "candidate": candidates},
            difference=("quantity", list(quantities.values())),
            seconds=("candidate repetition", seconds),
        )
    return made


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, set()),
        ({"preconditioned": 2e-4}, {"agree"}),
        ({"preconditioned": np.nan}, {"agree"}),
        ({"change": 1e-3}, {"same_steps"}),
        ({"mlp": 0.9}, {"mlp"}),
        ({"conv": 0.9}, {"conv"}),
    ],
)
def test_the_claims_are_about_the_worst_row(change, failing):
    table = peer_tables.KFAC_JAX
    dataset = table.reduce(runs_of(**change))
    found = rows.verdicts(table, dataset)
    assert {name for name, verdict in found.items() if not verdict.holds} == failing
    assert set(table.columns) <= set(dataset.data_vars)
    ratio = dataset["checked_ratio"] / dataset["ratio"]
    np.testing.assert_allclose(ratio, 2.0)


@pytest.mark.slow
@pytest.mark.skipif(not peer_experiment.PYTHON.exists(), reason=peer_experiment.COMMAND)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("problem", ["mlp", "conv"])
def test_kfac_jax_makes_the_same_matrices(problem, method, fisher):
    cfg = peer_experiment.Config(**SMALL, problem=problem, method=method, fisher=fisher)
    found = peer_experiment.run(cfg, None)["difference"].to_series()
    assert (found.drop(["raw", "one_more"]) <= 1e-4).all(), found
    assert (found[["raw", "one_more"]] > 1e-3).all(), found
