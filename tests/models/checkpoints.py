"""Random models of `transformers`, small and odd, and their checkpoints changed."""

import shutil

import pytest
import safetensors.numpy

from hpcjax.models import pretrained

VOCABULARY = 53
GPT = {"n_layer": 3, "n_embd": 20, "n_head": 5, "n_positions": 19}
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "max_position_embeddings": 19,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 24,
}
NARROW = {"word_embed_proj_dim": 10, "do_layer_norm_before": False}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2}
BERT = {**SIZES, "intermediate_size": 37}
# Name -> class of the model, class of its config, the config's fields.
CASES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT, "n_inner": 37}),
    "gpt2_untied": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 37}),
    "opt_350m": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 37, **NARROW}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 24, "n_layer": 3, "n_head": 3, "layer_norm_epsilon": 1e-4},
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, **GROUPED, "intermediate_size": 37, "rms_norm_eps": 1e-4},
    ),
    "llama_heads": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, **GROUPED, "intermediate_size": 37, "head_dim": 6},
    ),
    "llama_tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **SIZES,
            "intermediate_size": 37,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
        },
    ),
    "bert": ("BertForPreTraining", "BertConfig", BERT),
    "bert_words": ("BertForMaskedLM", "BertConfig", BERT),
    "bert_pooled": ("BertModel", "BertConfig", BERT),
}


def build(name):
    """A random model of `transformers` in which no norm or bias is trivial."""
    kind, config, fields = CASES[name]
    # Here, for where torch is not installed the other tests run.
    torch = pytest.importorskip("torch", reason="the oracle of these tests is torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    described = getattr(transformers, config)(
        vocab_size=VOCABULARY,
        attn_implementation="eager",
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
        **fields,
    )
    model = getattr(transformers, kind)(described).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def copy_of(case, tmp_path, change):
    """A folder with the checkpoint's config and its tensors after a change."""
    _, _, folder = case
    stored = pretrained.read_safetensors(folder)
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    safetensors.numpy.save_file(change(tensors), tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    return tmp_path


def one(*names):
    return pytest.mark.parametrize("case", names, indirect=True)
