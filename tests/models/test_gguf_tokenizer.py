"""Tokenizers rebuilt from GGUF, SmolLM2's among them."""

import pytest
from tokenizers import pre_tokenizers

from models.tokenizer import load_tokenizer
from tests.common.checkpoint_files import write_gguf

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama.cpp's token types
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # the characters that stand for bytes


def write(path, pre="gpt-2", model="gpt2", extra=(), types=None, **values):
    """Writes a file with a tokenizer and nothing else; `extra` are user-defined tokens."""
    tokens = ["<s>", "</s>", *ALPHABET, "ab", "abc", *extra]
    kinds = [CONTROL] * 2 + [NORMAL] * (len(ALPHABET) + 2) + [USER_DEFINED] * len(extra)
    values |= {"model": model, "pre": pre, "tokens": tokens, "token_type": types or kinds}
    values["merges"] = ["a b"]
    keys = {f"tokenizer.ggml.{k}": value for k, value in values.items() if value is not None}
    return write_gguf(path, {"general.architecture": "llama"} | keys, {})


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["it", "'s", "Ġ1234", "Ġx", "²", "!?", "ĊĠ", "Ġend"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġx", "²", "!?", "ĊĠ", "Ġend"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "Ġx", "²", "!?Ċ", "Ġ", "Ġend"]),
        ("default", ["it", "'", "s", "Ġ", "123", "4", "Ġx", "²", "!?", "ĊĠ", "Ġend"]),
        (None, ["it", "'", "s", "Ġ", "123", "4", "Ġx", "²", "!?", "ĊĠ", "Ġend"]),
    ],
)
def test_gguf_pre_tokenizers_split_as_named(tmp_path, pre, expected):
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", pre, bos_token_id=0))
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("it's 1234 x²!?\n  end")
    shown = [piece.replace("Â²", "²") for piece, _ in pieces]
    assert shown == expected


def test_gguf_merges_and_the_llama3_rule_for_whole_words(tmp_path):
    by_merges = load_tokenizer(write(tmp_path / "a.gguf", "gpt-2"))
    assert [by_merges.token_bytes(i) for i in by_merges.encode("abc")] == [b"ab", b"c"]
    whole = load_tokenizer(write(tmp_path / "b.gguf", "llama-bpe", bos_token_id=0))
    assert [whole.token_bytes(i) for i in whole.encode("abc", add_bos=False)] == [b"abc"]


def test_gguf_flags_and_special_tokens(tmp_path):
    ids = {"bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 1}
    tokenizer = load_tokenizer(
        write(tmp_path / "a.gguf", extra=["my word"], add_bos_token=True, **ids)
    )
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1, 2))
    for text in ("x", "<s>x"):
        assert tokenizer.encode(text)[0] == 0
        assert tokenizer.encode(text).count(0) == 1
    assert tokenizer.encode("<s><s>x").count(0) == 2
    last = tokenizer.vocab_size - 1
    assert tokenizer.encode("my word</s>") == [0, last, 1]
    assert (tokenizer.token_bytes(last), tokenizer.token_bytes(1)) == (b"my word", b"")
    tokenizer = load_tokenizer(write(tmp_path / "b.gguf", add_bos_token=False, **ids))
    assert 0 not in tokenizer.encode("x")
    # Absent flag: llama.cpp adds BOS for Llama 3's tokenizer and not for GPT-2's.
    assert load_tokenizer(write(tmp_path / "c.gguf", "llama-bpe", **ids)).add_bos
    assert not load_tokenizer(write(tmp_path / "d.gguf", "gpt-2", **ids)).add_bos


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "model 'llama' .* folder with tokenizer"),
        ({"pre": "tekken"}, "'tekken': only .* folder with tokenizer"),
        ({"extra": ["ab"]}, "261 tokens, 260 of them different"),
        ({"types": [NORMAL]}, "and 1 types"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_rebuilt_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        load_tokenizer(write(tmp_path / "model.gguf", **changes))


def test_gguf_without_tokenizer_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, {})
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.model"):
        load_tokenizer(path)


@pytest.fixture
def tokenizer(smollm2):
    return smollm2[1]


def test_smollm2_figures(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), False)


# Ids that another implementation of this tokenizer checks itself against.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
    ],
)
def test_smollm2_ids(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x**2  # 12345\n",
        "漢字とかな、한국어 中文。",
        "🙂👩‍👩‍👧 ﷽ ١٢٣ x²³ ⅔",
        "line\r\nline\r\n\r\n\tend  ",
        "no-break\u00a0space, zero\u200bwidth",
        "<|im_start|>user\n1 <|im_end|>",
        "",
    ],
)
def test_smollm2_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.decode(ids) == plain
    assert b"".join(map(tokenizer.token_bytes, ids)) == plain.encode()


def test_smollm2_drops_bytes_that_its_vocabulary_lacks(tokenizer):
    assert tokenizer.encode("a\x04b") == tokenizer.encode("a") + tokenizer.encode("b")


def test_smollm2_chat(tokenizer):
    messages = [{"role": "user", "content": "Hi!"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text)
    own = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.apply_chat_template(own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    )
