"""The forms in which prompts are published, told apart by the names of their fields.

    form                    fields of a row                      read as
    ours                    id, kind, split, text                a message
    Spec-Bench, MT-Bench    question_id, category, turns         messages, one after another
    HumanEval               task_id, prompt                      a text to go on with
    ShareGPT, chats         conversations or messages; each      a conversation up to the last
                            from, value or role, content         message of the user's
    Alpaca, self-instruct   instruction; input, context or       a message
                            instances
    WebQuestions            qId, qText                           a message
    GSM8K                   question, answer                     a message
    prompt tables           act, prompt                          a message

Other fields are not read. Only our form says to which split a row belongs: the others are "eval".
Rows without a name of their own are numbered. A category that the table below lacks is a kind.
"""

import dataclasses
from collections.abc import Callable

from experiments.prompts.prompt import Message, Prompt
from experiments.prompts.records import Record, brief

_KIND_OF = {
    **dict.fromkeys(("writing", "roleplay", "reasoning", "stem", "humanities"), "chat"),
    **dict.fromkeys(("extraction", "qa"), "chat"),
    **dict.fromkeys(("math", "math_reasoning"), "math"),
    "coding": "code",
    "summarization": "summary",
    "rag": "retrieval",
}
_ROLE_OF = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
_KEYS = (("from", "value"), ("role", "content"))


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to write a prompt down.

    Attributes:
        title: who publishes prompts so.
        fields: a row that has all of these is of this form, unless an earlier form has its own.
        read: turns such a row into a prompt, or raises a ValueError that names the line.
    """

    title: str
    fields: tuple[str, ...]
    read: Callable[[Record], Prompt]


def _own(row: Record) -> Prompt:
    return Prompt(row.text("id"), row.text("kind"), row.text("split"), row.text("text"))


def _turns(row: Record) -> Prompt:
    first, *later = (row.text("turns", i) for i in range(len(row.items("turns"))))
    name = row.identity("question_id")
    return Prompt(name, _kind(row), "eval", first, later=tuple(later))


def _beginning(row: Record) -> Prompt:
    return Prompt(row.identity("task_id"), "code", "eval", row.text("prompt"), continued=True)


def _conversation(row: Record) -> Prompt:
    field = "conversations" if "conversations" in row.values else "messages"
    said: list[Message] = []
    asked = -1
    for i in range(len(row.items(field))):
        role, content = _KEYS[row.get(field, i, "from") is None]
        by = row.text(field, i, role)
        if by not in _ROLE_OF:
            raise row.error((field, i, role), f"use one of {[*_ROLE_OF]}")
        said.append(Message(_ROLE_OF[by], row.string(field, i, content)))
        if said[i].role == "user":
            asked = i
            row.text(field, i, content)  # the user says something
    if asked < 0:
        raise row.error((field,), "add a message of the user's")
    before = tuple(said[:asked])
    return Prompt(_name(row), _kind(row), "eval", said[asked].content, before=before)


def _instruction(row: Record) -> Prompt:
    text, given = row.text("instruction"), ""
    for place in (("input",), ("context",), ("instances", 0, "input")):
        if row.get(place[0]) is not None:
            given = row.string(*place)
            break
    return Prompt(_name(row), _kind(row), "eval", f"{text}\n\n{given}" if given.strip() else text)


def _web_question(row: Record) -> Prompt:
    return Prompt(row.identity("qId"), "chat", "eval", row.text("qText"))


def _question(row: Record) -> Prompt:
    for part in ("context", "passage", "choices", "options"):
        if part in row.values:
            raise row.error((part,), "it belongs to the question: write both into one `text`")
    # GSM8K marks the result so.
    kind = "math" if "#### " in str(row.get("answer")) else "chat"
    return Prompt(_name(row), kind, "eval", row.text("question"))


def _act(row: Record) -> Prompt:
    return Prompt(_name(row), "chat", "eval", row.text("prompt"))


def _name(row: Record) -> str:
    return row.name if row.get("id") is None else row.identity("id")


def _kind(row: Record) -> str:
    if row.get("category") is None:
        return "chat"
    category = row.text("category")
    return _KIND_OF.get(category, category)


FORMS = (
    Form("ours", ("id", "kind", "split", "text"), _own),
    Form("Spec-Bench, MT-Bench", ("question_id", "category", "turns"), _turns),
    Form("HumanEval", ("task_id", "prompt"), _beginning),
    Form("ShareGPT", ("conversations",), _conversation),
    Form("chats", ("messages",), _conversation),
    Form("Alpaca, self-instruct", ("instruction",), _instruction),
    Form("WebQuestions", ("qId", "qText"), _web_question),
    Form("GSM8K", ("question", "answer"), _question),
    Form("prompt tables", ("act", "prompt"), _act),
)


def prompt(row: Record) -> Prompt:
    """Reads a row of any of the forms.

    Raises:
        ValueError: naming file and line, if it is of none, or a field is not what it should be.
    """
    for form in FORMS:
        if row.values.keys() >= set(form.fields):
            return form.read(row)
    forms = ", ".join(f"{'+'.join(form.fields)} ({form.title})" for form in FORMS)
    raise ValueError(f"{row.where}: fields {brief(sorted(row.values))} are no prompt; use {forms}")
