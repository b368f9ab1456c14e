"""What POJ-104's programs compute, by the words in them; seconds.

For which `pip install 'hpcjax[ir]'`.
Expect: almost half of unseen files right, which a graph network has not with so few
files (`hpcjax table programl/poj104`).
"""

from experiments.programl.peers import Config

base = texts = Config()
opcodes = Config(words="opcodes")
