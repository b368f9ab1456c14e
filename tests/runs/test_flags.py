"""Every flag that `--help` shows is passed to its command by a test."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from hpcjax.runs import cli, doctor
from tests.runs import roots

TESTS = pathlib.Path(__file__).parents[1]
COMMANDS = [*cli.COMMANDS, "data list", "data fetch"]
# What passes a command line on: in this process, or as a process.
CALLS = {"main", "run", "Popen", "check_output"}
# Tests that start a command by a helper of another module.
ELSEWHERE = {
    ("run", "--trust"): (
        "system/test_resume.py",
        "test_a_checkpoint_without_manifest_loads_only_with_trust",
    )
}


def words_of(tree: ast.AST) -> set[str]:
    """Returns the words of strings, with `--flag=value` as `--flag` too.

    What is looked for by `in` is what a test expects, and not what it passes.
    """
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        words = set(tree.value.split())
        return words | {word.partition("=")[0] for word in words}
    found = isinstance(tree, ast.Compare) and isinstance(tree.ops[0], ast.In)
    parts = () if found else ast.iter_child_nodes(tree)
    return set().union(*map(words_of, parts))


def names_of(tree: ast.AST) -> set[str]:
    """Returns the names that code mentions; of a function, its arguments too."""
    arguments = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    return arguments | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def calls_of(tree: ast.AST) -> set[str]:
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return {getattr(f, "attr", "") or getattr(f, "id", "") for f in called}


def commands_of(tree: ast.AST) -> set[str]:
    """Returns the commands, such as `run` or `data list`, that lists begin with.

    Arguments of a call are a list, too; a command may come after the program's name.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple, ast.Call)):
            items = node.args if isinstance(node, ast.Call) else node.elts
            words = [getattr(item, "value", None) for item in items]
            begin = words.index("hpcjax") + 1 if "hpcjax" in words else 0
            words = words[begin : begin + 2]
            found |= {str(words[0]) if words else "", " ".join(map(str, words))}
    return found & set(COMMANDS)


def definitions_of(module: ast.Module) -> dict[str, ast.AST]:
    """Returns what the top level of a module defines: functions and constants."""
    found: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {n.id: node.value for n in node.targets if isinstance(n, ast.Name)}
    return found


def reach(name: str, known: dict[str, ast.AST]) -> list[ast.AST]:
    """Returns a test with the fixtures, helpers and constants that it is made of."""
    waiting, reached = {name}, set[str]()
    while waiting:
        one = waiting.pop()
        reached.add(one)
        waiting |= (names_of(known[one]) & set(known)) - reached
    return [known[each] for each in reached]


def read_tests() -> Iterator[tuple[set[str], set[str]]]:
    """Yields, for each test that starts commands, these and the words it may pass."""
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text()
        known = definitions_of(ast.parse(text)) if '"--' in text else {}
        for name in known:
            trees = reach(name, known) if name.startswith("test_") else []
            if CALLS & set().union(*map(calls_of, trees)):
                commands = set().union(*map(commands_of, trees))
                yield commands, set().union(*map(words_of, trees))


@pytest.fixture(scope="module")
def tests():
    return list(read_tests())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_passed_to_it_by_a_test(command, tests, capsys):
    assert cli.main([*command.split(), "--help"]) == 0
    flags = {*re.findall(r"(?<=[\s│])--[a-z][a-z-]*", capsys.readouterr().out)}
    passed = [words for commands, words in tests if command in commands]
    elsewhere = {flag for own, flag in ELSEWHERE if own == command}
    assert flags - {"--help"} - elsewhere - set().union(*passed) == set()


@pytest.mark.parametrize("flag", ELSEWHERE)
def test_a_flag_tested_elsewhere_is_in_that_test(flag):
    file, name = ELSEWHERE[flag]
    test = definitions_of(ast.parse((TESTS / file).read_text()))[name]
    assert flag[1] in words_of(test)


def test_a_flag_that_is_only_expected_is_not_passed():
    code = "def test_a():\n  main(['run', '--new=1'])\n  assert '--old' in told"
    (test,) = definitions_of(ast.parse(code)).values()
    assert commands_of(test) == {"run"}
    assert words_of(test) == {"run", "--new", "--new=1"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root that is not the working directory, and no folder of data sets."""
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    monkeypatch.setenv("HPCJAX_DATA", "")
    return roots.make_running(tmp_path / "root")


def test_show_finds_configs_of_another_root(root, capsys):
    assert cli.main(["show", "mine/first"]) == 2
    assert cli.main(["show", "mine/first", "--root", str(root)]) == 0
    assert capsys.readouterr().out.startswith("mine/first:second")


@pytest.mark.parametrize(
    ("args", "status"),
    [
        pytest.param(  # whose workers are processes
            ["sweep", "mine/first", "seed=1,2", "--by", "answer", "--quiet"],
            0,
            marks=pytest.mark.slow,
        ),
        (["table", "mine/holds"], 0),
        (["bench", "mine/fails"], 1),
    ],
)
def test_what_runs_reads_the_data_sets_of_a_given_folder(root, args, status, tmp_path):
    data = tmp_path / "data sets"
    given = ["--root", str(root), "--data", str(data)]
    assert cli.main([*args, *given]) == status
    assert (data / "asked").exists()
    assert not (root / ".cache").exists()


def test_records_are_confirmed_and_judged_of_the_tier(root, tmp_path, capsys):
    own, data = ["mine/holds", "--root", str(root)], tmp_path / "data sets"
    model = ["--tier", "model"]
    assert cli.main(["table", *own, *model, "--record"]) == 0
    for command in ("rejudge", "confirm"):
        capsys.readouterr()
        assert cli.main([command, *own]) == 2
        assert "no committed result" in capsys.readouterr().err
    assert cli.main(["rejudge", *own, *model]) == 0
    assert "126 (≥ 100)   holds" in capsys.readouterr().out
    # Of older code, whose runs are made again.
    file = root / "experiments/mine/experiment.py"
    file.write_text(file.read_text() + "\nWORDS = 'one more'\n")
    assert cli.main(["confirm", *own, *model, "--data", str(data)]) == 0
    assert "mine/holds" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--root", "--data"])
def test_data_sets_are_listed_and_fetched_where_one_says(option, tmp_path, capsys):
    place = tmp_path / "place"
    folder = place / ".cache/data" if option == "--root" else place
    assert cli.main(["data", "list", option, str(place)]) == 0
    assert f"Data sets in {folder}" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["data", "fetch", "cifar10", option, str(place)]) == 3
    assert f" in {folder}/cifar10/ yourself" in capsys.readouterr().err


def test_doctor_examines_the_root(root, monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "examine", lambda root: seen.append(root) or ())
    assert cli.main(["doctor", "--root", str(root)]) == 0
    assert seen == [root]
