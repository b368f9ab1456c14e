"""What tiles of a matrix product load, of all stages that rules bring it to."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import ir, runs
from hpcjax.core import checks, config
from hpcjax.ir import affine, edit, propagation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A product of square matrices, in tiles.

    Attributes:
      size: rows and columns.
      checked: rows and columns of the product whose values are compared.
      tiles: rows and columns of a tile; they divide both.
      seed: of the values.
    """

    smoke: ClassVar[Mapping[str, str]] = {"size": "8", "checked": "4", "tiles": "[2,4]"}
    figures: ClassVar[Mapping[str, str]] = {
        "loaded": "tile: words, by what the program says",
        "whole": "tile: words if whole matrices were loaded",
        "formula": "tile: 2N³/T + 2N² words",
        "apart": "tile: largest difference of a stage's product from numpy's",
    }

    size: config.Size = 64
    checked: config.Size = 16
    tiles: tuple[config.Size, ...] = (4, 8, 16)
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for tile in self.tiles:
            good = self.size % tile == self.checked % tile == 0
            checks.require(good, "tiles must divide size and checked", tile=tile)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"tile": list(self.tiles)}


def product(size: int) -> "ir.SDFG":
    """Returns a matrix product, a map over elements around one over their terms."""
    program = ir.Builder("product")
    for name in "ABC":
        program.array(name, size, size)
    with program.map(i=f"0:{size}", j=f"0:{size}"), program.map(k=f"0:{size}"):
        edges = {"a": "A[i, k]", "b": "B[k, j]", "c": "C[i, j]"}
        program.tasklet("c = a * b", wcr="add", **edges)
    return program.build()


def stages(size: int, tile: int) -> "list[ir.SDFG]":
    """Returns the product, by elements in tiles, terms outside, and these in tiles."""
    graphs = [product(size)]
    for rule in (
        ir.MapTiling("map.1", (("i", tile), ("j", tile))),
        ir.MapInterchange("map.1"),
        ir.MapTiling("map.2", (("k", tile),)),
    ):
        graphs.append(graphs[-1].apply(rule))
    return graphs


def loaded(graph: "ir.SDFG", *, whole: bool = False) -> int:
    """Returns the elements that a local copy at each tile's border would move.

    Those of A and B are loaded in the innermost map over tiles, C's in the outermost,
    where they are loaded and stored.

    Args:
      graph: the last of the stages.
      whole: take a whole container for a tile, as a wrong propagation would.
    """
    outer, inner, within, *_ = (each.node for each in edit.walk(graph))
    words = 0
    for node, around, names in (
        (inner, outer.ranges, "C"),
        (within, outer.ranges + inner.ranges, "AB"),
    ):
        for edge in propagation.edges(node, graph.arrays):
            if edge.data in names and edge.reach.subset is not None:
                tile = graph.arrays[edge.data].whole if whole else edge.reach.subset
                words += (1 + (edge.data == "C")) * affine.count(around, tile)
    return words


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Tiles, counts and compares; leaves `graphs.png`, the first and the last graph."""
    rows = [stages(cfg.size, tile) for tile in cfg.tiles]
    if ctx is not None:
        from hpcjax.runs import curves

        figure = draw(rows[0][0], rows[0][-1])
        curves.save(figure, pathlib.Path(ctx.directory.path) / "graphs.png")
    n = cfg.size
    columns = {
        "loaded": [loaded(row[-1]) for row in rows],
        "whole": [loaded(row[-1], whole=True) for row in rows],
        "formula": [2 * n**3 // tile + 2 * n**2 for tile in cfg.tiles],
        "apart": [apart(cfg, tile) for tile in cfg.tiles],
    }
    return runs.analytical(
        {name: ("tile", values) for name, values in columns.items()},
        coords={"tile": list(cfg.tiles)},
    )


def apart(cfg: Config, tile: int) -> float:
    """Returns the largest difference between any stage's product and numpy's."""
    rng = np.random.default_rng(cfg.seed)
    a, b = rng.integers(-9, 9, (2, cfg.checked, cfg.checked))
    given: dict[str, Any] = {"A": a, "B": b, "C": np.zeros_like(a)}
    made = (ir.interpret(graph, given)["C"] for graph in stages(cfg.checked, tile))
    return max(float(np.abs(each - a @ b).max()) for each in made)


def flows(
    node: Any, graph: "ir.SDFG", around: "affine.Ranges" = (), by: str = ""
) -> "Iterator[tuple[tuple[str, str], int]]":
    """Yields the ends of edges into a node and those in it, and their words."""
    for edge in propagation.edges(node, graph.arrays):
        words = affine.count(around, edge.reach.subset or ())
        outside = (node.id, f"{edge.data} out") if edge.writes else (edge.data, node.id)
        yield (by, node.id) if by else outside, words
    if isinstance(node, ir.Map):
        for inner in node.body:
            yield from flows(inner, graph, (*around, *node.ranges), node.id)


def draw(*graphs: "ir.SDFG") -> "Figure":
    """Draws graphs: edges in the colour of the logarithm of their words."""
    import matplotlib as mpl

    from hpcjax.runs import panels

    words = [collections.Counter[tuple[str, str]]() for _ in graphs]
    for total, graph in zip(words, graphs, strict=True):
        for _, node in graph.nodes():
            for ends, moved in flows(node, graph):
                total[ends] += moved
    every = [moved for total in words for moved in total.values()]
    scale = mpl.colors.LogNorm(min(every), max(every))
    figure, (row,) = panels.open_figure(3.5, columns=len(graphs))
    for axes, total, graph in zip(row, words, graphs, strict=True):
        depth = {each.node.id: -1 - len(each.around) for each in edit.walk(graph)}
        names = dict.fromkeys(name for ends in total for name in ends)
        rows: dict[int, list[str]] = {}
        for name in names:
            rows.setdefault(depth.get(name, 0), []).append(name)
        at = {
            n: ((x + 0.5) / len(r), y) for y, r in rows.items() for x, n in enumerate(r)
        }
        for name, place in at.items():
            axes.text(*place, name, ha="center", va="center", fontsize=panels.SMALL)
        for (one, other), moved in total.items():
            colour = mpl.colormaps["viridis"](scale(moved))
            look = {"arrowstyle": "->", "color": colour, "shrinkA": 9, "shrinkB": 9}
            axes.annotate("", at[other], at[one], arrowprops=look)
        axes.set(xlim=(0, 1), ylim=(min(rows) - 0.5, 0.5))
        axes.axis("off")
    colours = mpl.cm.ScalarMappable(scale, "viridis")
    figure.colorbar(colours, ax=list(row), label="words", shrink=0.7)
    return figure
