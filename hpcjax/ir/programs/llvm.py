"""Graphs of LLVM's intermediate representation, by llvmlite."""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.ir.programs.graph import (
    CONSTANT,
    CONTROL,
    DATA,
    INSTRUCTION,
    UNDEFINED,
    VARIABLE,
    Builder,
    ProgramGraph,
)

Variables = Literal["ssa", "per_use"]
# Operands that are no values: what they lead to is told by control and calls.
_NO_VALUES = ("basic_block", "function", "inline_asm", "metadata_as_value")
_CALLS = ("call", "invoke", "callbr")


def from_llvm_ir(
    text: str,
    variables: Variables = "ssa",
    *,
    strict_release: bool = False,
    name: str = "the module",
) -> ProgramGraph:
    """Returns the graph of a module.

    Args:
      text: of the module, in a form that llvmlite's LLVM reads.
      variables: "ssa" for one vertex of each variable; "per_use" for one of each use of
        an instruction's result, as the released ProGraML has.
      strict_release: whether only `call` calls, and not `invoke` and `callbr`, as
        there.
      name: of the module in messages.

    Raises:
      ConfigError: llvmlite is not installed, or another kind of variables.
      DataFormatError: LLVM cannot read it, or no function of it has a body.

    References:
      Cummins et al.: ProGraML, ICML 2021, section 3; ChrisCummins/ProGraML,
      programl/ir/llvm/internal/program_graph_builder.cc.
    """
    checks.require_choice("variables", variables, ("ssa", "per_use"))
    module = _parse(text, name)
    builder = _Builder(variables, _CALLS[:1] if strict_release else _CALLS)
    if all(function.is_declaration for function in module.functions):
        raise DataFormatError(f"{name}: a function with a body is needed: found none")
    for function in module.functions:
        if function.is_declaration:
            vertex = builder.add(INSTRUCTION, UNDEFINED)
            builder.entries[function], builder.exits[function] = vertex, [vertex]
        else:
            builder.add_function(function)
    return builder.join(builder.entries)


def version() -> str:
    """Returns llvmlite's version; raises ConfigError if it is not installed."""
    return _binding("llvmlite").__version__


def _binding(module: str = "llvmlite.binding") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"llvmlite is needed to read LLVM-IR: pip install 'hpcjax[ir]' ({error})"
        ) from error


def _parse(text: str, name: str) -> Any:
    binding = _binding()
    try:
        return binding.parse_assembly(text)
    except RuntimeError as error:
        release = ".".join(map(str, binding.llvm_version_info))
        told = f"LLVM {release} cannot read it: {' '.join(str(error).split())}"
        raise DataFormatError(f"{name}: {told}") from error


class _Builder(Builder):
    """A graph of llvmlite's values, which are keys, by address."""

    def __init__(self, variables: Variables, calls: tuple[str, ...]) -> None:
        super().__init__()
        self.variables, self.calls = variables, calls

    def add_function(self, function: Any) -> None:
        """Adds instructions, then control, then what each of them uses."""
        number = len(self.entries)
        blocks = {block: list(block.instructions) for block in function.blocks}
        places = {
            each: self.add(INSTRUCTION, each.opcode, number)
            for each in itertools.chain(*blocks.values())
        }
        first = {block: places[own[0]] for block, own in blocks.items()}
        self.entries[function] = next(iter(first.values()))
        after = {block: _successors(own[-1]) for block, own in blocks.items()}
        seen = _reached(next(iter(blocks)), after)
        for block, own in blocks.items():
            for one, two in itertools.pairwise(own):
                self.edges.append((CONTROL, 0, places[one], places[two]))
            last = places[own[-1]]
            for position, other in enumerate(after[block]):
                if block in seen:
                    self.edges.append((CONTROL, position, last, first[other]))
            if not after[block] and block in seen:
                self.exits[function].append(last)
        self._add_uses(places, number)

    def _add_uses(self, places: dict[Any, int], function: int) -> None:
        known: dict[Any, int] = {}
        for each, vertex in places.items():
            for position, key, text, kind in _operands(each):
                if kind == CONSTANT:
                    if key not in self.constants:
                        self.constants[key] = self.add(CONSTANT, text)
                    self.edges.append((DATA, position, self.constants[key], vertex))
                    continue
                maker = places.get(key)
                if key not in known or (self.variables == "per_use" and maker):
                    known[key] = self.add(VARIABLE, text, function)
                    if maker:
                        self.edges.append((DATA, 0, maker, known[key]))
                self.edges.append((DATA, position, known[key], vertex))
            if each.opcode in self.calls:
                *_, callee = each.operands
                if callee.value_kind.name == "function":
                    self.sites.append((vertex, callee))


def _successors(terminator: Any) -> list[Any]:
    """Returns blocks in LLVM's order of successors."""
    # An operand says what it is by its kind alone: `is_block` is false of all.
    found = [o for o in terminator.operands if o.value_kind.name == "basic_block"]
    # The operands of a conditional branch are its condition, else, then.
    return found[::-1] if terminator.opcode == "br" else found


def _reached(entry: Any, after: dict[Any, list[Any]]) -> set[Any]:
    waiting, seen = [entry], set()
    while waiting:
        block = waiting.pop()
        if block not in seen:
            seen.add(block)
            waiting += after[block]
    return seen


def _operands(instruction: Any) -> Iterator[tuple[int, Any, str, int]]:
    """Yields position, key, type and kind of each operand that is a value."""
    for position, operand in enumerate(instruction.operands):
        kind = operand.value_kind.name
        if kind in _NO_VALUES:
            continue
        is_variable = kind in ("instruction", "argument")
        key = str(operand) if kind == "constant_int" else operand
        yield position, key, str(operand.type), VARIABLE if is_variable else CONSTANT
    if instruction.opcode == "switch":
        # Since LLVM 22 its cases are no operands: each is a line "i32 7, label %9".
        for number, line in enumerate(str(instruction).splitlines()[1:-1]):
            value = line.split(", label ")[0].strip()
            yield 2 * number + 2, value, value.split()[0], CONSTANT
