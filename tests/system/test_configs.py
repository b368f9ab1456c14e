"""Every config and variant that is in the repository: runs small, is described."""

import functools
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re

import jax
import numpy as np
import pytest

from hpcjax.core import ConfigError, DataMissing, UnsupportedOp
from hpcjax.runs import (
    cli,
    config,
    directory,
    discover,
    execute,
    outlines,
    plan,
    results,
)
from hpcjax.runs import overrides as override
from hpcjax.runs.table_records import record_path
from tests.data import writers

REPOSITORY = pathlib.Path(__file__).parents[2]
ENTRIES = discover.find_configs(REPOSITORY)
VARIANTS = [f"{entry.name}:{name}" for entry in ENTRIES for name in entry.variants]


def entry_of(name):
    return next(e for e in ENTRIES if e.name == name.partition(":")[0])


def small(name):
    return entry_of(name).small(name.partition(":")[2])


@functools.cache
def load(name, tiny=False):
    return discover.load(name, small(name) if tiny else {}, REPOSITORY)


TRAINING = [name for name in VARIANTS if hasattr(load(name).experiment, "task")]

smoke = pytest.mark.smoke
# Variants that the smoke override makes equal to another of their config run once.
SMALL = {
    (entry.name, config.digest(load(name, tiny=True).config)): name
    for entry in ENTRIES
    for variant in sorted(entry.variants, key=lambda name: name == entry.base)
    for name in [f"{entry.name}:{variant}"]
}


def quick(paper):
    """The variant of a paper that is not slow: of digits, or its first config."""
    own = [entry for entry in ENTRIES if entry.name.startswith(f"{paper}/")]
    entry = min(own, key=lambda entry: not entry.name.endswith("/digits"))
    return f"{entry.name}:{entry.base}"


QUICK = {quick(entry.name.partition("/")[0]) for entry in ENTRIES}


def mark(name, *marks):
    slow = () if name in QUICK else (pytest.mark.slow,)
    return pytest.param(name, marks=[*marks, *slow])


