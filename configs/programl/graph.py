"""A program's graph from a file `.ll`, `.pb` or `.json`, or standard input; a second.

`hpcjax run programl/graph source=a.ll write=a.pb`, which the reference's programs read;
`hpcjax run programl/graph source=- write=a.pb < a.ll`.
Expect: what the graph has, and the file.
"""

from experiments.programl.graph import Config

base = Config()
