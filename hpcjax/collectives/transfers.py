"""Amounts that exchanges send in one average, as they state them; imports no JAX.

A word has 32 bits: one float32 value or one int32 index. A sparse entry has two words.
"""

from typing import NamedTuple

from hpcjax.collectives.amounts import Count, dense_words


class Transfer(NamedTuple):
    """One collective operation, from the view of one member.

    Attributes:
      words: words that pass a member's link one after the other. Usually these are the
        words it sends, since it receives as many at the same time; in gTopk's tree,
        where a member sends and receives in turns, both count.
      passes: traversals of all members, around a ring or through a tree: 2 for an
        all-reduce, 1 for an all-gather.
      messages: further messages that follow one another, to any members.
      early: whether it needs no encoding, and so can overlap with the backward pass.
      per_pass: rounds of a pass that goes to neighbours in ways of its own, such as
        along rows and columns; None for those of the ring or tree.
    """

    words: float
    passes: int = 0
    messages: float = 0.0
    early: bool = False
    per_pass: int | None = None


def all_reduce(count: Count, members: int, *, early: bool = False) -> Transfer:
    """Returns the transfer of an all-reduce of `count` words."""
    return Transfer(dense_words(count, members), passes=2, early=early)


def all_gather(count: Count, members: int) -> Transfer:
    """Returns the transfer of an all-gather of `count` words of each member.

    Around a ring, a member sends the words of all members but the next one.
    """
    return Transfer(count * (members - 1), passes=1)


def between(least: float, most: float, place: float) -> float:
    """Interpolates: returns `least` for `place` = 0 and `most` for `place` = 1."""
    return least + place * (most - least)
