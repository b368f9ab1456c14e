"""Communication, operations and memory of compiled programs, read from their HLO.

The bytes of a collective are the bytes of its *operands* on one device, independent of
the algorithm that sends them (for the traffic of rings see `perf.ring_bytes`).
An operand is, among n devices:

| collective           | operand on one device                 |
|----------------------|---------------------------------------|
| `all-reduce`         | the whole array that is summed        |
| `all-gather`         | the device's own part of the result   |
| `reduce-scatter`     | the whole array, n times its result   |
| `all-to-all`         | the n parts that the device sends     |
| `collective-permute` | the array that the device sends, once |

The optimized program is read, which may differ from the one written: XLA on CPU sums
and gathers bfloat16 as float32, merges all-reduces of one dtype into one instruction,
and drops collectives over one device.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.stages import Compiled, Lowered

from hpcjax.core.errors import UnsupportedOp, nearest

log = logging.getLogger(__name__)

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Types whose name does not say their number of bits, unlike "f32" or "s4".
_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "c64": 64,
    "c128": 128,
    "bf16": 16,
}
# The text of a module consists of computations, each a head, instructions and "}":
#   ENTRY %main.7 (x: f32[8,16]) -> f32[8] {
#     %x = f32[8,16]{1,0} parameter(0)
#     ROOT %reduce.6 = f32[8]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add
#   }
# Comments count the elements of long tuples: (f32[2], /*index=5*/f32[3]).
_COMMENT = re.compile(r"/\*.*?\*/")
# A dtype and sizes; "<=" marks the bound of a dynamic size.
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^=]*)?.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
# Attributes that name other computations: one name, or several in braces.
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# "replica_groups={{0,1},{2,3}}", or counted: "[2,2]<=[4]", "[2,4]<=[4,2]T(1,0)" for
# the numbers below 8 as a 4 x 2 array, transposed, in rows of 4. "{}" is all devices.
_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """One collective instruction of a program.

    Attributes:
      kind: one of `KINDS`.
      bytes: size of its operands on one device, for one execution.
      times: number of executions in one run of the program.
      bounded: False if it stands in a loop whose trip count the program does not state;
        `times` then counts one iteration of that loop.
      pairs: number of source–target pairs of a `collective-permute`, else 0.
      name: the instruction's name.
      groups: the devices of each group, by their place in the mesh; of a permute each
        pair. Empty where all devices are one group.
      operands: number of arrays. XLA merges several all-reduces into one, and makes of
        the array of an all-to-all its parts.
    """

    kind: str
    bytes: int
    times: int = 1
    bounded: bool = True
    pairs: int = 0
    name: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    operands: int = 1

    @property
    def total(self) -> int:
        """Bytes per device over all executions."""
        return self.bytes * self.times

    @property
    def pair_bytes(self) -> int:
        """Bytes that a permute moves over all pairs and all executions."""
        return self.total * self.pairs


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: unique in its computation, without the leading "%".
      result: the type of its result, an array or a tuple, as text.
      opcode: such as "dot" or "all-reduce-start".
      operands: names of the instructions whose results it takes.
      attributes: the rest of the line, behind the operands.
    """

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Program(NamedTuple):
    """A module: computations by name, each with its instructions by name.

    Attributes:
      computations: in the order of the text.
      entry: name of the computation that a run of the program executes.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str


def collectives(program: Compiled | Lowered) -> list[Collective]:
    """Returns every collective that a run of a program executes.

    A pair of a start and a done instruction is one collective, and so is an instruction
    with several operands, whose bytes are added. The trip count of a loop, where the
    program states it, multiplies `times`. Of the branches of a conditional, only the
    one with the most bytes is returned.

    Args:
      program: a compiled one, or a lowered one, which is what JAX asks for: of its
        loops no trip count is stated.
    """
    return collectives_of_text(_read_text(program))


def collectives_by_branch(
    compiled: Compiled,
) -> tuple[list[Collective], list[Collective]]:
    """Returns the collectives outside of conditionals, and those inside of them.

    Of the branches of a conditional, only the one with the most bytes is returned.
    """
    program = parse(_read_text(compiled))
    always = _visit(program, program.entry, branches=False)
    both = _visit(program, program.entry)
    names = {collective.name for collective in always}
    return always, [c for c in both if c.name not in names]


def collectives_of_text(text: str) -> list[Collective]:
    """Returns the collectives of a compiled module given as text; see `collectives`."""
    program = parse(text)
    return _visit(program, program.entry)


def bytes_by_kind(compiled: Compiled) -> Counter[str]:
    """Returns the bytes per device of one run, by kind of collective."""
    totals: Counter[str] = Counter()
    for collective in collectives(compiled):
        totals[collective.kind] += collective.total
    return totals


def collective_bytes(compiled: Compiled, kind: str | None = None) -> int:
    """Returns the bytes per device of all collectives of one run, or of one kind.

    A loop without a stated trip count is counted as one iteration, with a warning.

    Raises:
      ValueError: an unknown `kind`.

    Examples:
      >>> import jax
      >>> collective_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
      0
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}{nearest(kind, KINDS)}")
    counted = [c for c in collectives(compiled) if kind in (None, c.kind)]
    unbounded = [c.name for c in counted if not c.bounded]
    if unbounded:
        log.warning(
            "collectives in loops of unknown length, counted once: %s", unbounded
        )
    return sum(collective.total for collective in counted)


