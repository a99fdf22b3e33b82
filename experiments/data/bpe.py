"""A tokenizer of one's own: byte-level BPE, trained once and kept beside the model."""

import json
import os
import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.tokenizer import Tokenizer, load_tokenizer

END = "<|endoftext|>"
# What `trained` writes, to be copied beside other models of the same tokens.
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def trained(folder: str | os.PathLike[str], texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns the tokenizer in `folder`; the first call trains it and writes it there.

    Digits stand alone, every byte is a token, and `END` ends a document.

    Args:
        folder: gets `FILES`; the last tells other libraries which token ends a text.
        texts: what merges are counted in; not read if the folder has a tokenizer.
        vocab_size: tokens, the 256 bytes and `END` among them.

    Raises:
        ValueError: if the folder's tokenizer has another size.
    """
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").exists():
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet
        )
        backend.train_from_iterator(texts, trainer)
        folder.mkdir(parents=True, exist_ok=True)
        end = backend.token_to_id(END)
        settings = {
            FILES[1]: {"eos_token": END, "add_bos_token": False},
            FILES[2]: {"eos_token_id": end, "pad_token_id": end},
        }
        for name, content in settings.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        temporary = folder / "tokenizer.json.tmp"
        backend.save(str(temporary))
        os.replace(temporary, folder / "tokenizer.json")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder} holds a tokenizer of {tokenizer.vocab_size} tokens, {vocab_size} are "
            "wanted: choose another folder."
        )
    return tokenizer
