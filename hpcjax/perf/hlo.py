"""Counters read from compiled programs: communication, operations, memory.

Convention for bytes: the sum over a collective's *operands* on one device, counted
once, whatever the algorithm sends how often. With n devices and s bytes per device:

| collective           | operand of one device      | bytes |
|----------------------|----------------------------|-------|
| `all-reduce`         | its whole value            | s     |
| `all-gather`         | its own part               | s     |
| `reduce-scatter`     | its whole value            | s     |
| `all-to-all`         | all n parts it sends       | s     |
| `collective-permute` | its value, once            | s     |

The program is the one that runs, which may differ from the one written: XLA on CPU sums
and gathers bfloat16 as float32, merges all-reduces of one dtype into one instruction,
and drops collectives over one device.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax.stages import Compiled

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
_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "c64": 64,
    "c128": 128,
    "bf16": 16,
}
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^=]*)?.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """One collective instruction of a program.

    Attributes:
      kind: one of `KINDS`.
      bytes: of its operands on one device, for one execution.
      times: executions in one run of the program.
      bounded: False if it is in a loop whose length the program does not state;
        `times` then counts that loop as one turn.
      pairs: source–target pairs of a `collective-permute`, else 0.
      name: the instruction's name.
    """

    kind: str
    bytes: int
    times: int = 1
    bounded: bool = True
    pairs: int = 0
    name: str = ""

    @property
    def total(self) -> int:
        """Bytes per device over all executions."""
        return self.bytes * self.times

    @property
    def pair_bytes(self) -> int:
        """Bytes a permute moves between all devices together, over all executions."""
        return self.total * self.pairs


class Instruction(NamedTuple):
    """One line of a computation: its result type, opcode, operand names, attributes."""

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Program(NamedTuple):
    """The computations of a module by name, and the name of the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


def collectives(compiled: Compiled) -> list[Collective]:
    """Returns every collective that a run of `compiled` executes.

    An asynchronous pair counts once, by its start; a merged instruction counts the sum
    of its operands; in a loop the length, where the program states it, multiplies
    `times`; of the branches of a conditional the one with most bytes counts.
    """
    return collectives_of_text(_text(compiled))


def collectives_by_branch(
    compiled: Compiled,
) -> tuple[list[Collective], list[Collective]]:
    """Returns what every run executes, and what only a branch of a conditional does.

    Of the branches of a conditional the one with most bytes counts.
    """
    program = parse(_text(compiled))
    always = _visit(program, program.entry, branches=False)
    every = _visit(program, program.entry)
    names = {collective.name for collective in always}
    return always, [c for c in every if c.name not in names]


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

    Loops of unstated length count as one turn, with a warning.

    Raises:
      ValueError: an unknown `kind`.

    Examples:
      >>> import jax
      >>> collective_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
      0
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}{nearest(kind, KINDS)}")
    found = [c for c in collectives(compiled) if kind in (None, c.kind)]
    loose = [c.name for c in found if not c.bounded]
    if loose:
        log.warning("collectives in loops of unknown length, counted once: %s", loose)
    return sum(collective.total for collective in found)


def ring_bytes(compiled: Compiled, devices: int) -> float:
    """Returns the bytes that one device sends to others in a run of `compiled`.

    If every collective is over all devices and made by the algorithm that sends least:
    with s bytes of operands on each of p devices an all-reduce sends 2 s (p − 1) / p,
    a reduce-scatter and an all-to-all s (p − 1) / p, an all-gather s (p − 1), and a
    permutation s.

    Args:
      compiled: the program.
      devices: p.

    Raises:
      UnsupportedOp: a collective of another kind.
    """
    share = (devices - 1) / devices
    sent = {
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-to-all": share,
        "all-gather": devices - 1,
        "collective-permute": 1,
    }
    found = collectives(compiled)
    unknown = {each.kind for each in found} - sent.keys()
    if unknown:
        raise UnsupportedOp(f"what {sorted(unknown)} send is not known")
    return sum(each.total * sent[each.kind] for each in found)


def flops(compiled: Compiled) -> float:
    """Returns XLA's count of floating-point operations per device.

    XLA counts the body of a loop once, whatever the loop's length.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> flops(jax.jit(jnp.dot).lower(x, x).compile()) >= 2 * 8**3
      True
    """
    analysis = compiled.cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else None
    return float((analysis or {}).get("flops", 0.0))