def flops(compiled: Compiled) -> float:
    """Returns XLA's count of floating-point operations per device.

    XLA counts the body of a loop once, whatever the loop's trip count.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> flops(jax.jit(jnp.dot).lower(x, x).compile()) >= 2 * 8**3
      True
    """
    return _analysis(compiled, "flops")


def bytes_accessed(compiled: Compiled) -> float:
    """Returns XLA's count of bytes that a program's instructions read and write.

    What a fusion reads or writes is counted, not what stays inside of it; an operand
    that a fusion uses several times may count as often.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> bytes_accessed(jax.jit(jnp.add).lower(x, x).compile())
      768.0
    """
    return _analysis(compiled, "bytes accessed")


def _analysis(compiled: Compiled, name: str) -> float:
    analysis = compiled.cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else None
    return float((analysis or {}).get(name, 0.0))


def peak_memory(compiled: Compiled) -> int:
    """Returns bytes per device: arguments + outputs + temporaries − aliased.

    Outputs that share the memory of a donated argument are counted in both, and once
    subtracted.

    Raises:
      UnsupportedOp: the backend has no memory analysis.
    """
    memory = _memory(compiled)
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def argument_memory(compiled: Compiled) -> int:
    """Returns bytes per device of a program's arguments.

    Raises:
      UnsupportedOp: the backend has no memory analysis.
    """
    return _memory(compiled).argument_size_in_bytes


def temporary_memory(compiled: Compiled) -> int:
    """Returns bytes per device that are neither arguments nor outputs.

    Raises:
      UnsupportedOp: the backend has no memory analysis.
    """
    return _memory(compiled).temp_size_in_bytes


def _memory(compiled: Compiled) -> Any:
    memory = compiled.memory_analysis()
    if memory is None:
        raise UnsupportedOp("this backend gives no memory analysis")
    return memory


def count_ops(compiled: Compiled, name: str | None = None) -> int:
    """Returns how many instructions of a program have opcode `name`.

    An instruction in a loop or in a fusion counts once, and so does a pair of a start
    and a done instruction.

    Args:
      compiled: the program.
      name: an HLO opcode, such as `"dot"`, `"fusion"` or `"all-reduce"`; None for all
        instructions.
    """
    program = parse(_read_text(compiled))
    return sum(
        name is None or instruction.opcode in (name, f"{name}-start")
        for computation in program.computations.values()
        for instruction in computation.values()
    )