# The newest Python and JAX run one variant of each config, and the contracts that all
# optimizers, exchanges and averages keep.
RUNS = [
    mark(name, *([smoke] if number == 0 else []))
    for _, group in itertools.groupby(SMALL.values(), lambda name: entry_of(name).name)
    for number, name in enumerate(group)
]
# A plan compiles what the small run of each variant compiles, too: of these it is made
# for one of each kind of data.
BASES = [name for name in TRAINING if entry_of(name).base == name.partition(":")[2]]
PLANS = {
    load(name).config.dataset.objective.name: name for name in BASES if name in QUICK
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    writers.write_all(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCJAX_DATA", str(folder / "data"))
        yield folder


@smoke
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_config_says_what_it_is_and_what_to_expect(entry):
    assert entry.problem == ""
    assert entry.summary
    assert "\nExpect: " in entry.doc
    assert entry.variants[entry.base]
    for name in entry.variants:
        tiny = load(f"{entry.name}:{name}", tiny=True).config
        assert config.diff(entry.variants[name], tiny)


@smoke
@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_survives_json_and_is_spelled_by_overrides(name):
    loaded = load(name)
    data = json.loads(json.dumps(config.to_json(loaded.config)))
    assert config.from_json(data) == loaded.config
    changes = config.changes(loaded.base, loaded.config)
    assert override.parse(loaded.base, changes) == loaded.config


def absent_peers(entry):
    """Environments that the config needs and `make` has not made here."""
    paper = entry.name.partition("/")[0]
    return [
        need
        for need in entry.needs
        if (REPOSITORY / f"experiments/{paper}/peers/{need}.txt").exists()
        and not (REPOSITORY / ".cache/peers" / need / "bin/python").exists()
    ]


def absent_packages(entry):
    """Packages of an extra that a small run needs and that are absent."""
    without_peer = entry.smoke.get("peer") == "false"
    return [
        need
        for need in entry.needs
        if (need == "triton" or (need == "torch" and not without_peer))
        and importlib.util.find_spec(need) is None
    ]


@pytest.mark.parametrize("name", RUNS)
def test_a_small_run_ends_well(name, root):
    if absent_packages(entry_of(name)):
        errors = (ConfigError, UnsupportedOp)
        with pytest.raises(errors, match=r"pip install 'hpcjax\[(oracles|gpu)\]'"):
            execute.run(name, small(name), root=root, quiet=True)
        return
    for peer in absent_peers(entry_of(name)):
        with pytest.raises(DataMissing, match=f"make .cache/peers/{peer}"):
            execute.run(name, small(name), root=root, quiet=True)
        return
    done = execute.run(name, small(name), root=root, quiet=True)
    folder = directory.open_run(root, done.id)
    assert folder.status == "done"
    result = results.read(folder.path / "result.nc")
    check_figures(result, folder)
    loaded = load(name, tiny=True)
    assert outlines.of_config(loaded.config).differences(result) == []
    check_origin(folder, name)


def check_figures(dataset, folder):
    assert dataset.attrs["source"] in results.SOURCES
    for column, values in dataset.data_vars.items():
        if values.dtype.kind in "OU":
            assert all(isinstance(text, str) for text in values.values.ravel()), column
        else:
            known = np.isfinite(values.values)
            may_lack = "NaN" in values.attrs.get("long_name", "")
            assert known.any() if may_lack else known.all(), column
    for record in folder.records():
        for column, value in record.items():
            assert math.isfinite(value), column


def check_origin(folder, name):
    origin = json.loads((folder.path / "provenance.json").read_text())
    stamped = results.read(folder.path / "result.nc").attrs["provenance"]
    assert json.loads(stamped) == origin
    loaded = load(name, tiny=True)
    assert origin["config_digest"] == config.digest(loaded.config)
    assert config.digest_json(folder.read_config()) == origin["config_digest"]
    assert origin["seed"] == loaded.config.seed
    assert set(origin) >= {"git_commit", "git_dirty", "parent", "settings", "command"}
    if (REPOSITORY / ".git").exists():
        assert len(origin["git_commit"]) == 40
    assert all(origin["versions"][package] for package in ("jax", "numpy", "optax"))
    assert origin["devices"] == {"cpu": 8}
    assert origin["environment"]["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert origin["started"].endswith("+00:00")


@pytest.mark.parametrize("name", BASES)
@pytest.mark.quick(*PLANS.values())
def test_a_small_plan_has_figures(name, root):
    planned = plan.plan_run(name, small(name), root=root)
    assert planned.name == name
    assert planned.parameters > 0
    assert planned.flops > 0
    assert planned.peak_bytes >= planned.state_bytes > planned.parameters


# Networks that have fewer than 1,000 weights.
PUBLISHED = {
    "smoe/heat:cnn": 305,
    "smoe/heat:coord_conv": 593,
    "gnn/staleness:regression": 650,
}
FIELDS = re.compile(r"dataset\.|model\.(crop|poolings)$")


def compose(loaded, data_root):
    """The task on the fewest devices that the config can be spread over."""
    for devices in (1, 2, 4):
        try:
            return loaded.experiment.task(loaded.config, data_root, devices)
        except ConfigError as error:
            if "must divide the devices" not in str(error):
                raise
    return loaded.experiment.task(loaded.config, data_root, 8)


@pytest.mark.parametrize("name", [mark(name) for name in TRAINING])
def test_the_full_model_and_optimizer_can_be_built(name, root):
    loaded = load(name)
    if "dataset.corpora" in config.flatten(loaded.config):
        # The vocabulary is of a few texts: to learn it from all takes 15 seconds.
        loaded = discover.load(name, {"dataset.limit": "20"}, REPOSITORY)
    if "dataset.probs" in config.flatten(loaded.config):  # a part has few images here
        loaded = discover.load(name, {"train.batch_size": "1"}, REPOSITORY)
    if "dataset.negatives" in config.flatten(loaded.config):  # few entities, likewise
        loaded = discover.load(name, {"dataset.negatives": "16"}, REPOSITORY)
    if "dataset.lead_hours" in small(name):  # fields here are few and small
        kept = {key: text for key, text in small(name).items() if FIELDS.match(key)}
        loaded = discover.load(name, kept, REPOSITORY)
    task = compose(loaded, directory.data_root(root))

    def make():
        params, state = task.model.init(jax.random.key(0))
        return params, state, task.method.init(params)

    params, _, _ = jax.eval_shape(make)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    # Statistics of ensembles have a few coefficients, and the raw one none.
    few = loaded.config.dataset.objective.name == "postprocessing"
    assert size == PUBLISHED[name] if name in PUBLISHED else size > 1000 or few


@smoke
def test_dry_run_prints_the_plan(root, capsys):
    entry = entry_of("jorge/digits")
    smoke = [f"{key}={value}" for key, value in entry.small().items()]
    args = ["run", entry.name, "--dry-run", "--root", str(root), *smoke]
    runs = len(directory.list_runs(root))
    assert cli.main(args) == 0
    text = capsys.readouterr().out
    for part in (entry.name, "parameters", "peak memory", "FLOP", "result.nc"):
        assert part in text
    assert len(directory.list_runs(root)) == runs


@smoke
@pytest.mark.parametrize("table_id", discover.find_tables(REPOSITORY))
def test_every_run_of_a_table_is_a_config_that_loads(table_id):
    table = discover.find_tables(REPOSITORY)[table_id]
    assert table.times or not table.benchmark
    for name, tier in table.tiers.items():
        assert tier.claims
        assert record_path(table, name, REPOSITORY).parent.name == "results"
        for runs in tier.runs.values():
            takes = {
                key: tier.runs[runs.like].tune[key][0]
                for key in runs.takes
                if runs.like
            }
            for trial in runs.trials():
                values = {**runs.overrides, **trial, **takes, "seed": "0"}
                assert override.parse(load(runs.config).config, values)
