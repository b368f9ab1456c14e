"""Chat templates: as transformers writes them, and those that do not work."""

import pytest

from hpcjax import core
from hpcjax.inference import write_chat

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + eos_token }}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
STRICT = """{% for m in messages %}
{% if m.role != 'user' %}{{ raise_exception('only users ask') }}{% endif %}
{{ m.content }}{% endfor %}"""


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_a_conversation_is_that_of_transformers(template):
    peer = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "user", "content": " Why {{ 1 }}? "},
        {"role": "user", "content": "é"},
    ]
    (expected,), _ = peer.render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=True,
        eos_token="<end>",
    )
    made = write_chat(template, messages, special={"eos_token": "<end>"})
    assert made == expected
    assert "{{ 1 }}" in made, "a question is no template"


def test_messages_that_a_template_refuses():
    with pytest.raises(core.ConfigError, match="only users ask"):
        write_chat(STRICT, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ nothing.at.all }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_templates_that_do_not_work_or_reach_out(template):
    with pytest.raises(core.DataFormatError, match="chat template fails"):
        write_chat(template, [{"role": "user", "content": "x"}])