def type_bytes(text: str) -> int:
    """Returns the bytes of an array or tuple type, each array rounded up to a byte.

    Raises:
      UnsupportedOp: an element type of unknown size.

    Examples:
      >>> type_bytes("(f32[8,16]{1,0}, bf16[3], pred[])")
      519
    """
    total = 0
    for dtype, shape in _ARRAY.findall(_COMMENT.sub("", text)):
        sizes = (int(size.strip(" <=")) for size in shape.split(",") if size.strip())
        # Bits, since elements of 4 bits are packed; -(-n // 8) rounds up.
        total += -(-math.prod(sizes) * _element_bits(dtype) // 8)
    return total


def parse(text: str) -> Program:
    """Parses the text of a compiled module.

    Raises:
      UnsupportedOp: it has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in _COMMENT.sub("", text).splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head and not line.startswith("HloModule"):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            current[match[1]] = _parse_instruction(match[1], match[2])
    if not entry:
        raise UnsupportedOp("the text has no entry computation")
    return Program(computations, entry)


def _parse_instruction(name: str, rest: str) -> Instruction:
    """Splits `result opcode(operands), attributes`, what follows `name =`."""
    # A tuple type may contain spaces, an array type does not.
    end = _find_closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _find_closing(rest, start)
    # An operand is "%x" or "f32[2]{0} %x", depending on how the text was printed.
    operands = tuple(
        part.split()[-1].lstrip("%") for part in _split(rest[start + 1 : end])
    )
    return Instruction(name, result, rest[:start], operands, rest[end + 1 :])


def _find_closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise UnsupportedOp(f"unbalanced parentheses in {text[:80]!r}")


def _split(text: str) -> Iterator[str]:
    """Yields the parts of `text` between commas outside brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if text[start:].strip():
        yield text[start:]


def _visit(program: Program, name: str, *, branches: bool = True) -> list[Collective]:
    """Returns the collectives of one execution of computation `name`.

    Args:
      program: the module.
      name: of the computation.
      branches: whether to enter the branches of conditionals.
    """
    executed: list[Collective] = []
    computation = program.computations.get(name, {})
    for instruction in computation.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            executed.append(_read_collective(kind, instruction, computation))
        elif instruction.opcode == "while":
            executed += _visit_loop(program, instruction, branches)
        elif instruction.opcode == "conditional":
            if branches:
                options = [_visit(program, n) for n in _called_names(instruction)]
                executed += max(
                    options, key=lambda b: sum(c.total for c in b), default=[]
                )
        else:
            for called in _called_names(instruction):
                executed += _visit(program, called, branches=branches)
    return executed


def _visit_loop(
    program: Program, loop: Instruction, branches: bool
) -> list[Collective]:
    stated = _TRIPS.search(loop.attributes)
    trips = int(stated[1]) if stated else 1
    called = dict(_CALLED.findall(loop.attributes))
    # The condition is evaluated once more than the body runs: the last time it fails.
    inside = [(called["body"], trips), (called["condition"], trips + bool(stated))]
    return [
        collective._replace(
            times=collective.times * times,
            bounded=collective.bounded and stated is not None,
        )
        for name, times in inside
        for collective in _visit(program, name.lstrip("%"), branches=branches)
    ]


def _called_names(instruction: Instruction) -> list[str]:
    """Returns the names of the computations that an instruction calls."""
    groups = (names for _, names in _CALLED.findall(instruction.attributes))
    return [name for group in groups for name in re.findall(r"[\w.\-]+", group)]


def _read_collective(
    kind: str, instruction: Instruction, computation: Mapping[str, Instruction]
) -> Collective:
    # Operands, not the result: that of a start instruction is a tuple which also holds
    # the operands and, on some backends, a context.
    sizes = [type_bytes(computation[name].result) for name in instruction.operands]
    pairs = _PAIRS.search(instruction.attributes)
    return Collective(
        kind=kind,
        bytes=sum(sizes),
        pairs=pairs[1].count("{") if pairs else 0,
        name=instruction.name,
        groups=_read_groups(instruction.attributes),
        operands=len(sizes),
    )


def _read_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of a collective, or the pairs of a permute."""
    if counted := _IOTA.search(attributes):
        shape, sizes, order = (
            [int(n) for n in part.split(",")] if part else None
            for part in counted.groups()
        )
        numbers = np.arange(math.prod(sizes or [])).reshape(sizes)
        rows: Any = numbers.transpose(order).reshape(shape)
        return tuple(tuple(map(int, row)) for row in rows)
    listed = _GROUPS.search(attributes) or _PAIRS.search(attributes)
    groups = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    return tuple(tuple(map(int, group.split(","))) for group in groups)


def _element_bits(dtype: str) -> int:
    """Returns the bits of one element, for most types the number in the name."""
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"[fsu](\d+)", dtype)
    if number is None:
        raise UnsupportedOp(f"element type of unknown size: {dtype!r}")
    return int(number[1])


def _read_text(program: Compiled | Lowered) -> str:
    if isinstance(program, Lowered):
        form: Any = program.compiler_ir("hlo")
        return form.as_hlo_text()
    text = program.as_text()
    if text is None:
        raise UnsupportedOp("this backend gives no text of a compiled program")
    return text
