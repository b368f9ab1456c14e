"""GPTQ's tables: the baseline in PyTorch, what is read off runs, and SmolLM2 itself."""

import importlib
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gptq import experiment, kernel_time, solver_time, tables
from hpcjax import compress, data, sharding
from hpcjax.compress import GptqOptions, GridSpec
from hpcjax.core import ConfigError, DataMissing, trees
from hpcjax.runs import directory, discover, execute, results
from hpcjax.runs.context import Context
from hpcjax.runs.progress import Progress
from hpcjax.runs.signals import StopSignals
from tests.data import writers
from tests.experiments import rows
from tests.oracles import obq

ROOT = pathlib.Path(__file__).parents[3]


def baseline():
    pytest.importorskip("torch", reason="the baseline is written in PyTorch")
    return importlib.import_module("experiments.gptq.torch_side")


@pytest.fixture(scope="module")
def sides():
    torch_side = baseline()
    cfg = solver_time.Config(
        width=16, heads=2, kv_heads=1, mlp_width=32, sequences=5, time=8, batch=2
    )
    return solver_time.Sides(cfg, torch_side)


@pytest.mark.slow
def test_the_baseline_is_the_same_block(sides):
    theirs = sides.side.apply(sides.weights, sides.tensor, sides.shape)
    one = jax.tree.map(lambda leaf: leaf[0], sides.params)
    ours, _ = sides.one.apply(one, {}, jnp.asarray(sides.inputs), train=False)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_baseline_gives_the_integers_of_obq():
    torch_side = baseline()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 24)) @ rng.standard_normal((24, 24))
    kernel, hessian = rng.standard_normal((24, 6)), 2 / 200 * x.T @ x
    tensor = torch_side.torch.from_numpy
    factor = torch_side.factor_of(tensor(hessian), 0.01)
    for block in (5, 128):
        made = torch_side.quantize(tensor(kernel.T.copy()), factor, 3, block)
        _, values, _ = obq.obq(kernel, hessian, 3)
        np.testing.assert_allclose(made.numpy().T, values, atol=1e-12)


@pytest.mark.slow
def test_the_baseline_loses_what_we_do(sides):
    made, hessians, outputs = sides.theirs()
    ours = sides.ours()
    np.testing.assert_allclose(ours.outputs, outputs, rtol=0.1, atol=0.1)
    assert set(hessians) == {group[0] for group in sides.groups}
    flat = trees.flatten(compress.dequantize_params(ours.params))
    losses = sides.losses()
    for path in losses:
        theirs = made[f"{path}/kernel"].numpy().T
        assert np.isclose(flat[f"{path}/kernel"][0], theirs, atol=1e-5).mean() > 0.9
    of_ours, of_rounding = np.array(list(losses.values())).T
    assert np.median(np.abs(of_ours - 1)) < 0.01
    # The negative control of the table's claim.
    assert np.abs(of_rounding - 1).max() > 0.01


def run_of(name, perplexity, ratio):
    """A row's run, with a perplexity for each seed; of GPTQ two matrices."""
    columns = {}
    if "GPTQ" in name:
        columns["objective"] = "matrix", np.ones(2)
        columns["rounded"] = "matrix", np.array([ratio, 2 * ratio])
    return rows.run(seeds=range(len(perplexity)), **columns).assign(
        perplexity=("seed", perplexity)
    )


def quality(ratio=2.0, **changes):
    """The table of perplexities 20, 40 by rounding and 26 by GPTQ."""
    names = tables.QUALITY.tier("cpu").runs
    perplexities = {
        name: [25.0, 26.0, 27.0] if "GPTQ" in name else [40.0] for name in names
    }
    perplexities["fp32"] = [20.0]
    perplexities |= changes
    table = tables.QUALITY.reduce(
        {name: run_of(name, each, ratio) for name, each in perplexities.items()}
    )
    return table, rows.verdicts(tables.QUALITY, table)


def test_what_quality_claims():
    table, verdicts = quality()
    assert float(table["closed"].sel(row="3 bits, GPTQ")) == pytest.approx(14 / 20)
    assert verdicts["gaps"].ours == pytest.approx(math.log(2) / math.log(1.3))
    assert verdicts["act_order"].ours == 1
    assert verdicts["every_matrix"].ours == 2
    assert verdicts["objective"].ours == pytest.approx(8**0.5)
    assert all(verdict.holds for verdict in verdicts.values())