def peak_memory(compiled: Compiled) -> int:
    """Returns bytes per device: arguments + outputs + temporaries − aliased ones.

    Raises:
      UnsupportedOp: the backend does not tell.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise UnsupportedOp("this backend gives no memory analysis")
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def count_ops(compiled: Compiled, name: str) -> int:
    """Returns how many instructions of a program have opcode `name`.

    Each is counted once wherever it stands (in a loop, in a fusion); an asynchronous
    pair counts as one.

    Args:
      compiled: the program.
      name: an HLO opcode, such as `"dot"`, `"fusion"` or `"all-reduce"`.
    """
    program = parse(_text(compiled))
    return sum(
        instruction.opcode in (name, f"{name}-start")
        for computation in program.computations.values()
        for instruction in computation.values()
    )


def type_bytes(text: str) -> int:
    """Returns the bytes of an array or tuple type, each array rounded up to bytes.

    Raises:
      UnsupportedOp: a type whose size is not known.

    Examples:
      >>> type_bytes("(f32[8,16]{1,0}, bf16[3], pred[])")
      519
    """
    total = 0
    for dtype, shape in _ARRAY.findall(_COMMENT.sub("", text)):
        sizes = (int(size.strip(" <=")) for size in shape.split(",") if size.strip())
        total += -(-math.prod(sizes) * _bits(dtype) // 8)
    return total


def parse(text: str) -> Program:
    """Reads the text of a compiled module.

    Raises:
      UnsupportedOp: there is no entry computation in it.
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
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found[1], found[2])
            current[instruction.name] = instruction
    if not entry:
        raise UnsupportedOp("the text has no entry computation")
    return Program(computations, entry)


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    operands = tuple(
        part.split()[-1].lstrip("%") for part in _split(rest[start + 1 : end])
    )
    return Instruction(name, result, rest[:start], operands, rest[end + 1 :])


def _closing(text: str, start: int) -> int:
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
    """Returns the collectives of one execution of computation `name`."""
    found: list[Collective] = []
    computation = program.computations.get(name, {})
    for instruction in computation.values():
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            found.append(_collective(kind, instruction, computation))
        elif instruction.opcode == "while":
            found += _loop(program, instruction, branches)
        elif instruction.opcode == "conditional":
            each = [_visit(program, called) for called in _called(instruction)]
            most = max(each, key=lambda b: sum(c.total for c in b), default=[])
            found += most if branches else []
        else:
            for called in _called(instruction):
                found += _visit(program, called, branches=branches)
    return found


def _loop(program: Program, loop: Instruction, branches: bool) -> list[Collective]:
    stated = _TRIPS.search(loop.attributes)
    turns = int(stated[1]) if stated else 1
    called = dict(_CALLED.findall(loop.attributes))
    # The condition is asked once more than the body runs.
    inside = [(called["body"], turns), (called["condition"], turns + bool(stated))]
    return [
        collective._replace(
            times=collective.times * times,
            bounded=collective.bounded and stated is not None,
        )
        for name, times in inside
        for collective in _visit(program, name.lstrip("%"), branches=branches)
    ]


def _called(instruction: Instruction) -> list[str]:
    groups = (names for _, names in _CALLED.findall(instruction.attributes))
    return [name for group in groups for name in re.findall(r"[\w.\-]+", group)]


def _collective(
    kind: str, instruction: Instruction, computation: Mapping[str, Instruction]
) -> Collective:
    sizes = [type_bytes(computation[name].result) for name in instruction.operands]
    pairs = _PAIRS.search(instruction.attributes)
    return Collective(
        kind=kind,
        bytes=sum(sizes),
        pairs=pairs[1].count("{") if pairs else 0,
        name=instruction.name,
    )


def _bits(dtype: str) -> int:
    """Returns the bits of one element: those in the name, for most types."""
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"[fsu](\d+)", dtype)
    if number is None:
        raise UnsupportedOp(f"element type of unknown size: {dtype!r}")
    return int(number[1])


def _text(compiled: Compiled) -> str:
    text = compiled.as_text()
    if text is None:
        raise UnsupportedOp("this backend gives no text of a compiled program")
    return text
