"""A network on boxes of simulated universes, by their width; 1 min on a core.

`shuffled` labels each box by another universe, the table's negative control.
Expect: an error of about 0.2, of 0.33 of the mean (`hpcjax table hybrid3dcnn/width`).
"""

import dataclasses

from experiments.hybrid3dcnn.width import Config

base = Config()
shuffled = dataclasses.replace(base, shuffled=True)
