"""Graphs in the forms of the reference: protocol buffers, and JSON.

Its messages are in ChrisCummins/ProGraML, programl/proto/program_graph.proto.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.ir.programs.graph import (
    CALL,
    CONSTANT,
    EXTERNAL,
    INSTRUCTION,
    UNDEFINED,
    ProgramGraph,
    from_rows,
)

_NODE, _EDGE, _FUNCTION, _MODULE = 1, 2, 4, 5
_VERTEX = {1: 0, 2: "", 4: 0}  # type, text and function, with what stands for nothing
_LINK = dict.fromkeys((1, 2, 3, 4), 0)  # flow, position, source and target
_SIZES = {1: 8, 5: 4}  # bytes of a wire type that is passed over
_Span = tuple[int, int]


def to_proto(graph: ProgramGraph) -> bytes:
    """Returns the graph as the reference's message `ProgramGraph`.

    The functions and the module have no names.

    Raises:
      ConfigError: a vertex is in no function that is no constant, nor outside of all.
    """
    vertices = zip(graph.kinds.tolist(), graph.texts, graph.functions, strict=True)
    columns = (graph.flow, graph.position, graph.source, graph.target)
    parts = []
    for kind, text, function in vertices:
        if (function < 0) != _is_outside(kind, text):
            rule = "constants, and what is outside, must be alone in no function"
            raise ConfigError(f"{rule}: got {text!r} with function={function}")
        row = (kind, text, max(int(function), 0))
        parts.append((_NODE, _encode(_VERTEX, row)))
    for row in zip(*(each.tolist() for each in columns), strict=True):
        parts.append((_EDGE, _encode(_LINK, row)))
    parts += [(_FUNCTION, b"")] * int(graph.functions.max() + 1)
    return b"".join(_field(*part) for part in [*parts, (_MODULE, b"")])


def _is_outside(kind: int, text: str) -> bool:
    return kind == CONSTANT or text in (EXTERNAL, UNDEFINED)


def _encode(fields: Mapping[int, Any], row: tuple[Any, ...]) -> bytes:
    pairs = zip(fields, row, strict=True)
    return b"".join(_field(number, value) for number, value in pairs if value)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    value = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    more = [value >> 7 * place & 127 for place in range((value.bit_length() + 6) // 7)]
    return bytes([*(group | 128 for group in more[:-1]), *(more[-1:] or [0])])


def from_proto(content: bytes, name: str = "the file") -> ProgramGraph:
    """Returns the graph of a message `ProgramGraph`, such as `llvm2graph` writes.

    Features, blocks and names are passed over.

    Args:
      content: of the file.
      name: of it in messages.

    Raises:
      DataFormatError: it is cut short or damaged, which names the byte, or has vertices
        or edges of types.
    """
    found: dict[int, list[Any]] = {n: [] for n in (_NODE, _EDGE, _FUNCTION, _MODULE)}
    forms: dict[int, Mapping[int, Any]] = {_NODE: _VERTEX, _EDGE: _LINK}
    try:
        for number, span in _read(content, (0, len(content))):
            if number in found:
                form = forms.get(number, {})
                found[number].append(_decode(content, span, form))
        # What is written last is missed first: a cut between two fields leaves no sign.
        if not found[_MODULE]:
            raise ValueError(f"cut short at byte {len(content)}: no module is told")
    except ValueError as error:
        raise DataFormatError(f"{name}: {error}") from error
    return _build(found[_NODE], found[_EDGE], len(found[_FUNCTION]), name)


def _read(content: bytes, span: _Span) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field: an integer, or the span of its bytes."""
    at, stop = span
    while at < stop:
        first = at
        key, at = _read_varint(content, at, stop)
        value: Any = None
        if not key >> 3:
            raise ValueError(f"damaged at byte {first}: field 0")
        if key & 7 in (0, 2):
            value, at = _read_varint(content, at, stop)
        elif key & 7 not in _SIZES:
            raise ValueError(f"damaged at byte {first}: wire type {key & 7}")
        if key & 7 == 2:
            value = (at, at + value)
            at = value[1]
        at += _SIZES.get(key & 7, 0)
        if at > stop:
            raise ValueError(f"cut short at byte {stop}: that of {first} has {at}")
        yield key >> 3, value


def _read_varint(content: bytes, at: int, stop: int) -> tuple[int, int]:
    """Returns a number and where the next begins."""
    value = 0
    for place in range(10):
        if at + place >= stop:
            raise ValueError(f"cut short at byte {stop}: in a number")
        value |= (content[at + place] & 127) << 7 * place
        if content[at + place] < 128:
            return value, at + place + 1
    raise ValueError(f"damaged at byte {at}: a number of more than ten bytes")


def _decode(content: bytes, span: Any, form: Mapping[int, Any]) -> tuple[Any, ...]:
    if not isinstance(span, tuple):
        raise ValueError("damaged: a number in the place of a message")
    row = dict(form)
    for number, value in _read(content, span):
        if number in row:
            is_text = isinstance(value, tuple)
            row[number] = content[slice(*value)].decode() if is_text else value
            if type(row[number]) is not type(form[number]):
                raise ValueError(f"damaged at byte {span[0]}: type of field {number}")
    return tuple(row.values())


def from_json(content: str, name: str = "the file") -> ProgramGraph:
    """Returns the graph of NetworkX's node-link form, ours or the reference's.

    Args:
      content: of the file.
      name: of it in messages.

    Raises:
      DataFormatError: it is no such form, or a vertex or an edge lacks something.
    """
    try:
        form = json.loads(content)
        nodes = sorted(form["nodes"], key=lambda node: node["id"])
        if [node["id"] for node in nodes] != list(range(len(nodes))):
            raise ValueError("ids must be the numbers of vertices, from 0")
        rows = [tuple(n[key] for key in ("type", "text", "function")) for n in nodes]
        ends = ("flow", "position", "source", "target")
        edges = [tuple(link[key] for key in ends) for link in form["links"]]
        forms = [(int, str, int)] * len(rows) + [(int,) * 4] * len(edges)
        for row, types in zip([*rows, *edges], forms, strict=True):
            if tuple(map(type, row)) != types:
                raise ValueError(f"numbers must be integers, and text a string: {row}")
    except (ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise DataFormatError(f"{name}: no node-link form: {told}") from error
    return _build(rows, edges, 1 + max([row[2] for row in rows], default=0), name)


def _build(
    rows: list[Any], edges: list[Any], functions: int, name: str
) -> ProgramGraph:
    """Returns the graph of rows of vertices and of edges, of a file."""
    try:
        if not rows or rows[0][:2] != (INSTRUCTION, EXTERNAL):
            raise ValueError(f"vertex 0 must be the instruction {EXTERNAL!r}")
        kept = [(k, t, -1 if _is_outside(k, t) else f) for k, t, f in rows]
        graph = from_rows(kept, edges)
        if graph.functions.max() >= functions or graph.functions.min() < -1:
            raise ValueError(f"a vertex is in none of {functions} functions")
        own = np.where(graph.kinds == INSTRUCTION, graph.functions, -1)
        for entry in graph.following[CALL][0]:
            if own[entry] >= 0 and own[entry] in own[:entry]:
                raise ValueError(f"vertex {entry} must come first in its function")
    except (ValueError, OverflowError, TypeError) as error:
        raise DataFormatError(f"{name}: no graph of a program: {error}") from error
    return graph
