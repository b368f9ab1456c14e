"""What this paper adds to the parts of every training config; imports no JAX."""

PARTS = {"codec": {"left_out": "experiments.mpcompress.floors:LeftOut"}}
