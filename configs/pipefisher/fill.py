"""K-FAC in the bubbles of 4 stages of 3 BERT-Base blocks on P100s; simulated.

Expect: at least 85 % of the time is computed, from 57 % with GPipe and 1F1B and 76 %
with Chimera, at one refresh in 3 and 6 steps (`hpcjax table pipefisher/fill`).
"""

import dataclasses

from experiments.pipefisher.experiment import Config

gpipe = Config()
one_f_one_b = dataclasses.replace(gpipe, schedule="one_f_one_b")
chimera = dataclasses.replace(gpipe, schedule="chimera")
zero_bubble_h1 = dataclasses.replace(gpipe, schedule="zero_bubble_h1")
interleaved = dataclasses.replace(gpipe, schedule="interleaved", stages=8)
base = gpipe
