"""Options of compressed training state; importing this module imports no JAX."""

from typing import Literal

Index = Literal["int32", "bitmap"]
Mode = Literal["dense", "rematerialize"]
INDICES = ("int32", "bitmap")
MODES = ("dense", "rematerialize")