@pytest.mark.parametrize(
    ("claim", "ratio", "changes"),
    [
        ("closed", 2.0, {"3 bits, GPTQ": [29.0, 31.0, 31.0]}),
        ("gaps", 2.0, {"2 bits, GPTQ": [32.0, 33.0, 34.0]}),
        ("act_order", 2.0, {"2 bits, GPTQ, act-order": [27.0, 28.0, 29.0]}),
        ("every_matrix", 0.99, {}),
        ("objective", 1.05, {}),
    ],
)
def test_a_claim_of_quality_can_fail(claim, ratio, changes):
    verdicts = quality(ratio, **changes)[1]
    failed = {name for name, verdict in verdicts.items() if not verdict.holds}
    assert claim in failed
    assert failed <= {claim, "objective", "every_matrix"}


def test_the_time_of_the_solver_is_pytorchs_over_ours():
    seconds = [[[4.0, 4.0], [1.0, 1.0]], [[9.0, 9.0], [3.0, 3.0]]]
    run = rows.run(
        {"stage": ["block", "matrices"], "candidate": ["torch", "hpcjax"]},
        seconds=("stage candidate repetition", seconds),
        loss=("path", [1.0, 0.98]),
        rounded=("path", [1.7, 1.9]),
    )
    table = tables.SOLVER.reduce({"all": run})
    assert table["row"].values.tolist()[:2] == ["block, torch", "block, hpcjax"]
    assert table["ratio"].values.tolist() == [1, 1 / 4, 1, 1 / 3]
    assert table["milliseconds"].values.tolist() == [4000, 1000, 9000, 3000]
    found = rows.verdicts(tables.SOLVER, table)
    assert [verdict.holds for verdict in found.values()] == [True, True, False]


@pytest.mark.parametrize(("dense", "expected"), [(300.0, 3.0), (900.0, 4.0)])
def test_a_slow_baseline_of_the_product_does_not_help(dense, expected):
    names = [*tables.BASELINES, "4 bits", "3 bits", "copy"]
    micro = np.array([dense, 2 * dense, 2 * dense, 100.0, 50.0, 600.0])
    # 70 % of the bandwidth takes 400 µs.
    size = 400e-6 * tables.BANDWIDTH * tables.REACHED
    run = rows.run(
        {"candidate": names, "bits": [4, 3]},
        seconds=("candidate repetition", 1e-6 * np.repeat(micro[:, None], 3, axis=1)),
        bytes=("candidate", [size] * 3 + [size / 4] * 2 + [2 * size]),
        error=("bits", [1e-4, 2e-4]),
        mixed=("bits", [0.02, 0.03]),
    )
    table = tables.KERNEL.reduce({"all": run})
    assert float(table["ratio"].sel(row="4 bits")) == pytest.approx(expected)
    assert float(table["share"].sel(row="4 bits")) == pytest.approx(0.75)
    assert float(table["error"].sel(row="3 bits")) == 2e-4


