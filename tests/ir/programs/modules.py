"""Programs for tests: the specification's example, real files, and drawn modules."""

import functools

import numpy as np

from hpcjax.data import program_source
from hpcjax.ir import programs

FIB = """
define i32 @fib(i32 %0) {
  %2 = icmp slt i32 %0, 2
  br i1 %2, label %9, label %3
3:
  %4 = add nsw i32 %0, -1
  %5 = call i32 @fib(i32 %4)
  %6 = add nsw i32 %0, -2
  %7 = call i32 @fib(i32 %6)
  %8 = add nsw i32 %7, %5
  br label %9
9:
  %10 = phi i32 [ %8, %3 ], [ %0, %1 ]
  %11 = add i32 %10, %10
  %12 = sdiv i32 %11, 3
  ret i32 %12
}
"""


def draw_function(rng, name="f"):
    """A valid function of a few blocks: dead code, loops without exit, phis."""
    blocks = int(rng.integers(2, 8))
    after = [draw_after(rng, blocks) for _ in range(blocks)]
    lines = [f"define i32 @{name}(i32 %a, i32 %b) {{"]
    entry = [f"%x{number}" for number in range(3)]
    for block in range(blocks):
        lines.append(f"b{block}:")
        seen = ["%a", "%b", "7", "9"] + (entry if block else [])
        into = [n for n in range(blocks) if block in after[n]]
        if block and into and rng.random() < 0.5:
            # Each edge of a switch comes in on its own.
            counts = [n for n in into for _ in range(after[n].count(block))]
            ways = ", ".join(f"[ {rng.choice(['%a', '3'])}, %b{n} ]" for n in into)
            if len(counts) == len(into):
                lines.append(f"  %p{block} = phi i32 {ways}")
                seen.append(f"%p{block}")
        new = [f"%v{block}.{n}" for n in range(rng.integers(0, 4))] if block else entry
        for one in new:
            what = rng.choice(["add i32", "sub i32", "mul i32", "xor i32"])
            left, right = rng.choice(seen, 2)
            lines.append(f"  {one} = {what} {left}, {right}")
            seen.append(one)
        lines.append(f"  {terminator(rng, after[block], seen)}")
    return "\n".join([*lines, "}"])


CALLER = """
declare void @stop()
define i32 @h(i32 %a) {
  %1 = call i32 @f(i32 %a, i32 7)
  call void @stop()
  %2 = call i32 @g(i32 %1, i32 %1)
  ret i32 %2
}
"""


def draw_module(seed):
    """Two functions, and one that calls them and what is declared alone."""
    rng = np.random.default_rng(seed)
    return "\n".join([*(draw_function(rng, name) for name in "fg"), CALLER])


def draw_after(rng, blocks):
    """Successors of a block; none is the entry."""
    count = int(rng.choice([0, 1, 2, 3], p=[0.2, 0.4, 0.3, 0.1]))
    return rng.integers(1, blocks, count).tolist()


def terminator(rng, after, seen):
    if not after:
        return f"ret i32 {rng.choice(seen)}" if rng.random() < 0.7 else "unreachable"
    if len(after) == 1:
        return f"br label %b{after[0]}"
    if len(after) == 2:
        return f"br i1 {rng.choice(['true', 'false'])}, " + ", ".join(
            f"label %b{each}" for each in after
        )
    cases = " ".join(f"i32 {n}, label %b{each}" for n, each in enumerate(after[1:]))
    return f"switch i32 {rng.choice(seen)}, label %b{after[0]} [ {cases} ]"


@functools.cache
def real(count=20):
    """Graphs of some files of POJ-104."""
    return tuple(program_source.read_graphs("poj104", "ssa", count, None).values())


@functools.cache
def drawn(count=40):
    """Graphs of drawn modules."""
    return tuple(programs.from_llvm_ir(draw_module(seed)) for seed in range(count))
