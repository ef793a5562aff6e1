"""Prompts and answers against transformers, with tokenizers of every kind that decoder models have."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peer.source import resolve_model
from swarm.detokenizer import BYTE_OF, CleanUpStage, StopStage, WindowStage
from swarm.errors import MessageError, TemplateFailed, UsageError
from swarm.facts import ModelFacts, SamplingDefaults
from swarm.state import StateDir
from swarm.tokenizer import EncodedPrompt, TextCodec, bundle_hash

LINES = [
    "The quick brown fox jumps over the lazy dog, doesn't it? No!",
    "你好,世界。今天天气很好。  Two  spaces\n\tand a tab.",
    "👋🏽 emoji 👩‍👩‍👧 and ünïcödé; naïve café's we've they're I'm",
    "def f(x):\n    return x ** 2  # code",
]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FACTS = {
    "model_type": "llama",
    "vocab_size": 4096,
    "context_length": 2048,
    "bos_token_id": 0,
    "eos_token_ids": [1],
    "sampling": {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
}
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIALS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<plain added>", "你"])  # not special: part of the text, spelled as they are
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As in Llama 2 and Mistral: SentencePiece's BPE, unknown characters as byte tokens."""
    letters = [*sorted(set("".join(LINES)) - set("你好世界👋🏽\n\t ")), "▁"]
    words = ["▁t", "▁th", "▁the", "▁▁", "e▁", "▁.", "."]
    tokens = [*SPECIALS.values(), *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("e", "▁"), ("▁", ".")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=list(SPECIALS.values()), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=list(SPECIALS.values()), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def end_of_word() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIALS.values()), end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def whole_words() -> Tokenizer:
    """No decoder: tokens are joined with spaces."""
    words = [*SPECIALS.values(), *dict.fromkeys(" ".join(LINES).split()), ".", "'s", "'", "n't", "?"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "BPE with byte fallback": byte_fallback,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "BPE with end-of-word marks": end_of_word,
    "whole words": whole_words,
}


@dataclass
class Pair:
    """One set of files, read by us and by transformers."""

    files: dict[str, bytes]
    ours: TextCodec
    theirs: PreTrainedTokenizerBase

    def decoded(self, ids: Sequence[int]) -> str:
        known = [one for one in ids if one < len(self.theirs)]
        with warnings.catch_warnings():
            return self.theirs.decode(known, skip_special_tokens=True)


def make_pair(tokenizer: Tokenizer, folder: Path, config: Mapping[str, object] | None = None) -> Pair:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIALS).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return read_pair(folder, FACTS)


