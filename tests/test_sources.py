"""What the house asks of its sources as a whole."""

import ast
import importlib
import pathlib
import pkgutil
import re
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PRODUCT = sorted(
    path
    for room in ("hpcjax", "experiments", "configs")
    for path in (ROOT / room).rglob("*.py")
)
ROOMS = sorted(
    ".".join(path.parent.relative_to(ROOT / "hpcjax").parts)
    for path in (ROOT / "hpcjax").glob("*/**/__init__.pyi")
)


def functions():
    """Yields functions and how many lines they have below docstrings; no comments."""
    for path in PRODUCT:
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body
                documented = isinstance(body[0], ast.Expr) and isinstance(
                    body[0].value, ast.Constant
                )
                first = body[0].end_lineno if documented else node.lineno
                code = [
                    line
                    for line in lines[first : node.end_lineno]
                    if not line.lstrip().startswith("#")
                ]
                yield path.relative_to(ROOT), node, len(code)


def test_files_are_short():
    long = {p.name: n for p in PRODUCT if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_functions_are_short():
    lengths = [(length, str(path), node.name) for path, node, length in functions()]
    assert not [entry for entry in lengths if entry[0] > 60]
    assert statistics.median(length for length, *_ in lengths) <= 15


def test_tests_are_at_least_a_third_of_the_lines():
    def lines(paths):
        return sum(len(path.read_text().splitlines()) for path in paths)

    tests = lines((ROOT / "tests").rglob("*.py"))
    assert tests / (tests + lines(PRODUCT)) >= 0.35


def test_public_functions_are_annotated():
    bare = [
        f"{path}:{node.name}"
        for path, node, _ in functions()
        if not node.name.startswith("_")
        and node.col_offset == 0
        and (
            node.returns is None
            or any(
                arg.annotation is None
                for arg in (
                    *node.args.args,
                    *node.args.kwonlyargs,
                    *node.args.posonlyargs,
                )
            )
        )
    ]
    assert not bare


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_resolves_and_is_documented(room):
    module = importlib.import_module(f"hpcjax.{room}")
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and getattr(value, "__module__", "").startswith("hpcjax"):
            assert value.__doc__, f"{room}.{name} has no docstring"


def test_importing_the_rooms_and_their_configs_loads_no_jax():
    code = f"""
import importlib, sys
for room in {ROOMS}:
    module = importlib.import_module(f"hpcjax.{{room}}")
    for name in module.__all__:
        if name.endswith(("Config", "Options")):
            getattr(module, name)
loaded = {{"jax", "flax", "optax", "grain", "sklearn", "PIL"}} & set(sys.modules)
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_list_of_systems_loads_little():
    """It is said at once: what takes longest to import, it does without."""
    code = """
import sys
from hpcjax.runs.cli import main
main(["list"])
loaded = {"jax", "numpy", "psutil", "typeguard"} & set(sys.modules)
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def configs_with_factory():
    for room in ROOMS:
        module = importlib.import_module(f"hpcjax.{room}")
        for name in module.__all__:
            if name.endswith("Config"):
                value = getattr(module, name)
                if isinstance(value, type) and getattr(value, "factory", ""):
                    yield pytest.param(value, id=f"{room}.{name}")


@pytest.mark.parametrize("config", list(configs_with_factory()))
def test_a_config_names_a_function_that_there_is(config):
    assert callable(pkgutil.resolve_name(config.factory))


UNSAFE = re.compile(
    r"^\s*(from|import)\b.*\b(c?pickle|_pickle|cloudpickle|dill|marshal|joblib|shelve)\b"
    r"|(torch|joblib|pd|pandas)\.(load|read_pickle)\(|allow_pickle\s*=\s*(?!False)"
    r"|\beval\(|\bexec\(|yaml\.(unsafe_|full_)?load\((?!.*(Safe|Base)Loader)"
)


@pytest.mark.faults(21)
def test_nothing_unpickles_or_evaluates():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PRODUCT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNSAFE.search(line)
    ]
    assert not found


@pytest.mark.faults(21)
@pytest.mark.parametrize(
    ("line", "unsafe"),
    [
        ("import pickle", True),
        ("import os, pickle as p", True),
        ("    from cloudpickle import loads", True),
        ("import marshal", True),
        ("import joblib", True),
        ("import shelve, os", True),
        ("from dill import load", True),
        ("weights = torch.load(path)", True),
        ("np.load(path, allow_pickle = True)", True),
        ("np.load(path, allow_pickle=trusted)", True),
        ("yaml.load(text, yaml.Loader)", True),
        ("yaml.unsafe_load(text)", True),
        ("np.load(path, allow_pickle=False)", False),
        ("yaml.load(text, Loader=yaml.SafeLoader)", False),
        ("from hpcjax import models  # nothing is pickled", False),
        ("model.evaluate(x)", False),
    ],
)
def test_what_would_unpickle_is_found(line, unsafe):
    assert bool(UNSAFE.search(line)) == unsafe


def test_every_figure_of_reliability_is_claimed_by_a_test():
    marks = re.compile(r"pytest\.mark\.faults\(([\d, ]+)\)")
    claimed = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for numbers in marks.findall(path.read_text())
        for number in numbers.split(",")
    }
    assert claimed == set(range(1, 30))


def test_no_todo_is_left():
    marks = ("TO" + "DO", "FIX" + "ME", "X" + "XX")
    found = [
        f"{path.relative_to(ROOT)}: {mark}"
        for path in (*PRODUCT, *(ROOT / "tests").rglob("*.py"))
        for mark in marks
        if mark in path.read_text()
    ]
    assert not found
