"""Language models by name: what is found, what goes together, what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from hpcjax import core, inference, models
from hpcjax.inference import load_language_model
from hpcjax.models import pretrained
from hpcjax.runs import cli

tokenizers = pytest.importorskip("tokenizers")


def test_the_random_model_spells_in_bytes(tmp_path):
    loaded, tokenizer, *_ = load_language_model("random", tmp_path)
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"
    made = inference.generate(
        inference.LanguageModel(model=loaded.model, params=loaded.params),
        inference.pad_prompts([tokenizer.encode("aé")]),
        inference.Continuation(max_new_tokens=3),
        key=jax.random.key(0),
    )
    assert len(tokenizer.decode(np.asarray(made.tokens[0]))) <= 3


def saved(folder, vocabulary, words, **metadata):
    config = models.CausalLmConfig(width=8, heads=2, options=models.LLAMA)
    empty = pretrained.Pretrained(
        params=None, config=config, context=8, vocabulary=vocabulary
    )
    params, _ = empty.model.init(jax.random.key(0))
    whole = dataclasses.replace(empty, params=params, metadata=metadata)
    pretrained.save(folder, whole)
    vocabulary = {word: code for code, word in enumerate(words)}
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token=words[0])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def test_a_folder_with_its_tokenizer(tmp_path):
    saved(tmp_path, 5, ["?", "a", "b"])
    loaded, tokenizer, *_ = load_language_model(str(tmp_path), tmp_path)
    assert loaded.vocabulary == 5
    assert tokenizer.encode("b a c").tolist() == [2, 1, 0]
    assert tokenizer.eos is None


@pytest.mark.parametrize(
    ("eos", "told", "ends"),
    [(0, None, (0,)), ([2, 1], None, (2, 1)), (1, [0, 1], (1, 0)), (None, 2, (2,))],
)
def test_the_end_tokens_of_a_folder(tmp_path, eos, told, ends):
    saved(tmp_path, 5, ["?", "a", "b"], eos_token_id=eos)
    if told is not None:
        own = tmp_path / "generation_config.json"
        own.write_text(json.dumps({"eos_token_id": told}))
    found = load_language_model(str(tmp_path), tmp_path)
    assert (found.ends, found.tokenizer.eos) == (ends, ends[0])


def test_end_tokens_are_numbers(tmp_path):
    saved(tmp_path, 5, ["?", "a", "b"], eos_token_id=[1, "b"])
    with pytest.raises(core.DataFormatError, match="must be integers: found 'b'"):
        load_language_model(str(tmp_path), tmp_path)


def test_the_end_tokens_of_a_gguf_file(tmp_path, monkeypatch):
    path, key = tmp_path / "tiny.gguf", "tokenizer.ggml."
    path.touch()
    tokens = ["a", "b", "</s>", "<eot>", "<eom>"]
    metadata = {f"{key}model": "gpt2", f"{key}tokens": tokens, f"{key}merges": []}
    for name, code in (("eom", 4), ("eot", 3), ("eos", 2)):
        metadata[f"{key}{name}_token_id"] = code
    made = load_language_model("random", tmp_path).pretrained
    made = dataclasses.replace(made, metadata=metadata)
    monkeypatch.setattr(pretrained, "load", lambda path: made)
    found = load_language_model(str(path), tmp_path)
    assert (found.ends, found.tokenizer.eos) == ((2, 3, 4), 2)


@pytest.mark.acceptance("lm-models", 10)
def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    saved(tmp_path, 2, ["?", "a", "b"])
    with pytest.raises(core.ConfigError, match="has 3 tokens, the model only 2"):
        load_language_model(str(tmp_path), tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(core.DataMissing, match="hpcjax data fetch smollm2"):
        load_language_model("smollm2", tmp_path)
    with pytest.raises(core.DataMissing, match="no language model 'smolm'"):
        load_language_model("smolm", tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["run", "a", "--prompt", "x y"], ["run", "a", "prompt=x y"]),
        (["run", "a", "--prompt=x=1"], ["run", "a", "prompt=x=1"]),
        (["run", "a", "--max-new-tokens", "5"], ["run", "a", "max_new_tokens=5"]),
        (["run", "a", "--a.top-p=0.5"], ["run", "a", "a.top_p=0.5"]),
        (["run", "a", "--model.width", "8", "--quiet"],
         ["run", "a", "model.width=8", "--quiet"]),
        (["run", "a", "--root", "b", "--dry-run"],
         ["run", "a", "--root", "b", "--dry-run"]),
        (["run", "a", "--prompt", "--quiet"], ["run", "a", "--prompt", "--quiet"]),
        (["run", "a", "--prompt"], ["run", "a", "--prompt"]),
        (["list", "--prompt", "x"], ["list", "--prompt", "x"]),
        (["run", "a", "--help"], ["run", "a", "--help"]),
        (["run", "a", "--lr", "-1"], ["run", "a", "lr=-1"]),
        ([], []),
    ],
)  # fmt: skip
def test_options_of_a_config_are_overrides(given, expected):
    assert cli._as_overrides(given) == expected
