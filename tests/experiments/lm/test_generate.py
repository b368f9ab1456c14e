"""`lm/generate`: compiled once, up to the context's end, questions in their form."""

import json

import jax
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

    def say(self, text):
        self.said.append(text)

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
    compile_generation = inference.compile_generation

    def counting(*given):
        write = compile_generation(*given)
        return lambda key: (calls.append(1), write(key))[1]

    monkeypatch.setattr(inference, "compile_generation", counting)
    monkeypatch.setattr(inference, "generate", None)
    found, _ = run(tmp_path, prompt="a b", max_new_tokens=4)
    assert calls == [1]
    assert found["compile_seconds"] > 0


def test_compiled_generation_is_generation(tmp_path):
    saved(tmp_path, 5, WORDS)
    loaded = inference.load_language_model(str(tmp_path), tmp_path).pretrained
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    prompts, key = inference.pad_prompts([[1, 2], [2]], least=2), jax.random.key(3)
    options = inference.Continuation(max_new_tokens=4)
    expected = inference.generate(speaker, prompts, options, key=key)
    made = inference.compile_generation(speaker, prompts, options)(key)
    assert made.tokens.tolist() == expected.tokens.tolist()


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
