"""Renders chat templates the way Hugging Face does."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import sandbox


def render(template: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
    """Renders a conversation.

    Templates are code from the checkpoint, so they run in jinja's sandbox and cannot change their
    arguments. Whitespace options and names are those of transformers' `apply_chat_template`,
    except `strftime_now`: a prompt must not depend on the day (Llama 3's template then uses a
    fixed date).

    Args:
        template: jinja source.
        messages: each with `role` and `content`.
        **values: what else the template may read, such as `add_generation_prompt`.

    Raises:
        ValueError: if the template is no valid jinja, or refuses these messages.
    """
    try:
        return _compiled(template).render(messages=messages, tools=None, documents=None, **values)
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template cannot render these messages: {error}") from error


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Compiling costs a hundred times what rendering does."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Unlike jinja's own filter, without escapes for HTML.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