def test_bad_settings_and_absent_models_are_named(tmp_path):
    with pytest.raises(ConfigError, match="blocks=0"):
        experiment.Config(blocks=0)
    with pytest.raises(ConfigError, match="time=1"):
        experiment.Config(time=1)
    wrong = experiment.Config()
    # The type checker of the tests would be first.
    object.__setattr__(wrong, "method", "gtpq")
    with pytest.raises(ConfigError, match="'gtpq'; did you mean 'gptq'"):
        wrong.__post_init__()
    with pytest.raises(ConfigError, match="cannot be packed: got method='rtn'"):
        experiment.Config(method="rtn", grid=GridSpec(ternary=True))
    with pytest.raises(DataMissing, match="hpcjax data fetch smollm2"):
        experiment.load(experiment.Config(), tmp_path)
    with pytest.raises(ConfigError, match="4 blocks: got blocks=5"):
        experiment.load(experiment.Config(model="random", blocks=5), tmp_path)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (solver_time.Config, {"sequences": 0}),
        (solver_time.Config, {"batch": 0}),
        (solver_time.Config, {"repetitions": 0}),
        (solver_time.Config, {"heads": 7}),
        (solver_time.Config, {"bits": 5}),
        (kernel_time.Config, {"inputs": -3}),
        (kernel_time.Config, {"repetitions": 0}),
        (kernel_time.Config, {"group_size": 100}),
        (kernel_time.Config, {"bits": (5,)}),
        (kernel_time.Config, {"bits": (3, 3)}),
        (kernel_time.Config, {"bits": ()}),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(config, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(**wrong)


class Silent:
    """A context with data, which keeps nothing."""

    def __init__(self, data_root):
        self.data_root = data_root

    def record(self, step, **figures):
        assert figures["loss"] > 0


def measured(root, bits, blocks, method, seeds=(0, 1, 2), windows=16, **options):
    """Mean perplexity over seeds, and rounding's objective over GPTQ's."""
    perplexities, ratios = [], []
    for seed in seeds:
        cfg = experiment.Config(
            blocks=blocks,
            method=method,
            grid=GridSpec(bits=bits),
            gptq=GptqOptions(**options),
            windows=windows,
            seed=seed,
        )
        made = experiment.run(cfg, Silent(root))
        perplexities.append(float(made["perplexity"]))
        if method == "gptq":
            ratios.append(made["rounded"].values / made["objective"].values)
    return np.mean(perplexities), np.array(ratios)


@pytest.fixture(scope="module")
def root():
    found = directory.data_root(ROOT)
    for name in ("smollm2", "kjv"):
        data.fetch(name, found)
    return found


@pytest.mark.slow
@pytest.mark.acceptance("gptq", 10)
def test_two_blocks_of_smollm2_keep_their_perplexity():
    """The relations of the table, of two blocks and three windows.

    At 2 bits over three seeds, as in the specification: with one, another order of
    sums, as another processor has it, moves the perplexity by 10 %.
    """
    root = directory.data_root(ROOT)
    if not all(data.is_present(name, root) for name in ("smollm2", "kjv")):
        pytest.skip("needs `hpcjax data fetch smollm2 kjv`")
    given = {"root": root, "blocks": 2, "seeds": (0,), "windows": 3}
    whole, _ = measured(bits=3, method="none", **given)
    for bits in (3, 2):
        given["seeds"] = (0,) if bits == 3 else (0, 1, 2)
        rounded, _ = measured(bits=bits, method="rtn", **given)
        found, ratios = measured(bits=bits, method="gptq", **given)
        ordered, others = measured(bits=bits, method="gptq", act_order=True, **given)
        assert ordered <= 1.05 * found
        assert rounded - found >= 0.5 * (rounded - whole)
        assert math.log(rounded / whole) >= 1.5 * math.log(found / whole)
        for each in (ratios, others):
            assert each.min() > 1
            assert np.exp(np.log(each).mean()) >= 1.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.acceptance("gptq", 10)
@pytest.mark.parametrize("blocks", [6, None], ids=["first", "all"])
def test_at_3_bits_gptq_closes_half_of_the_gap(root, blocks):
    whole, _ = measured(root, 3, blocks, "none", (0,))
    rounded, _ = measured(root, 3, blocks, "rtn", (0,))
    found, ratios = measured(root, 3, blocks, "gptq")
    ordered, others = measured(root, 3, blocks, "gptq", act_order=True)
    assert rounded - found >= 0.5 * (rounded - whole)
    assert ordered <= 1.05 * found
    for each in (ratios, others):
        assert each.min() > 1
        assert np.exp(np.log(each).mean()) >= 1.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.acceptance("gptq", 10)
def test_at_2_bits_the_gap_in_log_perplexity_is_smaller(root):
    whole, _ = measured(root, 2, 6, "none", (0,))
    rounded, _ = measured(root, 2, 6, "rtn", (0,))
    found, ratios = measured(root, 2, 6, "gptq")
    ordered, _ = measured(root, 2, 6, "gptq", act_order=True)
    assert ordered <= 1.05 * found
    assert math.log(rounded / whole) >= 1.5 * math.log(found / whole)
    assert ratios.min() > 1
    assert np.exp(np.log(ratios).mean()) >= 1.5


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_keeps_a_record_of_every_matrix(tmp_path, monkeypatch):
    writers.write_all(tmp_path / "data")
    monkeypatch.setenv("HPCJAX_DATA", str(tmp_path / "data"))
    smoke = discover.find("gptq/smollm2", tmp_path)[0].small()
    done = execute.run("gptq/smollm2", smoke, root=tmp_path, quiet=True)
    folder = directory.open_run(tmp_path, done.id)
    made = results.read(folder.path / "result.nc")
    records = folder.records()
    assert [record["step"] for record in records] == list(range(1, 8))
    assert [record["loss"] for record in records] == made["objective"].values.tolist()
    assert made["matrix"].values[0] == "0/attention/query"
    # A run that was cut off begins anew: what it had kept is forgotten.
    quiet = Progress("again", None, quiet=True)
    again = Context(tmp_path, sharding.data_mesh(1), folder, quiet, StopSignals())
    again.record(1, loss=0.5)
    steps = [record["step"] for record in folder.records() if "loss" in record]
    assert steps == [1]
