"""The largest base of a mixture of 4 experts in 4 GiB of each of 32 devices; 1 min.

Steps are compiled for simulated devices, and nothing is run.
Expect: nearly twice the parameters with two devices to a matrix, and more than three
times with four (`hpcjax table ted/memory`).
"""

from experiments.ted.memory import Config

base = Config()
gathered = Config(gathered=True)
