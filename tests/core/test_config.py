"""Configs are checked by the types of their fields, and make what they name."""

import dataclasses
import math
import subprocess
import sys
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from hpcjax import core
from hpcjax.core import config
from hpcjax.core.config import Above, AtLeast, Within


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerConfig(core.Config):
    size: config.Size = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig(core.Config):
    factory: ClassVar[str] = "builtins:dict"

    count: config.Count = 0
    size: config.Size | None = None
    plain: int = 0
    number: float = 0.5
    flag: bool = False
    word: str = "word"
    five: Annotated[int, AtLeast(5)] = 5
    grown: Annotated[float, AtLeast(1.5)] = 2.0
    least: config.NotNegative = 0.0
    large: Annotated[float, Above(2)] = 3.0
    share: config.Share = 0.5
    decay: config.Decay = 0.0
    density: Annotated[float, Within("(0, 1]")] = 1.0
    closed: Annotated[float, Within("[0, 1]")] = 1.0
    rate: config.Float32 = 0.1
    beta: config.Share | Literal["dynamic"] = "dynamic"
    norm: Literal["batch", "group"] = "batch"
    depth: Literal[8, 20] | None = 8
    widths: tuple[config.Size, ...] = (3,)
    pair: tuple[int, float] | None = None
    patterns: config.Patterns = ()
    rules: config.PathRules = ((".*", True),)
    file: config.FileName = "file"
    inner: InnerConfig | None = InnerConfig()
    table: dict[str, int] | None = None
    anything: Any = None


ACCEPTED = {
    "count": (0, 2**31 - 1),
    "size": (1, None),
    "plain": (-3, 2**40),
    "number": (1, -0.5, math.inf, np.float32(0.5), np.ones(())),
    "flag": (True,),
    "five": (5, 6),
    "grown": (1.5, 2, 1e300),
    "least": (0, 0.5, 2**40),
    "large": (2.1, 3, 2**40),
    "share": (0.001, 0.999),
    "decay": (0, 0.0, 0.999),
    "density": (0.001, 1, 1.0),
    "closed": (0, 0.0, 1.0),
    "rate": (0, 1e-37, 3e38),
    "beta": (0.5, "dynamic"),
    "norm": ("group",),
    "depth": (20, None),
    "widths": ((), (1, 2)),
    "pair": ((1, 2.0), (1, 2), None),
    "patterns": ((), ("^a", "b$")),
    "rules": ((("a", False), (".*", True)),),
    "file": ("a-b_c.txt",),
    "inner": (None, InnerConfig(size=2)),
    "table": ({}, {"a": 1}),
    "anything": ("x", 3, None),
}
NOT_SIZE = "must be an integer >= 1 and < 2**31: got"
REFUSED = [
    ("count", -1, "count must be an integer >= 0 and < 2**31: got count=-1"),
    ("count", 2**31, "and < 2**31: got count=2147483648"),
    ("size", 0, f"size {NOT_SIZE} size=0"),
    ("size", 1.0, "size must be int | none: got size=1.0"),
    ("size", "1", "size must be int | none: got size='1'"),
    ("plain", True, "plain must be int: got plain=True"),
    ("number", True, "number must be float: got number=True"),
    ("number", "0.5", "number must be float: got number='0.5'"),
    ("number", None, "number must be float: got number=None"),
    ("flag", 1, "flag must be bool: got flag=1"),
    ("word", None, "word must be str: got word=None"),
    ("five", 4, "five must be an integer >= 5"),
    ("grown", 1.4, "grown must be finite and >= 1.5: got grown=1.4"),
    ("grown", 1, "grown must be finite and >= 1.5: got grown=1"),
    ("grown", math.inf, "got grown=inf"),
    ("grown", math.nan, "got grown=nan"),
    ("least", -1, "least must be finite and >= 0: got least=-1"),
    ("large", 2, "large must be finite and > 2: got large=2"),
    ("large", math.inf, "got large=inf"),
    ("share", 0.0, "share must be in (0, 1): got share=0.0"),
    ("share", 1, "share must be in (0, 1): got share=1"),
    ("decay", 1.0, "decay must be in [0, 1): got decay=1.0"),
    ("decay", -0.1, "decay must be in [0, 1): got decay=-0.1"),
    ("decay", math.nan, "decay must be in [0, 1): got decay=nan"),
    ("density", 0.0, "density must be in (0, 1]: got density=0.0"),
    ("density", 1.1, "density must be in (0, 1]: got density=1.1"),
    ("closed", -0.1, "closed must be in [0, 1]"),
    ("rate", -0.1, "rate must be finite and >= 0, in the range of float32"),
    ("rate", 1e-39, "in the range of float32: got rate=1e-39"),
    ("rate", 1e39, "in the range of float32: got rate=1e+39"),
    ("beta", 1.0, "beta must be in (0, 1): got beta=1.0"),
    ("beta", "dynamc", "beta must be float | 'dynamic': got beta='dynamc'; did you"),
    (
        "norm",
        "bach",
        "must be 'batch' | 'group': got norm='bach'; did you mean",
    ),
    ("depth", 9, "depth must be 8 | 20 | none: got depth=9"),
    ("depth", 8.0, "depth must be 8 | 20 | none: got depth=8.0"),
    ("widths", (3, 0), f"widths[1] {NOT_SIZE} widths[1]=0"),
    ("widths", (3, "4"), "widths[1] must be int: got widths[1]='4'"),
    ("widths", [3], "widths must be [int, ...]: got widths=[3]"),
    ("widths", 3, "widths must be [int, ...]: got widths=3"),
    ("pair", (1,), "pair must be [int, float] | none: got pair=(1,)"),
    ("pair", (1.0, 2.0), "pair[0] must be int: got pair[0]=1.0"),
    (
        "patterns",
        ("a", "("),
        "patterns must hold regular expressions: got '('",
    ),
    ("patterns", "^a", "patterns must be [str, ...]: got patterns='^a'"),
    ("rules", (), "rules must be (regex, chosen) pairs, at least one: got rules=()"),
    ("rules", (("*", True),), "rules must hold regular expressions: got '*'"),
    ("rules", ("a", False), "rules[0] must be [str, bool]: got rules[0]='a'"),
    ("file", "../x", "file may hold only letters"),
    ("inner", 3, "inner must be inner | none: got inner=3"),
    ("inner", OuterConfig, "inner must be inner | none"),
    ("table", 3, "table must be dict | none: got table=3"),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in ACCEPTED.items() for value in values],
)
def test_what_a_type_allows_is_taken(field, value):
    assert getattr(OuterConfig(**{field: value}), field) is value


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_what_it_does_not_is_refused(field, value, message):
    with pytest.raises(core.ConfigError) as caught:
        OuterConfig(**{field: value})
    assert message in str(caught.value)