def read_pair(folder: Path, facts: Mapping[str, object]) -> Pair:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    files["model.json"] = json.dumps(facts).encode()
    return Pair(files, TextCodec.from_files(files), AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config = {"clean_up_tokenization_spaces": request.param in ("WordPiece", "whole words")}
    made = make_pair(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer"), config)
    yield made
    made.ours.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = make_pair(byte_level(), tmp_path_factory.mktemp("plain"))
    yield made
    made.ours.close()


@pytest.fixture(scope="module")
def smollm2(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("smollm2")
    for name, content in resolve_model("smollm2", cache=StateDir.open().cache).tokenizer_files().items():
        (folder / name).write_bytes(content)
    made = read_pair(folder, {**FACTS, "vocab_size": 49152})
    yield made
    made.ours.close()


def streamed(
    codec: TextCodec, ids: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = ()
) -> list[str]:
    """The pieces when the ids come in groups of the sizes `cuts`, over and over."""
    text, pieces, place = codec.detokenizer(stop), [], 0
    while place < len(ids):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(text.push(ids[place : place + size]))
        place += size
    return [*pieces, text.finish()]


def cut_at_first(text: str, stops: Sequence[str]) -> str:
    """The definition, over the whole text."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)

# ---------------------------------------------------------------- ids -> text


@QUICK
@given(data=st.data(), cuts=sizes)
def test_pieces_join_to_what_transformers_decodes(pair: Pair, data: st.DataObject, cuts: list[int]) -> None:
    ids = data.draw(st.lists(st.integers(0, len(pair.theirs) + 3), max_size=40))
    whole = pair.decoded(ids)
    assert pair.ours.decode(ids) == whole
    assert "".join(streamed(pair.ours, ids, cuts)) == whole


@QUICK
@given(text=st.text(max_size=60), cuts=sizes)
def test_pieces_of_an_encoded_text_join_to_its_decoding(pair: Pair, text: str, cuts: list[int]) -> None:
    ids = pair.theirs.encode(text)
    assert "".join(streamed(pair.ours, ids, cuts)) == pair.decoded(ids)


@QUICK
@given(data=st.data(), cuts=sizes)
def test_runs_of_byte_tokens_are_shown_as_transformers_shows_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, cuts: list[int]
) -> None:
    """Valid, invalid and cut characters, between special tokens, spaces and words."""
    made = fallback_pair(tmp_path_factory)
    spelled = data.draw(
        st.lists(st.sampled_from(["你".encode(), "👋🏽".encode(), b"\xff", b"\xe4\xbd", b"\n"]))
    )
    words = [made.theirs.convert_tokens_to_ids(t) for t in ("▁", "▁the", "▁▁", "e", "</s>")]
    runs = [[made.theirs.convert_tokens_to_ids(f"<0x{b:02X}>") for b in some] for some in spelled]
    between = data.draw(st.lists(st.lists(st.sampled_from(words), max_size=3), min_size=len(runs) + 1))
    ids = [one for gap, run in zip(between, [*runs, []], strict=False) for one in (*gap, *run)]
    assert "".join(streamed(made.ours, ids, cuts)) == made.decoded(ids)


_fallback: list[Pair] = []


def fallback_pair(folders: pytest.TempPathFactory) -> Pair:
    if not _fallback:
        _fallback.append(make_pair(byte_fallback(), folders.mktemp("fallback")))
    return _fallback[0]


@QUICK
@given(data=st.data(), cuts=sizes)
def test_random_ids_of_a_real_vocabulary_join_to_what_transformers_decodes(
    smollm2: Pair, data: st.DataObject, cuts: list[int]
) -> None:
    single_bytes = st.sampled_from([smollm2.theirs.convert_tokens_to_ids(letter) for letter in BYTE_OF])
    one = st.integers(0, 49_151) | single_bytes.filter(lambda token: token is not None)
    ids = data.draw(st.lists(one, max_size=60))
    whole = smollm2.decoded(ids)
    assert smollm2.ours.decode(ids) == whole
    assert "".join(streamed(smollm2.ours, ids, cuts)) == whole


def test_a_character_comes_whole_and_as_soon_as_it_is_complete(plain: Pair) -> None:
    ids = plain.theirs.encode("a🫠b")
    assert len(ids) == 5  # the four bytes of the face in three tokens
    assert streamed(plain.ours, ids, [1]) == ["a", "", "", "🫠", "b", ""]
    assert streamed(plain.ours, ids[:3], [1]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("added", [" the sky", "the sky", "\n\nthe sky", "\n", "."])
async def test_text_that_is_put_behind_other_text_is_spelled_as_it_is(pair: Pair, added: str) -> None:
    before = pair.theirs("The sky", add_special_tokens=False).input_ids
    if pair.ours.vocabulary.steps & {"ByteLevel", "ByteFallback", "Metaspace"}:
        ids = [*before, *(await pair.ours.encode_after(added))]
        assert pair.ours.decode(ids) == pair.decoded(ids) == "The sky" + added
    elif added.strip():  # these know no white space: nothing can be different behind other text
        alone = pair.theirs(added, add_special_tokens=False).input_ids
        assert list(await pair.ours.encode_after(added)) == alone
    assert await pair.ours.encode_after("") == ()


def test_ids_that_the_tokenizer_does_not_know_have_no_text(plain: Pair) -> None:
    ids = [*plain.theirs.encode("the"), 4000, 1 << 40, -1]
    assert plain.ours.decode(ids) == "the"
    assert "".join(streamed(plain.ours, ids, [1])) == "the"


@pytest.mark.parametrize("token", [1, 2, 3], ids=["words", "fragments", "invisible"])
def test_a_long_answer_decodes_each_token_a_bounded_number_of_times(token: int) -> None:
    spent = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal spent
        spent += len(ids)
        return "".join({1: "word ", 2: "b", 3: ""}[one] for one in ids if one != 3)

    stage = WindowStage(decode, is_fragment=lambda one: one in (2, 3), hold_replacement=False)
    count = 5000
    text = "".join(stage.feed([token]) for _ in range(count)) + stage.flush()
    assert text == {1: "word ", 2: "b", 3: ""}[token] * count
    assert spent <= 6 * count


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=" .?!,'ntmsverx", max_size=40), cuts=sizes)
def test_spaces_are_cleaned_up_as_transformers_does_it(text: str, cuts: list[int]) -> None:
    stage, pieces, place = CleanUpStage(), [], 0
    while place < len(text):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(stage.feed(text[place : place + size]))
        place += size
    whole = PreTrainedTokenizerBase.clean_up_tokenization(None, text)
    assert "".join(pieces) + stage.flush() == whole


# ---------------------------------------------------------------- stop strings


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    cuts=sizes,
)
def test_the_stop_string_that_begins_first_cuts_the_text(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stage, pieces, place = StopStage(stops), [], 0
    while place < len(text):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(stage.feed(text[place : place + size]))
        place += size
    assert "".join(pieces) + stage.flush() == cut_at_first(text, stops)
    assert stage.stopped == any(stop in text for stop in stops)


@QUICK
@given(data=st.data(), cuts=sizes)
def test_pieces_join_to_the_text_before_the_first_stop_string(
    plain: Pair, data: st.DataObject, cuts: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(plain.theirs) - 1), max_size=30))
    whole = plain.decoded(ids)
    inside = st.builds(lambda at, size: whole[at : at + size], st.integers(0, len(whole)), st.integers(1, 6))
    stops = data.draw(st.lists((inside | st.text(min_size=1, max_size=3)).filter(bool), max_size=4))
    assert "".join(streamed(plain.ours, ids, cuts, stops)) == cut_at_first(whole, stops)


def test_a_stop_string_over_several_tokens_is_held_back_until_it_is_decided(plain: Pair) -> None:
    text = plain.ours.detokenizer(["\n\nUser:"])
    held = text.push(plain.theirs.encode("yes\n\nUs"))
    assert (held, text.stopped) == ("yes", False)
    assert text.push(plain.theirs.encode("e it\n\nUser")) == "\n\nUse it"
    assert text.push(plain.theirs.encode(": more")) == ""
    assert text.stopped
    assert text.push(plain.theirs.encode("ignored")) + text.finish() == ""


def test_a_stop_string_may_be_found_only_at_the_end(plain: Pair) -> None:
    text = plain.ours.detokenizer(["bcd", "abcde"])
    assert text.push(plain.theirs.encode("xabcd")) == "x"
    assert not text.stopped  # "abcde" would begin first
    assert text.finish() == "a"
    assert text.stopped


@pytest.mark.parametrize("stop", [[""], ["x"] * 17, ["x" * 257]])
def test_impossible_stop_strings_are_refused(plain: Pair, stop: list[str]) -> None:
    with pytest.raises(UsageError, match="stop takes up to 16 strings of 1 to 256 characters"):
        plain.ours.detokenizer(stop)


# ---------------------------------------------------------------- text -> ids

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": LINES[2]}],
    [{"role": "system", "content": "Be </s> brief."}, {"role": "user", "content": " <s> hi\n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "reasoning": "3"},
        {"role": "user", "content": "4", "name": None},  # type: ignore[dict-item]
    ],
]


def for_any_transformers(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    """Reasoning under all the names that templates read: since 5.2x transformers adds them itself."""
    return [
        {**message, "reasoning_content": message["reasoning"], "thinking": message["reasoning"]}
        if "reasoning" in message
        else message
        for message in chat
    ]


@pytest.mark.parametrize("chat", CHATS)
async def test_messages_become_the_ids_that_transformers_makes_of_them(
    pair: Pair, chat: list[dict[str, str]]
) -> None:
    expected = pair.theirs.apply_chat_template(for_any_transformers(chat), add_generation_prompt=True)["input_ids"]
    assert await pair.ours.encode_prompt(chat) == EncodedPrompt(tuple(expected))


@pytest.mark.parametrize("line", LINES)
async def test_a_string_is_one_user_message_and_raw_it_is_itself(pair: Pair, line: str) -> None:
    chat = [{"role": "user", "content": line}]
    expected = pair.theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert (await pair.ours.encode_prompt(line)).ids == tuple(expected)
    assert (await pair.ours.encode_prompt(line, raw=True)).ids == tuple(pair.theirs.encode(line))


@pytest.mark.parametrize("line", LINES)
async def test_a_real_model_s_prompts_are_those_of_transformers(smollm2: Pair, line: str) -> None:
    for chat in ([{"role": "user", "content": line}], [{"role": "system", "content": line}, *CHATS[0]]):
        expected = smollm2.theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert (await smollm2.ours.encode_prompt(chat)).ids == tuple(expected)
    assert (await smollm2.ours.encode_prompt(line, raw=True)).ids == tuple(smollm2.theirs.encode(line))


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"600": {"content": "<tool>", "special": True, "lstrip": True}}},
        {"image_token": "<image>", "extra_special_tokens": ["<tool>"]},
        {"video_token": "<tool>", "extra_special_tokens": {"image_token": "<image>"}},
        {"image_token": "<image>", "chat_template": "unused: the file comes first"},
    ],
    ids=lambda config: ",".join(config),
)
async def test_the_tokenizer_config_is_followed_as_transformers_follows_it(
    tmp_path: Path, config: dict[str, object]
) -> None:
    made = make_pair(byte_level(), tmp_path, config)
    try:
        for text in ("<s>hello</s>", "a  <tool> b", "<image>"):
            raw = await made.ours.encode_prompt(text, raw=True)
            assert raw.ids == tuple(made.theirs.encode(text))
            assert made.ours.decode(raw.ids) == made.theirs.decode(raw.ids, skip_special_tokens=True)
            chat = [{"role": "user", "content": text}]
            expected = made.theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert (await made.ours.encode_prompt(text)).ids == tuple(expected)
    finally:
        made.ours.close()


async def test_special_tokens_are_added_to_a_raw_prompt_only(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = make_pair(tokenizer, tmp_path)
    try:
        assert (await made.ours.encode_prompt("hi", raw=True)).ids.count(0) == 1
        assert (await made.ours.encode_prompt("hi")).ids.count(0) == 1  # the template wrote it
    finally:
        made.ours.close()


async def test_a_model_without_a_template_takes_the_prompt_as_it_is_and_says_so(plain: Pair) -> None:
    files = {name: data for name, data in plain.files.items() if name != "chat_template.jinja"}
    codec = TextCodec.from_files(files)
    encoded = await codec.encode_prompt("hello")
    assert encoded.ids == tuple(plain.theirs.encode("hello"))
    assert encoded.note is not None and "no chat template" in encoded.note
    assert (await codec.encode_prompt("hello", raw=True)).note is None
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert (await codec.encode_prompt(chat)).ids == tuple(plain.theirs.encode("a\n\nb"))


@pytest.mark.parametrize("listed", [False, True])
async def test_the_template_may_be_in_the_tokenizer_config(plain: Pair, listed: bool) -> None:
    template: object = TEMPLATE
    if listed:
        template = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    files = {name: data for name, data in plain.files.items() if name != "chat_template.jinja"}
    config = {**json.loads(files["tokenizer_config.json"]), "chat_template": template}
    codec = TextCodec.from_files({**files, "tokenizer_config.json": json.dumps(config).encode()})
    try:
        assert await codec.encode_prompt("hi") == await plain.ours.encode_prompt("hi")
    finally:
        await codec.aclose()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "1 to 4096 messages"),
        (7, "a string or a list"),
        (["hi"], "message 0 of the prompt has to be a dict"),
        ([{"role": "user"}], "needs a string as 'content'"),
        ([{"role": "user", "content": None}], "needs a string as 'content'"),
        ([{"content": "x"}], "needs a string as 'role'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string as 'content'"),
        ([{"role": "user", "content": "x", "n": 1}], "needs a string as 'n'"),
        ("\ud800", "surrogate"),
        ("x" * ((4 << 20) + 1), "4194304"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, str) else None,
)
async def test_a_prompt_that_can_not_be_encoded_is_a_usage_error(
    plain: Pair, prompt: object, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        await plain.ours.encode_prompt(prompt)  # type: ignore[arg-type]


async def test_messages_have_no_raw_form_and_an_empty_prompt_has_no_tokens(plain: Pair) -> None:
    with pytest.raises(UsageError, match="raw prompt is a string"):
        await plain.ours.encode_prompt([{"role": "user", "content": "x"}], raw=True)
    with pytest.raises(UsageError, match="empty"):
        await plain.ours.encode_prompt("", raw=True)


# ---------------------------------------------------------------- files of strangers


def test_the_model_s_facts_are_read(plain: Pair) -> None:
    codec = plain.ours
    assert (codec.eos_ids, codec.context, codec.vocab_size) == ((1,), 2048, 4096)
    assert codec.defaults == SamplingDefaults(temperature=0.6, top_k=50, top_p=0.9)
    greedy = ModelFacts.from_bytes(json.dumps({**FACTS, "sampling": {}, "context_length": None}).encode())
    assert (greedy.sampling.temperature, greedy.context) == (0.0, None)


def test_the_facts_that_a_peer_states_are_those_that_are_read() -> None:
    from peer.tokenizer_bundle import model_facts

    config = LlamaConfig(vocab_size=500, max_position_embeddings=64, eos_token_id=[3, 4])
    stated = json.dumps(model_facts(config, {"do_sample": True, "temperature": 0.7})).encode()
    assert ModelFacts.from_bytes(stated) == ModelFacts(
        "llama", 500, 64, (3, 4), SamplingDefaults(0.7, 50, 1.0)
    )
    told = {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.1}
    stated = json.dumps(model_facts(config, told)).encode()
    assert ModelFacts.from_bytes(stated).sampling == SamplingDefaults(1.0, 50, 1.0, 0.05, 1.1)
    stated = json.dumps(model_facts(config, {"eos_token_id": 9, "repetition_penalty": 1.2})).encode()
    assert ModelFacts.from_bytes(stated).sampling == SamplingDefaults(repetition_penalty=1.2)  # greedy has it too
    stated = json.dumps(model_facts(config, {"eos_token_id": 9})).encode()
    assert ModelFacts.from_bytes(stated) == ModelFacts("llama", 500, 64, (9,), SamplingDefaults())


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 0},
        {"vocab_size": True},
        {"vocab_size": 1 << 40},
        {"context_length": "long"},
        {"eos_token_ids": 1},
        {"eos_token_ids": [-1]},
        {"eos_token_ids": [1] * 257},
        {"model_type": None},
        {"sampling": []},
        {"sampling": {"temperature": float("nan"), "top_k": 0, "top_p": 1}},
        {"sampling": {"temperature": 1, "top_k": 0, "top_p": 2}},
        {"sampling": {"temperature": 1}},
    ],
    ids=str,
)
def test_wrong_facts_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(MessageError, match=r"model\.json.* is not "):
        ModelFacts.from_bytes(json.dumps({**FACTS, **wrong}).encode())


def with_tokenizer(change: Callable[[dict[str, object]], object]) -> Callable[[dict[str, bytes]], None]:
    def broken(files: dict[str, bytes]) -> None:
        tokenizer = json.loads(files["tokenizer.json"])
        change(tokenizer)
        files["tokenizer.json"] = json.dumps(tokenizer).encode()

    return broken


HUGE = {"temperature": 10**400, "top_k": 1, "top_p": 1.0}


def exploding(part: str, steps: str) -> Callable[[dict[str, object]], object]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    return lambda tokenizer: tokenizer.update({part: {"type": "Sequence", steps: [step] * 9}})


BROKEN: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "no tokenizer": (lambda f: f.pop("tokenizer.json"), "no tokenizer.json"),
    "no facts": (lambda f: f.pop("model.json"), "no model.json"),
    "not JSON": (lambda f: f.update({"tokenizer.json": b"\xff{"}), "not JSON"),
    "an empty object": (lambda f: f.update({"tokenizer.json": b"{}"}), "tokenizer.json.*unusable"),
    "a list": (lambda f: f.update({"tokenizer_config.json": b"[]"}), "not a JSON object"),
    "deep nesting": (lambda f: f.update({"tokenizer_config.json": b"[" * 100_000}), "not JSON"),
    "a huge number": (
        lambda f: f.update({"model.json": b'{"vocab_size": ' + b"9" * 9000 + b"}"}),
        "not JSON",
    ),
    "a number too large for a float": (
        lambda f: f.update({"model.json": json.dumps({**FACTS, "sampling": HUGE}).encode()}),
        "temperature is not a number from 0 to 100",
    ),
    "a huge file": (lambda f: f.update({"model.json": b" " * (64 << 10) + b"{}"}), "at most 65536"),
    "a huge template": (lambda f: f.update({"chat_template.jinja": b"x" * 300_000}), "at most 262144"),
    "a template of other bytes": (lambda f: f.update({"chat_template.jinja": b"\xff"}), "not UTF-8"),
    "an id that is no number": (
        lambda f: f.update({"tokenizer_config.json": b'{"added_tokens_decoder": {"x": {"content": "a"}}}'}),
        "unusable",
    ),
    "an unknown model": (with_tokenizer(lambda t: t.update(model={"type": "Evil"})), "unusable"),
    "text that explodes": (with_tokenizer(exploding("normalizer", "normalizers")), "times as long"),
    "answers that explode": (with_tokenizer(exploding("decoder", "decoders")), "times as long"),
}


@pytest.mark.parametrize(("break_it", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_files_cost_a_message_error(
    plain: Pair, break_it: Callable[[dict[str, bytes]], object], words: str
) -> None:
    files = dict(plain.files)
    break_it(files)
    with pytest.raises(MessageError, match=words):
        TextCodec.from_files(files)


def test_padding_and_truncation_in_the_file_do_not_count(plain: Pair) -> None:
    tokenizer = Tokenizer.from_str(plain.files["tokenizer.json"].decode())
    tokenizer.enable_padding(length=1000)
    tokenizer.enable_truncation(1)
    codec = TextCodec.from_files({**plain.files, "tokenizer.json": tokenizer.to_str().encode()})
    assert codec.encode_prompt_blocking("hello you", raw=True).ids == tuple(plain.theirs.encode("hello you"))


def test_ids_beyond_the_model_s_vocabulary_are_refused(plain: Pair) -> None:
    facts = json.dumps({**FACTS, "vocab_size": 10}).encode()
    codec = TextCodec.from_files({**plain.files, "model.json": facts})
    with pytest.raises(MessageError, match="the model has 10"):
        codec.encode_prompt_blocking("hello", raw=True)


async def test_a_template_that_fails_leaves_raw_prompts_working(plain: Pair) -> None:
    codec = TextCodec.from_files({**plain.files, "chat_template.jinja": b"{{ nothing.there }}"})
    try:
        with pytest.raises(TemplateFailed, match="raw prompt works"):
            await codec.encode_prompt("hi")
        assert (await codec.encode_prompt("hi", raw=True)).ids
    finally:
        await codec.aclose()


def test_a_token_of_a_million_characters_is_not_shown(plain: Pair) -> None:
    tokenizer = Tokenizer.from_str(plain.files["tokenizer.json"].decode())
    tokenizer.add_tokens(["x" * 1_000_000])
    with pytest.raises(MessageError, match="1000000 characters"):
        TextCodec.from_files({**plain.files, "tokenizer.json": tokenizer.to_str().encode()})


def test_ordinary_replacements_are_not_taken_for_explosions(plain: Pair) -> None:
    tokenizer = Tokenizer.from_str(plain.files["tokenizer.json"].decode())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace("``", '"'), normalizers.Prepend("▁")]
    )
    TextCodec.from_files({**plain.files, "tokenizer.json": tokenizer.to_str().encode()})


def test_the_hash_of_a_bundle_is_the_documented_one() -> None:
    files = {"b": b"two", "a": b"one"}
    entries = b"".join(
        b"\0\x09tokenizer" + b"\0\x01" + name + hashlib.sha256(data).digest()
        for name, data in ((b"a", b"one"), (b"b", b"two"))
    )
    assert bundle_hash(files) == hashlib.sha256(b"layerswarm tokenizer 1\n" + entries).digest()
