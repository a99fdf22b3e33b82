"""Text to token ids and back, with one rule for BOS, read from a model's own files."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from models import chat, token_bytes
from models.checkpoint import gguf, gguf_tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A `tokenizers.Tokenizer` and what a language model adds to it.

    Attributes:
        backend: splits text and merges pieces. Special tokens inside text are recognised.
        bos_id: the token that begins a text, or None.
        eos_ids: tokens that end a generation, possibly several.
        add_bos: whether the model was trained on texts that begin with BOS.
        chat_template: jinja source, or None.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None

    def __post_init__(self) -> None:
        """Refuses special tokens that the vocabulary lacks, and BOS asked for but unknown."""
        for token_id in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if self.backend.id_to_token(token_id) is None:
                raise ValueError(
                    f"BOS or EOS token {token_id} is not among the {self.vocab_size} tokens."
                )
        if self.add_bos and self.bos_id is None:
            raise ValueError(
                "add_bos is true, but the tokenizer names no BOS token: name one or set it false."
            )

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of token ids; all are smaller. A model's embedding table may have more rows."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Turns text into token ids.

        BOS rule: with `add_bos` the result begins with BOS, which is added only where the text
        does not begin with it already. BOS tokens that the text contains are never removed.

        Args:
            text: special tokens in it are read as such.
            add_bos: None for `self.add_bos`.

        Raises:
            ValueError: if BOS is asked for and the tokenizer has none.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        add_bos = self.add_bos if add_bos is None else add_bos
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos = True, but the tokenizer has no BOS token: pass False.")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for: part of a character perhaps, none if special.

        Raises:
            ValueError: if there is no such id, or the tokenizer is neither byte-level BPE nor
                SentencePiece-like.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"Token id {token_id} is outside 0..{self.vocab_size - 1}.")
        return self._bytes[token_id]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation as the text that the model was trained on.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: ends with the opening of the assistant's answer.

        Raises:
            ValueError: if there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError("The tokenizer has no chat template: encode plain text instead.")
        eos_id = self.eos_ids[0] if self.eos_ids else None
        return chat.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token="" if self.bos_id is None else self.backend.id_to_token(self.bos_id),
            eos_token="" if eos_id is None else self.backend.id_to_token(eos_id),
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Turns a conversation into ids. A template writes BOS itself, so none is added."""
        return self.encode(self.apply_chat_template(messages), add_bos=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Turns a question into ids: a user's message if there is a chat template, else text."""
        if self.chat_template is None:
            return self.encode(text)
        return self.encode_chat([{"role": "user", "content": text}])

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        return token_bytes.table(self.backend)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        path: a GGUF file, or a folder with `tokenizer.json`; its `tokenizer_config.json`,
            `chat_template.jinja`, `generation_config.json` and `config.json` are read if present.

    Raises:
        ValueError: if there is no tokenizer there, or one that cannot be read.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    if (path / "tokenizer.json").is_file():
        return _from_folder(path)
    raise ValueError(
        f"{path} holds no tokenizer: give a .gguf file or a folder with tokenizer.json."
    )


def check_same_vocabulary(target: Tokenizer, drafter: Tokenizer) -> None:
    """Refuses a drafter whose ids mean other tokens than the target's.

    Embedding tables of different heights are fine: rows above the vocabulary are padding.

    Raises:
        ValueError: naming both sizes and the first id that differs.
    """
    ours, theirs = target.backend, drafter.backend
    if ours.get_vocab(with_added_tokens=True) == theirs.get_vocab(with_added_tokens=True):
        return
    for token_id in range(max(target.vocab_size, drafter.vocab_size)):
        pair = ours.id_to_token(token_id), theirs.id_to_token(token_id)
        if pair[0] != pair[1]:
            raise ValueError(
                f"Target and drafter have different vocabularies ({target.vocab_size} and "
                f"{drafter.vocab_size} tokens): token {token_id} is {pair[0]!r} for the target and "
                f"{pair[1]!r} for the drafter. Use a drafter with the target's tokenizer."
            )


def _from_gguf(path: pathlib.Path) -> Tokenizer:
    reader = gguf.open_gguf(path)
    backend = gguf_tokenizer.build(reader, path)
    llama3 = gguf.metadata(reader, "tokenizer.ggml.pre") == "llama-bpe"
    eos_ids = [
        gguf.metadata(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    return Tokenizer(
        backend,
        bos_id=gguf.metadata(reader, "tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        # The default is llama.cpp's.
        add_bos=gguf.metadata(reader, "tokenizer.ggml.add_bos_token", llama3),
        chat_template=gguf.metadata(reader, "tokenizer.chat_template"),
    )


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    # A file may carry the limits of the run that wrote it, and would cut long texts silently.
    backend.no_truncation()
    backend.no_padding()
    options, model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    bos_id = _token_id(backend, options.get("bos_token"), model.get("bos_token_id"))
    eos = _json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = model.get("eos_token_id", _token_id(backend, options.get("eos_token"), None))
    add_bos = options.get("add_bos_token")
    if add_bos is None:  # then what the tokenizer's own post-processor does
        add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    template = options.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        add_bos=add_bos,
        chat_template=template,
    )


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}. Download it again.") from error


def _token_id(
    backend: tokenizers.Tokenizer, token: str | dict[str, Any] | None, default: int | None
) -> int | None:
    """Returns the id of a token from `tokenizer_config.json`: a string, or an object with one."""
    text = token["content"] if isinstance(token, dict) else token
    return default if text is None else backend.token_to_id(text)
