"""Which collectives of a compiled program the processor's threads may swap."""

import re

_TALKS = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(-start)?\("
)
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)")
_NAME = re.compile(r"%([\w.\-]+)")


def swappable(text: str) -> list[tuple[str, str]]:
    """Returns pairs of operations that devices may reach in different orders.

    Both communicate, at least one of them inside (a `conditional`, `while` or `call`),
    and neither needs what the other returns; see `core.after`.

    Args:
      text: a compiled program, from `as_text()`.
    """
    found = []
    bodies = _bodies(text)
    talking = _talking(bodies)
    for lines in bodies.values():
        before, behind = {}, []
        for name, made in lines.items():
            operands = [other for other in _NAME.findall(made) if other in lines]
            before[name] = set(operands).union(*(before[one] for one in operands))
            plain = bool(_TALKS.search(made))
            if plain or talking.intersection(_NAME.findall(made)):
                found += [
                    (one, name)
                    for one, simple in behind
                    if one not in before[name] and not (plain and simple)
                ]
                behind.append((name, plain))
    return found


def _bodies(text: str) -> dict[str, dict[str, str]]:
    """Returns the lines of each computation by the name of what they make."""
    bodies, lines = {}, {}
    for line in text.splitlines():
        if not line.startswith(" ") and (head := _HEAD.match(line)):
            lines = bodies[head[2]] = {}
        elif made := _LINE.match(line):
            lines[made[1]] = made[2].partition(", metadata")[0]
    return bodies


def _talking(bodies: dict[str, dict[str, str]]) -> set[str]:
    """Returns the computations that communicate, by themselves or by what they call."""
    talking: set[str] = set()
    while True:
        more = {
            name
            for name, lines in bodies.items()
            if any(
                _TALKS.search(made) or talking.intersection(_NAME.findall(made))
                for made in lines.values()
            )
        }
        if more == talking:
            return talking
        talking = more
