"""Every rule of graphs of data movement on 500 drawn programs; 3 minutes.

Expect: no result differs, but without a condition (`hpcjax table sdfg/rules`).
"""

from experiments.sdfg.rules import Config

base = Config()
