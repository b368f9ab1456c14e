"""Configs, experiments and tables of several roots."""

import dataclasses
import importlib
import json
import os
import pathlib
import sys

import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.runs import config as configs
from hpcjax.runs import discover, places
from tests.runs import roots

REPOSITORY = pathlib.Path(__file__).parents[2]
HOSTILE = [
    "..",
    "../etc/passwd",
    "mine/../mine/first",
    "mine/..",
    "/mine/first",
    "//mine/first",
    "mine//first",
    "mine/first/",
    "mine/first:../second",
    "mine/first:se cond",
    "mine/first:",
    "mine/.hidden",
    "mine\\first",
    "mine/first\n",
    "mine/first\x00",
    "mine/first;rm -rf",
    "mine/$(first)",
    "~/first",
    "mine/first\N{RIGHT-TO-LEFT OVERRIDE}",
    "mïne/first",
    "mine/" + "a" * 300,
    "-rf/first",
    "",
]


def test_configs_of_a_root(tmp_path):
    roots.make(tmp_path)
    entries = {entry.name: entry for entry in discover.find_configs(tmp_path)}
    entry = entries["mine/first"]
    assert entry.summary == "Two ways to do it."
    assert "Expect: nothing." in entry.doc
    assert list(entry.variants) == ["first", "second"]
    assert entry.base == "second"
    assert entry.smoke == {"steps": "1"}
    assert entry.needs == ("a data set",)
    assert entry.problem == ""
    assert entry.path == tmp_path / "configs/mine/first.py"
    only = discover.find_configs(tmp_path, "mine")
    assert [entry.name for entry in only] == ["mine/first"]
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        discover.find_configs(tmp_path, "mini")


def test_a_users_root_stands_beside_the_checkout(tmp_path):
    roots.make(tmp_path)
    roots.write(
        tmp_path,
        "configs/mine/derived.py",
        """
        from experiments.jorge import step_cost
        from experiments.mine.experiment import Config
        only = Config(seed=len(step_cost.__name__))
        """,
    )
    loaded = discover.load("mine/derived", {}, tmp_path)
    assert loaded.config.seed == len("experiments.jorge.step_cost")
    assert loaded.variant == "only"
    assert {"jorge", "mine"} <= {
        entry.name.partition("/")[0] for entry in discover.find_configs(tmp_path)
    }


def test_load(tmp_path):
    roots.make(tmp_path)
    loaded = discover.load("mine/first", {}, tmp_path)
    assert (loaded.name, loaded.variant, loaded.title) == (
        "mine/first",
        "second",
        "mine/first:second",
    )
    assert loaded.experiment.__name__ == "experiments.mine.experiment"
    changed = discover.load("mine/first:first", {"optimizer.lr": "3"}, tmp_path)
    assert changed.config.optimizer.lr == 3.0
    assert changed.base == loaded.config
    assert discover.load("mine/first:base", {}, tmp_path).variant == "second"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mine/frist", "did you mean 'mine/first'"),
        ("mini/first", "did you mean 'mine/first'"),
        ("mine/first:secnd", "did you mean 'second'"),
        ("mine", "is a paper; its configs: mine/first"),
        ("zzz", "unknown config 'zzz'"),
        ("mine/first:_hidden", "must start with a letter"),
        ("absent.json", "no such file"),
    ],
)
def test_names_that_are_not_there(tmp_path, name, part):
    roots.make(tmp_path)
    with pytest.raises(ConfigError, match=r".") as caught:
        discover.load(name, {}, tmp_path)
    assert part in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(tmp_path, name):
    roots.make(tmp_path)
    with pytest.raises(ConfigError):
        discover.load(name, {}, tmp_path)
    with pytest.raises(ConfigError):
        discover.experiment_folder(name, tmp_path)


def test_a_link_out_of_the_root_is_refused(tmp_path):
    root = roots.make(tmp_path / "root")
    outside = roots.write(tmp_path, "outside.py", "raise SystemExit('it was run')")
    (root / "configs/mine/linked.py").symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of"):
        discover.load("mine/linked", {}, root)


