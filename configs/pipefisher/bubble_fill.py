"""K-FAC's work against a pipeline's idle time, one BERT block a stage; simulated.

Expect: every figure that follows from the published times (`hpcjax table
pipefisher/bubble-fill --tier model`): Base, 4 stages: 2.21 steps' bubbles with GPipe.
"""

import dataclasses

from experiments.pipefisher.experiment import Config

gpipe = Config(blocks=1)
one_f_one_b = dataclasses.replace(gpipe, schedule="one_f_one_b")
chimera = dataclasses.replace(gpipe, schedule="chimera")
base = gpipe
