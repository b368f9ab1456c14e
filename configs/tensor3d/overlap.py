"""Exposed communication of two pieces of a batch over that of one; seconds.

Expect: 0.50, 0.26, 0.17, 0, 0 as computation grows from half of the communication to
twice (`hpcjax table tensor3d/overlap --tier model`).
"""

import dataclasses

from experiments.tensor3d.overlap import Config

base = Config()
early = dataclasses.replace(base, early=True)
in_turn = dataclasses.replace(base, in_turn=True)
