"""Compression: GPTQ, SparseGPT, structured pruning, distillation, sharing, fields."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "sharing": {"stores": "SharingConfig"},
    "codec": {
        "identity": "Identity",
        "autoencoder": "Autoencoder",
        "quantize": "Quantizer",
        "topk": "TopK",
        "randomk": "RandomK",
    },
}
