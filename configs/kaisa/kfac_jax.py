"""Our K-FAC beside kfac-jax 0.0.8, factors and step time; 3 min a run on 2 cores.

Needs `make .cache/peers/kfac-jax`, an environment of its own with jax 0.9.0.
Expect: preconditioned gradients and 100 steps within 1e-5 of kfac-jax's; a step of the
MLP in 0.8 to 1.0, of the convolutions in 0.1 to 0.4 of its time
(`hpcjax table kaisa/kfac-jax`).
"""

import dataclasses

from experiments.kaisa.peer_experiment import Config

needs = ("kfac-jax",)

mlp = Config(problem="mlp", widths=(256, 128))
conv = dataclasses.replace(mlp, problem="conv", widths=(16, 32, 32))
base = mlp
