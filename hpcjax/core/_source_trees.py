"""What the syntax tree of a module defines and mentions; see `core.sources`."""

import ast
import functools
import re
from collections.abc import Iterator

_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Bare(ast.NodeTransformer):
    """Removes from a tree what has no effect on results."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # pyrefly: ignore
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(value=None)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.AST]:
        """Drops what is below `if TYPE_CHECKING`, which never runs."""
        self.generic_visit(node)
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return list(node.orelse)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Drops empty texts, which Python 3.12 adds."""
        self.generic_visit(node)
        kept = (each for each in node.values if getattr(each, "value", None) != "")
        node.values = list(kept)
        return node


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def find_defined(node: ast.AST) -> list[str]:
    """Returns the names that a statement at the top level defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return [
            each.id
            for target in targets
            for each in ast.walk(target)
            if isinstance(each, ast.Name)
        ]
    return []


def find_mentions(
    node: ast.AST, hidden: frozenset[str] = frozenset()
) -> Iterator[tuple[str, ...]]:
    """Yields the dotted names that a tree reads, and texts `"module:name"`.

    Args:
      node: the tree.
      hidden: names that mean variables of the functions around it.
    """
    path = _dotted(node)
    if path:
        if path[0] not in hidden:
            yield path
        return
    text = node.value if isinstance(node, ast.Constant) else None
    if isinstance(text, str) and (_PLACE.fullmatch(text) or _DOTTED.fullmatch(text)):
        yield (text,)
    outside = set(map(id, _evaluated_outside(node)))
    inside = hidden | frozenset(_variables(node))
    for child in _children(node):
        yield from find_mentions(child, hidden if id(child) in outside else inside)


_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the children of a node; arguments and their defaults one by one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments):
            yield from ast.iter_child_nodes(child)
        else:
            yield child


def _evaluated_outside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the children of a function that do not see its variables."""
    yield from getattr(scope, "decorator_list", ())
    given = getattr(scope, "args", None)
    if isinstance(given, ast.arguments):
        yield from (*given.defaults, *filter(None, given.kw_defaults))


def _variables(scope: ast.AST) -> set[str]:
    """Returns the arguments and variables of a function, not of those inside it."""
    found, shared = set[str](), set[str]()
    waiting = [*_children(scope)] if isinstance(scope, _SCOPES) else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Global):
            shared |= {*node.names}
        if isinstance(node, _NAMED):
            found.add(node.name)
        elif not isinstance(node, _SCOPES):
            waiting += _children(node)
    if hasattr(scope, "generators"):
        # The first iterable of a comprehension is evaluated outside.
        first = scope.generators[0].iter  # pyrefly: ignore[missing-attribute]
        found -= {each.id for each in ast.walk(first) if isinstance(each, ast.Name)}
    return found - shared


def _dotted(node: ast.AST) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    is_set = not names and isinstance(node.ctx, ast.Store)
    return () if is_set else (node.id, *reversed(names))


@functools.cache
def write_plain(node: ast.AST) -> str:
    """Returns a tree as text that no version of Python writes in another way."""
    fields = (
        (name, value)
        for name, value in ast.iter_fields(node)
        if value not in (None, []) and name not in ("kind", "type_comment", "ctx")
    )
    texts = []
    for name, value in fields:
        if isinstance(value, list):
            each = [
                write_plain(v) if isinstance(v, ast.AST) else repr(v) for v in value
            ]
            texts.append(f"{name}=[{','.join(each)}]")
        else:
            plain = write_plain(value) if isinstance(value, ast.AST) else repr(value)
            texts.append(f"{name}={plain}")
    return f"{type(node).__name__}({','.join(texts)})"
