"""Files import each other in one direction only, within functions too."""

import ast
import pathlib

import networkx as nx

ROOT = pathlib.Path(__file__).parents[2]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    name_of(path): path
    for top in ("hpcjax", "experiments")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def nodes_of(path):
    """All of a file but what only a type checker reads."""
    found = [ast.parse(path.read_text())]
    for node in found:
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        found.extend([] if checked else ast.iter_child_nodes(node))
    return found


def imported_by(nodes):
    """`{name in the file: dotted name}`."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            source = node.module
            found |= {a.asname or a.name: f"{source}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name: a.name for a in node.names}
    return found


def stub_of(package):
    """What a package loads when it is asked for: `{name: dotted name}`."""
    stub = FILES[package].with_suffix(".pyi")
    found = imported_by(nodes_of(stub)) if stub.exists() else {}
    return {name: f"{package}.{source}" for name, source in found.items()}


STUBS = {name: stub_of(name) for name, path in FILES.items() if path.stem == "__init__"}


def file_of(dotted):
    """The file where a name is: `hpcjax.optim.sgd` is in `hpcjax.optim.first_order`."""
    package, _, name = dotted.rpartition(".")
    if dotted in FILES or not package:
        return dotted if dotted in FILES else None
    if source := STUBS.get(package, {}).get(name):
        return file_of(source)
    return file_of(package)


def files_used(path):
    """Files whose names a file imports, or takes from a package that it imports."""
    nodes = nodes_of(path)
    names = imported_by(nodes)
    used = {
        f"{names[node.value.id]}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and names.get(node.value.id) in STUBS
    }
    return {file for each in {*names.values(), *used} if (file := file_of(each))}


def test_no_files_import_each_other_in_a_circle():
    graph = nx.DiGraph()
    for name, path in FILES.items():
        graph.add_edges_from((name, used) for used in files_used(path) - {name})
    circles = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles, (
        "each of these files needs the others: move what they share into one of its "
        f"own, or let a config name its factory as text: {circles}"
    )
