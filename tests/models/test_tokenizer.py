"""Ids, bytes, one BOS (HO-25), chat templates and the comparison of vocabularies."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from models.tokenizer import check_same_vocabulary, load_tokenizer

# The characters that stand for the 256 bytes.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ':' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'bot:' }}{% endif %}"
)


def byte_level(*tokens, specials=("<s>", "</s>")):
    """A byte-level tokenizer without merges: special tokens, then bytes, then more tokens."""
    vocabulary = {token: i for i, token in enumerate((*specials, *ALPHABET, *tokens))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return backend


def sentencepiece():
    """A tokenizer as Llama 2's tokenizer.json describes it: spaces as ▁, bytes as <0xAB>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", "▁x"]
    bpe = models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        [("▁", "x")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def adding_bos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_folder(folder, backend, **files):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder, backend, **config):
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    return load_tokenizer(write_folder(folder, backend, tokenizer_config=config))


BACKENDS = pytest.mark.parametrize("make", [byte_level, sentencepiece])


@BACKENDS
def test_exactly_one_bos_where_it_is_wanted(tmp_path, make):
    tokenizer = load(tmp_path, make(), add_bos_token=True, chat_template=CHATML)
    bos = tokenizer.bos_id
    template = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    for ids in (tokenizer.encode("x"), tokenizer.encode("<s>x"), template):
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("<s><s>x")[:2] == [bos, bos]  # typed on purpose
    assert tokenizer.encode("<s><s>x").count(bos) == 2
    assert tokenizer.encode("x<s>").count(bos) == 2  # not at the beginning
    assert bos not in tokenizer.encode("x", add_bos=False)


@BACKENDS
def test_no_bos_where_the_flag_says_no(tmp_path, make):
    tokenizer = load(tmp_path, make(), add_bos_token=False)
    assert tokenizer.bos_id not in tokenizer.encode("x")
    assert tokenizer.encode("<s>x").count(tokenizer.bos_id) == 1
    assert tokenizer.encode("x", add_bos=True)[0] == tokenizer.bos_id


def test_without_a_flag_the_post_processor_decides(tmp_path):
    assert not load(tmp_path / "none", byte_level()).add_bos
    tokenizer = load(tmp_path / "adds", adding_bos(byte_level()))
    assert tokenizer.add_bos
    assert tokenizer.encode("x").count(tokenizer.bos_id) == 1
    assert not load(tmp_path / "flag", adding_bos(byte_level()), add_bos_token=False).add_bos


def test_bos_that_does_not_exist_is_refused(tmp_path):
    tokenizer = load(tmp_path, byte_level(), bos_token=None)
    assert (tokenizer.bos_id, tokenizer.add_bos) == (None, False)
    with pytest.raises(ValueError, match="no BOS token"):
        tokenizer.encode("x", add_bos=True)
    with pytest.raises(ValueError, match="names no BOS"):
        load(tmp_path, byte_level(), bos_token=None, add_bos_token=True)


@BACKENDS
@pytest.mark.parametrize("text", ["x", " x  y\n", "caf\u00e9 \u6f22\u5b57 \U0001f642", "a\r\n\tb"])
def test_bytes_of_the_tokens_are_the_text(tmp_path, make, text):
    tokenizer = load(tmp_path, make())
    ids = tokenizer.encode(text)
    expected = text if make is byte_level else f" {text}"  # Llama 2 puts a space before a text
    assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()
    assert tokenizer.decode(ids) == text


@BACKENDS
def test_special_tokens_have_no_bytes_and_added_words_have_theirs(tmp_path, make):
    backend = make()
    backend.add_tokens([tokenizers.AddedToken("a word", special=False)])
    tokenizer = load(tmp_path, backend)
    word = backend.token_to_id("a word")
    assert tokenizer.vocab_size == word + 1
    assert tokenizer.token_bytes(tokenizer.bos_id) == b""
    assert tokenizer.token_bytes(word) == b"a word"
    assert tokenizer.decode([tokenizer.bos_id, word, *tokenizer.eos_ids]) == "a word"
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"Token id {outside} is outside"):
            tokenizer.token_bytes(outside)


def test_byte_level_tokens_outside_the_alphabet_stand_for_themselves(tmp_path):
    tokenizer = load(tmp_path, byte_level("<\u6f22 1>"))
    token_id = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(token_id) == "<\u6f22 1>".encode()
    assert tokenizer.decode([token_id]) == "<\u6f22 1>"


