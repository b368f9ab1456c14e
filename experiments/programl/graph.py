"""A program's graph, from a file of one form into another."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax import runs
from hpcjax.core import checks, config, files
from hpcjax.core.errors import DataMissing

if TYPE_CHECKING:
    from hpcjax.ir.programs import ProgramGraph

_FORMS = (".pb", ".json", ".mmd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """What is read and written.

    Attributes:
      source: a file of LLVM-IR; of the reference's messages, `.pb`, or node-link form,
        `.json`; "-" for LLVM-IR on standard input; "poj104" for its first program.
      write: a file that the graph is written into, `.pb`, `.json` or, as a flow chart
        of Mermaid, `.mmd`; none for no file.
      variables: see `ir.programs.from_llvm_ir`.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"variables": "per_use"}
    figures: ClassVar[Mapping[str, str]] = {
        "instructions variables constants": ": vertices",
        "control data call": ": edges",
    }

    source: str = "poj104"
    write: str = ""
    variables: Literal["ssa", "per_use"] = "ssa"
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        good = not self.write or self.write.endswith(_FORMS)
        checks.require(good, f"write must end in one of {_FORMS}", write=self.write)


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Reads a graph, writes it if that is asked for, and counts what it has."""
    del ctx
    graph = _read(cfg)
    if cfg.write:
        path = pathlib.Path(cfg.write)
        files.write_atomic(path, _content(graph, path.suffix))
    names = ("instructions", "variables", "constants")
    found = {name: graph.count(kind) for kind, name in enumerate(names)}
    found |= {
        flow: len(graph.edges(n)) for n, flow in enumerate(("control", "data", "call"))
    }
    return runs.measured({name: ((), value) for name, value in found.items()})


def _content(graph: "ProgramGraph", form: str) -> bytes | str:
    from hpcjax.ir import programs

    if form == ".pb":
        return programs.to_proto(graph)
    return graph.to_json() if form == ".json" else graph.to_mermaid()


def _read(cfg: Config) -> "ProgramGraph":
    from hpcjax.data import program_source
    from hpcjax.ir import programs

    if cfg.source == "poj104":
        content = min(program_source.read_texts("poj104").items())[1]
    elif cfg.source == "-":
        content = sys.stdin.buffer.read()
    elif pathlib.Path(cfg.source).is_file():
        content = pathlib.Path(cfg.source).read_bytes()
    else:
        raise DataMissing(f"there is no file at {cfg.source}")
    if cfg.source.endswith(".pb"):
        return programs.from_proto(content, cfg.source)
    text = content.decode(errors="replace")
    if cfg.source.endswith(".json"):
        return programs.from_json(text, cfg.source)
    return programs.from_llvm_ir(text, cfg.variables, name=cfg.source)
