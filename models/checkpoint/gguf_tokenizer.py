"""Rebuilds the byte-level BPE tokenizer that a GGUF file describes."""

import os
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.checkpoint.gguf import metadata

# llama.cpp's token types (enum llama_token_type); the others need nothing done.
_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
# tokenizer.ggml.pre -> the patterns that text is split by, one after the other. GGUF names them
# only; they stand in llama.cpp's src/llama-vocab.cpp (struct llm_tokenizer_bpe) and in each
# model's tokenizer.json.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": _GPT2,
    "smollm": (r"\p{N}", *_GPT2),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    # What llama.cpp does for files from before the key existed.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def build(reader: gguf.GGUFReader, path: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Builds the tokenizer from `tokenizer.ggml.*`.

    Args:
        reader: the open file.
        path: named in errors.

    Raises:
        ValueError: if the file has no tokenizer, or one of a kind that is not rebuilt here.
    """

    def value(key: str) -> Any:
        found = metadata(reader, f"tokenizer.ggml.{key}")
        if found is None:
            raise ValueError(f"{path} lacks tokenizer.ggml.{key}: {_USE_A_FOLDER}")
        return found

    kind, split = value("model"), metadata(reader, "tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"{path} has a tokenizer of model {kind!r} with pre-tokenizer {split!r}: only 'gpt2' "
            f"with {', '.join(map(repr, _SPLITS))} is rebuilt from GGUF. {_USE_A_FOLDER}"
        )
    tokens, types = value("tokens"), value("token_type")
    ids = {token: i for i, token in enumerate(tokens)}
    if not len(ids) == len(tokens) == len(types):
        raise ValueError(
            f"{path} lists {len(tokens)} tokens, {len(ids)} of them different, and {len(types)} "
            "types: the file is damaged, convert it again."
        )
    # A byte-level token has no space of its own, so the first one separates the pair.
    merges = [tuple(merge.split(" ", 1)) for merge in value("merges")]
    # Llama 3 keeps a word that is itself a token whole, whatever the merges say.
    bpe = models.BPE(ids, merges, ignore_merges=split == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in _SPLITS[split]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=type_ == _CONTROL, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


_USE_A_FOLDER = "Give a Hugging Face folder with tokenizer.json instead."
