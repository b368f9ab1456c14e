"""What scattering sends by the papers' formulas and in compiled programs; a minute.

Expect: tiles of energies and atoms send an eightieth of the original scheme's bytes on
1,792 processes (`hpcjax table omen/volumes`).
"""

from experiments.omen.volumes import Config

base = Config()
