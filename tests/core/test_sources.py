"""What a function depends on, of small packages written for it."""

import importlib
import sys
import textwrap

import pytest

from hpcjax.core.sources import Sources, Symbol

FILES = {
    "house/__init__.py": "",
    "house/room/__init__.py": """
        import lazy_loader
        __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
        """,
    "house/room/__init__.pyi": """
        from ._own import fast as fast
        from ._own import slow as quick
        """,
    "house/room/_own.py": '''
        """Two ways."""
        from typing import TYPE_CHECKING
        from house import other

        if TYPE_CHECKING:
            from house.unread import Type

        RATE = 0.5
        UNUSED = 1

        def fast(x: "Type") -> float:
            """Returns it."""
            return _inner(x) * RATE

        def slow(x):
            return other.constant + x

        def _inner(RATE):
            return RATE
        ''',
    "house/other.py": """
        constant = 3
        registry = {}
        registry["x"] = constant
        """,
    "house/unread.py": "class Type: pass",
    "house/config.py": """
        class Config:
            factory = "house.room._own:fast"
            def make(self):
                return 1
        """,
    "house/use.py": """
        from house import room
        from house.room import quick
        import house.other

        def run(cfg):
            return room.fast(cfg)

        def also():
            return quick(1)

        def dotted():
            return house.other.registry

        def whole(get):
            return get(room)

        def hides(room):
            return room.fast
        """,
}


@pytest.fixture
def house(tmp_path, monkeypatch):
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    importlib.import_module("house")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def reached(*places):
    found = Sources(["house"]).reached(map(Symbol.parse, places))
    return {str(symbol) for symbol in found if symbol.name}


FAST = {"house.room._own:fast", "house.room._own:_inner", "house.room._own:RATE"}
SLOW = {"house.room._own:slow", "house.other:constant"}


def test_names_are_followed_through_lazy_packages(house):
    assert reached("house.use:run") == {"house.use:run"} | FAST
    assert reached("house.use:also") == {"house.use:also"} | SLOW
    assert reached("house.use:dotted") == {
        "house.use:dotted",
        "house.other:registry",
        "house.other:constant",
    }


def test_places_in_texts_are_followed(house):
    assert reached("house.config:Config") == {"house.config:Config"} | FAST


def test_a_module_used_as_a_value_counts_as_a_whole(house):
    assert reached("house.use:whole") >= FAST | SLOW


def test_arguments_hide_what_the_module_calls_the_same(house):
    assert reached("house.use:hides") == {"house.use:hides"}


def test_nothing_of_it_is_imported(house):
    reached("house.use:run")
    assert "house.use" not in sys.modules
    assert "house.room" not in sys.modules


MORE = {
    "house/far.py": """
        import pathlib
        from house.more import f as p, g as q
        HERE = pathlib.Path(__file__).parent
        STARTED = "house.more"
        def run(c): return p(c) + q(c)
        def reads(): return (HERE / "table.csv").read_text()
        def unpacks(): return HERE / "files" / "graph.csv.gz"
        def starts(): return STARTED
        def method(): return "house.more:Kind.make"
        def default(RATE=HERE): return RATE
        def listed(): return [HERE for HERE in HERE.glob("x")]
        def shared():
            global HERE
            HERE = HERE / "x"
        """,
    "house/more.py": """
        def f(c): return c
        def g(c): return -c
        class Kind:
            def make(self): return 1
        """,
    "house/here.py": "from house.far import run\nclass Config: pass",
    "house/table.csv": "1,2",
    "house/files/graph.csv.gz": "packed",
    "house/files/other.csv.gz": "packed",
}


def test_what_a_second_look_found(house):
    write(house, MORE)

    def digests():
        sources = Sources(["house"])
        names = (
            "run",
            "reads",
            "unpacks",
            "starts",
            "method",
            "default",
            "listed",
            "shared",
        )
        found = {name: sources.digest([f"house.far:{name}"]) for name in names}
        return {**found, "imported": sources.digest(["house.here:run"])}

    def edit(file, old, new):
        before = digests()
        text = (house / file).read_text()
        assert old in text
        (house / file).write_text(text.replace(old, new))
        after = digests()
        (house / file).write_text(text)
        return {name for name in after if after[name] != before[name]}

    swapped = edit("house/far.py", "f as p, g as q", "g as p, f as q")
    assert swapped == {"run", "imported"}
    assert edit("house/table.csv", "1,2", "1,3") == {"reads"}
    assert edit("house/files/graph.csv.gz", "packed", "else") == {"unpacks"}
    assert edit("house/files/other.csv.gz", "packed", "else") == set()
    assert edit("house/more.py", "return 1", "return 2") == {"starts", "method"}
    users = {"reads", "unpacks", "default", "listed", "shared"}
    assert edit("house/far.py", ".parent", ".parents[0]") == users


CHANGES = {
    "a constant": ("RATE = 0.5", "RATE = -0.5", True),
    "a callee": (
        "def _inner(RATE):\n    return RATE",
        "def _inner(x): return -x",
        True,
    ),
    "a default": ('def fast(x: "Type")', "def fast(x=1)", True),
    "another function": ("other.constant + x", "other.constant - x", False),
    "a comment": ("RATE = 0.5", "RATE = 0.5  # of the paper", False),
    "documentation": ("Returns it.", "Returns half of it.", False),
    "an annotation": ('x: "Type"', "x: int", False),
    "formatting": ("_inner(x) * RATE", "(_inner(\n        x\n    ) * RATE)", False),
    "a constant nobody uses": ("UNUSED = 1", "UNUSED = 2", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_is_used_and_has_an_effect_changes_the_digest(house, change):
    old, new, differs = CHANGES[change]
    before = Sources(["house"])
    first = before.digest(["house.use:run"])
    path = house / "house/room/_own.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    after = Sources(["house"])
    assert (after.digest(["house.use:run"]) != first) == differs
    assert before.digest(["house.use:run"]) == first  # as it was read


def test_registrations_of_a_module_count(house):
    path = house / "house/other.py"
    also, dotted = ["house.use:also"], ["house.use:dotted"]
    before = Sources(["house"])
    first = before.digest(dotted), before.digest(also)
    text = path.read_text()
    path.write_text(text.replace('["x"]', '["y"]'))
    after = Sources(["house"])
    assert after.digest(dotted) != first[0]  # uses the registry
    assert after.digest(also) == first[1]
    path.write_text(text + "print(registry)\n")  # whoever imports the module runs it
    assert Sources(["house"]).digest(also) != first[1]


def test_hpcjax_follows_a_config_to_the_mathematics_it_names():
    start = Symbol.parse("hpcjax.optim.jorge_config:JorgeConfig")
    found = set(map(str, Sources(["hpcjax"]).reached([start])))
    assert "hpcjax.optim._jorge:scale_by_jorge" in found
    assert "hpcjax.optim.jorge_factor:_series" in found
    assert not any(place.startswith("hpcjax.averaging") for place in found)