def test_config_json(tmp_path):
    roots.make(tmp_path)
    loaded = discover.load("mine/first:first", {"seed": "4"}, tmp_path)
    data = {"name": loaded.title, **configs.to_json(loaded.config)}
    path = roots.write(tmp_path, "runs/x/config.json", json.dumps(data))
    for name in (str(path), "runs/x/config.json"):
        again = discover.load(name, {"steps": "8"}, tmp_path)
        assert again.config == dataclasses.replace(loaded.config, steps=8)
        assert again.title == "mine/first:first"
        assert again.base.optimizer == loaded.base.optimizer
    path.write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        discover.load(str(path), {}, tmp_path)
    path.write_text(json.dumps(data | {"name": "../../x"}))
    with pytest.raises(ConfigError, match="name"):
        discover.load(str(path), {}, tmp_path)
    for depth in (900, 985, 100_000):  # too deep to be shown, or to be read
        deep = "[" * depth + "]" * depth
        path.write_text(json.dumps(data | {"values": {"seed": 7}}).replace("7", deep))
        with pytest.raises(ConfigError, match=r"config\.json"):
            discover.load("runs/x/config.json", {}, tmp_path)
    path.write_text(json.dumps(data | {"values": {"sede": 3}}))
    with pytest.raises(ConfigError, match=r"config\.json.*did you mean 'seed'"):
        discover.load(str(path), {}, tmp_path)


def test_one_paper_in_two_roots(tmp_path, monkeypatch):
    mine = roots.make(tmp_path / "mine", "jorge")
    with pytest.raises(ConfigError) as caught:
        discover.find_configs(mine)
    assert str(mine) in str(caught.value)
    assert str(REPOSITORY) in str(caught.value)


def test_the_same_folder_twice_is_one_root(tmp_path):
    linked = tmp_path / "linked"
    linked.symlink_to(REPOSITORY)
    assert places.search_path(linked) == places.search_path(REPOSITORY)


def test_another_checkout_is_not_a_root_of_this_one(tmp_path):
    other = roots.make(tmp_path / "other", "shipped")
    (other / "hpcjax").mkdir()
    (other / "hpcjax/__init__.py").touch()
    (other / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match="run `python -m hpcjax` in that folder"):
        places.search_path(other)


def installed(folder, monkeypatch):
    """Pretends that hpcjax is installed in `folder`, with a bundled paper."""
    home = folder / "site-packages" / "hpcjax"
    roots.make(home / "_bundled", "shipped")
    monkeypatch.setattr(places, "_HOME", home)
    return home


def test_an_installation_brings_its_bundle(tmp_path, monkeypatch):
    home = installed(tmp_path, monkeypatch)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert places.search_path(empty) == (home / "_bundled",)
    mine = roots.make(tmp_path / "mine")
    names = [entry.name for entry in discover.find_configs(mine)]
    assert names == ["mine/first", "shipped/first"]
    clash = roots.make(tmp_path / "clash", "shipped")
    with pytest.raises(ConfigError, match="in two roots"):
        discover.find_configs(clash)


def test_a_checkout_as_root_replaces_the_bundle(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch)
    checkout = roots.make(tmp_path / "checkout", "shipped")
    roots.write(checkout, "pyproject.toml", "")
    roots.write(checkout, "hpcjax/__init__.py", "")
    assert places.search_path(checkout) == (checkout,)
    assert [e.name for e in discover.find_configs(checkout)] == ["shipped/first"]


def test_a_regular_package_is_refused(tmp_path):
    file = roots.write(roots.make(tmp_path), "configs/__init__.py", "")
    with pytest.raises(ConfigError, match="remove") as caught:
        discover.find_configs(tmp_path)
    assert str(file) in str(caught.value)


