"""Questions in the form in which a chat model was trained to read them."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from hpcjax.core.errors import ConfigError, DataFormatError


def write_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    special: Mapping[str, str] | None = None,
) -> str:
    """Returns a conversation as one text, up to where the model's answer begins.

    Args:
      template: the model's, in Jinja, as `TextModel.chat_template`.
      messages: each with "role", such as "system", "user" or "assistant", and
        "content".
      special: names of special tokens, such as "bos_token", and how they are written.

    Raises:
      DataFormatError: a template that does not work.
      ConfigError: messages that the template refuses, such as two questions in a row.

    References:
      Chat templates of Hugging Face's transformers, which GGUF files carry, too.

    Examples:
      >>> template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
      >>> write_chat(template, [{"role": "user", "content": "Why?"}])
      '[user] Why?'
    """
    import jinja2
    from jinja2 import sandbox

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"the chat template refuses these messages: {message}")

    # A template comes with a file of weights: it gets no access to Python.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    names = {"raise_exception": refuse, **(special or {})}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **names
        )
    except jinja2.TemplateError as error:
        raise DataFormatError(f"the model's chat template fails: {error}") from error