def test_a_function_may_check_some_options_against_a_config():
    config.check_fields(OuterConfig, size=3, share=0.5)
    with pytest.raises(core.ConfigError, match=r"share must be in \(0, 1\)"):
        config.check_fields(OuterConfig, size=3, share=2.0)


def test_fields_of_a_base_class_are_checked_too():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class DerivedConfig(InnerConfig):
        more: int = 0

    with pytest.raises(core.ConfigError, match="size must be"):
        DerivedConfig(size=0)


def test_make_calls_the_factory_with_fields_and_what_a_run_adds():
    made = OuterConfig(size=3).make({"given": 1}, steps=7)
    assert (made["given"], made["steps"]) == (1, 7)
    assert config.fields_of(OuterConfig(size=3)).items() <= made.items()


def test_keyword_options_become_a_config():
    def cut(paper, **options):
        return InnerConfig.of(options, cut)

    assert cut("A4", size=3) == InnerConfig(size=3)
    assert cut("A4", options={"size": 3}) == InnerConfig(size=3)
    rule = r"^cut\(\) got an unexpected keyword argument '{}'; did you mean '{}'\?$"
    with pytest.raises(TypeError, match=rule.format("sise", "size")):
        cut("A4", sise=3)
    with pytest.raises(TypeError, match=rule.format("papers", "paper")):
        cut("A4", papers=3)
    with pytest.raises(TypeError, match=r"^InnerConfig\(\) .* did you mean 'size'\?$"):
        InnerConfig(sise=3)


def test_importing_it_imports_no_jax():
    code = "import sys, hpcjax.core.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
