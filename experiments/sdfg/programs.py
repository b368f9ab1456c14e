"""Programs that are drawn: aliases, later reads, steps, empty ranges, reductions."""

import numpy as np

from hpcjax import ir
from hpcjax.core.errors import ConfigError

# Indices are at most 2 * 3 + 2.
_SIZE, _ITERATIONS = 9, 4
_POOL = ("X", "Y", "Z")


def draw(seed: int) -> "ir.SDFG":
    """Returns a valid program of three maps, and of other nodes in half of all."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            return _Drawn(rng).made()
        except ConfigError:  # Two iterations write one element: another is drawn.
            continue


class _Drawn:
    """A program that grows."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.rank = rng, int(rng.integers(1, 3))
        self.program = ir.Builder("drawn")
        for name in _POOL:
            self.program.array(name, *[_SIZE] * self.rank)
        self.program.transient("T", *[_SIZE] * self.rank)

    def made(self) -> "ir.SDFG":
        """Returns the program."""
        self.maps()
        for part in (self.reduction, self.copy, self.dead, self.nest, self.nested):
            if self.rng.random() < 0.35:
                part()
        if self.rng.random() < 0.3:
            self.program.state()
            self.statement(["T"], "Y")
        return self.program.build()

    def pick(self, *values: object) -> object:
        """Returns one of several."""
        return values[self.rng.integers(len(values))]

    def ranges(self) -> dict[str, str]:
        """Returns ranges of as many parameters as there are axes."""
        made = {}
        for name in ("i", "j")[: self.rank]:
            start, stop = self.pick(0, 0, 0, 1), self.pick(1, 3, 4, 4, 4)
            made[name] = f"{start}:{stop}:{self.pick(1, 1, 2)}"
        return made

    def index(self, names: list[str]) -> str:
        """Returns an index of each axis by a parameter of its own."""
        parts = []
        for name in names:
            factor = self.pick(1, 1, 1, 2, -1)
            low, high = (3, 6) if factor == -1 else (0, 3)
            parts.append(f"{factor}*{name} + {self.rng.integers(low, high)}")
        return ", ".join(parts)

    def statement(
        self,
        sources: list[str],
        target: str,
        ranges: dict[str, str] | None = None,
        shared: str = "",
        wcr: str = "",
    ) -> str:
        """Adds a map; `shared` is the index of T. Returns it."""
        ranges = ranges or self.ranges()
        names = list(ranges)
        if self.rng.random() < 0.2:
            names.reverse()
        shared = shared or self.index(names)
        parts = [f"{n}[{shared if n == 'T' else self.index(names)}]" for n in sources]
        edges = dict(zip("ab", parts, strict=False))
        at = shared if target == "T" else self.index(names)
        code = f"c = {self.rng.integers(1, 4)} * a" + (" - b" if len(parts) > 1 else "")
        with self.program.map(**ranges):
            self.program.tasklet(code, wcr=wcr, **edges, c=f"{target}[{at}]")
        return shared

    def maps(self) -> None:
        """Adds maps before and behind T, and another one."""
        ranges = self.ranges()
        wcr = "add" if self.rng.random() < 0.1 else ""
        one, two = (str(self.pick(*_POOL)) for _ in range(2))
        shared = self.statement([one], "T", ranges, wcr=wcr)
        if self.rng.random() < 0.2:
            self.statement([two], one)
        same = self.rng.random() < 0.85
        second = self.ranges()
        if same:
            second = dict(zip(["p", "q"], ranges.values(), strict=False))
        if same and self.rng.random() < 0.9:
            for old, new in zip("ij", "pq", strict=True):
                shared = shared.replace(old, new)
        else:
            shared = ""
        read = ["T", two] if self.rng.random() < 0.6 else ["T"]
        self.statement(read, str(self.pick(*_POOL)), second, shared)
        self.statement([str(self.pick(*_POOL, "T"))], two)

    def reduction(self) -> None:
        """Adds a map whose results are reduced, all of them or some."""
        rank, n = self.rank, _ITERATIONS
        self.program.transient("P", *[n] * rank)
        axis = int(self.rng.integers(rank))
        self.program.array("R", *[n] * (rank - 1))
        if self.rng.random() < 0.2:
            self.program.copy("R", "R")
        names = ("i", "j")[:rank]
        subset = ", ".join(f"{k} + {self.rng.integers(0, 4)}" for k in names)
        with self.program.map(**dict.fromkeys(names, f"0:{n}")):
            edges = {"a": f"X[{subset}]", "c": f"P[{', '.join(names)}]"}
            self.program.tasklet("c = 2 * a + 1", **edges)
        op = str(self.pick("add", "add", "maximum"))
        part = "P" if self.rng.random() < 0.85 else f"P[{', '.join(['1:4'] * rank)}]"
        target = "R" if part == "P" else f"R[{', '.join(['0:3'] * (rank - 1))}]"
        self.program.reduce(op, part, target if rank > 1 else "R", axis)

    def copy(self) -> None:
        """Adds a container that only brings another one's elements."""
        shape = [_SIZE] * self.rank
        self.program.transient("Q", *shape)
        names = ("i", "j")[: self.rank]
        at = ", ".join(names)
        with self.program.map(**dict.fromkeys(names, f"0:{_SIZE}")):
            self.program.tasklet("c = a + 1", a=f"X[{at}]", c=f"Q[{at}]")
        if self.rng.random() < 0.4:
            self.statement(["Y"], "Z")
        self.program.copy("Q", str(self.pick("Y", "Z")))
        if self.rng.random() < 0.3:
            self.statement(["Q"], "X")

    def dead(self) -> None:
        """Adds results that may never be used."""
        self.program.transient("D", *[_SIZE] * self.rank)
        self.statement(["X"], "D")
        if self.rng.random() < 0.3:
            self.statement(["D"], "Y")

    def nest(self) -> None:
        """Adds a map in a map."""
        inner = str(self.pick("0:4", "1:4:2", "0:k + 1"))
        self.program.array("N", 4, 4)
        with self.program.map(k="0:4"), self.program.map(m=inner):
            self.program.tasklet("c = a + 1", a="N[k, m]", c="N[k, m]")

    def nested(self) -> None:
        """Adds a graph in the graph, most of which run once."""
        inner = ir.Builder("inner", symbols=("w",))
        inner.array("U", *[_SIZE] * self.rank)
        inner.transient("T", 6)
        at = ", ".join(["i + 1"] + ["w"] * (self.rank - 1))
        with inner.map(i="0:w"):
            inner.tasklet("c = 2 * a + w", a=f"U[{at}]", c="T[i]")
        with inner.map(i="0:w"):
            inner.tasklet("c = a", a="T[i]", c=f"U[{at}]")
        times = int(str(self.pick(1, 1, 1, 2)))
        name = str(self.pick(*_POOL))
        graph = inner.build(w="1:5")
        self.program.nested(graph, times, symbols={"w": 3}, U=name)
