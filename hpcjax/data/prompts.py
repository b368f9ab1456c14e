"""Prompts for speculative decoding, and a target model's recorded continuations."""

import json
import pathlib
import re

import numpy as np
from jaxtyping import Int32

from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data.records import field, read_records
from hpcjax.data.text import read_utf8

# Nested brackets, followed by what torch prints after them: dtype and device.
_BLOCK = re.compile(r"\s*tensor\((?P<values>\[[^a-z()]*\])(,\s*\w+=[^(),]+)*\)")
_LARGEST = 2**31 - 1


def read_prompts(path: pathlib.Path) -> list[str]:
    """Reads prompts from JSON lines {"prompt": …}.

    Raises:
      DataMissing: no such file.
      DataFormatError: a line is not in the format.
    """
    return [field(each, "prompt", str, place) for place, each in read_records(path)]


def read_token_blocks(path: pathlib.Path) -> list[Int32[np.ndarray, "..."]]:
    """Reads tokens as printed by torch, such as `tensor([[1, 2], [3, 4]])`.

    A block may extend over several lines and name a dtype or a device.

    Returns:
      The array of each block, usually [prompts, tokens], in the order of the file.

    Raises:
      DataMissing: no such file.
      DataFormatError: there is other text between the blocks, printing has abbreviated
        them ("..."), rows differ in length, or a number is not a non-negative int32.
    """
    if not path.exists():
        raise DataMissing(f"no file {path}")
    content = read_utf8(path)
    at, end, blocks = 0, len(content.rstrip()), []
    while at < end:
        block = _BLOCK.match(content, at)
        try:
            if block is None:
                raise ValueError("expected tensor([[…]])")
            blocks.append(_values(block["values"]))
        except ValueError as error:
            rest = content[at:].lstrip()
            line = 1 + content.count("\n", 0, len(content) - len(rest))
            raise DataFormatError(
                f"{path}: line {line}: {error}, found {rest[:40]!r}"
            ) from error
        at = block.end()
    return blocks


def _values(brackets: str) -> Int32[np.ndarray, "..."]:
    """Returns the array of a block; raises ValueError with what was expected."""
    if "..." in brackets:
        raise ValueError("expected all numbers, some were left out by printing")
    try:
        values = np.array(json.loads(brackets))
    except (ValueError, RecursionError) as error:
        raise ValueError("expected rows of as many numbers") from error
    if values.dtype != np.int64:
        raise ValueError("expected whole numbers")
    if not 0 <= values.min(initial=0) <= values.max(initial=0) <= _LARGEST:
        raise ValueError(f"expected numbers from 0 to {_LARGEST}")
    return values.astype(np.int32)
