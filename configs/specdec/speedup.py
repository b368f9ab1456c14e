"""LLaMA-7B's shape with a draft of two layers, acceptance forced; a GPU, 5 min.

Random weights in bfloat16, 13 GB. What counts as accepted is drawn beforehand.
Expect: at least 1.5 times plain decoding's rate at 0.7 of the drafts accepted, not
measured yet (`hpcjax table specdec/speedup --tier gpu`).
"""

from experiments.specdec.speedup import Config

base = Config()
smoke = {
    "target.depth": "3",
    "target.width": "16",
    "target.heads": "2",
    "target.mlp_width": "24",
    "vocabulary": "31",
    "most": "3",
    "length": "4",
    "tokens": "16",
    "compute": "float32",
    "repetitions": "2",
    "inner": "1",
}