def test_two_roots_one_after_the_other(tmp_path):
    one, two = roots.make(tmp_path / "one"), roots.make(tmp_path / "two")
    old = discover.load("mine/first", {}, one).config
    text = (two / "experiments/mine/experiment.py").read_text()
    (two / "experiments/mine/experiment.py").write_text(text.replace("= 3", "= 5"))
    assert discover.load("mine/first", {}, two).config.steps == 5
    assert discover.load("mine/first", {}, one).config.steps == 3
    assert type(old) is not type(discover.load("mine/first", {}, one).config)
    assert discover.find_configs(REPOSITORY)
    assert "configs.mine" not in sys.modules


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("def", "cannot be imported: SyntaxError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        (
            "from experiments.mine.experiment import Config as C\na = C()\nb = C()",
            "must define `base`, one of: a, b",
        ),
        ("x = 3", "must define `base`"),
    ],
)
def test_a_file_that_fails_spoils_only_itself(tmp_path, text, part):
    roots.make(tmp_path)
    file = roots.write(tmp_path, "configs/mine/broken.py", text)
    found = {entry.name: entry for entry in discover.find_configs(tmp_path)}
    assert part in found["mine/broken"].problem
    assert not found["mine/first"].problem
    assert discover.load("mine/first", {}, tmp_path)
    with pytest.raises(ConfigError) as caught:
        discover.load("mine/broken", {}, tmp_path)
    assert str(file) in str(caught.value)


def test_an_experiment_must_have_run(tmp_path):
    roots.make(tmp_path)
    roots.write(
        tmp_path,
        "configs/mine/odd.py",
        """
        from tests.runs.example_config import SgdConfig
        import sys
        del sys.modules["tests.runs.example_config"].run
        base = SgdConfig()
        """,
    )
    import tests.runs.example_config as example

    kept = example.run
    try:
        with pytest.raises(ConfigError, match="must define run"):
            discover.load("mine/odd", {}, tmp_path)
    finally:
        example.run = kept


TABLE = """
from hpcjax.runs.tables import Table
def reduce(rows): ...
T = Table(id="{id}", title="t", paper="p", tiers={{}}, reduce=reduce, columns={{}})
"""


def test_tables(tmp_path):
    roots.make(tmp_path)
    file = roots.write(
        tmp_path, "experiments/mine/tables.py", TABLE.format(id="mine/steps")
    )
    found = discover.find_tables(tmp_path)
    assert found["mine/steps"].title == "t"
    file.write_text(TABLE.format(id="other/steps"))
    os.utime(file, (0, 0))
    sys.modules.pop("experiments.mine.tables")
    with pytest.raises(ConfigError, match="must start with 'mine/'"):
        discover.find_tables(tmp_path)
    file.write_text(
        TABLE.format(id="mine/a") + TABLE.format(id="mine/a").replace("T =", "U =")
    )
    os.utime(file, (1, 1))
    sys.modules.pop("experiments.mine.tables", None)
    with pytest.raises(ConfigError, match="defined twice"):
        discover.find_tables(tmp_path)


def test_experiment_folder(tmp_path):
    roots.make(tmp_path)
    folder = discover.experiment_folder("mine", tmp_path)
    assert folder == tmp_path / "experiments/mine"
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        discover.experiment_folder("mime", tmp_path)


@pytest.mark.parametrize("name", ["jorge/digits", "jorge/step_cost", "loop/overhead"])
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_makes_no_key_is_refused(name, seed):
    with pytest.raises(ConfigError, match=rf"seed must be .*2\*\*32: got seed={seed}"):
        discover.load(name, {"seed": str(seed)}, REPOSITORY)
    highest = discover.load(name, {"seed": str(2**32 - 1)}, REPOSITORY)
    assert highest.config.seed == 2**32 - 1


@pytest.mark.parametrize("steps", [-1, 2**31 - 1])
def test_steps_that_no_loop_takes_are_refused(steps):
    with pytest.raises(ConfigError, match="steps must be"):
        discover.load("loop/overhead", {"steps": str(steps)}, REPOSITORY)


def test_packages_inside_a_paper_are_forgotten_with_it(tmp_path):
    """A folder inside a paper's is a package whose path its parent works out."""
    folder = roots.make(tmp_path / "mine") / "experiments" / "mine" / "parts"
    folder.mkdir(parents=True)
    (folder / "part.py").write_text("NAME = 'part'\n")
    discover.activate(tmp_path / "mine")
    inner = importlib.import_module("experiments.mine.parts.part")
    assert inner.NAME == "part"
    discover.activate(roots.make(tmp_path / "other"))
    assert "experiments.mine.parts" not in sys.modules
