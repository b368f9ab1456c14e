"""Look-ahead on 400 random streams, in integers; 20 s.

Expect: no table is wrong in the order of the plan, and some are in any other
(`hpcjax table bagpipe/lookahead`).
"""

from experiments.bagpipe.streams import Config

base = Config()
