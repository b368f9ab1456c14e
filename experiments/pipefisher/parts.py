"""What this paper adds to the parts of every training config; imports no JAX."""

PARTS = {
    "optimizer": {"pipefisher": "experiments.pipefisher.training:PipeFisherConfig"}
}
