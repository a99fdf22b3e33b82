"""The bytes that each token stands for: what stop strings and streams are matched on."""

import functools
import json

import tokenizers


def table(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Returns the bytes of every id, none for special tokens.

    The alphabet is told by the decoder: byte-level (GPT-2, Llama 3) or that of SentencePiece
    (Llama 1 and 2), where "▁" is a space and "<0xAB>" a byte.

    Raises:
        ValueError: if it is neither.
    """
    decoder = json.loads(backend.to_str())["decoder"] or {"type": None}
    kinds = {part["type"] for part in (decoder, *decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentencepiece
    else:
        raise ValueError(
            f"The tokenizer's decoder {decoder} is neither ByteLevel nor SentencePiece's "
            "(ByteFallback or Metaspace): the bytes of its tokens are not known."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    out = [b""] * (1 + max(vocabulary.values()))
    for token, token_id in vocabulary.items():
        if token_id not in added:
            out[token_id] = to_bytes(token)
        elif not added[token_id].special:
            out[token_id] = token.encode()
    return out


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's byte of each character: printable bytes are themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(rest)
    }


def _byte_level(token: str) -> bytes:
    if any(character not in _alphabet() for character in token):
        return token.encode()  # as the decoder does, for entries that no text produces
    return bytes(_alphabet()[character] for character in token)


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
