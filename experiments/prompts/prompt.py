"""A prompt: what is asked, what was said before it, and the token ids that a model reads."""

import dataclasses

from models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Message:
    """What one side of a conversation said."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One user message, to be sent through the target's chat template, or a text to go on with."""

    id: str  # unique in its file
    kind: str  # what the message asks for, one of KINDS in the committed file
    split: str  # "dev" to tune on, "eval" to report, "train" to learn from
    text: str
    before: tuple[Message, ...] = ()  # the conversation that the message belongs to
    later: tuple[str, ...] = ()  # the user's next messages, each after the model's own answer
    continued: bool = False  # `text` is the beginning of a text: no chat template

    @property
    def turn(self) -> int:
        """Which message of the user's this is in the conversation, from 1."""
        return 1 + sum(message.role == "user" for message in self.before)

    def next_turn(self, answer: str) -> "Prompt":
        """Returns the prompt of the user's next message, `answer` having been given to this one."""
        said = (*self.before, Message("user", self.text), Message("assistant", answer))
        first = self.id.removesuffix(f" turn {self.turn}")
        return dataclasses.replace(
            self,
            id=f"{first} turn {self.turn + 1}",
            text=self.later[0],
            before=said,
            later=self.later[1:],
        )

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Turns the prompt into ids: through the chat template if there is one, else as text.

        Raises:
            ValueError: for a conversation that the tokenizer has no template for, or one that its
                template refuses.
        """
        if self.continued:
            return tokenizer.encode(self.text)
        if not self.before:
            return tokenizer.encode_prompt(self.text)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"Prompt {self.id!r} is a conversation, and the tokenizer has no chat template to "
                "write it in: use a model that has one, or single messages (generate: --turns 1)."
            )
        messages = [*self.before, Message("user", self.text)]
        try:
            return tokenizer.encode_chat([dataclasses.asdict(message) for message in messages])
        except ValueError as error:
            raise ValueError(f"Prompt {self.id!r}: {error}") from error