def test_bytes_of_another_kind_of_tokenizer_are_not_guessed(tmp_path):
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="neither ByteLevel nor"):
        load(tmp_path, backend).token_bytes(0)


def test_broken_utf8_is_shown_as_such(tmp_path):
    tokenizer = load(tmp_path, byte_level())
    first, *_ = tokenizer.encode("\u6f22")
    assert tokenizer.token_bytes(first) == b"\xe6"
    assert tokenizer.decode([first]) == "\ufffd"


def test_limits_stored_in_the_file_do_not_cut_texts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load(tmp_path, backend)
    assert len(tokenizer.encode("a" * 20)) == 20
    assert len(tokenizer.encode("a")) == 1


def test_eos_may_be_several_and_comes_from_the_nearest_file(tmp_path):
    options = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}
    folder = write_folder(tmp_path, byte_level(), tokenizer_config=options)
    assert load_tokenizer(folder).eos_ids == (1,)
    assert load_tokenizer(folder).bos_id == 0
    (folder / "config.json").write_text('{"eos_token_id": 5, "bos_token_id": 6}')
    assert load_tokenizer(folder).eos_ids == (5,)
    assert load_tokenizer(folder).bos_id == 0
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_tokenizer(folder).eos_ids == (7, 8)
    (folder / "generation_config.json").write_text('{"eos_token_id": 999}')
    with pytest.raises(ValueError, match="999 is not among the 258 tokens"):
        load_tokenizer(folder)


def test_chat_template_sources(tmp_path):
    user = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="no chat template"):
        load(tmp_path, byte_level()).apply_chat_template(user)
    assert load(tmp_path, byte_level(), chat_template="one").apply_chat_template(user) == "one"
    several = [{"name": "tool_use", "template": "1"}, {"name": "default", "template": "2"}]
    tokenizer = load(tmp_path, byte_level(), chat_template=several)
    assert tokenizer.apply_chat_template(user) == "2"
    (tmp_path / "chat_template.jinja").write_text("3")
    assert load(tmp_path, byte_level(), chat_template="one").apply_chat_template(user) == "3"


def test_chat_templates_are_rendered_as_hugging_face_does(tmp_path):
    template = (
        "{{ bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {% if message.role == 'skip' %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "{{ message.content | tojson }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{% if tools is none and add_generation_prompt %}\n"
        "go\n"
        "{% endif %}\n"
    )
    tokenizer = load(tmp_path, byte_level(), chat_template=template)
    messages = [{"role": "skip", "content": ""}, {"role": "user", "content": "<é>"}]
    assert tokenizer.apply_chat_template(messages) == '<s>"<é>"</s>\ngo\n'
    assert tokenizer.apply_chat_template(messages, False) == '<s>"<é>"</s>\n'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ messages.__class__.__mro__ }}", "cannot render"),
    ],
)
def test_templates_that_fail_or_reach_out_are_refused(tmp_path, template, words):
    tokenizer = load(tmp_path, byte_level(), chat_template=template)
    with pytest.raises(ValueError, match=words):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_equal_vocabularies_pass_and_others_are_named(tmp_path):
    one = load(tmp_path / "1", byte_level("aa", "bb"))
    check_same_vocabulary(one, load(tmp_path / "2", byte_level("aa", "bb")))
    with pytest.raises(ValueError, match=r"260 and 260 .* token 258 is 'aa' .* 'cc'"):
        check_same_vocabulary(one, load(tmp_path / "3", byte_level("cc", "bb")))
    with pytest.raises(ValueError, match=r"260 and 259 .* token 259 is 'bb' .* None"):
        check_same_vocabulary(one, load(tmp_path / "4", byte_level("aa")))
    with pytest.raises(ValueError, match=r"258 and 262"):
        check_same_vocabulary(
            load(tmp_path / "5", byte_level()), load(tmp_path / "6", sentencepiece())
        )


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "Nonsense"}}'])
def test_broken_tokenizer_files_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_broken_settings_are_refused_by_name(tmp_path):
    folder = write_folder(tmp_path, byte_level())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is no JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("path", ["", "nowhere", "nowhere.gguf"])
def test_a_place_without_tokenizer_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / path)
