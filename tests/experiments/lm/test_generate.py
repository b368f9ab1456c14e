"""`lm/generate`: compiled once, up to the context's end, questions in their form."""

import json

import jax
import numpy as np
import pytest

from experiments.lm import generate
from hpcjax import core, inference
from hpcjax.inference import Sampler
from tests.inference.test_language_models import saved

WORDS = ["?", "a", "b", "<end>"]


class Context:
    """What `run` needs of a run."""

    def __init__(self, root):
        self.data_root, self.said, self.recorded = root, [], {}
        self.open = False

    def say(self, text, end="\n"):
        if self.open:
            self.said[-1] += text
        else:
            self.said.append(text)
        self.open = not end

    def record(self, step, **values):
        self.recorded |= values


def run(folder, **options):
    options = {"sampler": Sampler(temperature=0.0), **options}
    context = Context(folder)
    found = generate.run(generate.Config(model=str(folder), **options), context)
    return found, context


@pytest.mark.slow
def test_a_text_ends_with_the_models_context(tmp_path):
    saved(tmp_path, 5, WORDS)
    found, context = run(tmp_path, prompt="a b a b a", max_new_tokens=48, samples=2)
    assert found["tokens"].values.tolist() == [3, 3], "8 tokens of context"
    assert "context of 8 tokens ends here" in context.said[2]
    assert "6 tokens at" in context.said[-1]
    assert "tokens/s" in context.said[-1]
    found, context = run(tmp_path, prompt="a b a", max_new_tokens=2)
    assert found["tokens"].values.tolist() == [2]
    assert not any("ends here" in text for text in context.said)
    with pytest.raises(core.ConfigError, match="of context: got a prompt of 8"):
        run(tmp_path, prompt="a b a b a b a b")


def test_the_text_is_generated_once(tmp_path, monkeypatch):
    saved(tmp_path, 5, WORDS)
    calls = []
    compile_stream = inference.compile_stream

    def counting(*given):
        write = compile_stream(*given)
        return lambda key: (calls.append(1), write(key))[1]

    monkeypatch.setattr(inference, "compile_stream", counting)
    monkeypatch.setattr(inference, "generate", None)
    found, context = run(tmp_path, prompt="a b", max_new_tokens=4)
    assert calls == [1]
    assert found["compile_seconds"] > 0
    assert found["first_seconds"] > 0
    assert context.said[0] == "a b" + found["text"].item()


def test_a_prompt_is_read_from_a_file(tmp_path):
    saved(tmp_path, 5, WORDS)
    file = tmp_path / "prompt.txt"
    file.write_text("a b", "utf-8")
    found, context = run(tmp_path, prompt_file=str(file), max_new_tokens=2)
    other, _ = run(tmp_path, prompt="a b", max_new_tokens=2)
    assert found["text"].item() == other["text"].item()
    assert context.said[0].startswith("a b")
    file.write_bytes(b"\xff")
    with pytest.raises(core.ConfigError, match=r"prompt.txt'.*utf-8"):
        run(tmp_path, prompt_file=str(file))
    with pytest.raises(core.ConfigError, match="No such file"):
        run(tmp_path, prompt_file=str(tmp_path / "none.txt"))


def test_characters_of_several_tokens_are_shown_whole():
    class Bytes:
        def decode(self, words):
            return bytes(words.tolist()).decode(errors="replace")

        def __len__(self):
            return 256

    text = "aß€b".encode()
    shown = generate._Shown(Bytes(), (), 1)
    parts = [shown.add(np.array([byte])) for byte in text]
    assert parts == ["a", "", "ß", "", "", "€", "b"]
    assert shown.rest() == ""
    cut = generate._Shown(Bytes(), (), 1)
    assert cut.add(np.array([text[1]])) == ""
    assert cut.rest() == "\ufffd"


def test_streamed_generation_is_generation(tmp_path):
    saved(tmp_path, 5, WORDS)
    loaded = inference.load_language_model(str(tmp_path), tmp_path).pretrained
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    prompts, key = inference.pad_prompts([[1, 2], [2]], least=2), jax.random.key(3)
    for end in ((), (1,), (3, 1)):
        options = inference.Continuation(max_new_tokens=5, end=end)
        expected = inference.generate(speaker, prompts, options, key=key)
        write = inference.compile_stream(speaker, prompts, options)
        with jax.transfer_guard("disallow"):
            made = np.stack([*write(key)], 1)
        count = int(expected.lengths.max())
        np.testing.assert_array_equal(made, expected.tokens[:, :count])


def test_questions_are_written_as_the_model_reads_them(tmp_path):
    saved(tmp_path, 5, WORDS, eos_token_id=3)
    with pytest.raises(core.ConfigError, match="no chat template"):
        run(tmp_path, prompt="a", chat=True)
    template = "{% for m in messages %}b {{ m.content }} {{ eos_token }} b{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template})
    )
    inference.language_models.load_language_model.cache_clear()
    speaking = inference.load_language_model(str(tmp_path), tmp_path)
    assert speaking.ask("a") == "b a <end> b"
    asked, answered = run(tmp_path, prompt="a", chat=True, max_new_tokens=3)
    _, told = run(tmp_path, prompt="b a <end> b", max_new_tokens=3)
    assert "b a <end> b" + answered.said[0] == told.said[0]
    assert answered.said[0] == asked["text"].item()


def test_each_of_the_models_ends_ends_a_text(tmp_path):
    saved(tmp_path, 5, WORDS)
    found, _ = run(tmp_path, prompt="a b", max_new_tokens=4)
    assert found["tokens"].values.tolist() == [4]
    first = WORDS.index(found["text"].item().split()[0])
    other = next(code for code in range(5) if code != first)
    saved(tmp_path, 5, WORDS, eos_token_id=[other, first])
    inference.language_models.load_language_model.cache_clear()
    found, _ = run(tmp_path, prompt="a b", max_new_tokens=4)
    assert (found["tokens"].item(), found["text"].item()) == (1, "")
