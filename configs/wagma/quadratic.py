"""Replicas on noisy quadratics, eight workers, 400 steps; 5 s on 2 cores.

Expect: fixed groups without a mean of all leave replicas at least ten times as far
apart as changing groups, which need no mean of all (`hpcjax table wagma/drift`).
"""

from experiments.wagma.quadratic import Config

base = Config()
