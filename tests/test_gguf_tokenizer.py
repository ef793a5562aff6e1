"""The tokenizer out of a GGUF file, against what transformers and SentencePiece make of its vocabulary."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from peer import gguf_tokenizer
from peer.source import ModelSource, resolve_model
from swarm.errors import BrokenModel, UnsupportedModel
from swarm.tokenizer import TextCodec
from tests.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    TEMPLATE,
    UNKNOWN,
    VOCABULARY,
    convert_here,
    write_gguf,
    write_vocabulary,
)

SENTENCES = [
    "the cat sat on the mat and the dog ran after the cat",
    "a swarm of peers holds a model that no peer could hold alone",
    "numbers 1 2 3 and 2024, punctuation! (brackets) and UPPER case",
    "every layer has a peer and every peer has a span of layers",
]
TEXTS = [
    *SENTENCES,
    "",
    " ",
    "  two  spaces ",
    "line\nbreak\ttab\r\n\n",
    "unseen: é 你好 🙂 \u200d ﬁ",
    "12345 1,000",
    "I'll we've",
    "<|im_start|>user hi<|im_end|>",
    "a<|im_end|>b",
    "<think> the </think>",
    "<s> the </s> cat",
    "\x00\x7f",
    "▁the ▁",
    "'S",
]
KNOWS_SPLITS = hasattr(
    importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping"),
    "GGUF_PRE_TOKENIZER_SPLITS",
)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_smollm2 has the child itself."""
    monkeypatch.setattr(gguf_tokenizer, "run_child", convert_here)


def resolve(
    tmp_path: Path, family: str, vocabulary: Callable[[gguf.GGUFWriter], None] | None = None
) -> ModelSource:
    write_gguf(tmp_path / "tiny.gguf", family, vocabulary=vocabulary)
    return resolve_model(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache")


def ours(source: ModelSource) -> Tokenizer:
    return Tokenizer.from_str(source.bundle["tokenizer.json"].decode())


# -- vocabularies ----------------------------------------------------------------------------------------


def train(folder: Path) -> sentencepiece.SentencePieceProcessor:
    (folder / "text.txt").write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "spm"), vocab_size=VOCABULARY,
        model_type="bpe", byte_fallback=True, character_coverage=1.0, minloglevel=2, num_threads=1,
        hard_vocab_limit=False,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def write_sentencepiece(
    writer: gguf.GGUFWriter, trained: sentencepiece.SentencePieceProcessor, extra: Sequence[str] = ()
) -> None:
    """As the converter does it. `extra` takes the last places of the vocabulary, as control tokens."""
    tokens, scores, types = [], [], []
    for i in range(VOCABULARY):
        known = i < trained.vocab_size()
        tokens.append(trained.id_to_piece(i) if known else f"[PAD{i}]")
        scores.append(trained.get_score(i) if known else -10_000.0)
        kind = (
            CONTROL
            if known and trained.is_control(i)
            else UNKNOWN
            if known and trained.is_unknown(i)
            else NORMAL
        )
        types.append(BYTE if known and trained.is_byte(i) else kind)
    for place, text in enumerate(extra, VOCABULARY - len(extra)):
        tokens[place], scores[place], types[place] = text, -1000.0, CONTROL
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    return train(tmp_path_factory.mktemp("spm"))


# -- against transformers --------------------------------------------------------------------------------


def compare(source: ModelSource, folder: Path) -> None:
    """Ids of awkward texts, their decoding, a chat. Whether a text begins with a token is tested apart."""
    theirs, tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf"), ours(source)
    # older releases guess these, or overlook them
    theirs.bos_token = json.loads(source.bundle["tokenizer_config.json"])["bos_token"]
    added = json.loads(source.bundle["tokenizer.json"])["added_tokens"]
    control = [
        AddedToken(token["content"], normalized=False, special=True) for token in added if token["special"]
    ]
    theirs.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)
    theirs.add_tokens([AddedToken(t["content"], normalized=False) for t in added if not t["special"]])
    for text in TEXTS:
        right = theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == right, text
        for skip in (True, False):
            assert tokenizer.decode(right, skip_special_tokens=skip) == theirs.decode(
                right, skip_special_tokens=skip
            )
    codec = TextCodec.from_files(source.tokenizer_files())
    try:
        chat = [{"role": "user", "content": "the cat 12345"}, {"role": "assistant", "content": " é\n"}]
        rendered = codec.render(chat)
        assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert (
            list(codec.encode_prompt_blocking(chat).ids)
            == theirs(rendered, add_special_tokens=False).input_ids
        )
    finally:
        codec.close()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "starcoder2", "stablelm", "falcon", "nemotron"])
def test_a_byte_level_vocabulary_gives_the_ids_of_transformers(family: str, tmp_path: Path) -> None:
    compare(resolve(tmp_path, family), tmp_path)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gemma3"])
def test_a_sentencepiece_vocabulary_gives_the_ids_of_transformers(
    family: str, tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    source = resolve(tmp_path, family, lambda writer: write_sentencepiece(writer, trained))
    compare(source, tmp_path)
    if family == "llama":
        for text in SENTENCES:
            assert ours(source).encode(text, add_special_tokens=False).ids == trained.encode(text)


def test_a_vocabulary_of_gemma_1_is_read_like_that_of_gemma_2(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    """transformers has no name for the first in its tables."""
    made = {}
    for family in ("gemma", "gemma2"):
        (tmp_path / family).mkdir()
        source = resolve(tmp_path / family, family, lambda writer: write_sentencepiece(writer, trained))
        made[family] = source.bundle["tokenizer.json"]
    assert made["gemma"] == made["gemma2"]


def test_a_split_of_its_own_is_kept_or_the_release_is_refused(tmp_path: Path) -> None:
    """Llama 3's, say, where at most three digits are together: a release without it would split wrongly."""

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        write_vocabulary(writer, pre="llama-bpe")

    if not KNOWS_SPLITS:
        with pytest.raises(
            UnsupportedModel, match=r"the way called llama-bpe, which transformers 5\.\d+.* -U"
        ):
            resolve(tmp_path, "llama", vocabulary)
        return
    source = resolve(tmp_path, "llama", vocabulary)
    compare(source, tmp_path)
    pieces = ours(source).pre_tokenizer.pre_tokenize_str("12345")
    assert [text for text, _ in pieces] == ["123", "45"]


# -- what the metadata says, whatever the converters make of it ------------------------------------------


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_text_begins_with_a_token_where_the_metadata_says_so(
    said: bool | None, kind: str, tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        write_vocabulary(writer) if kind == "gpt2" else write_sentencepiece(writer, trained)
        if said is not None:
            writer.add_add_bos_token(said)

    tokenizer = ours(resolve(tmp_path, "llama", vocabulary))
    begins = kind == "llama" if said is None else said
    for text in SENTENCES:
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).ids == ([1] if begins else []) + plain


def test_tokens_that_the_file_marks_are_found_whole(tmp_path: Path) -> None:
    source = resolve(tmp_path, "gpt2", lambda writer: write_vocabulary(writer, ends=["<|user|>"]))
    added = {token["content"]: token for token in json.loads(source.bundle["tokenizer.json"])["added_tokens"]}
    assert {text: token["special"] for text, token in added.items()} == {
        "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<|user|>": True, "<think>": False,
    }  # fmt: skip
    assert ours(source).encode("a<|user|>", add_special_tokens=False).ids[1:] == [3]


def test_the_special_tokens_are_those_of_the_metadata(tmp_path: Path) -> None:
    assert json.loads(resolve(tmp_path, "llama").bundle["tokenizer_config.json"]) == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }  # fmt: skip


def facts(source: ModelSource) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(source.bundle["model.json"])
    return found


def test_the_facts_are_those_of_the_file(tmp_path: Path) -> None:
    assert facts(resolve(tmp_path, "llama")) == {
        "model_type": "llama", "vocab_size": VOCABULARY, "context_length": 128, "bos_token_id": 1,
        "eos_token_ids": [2], "sampling": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        (["<|eot_id|>", "<|eom_id|>"], [2, 3, 4]),
        (["<end_of_turn>"], [2, 3]),
        (["<|end|>"], [2, 3]),
        (["<|return|>", "<|call|>", "<|end|>"], [2, 3, 4]),  # there <|end|> ends a message, not the answer
        (["<|endoftext_2|>"], [2]),
    ],
)
def test_the_end_of_a_turn_ends_an_answer(ends: list[str], stops: list[int], tmp_path: Path) -> None:
    source = resolve(tmp_path, "llama", lambda writer: write_vocabulary(writer, ends=ends))
    assert facts(source)["eos_token_ids"] == stops


def test_ends_that_the_metadata_names_count_and_nonsense_does_not(tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        write_vocabulary(writer, ends=["<END>"])
        writer.add_eot_token_id(3)
        writer.add_eom_token_id(0xFFFFFFFF)  # some writers' way to say that there is none

    assert facts(resolve(tmp_path, "llama", vocabulary))["eos_token_ids"] == [2, 3]


def test_sampling_is_as_the_maker_wants_it(tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        write_vocabulary(writer)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.top_p", 0.75)

    sampling = facts(resolve(tmp_path, "llama", vocabulary))["sampling"]
    assert {key: sampling[key] for key in ("temperature", "top_k", "top_p")} == {
        "temperature": 0.5, "top_k": 20, "top_p": 0.75,
    }  # fmt: skip


# -- once, and from the vocabulary alone -----------------------------------------------------------------


def test_a_conversion_is_done_once_for_a_vocabulary_whatever_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resolve(tmp_path, "llama")
    monkeypatch.setattr(gguf_tokenizer, "run_child", None)
    again = resolve_model(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache")
    assert again.tokenizer_files() == before.tokenizer_files()
    other = resolve(tmp_path, "llama, biased, wide heads")
    assert other.fingerprint != before.fingerprint
    assert other.tokenizer_hash == before.tokenizer_hash
    assert [path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.name.startswith(".")] == []


def test_another_template_or_special_token_is_another_conversion(tmp_path: Path) -> None:
    before = resolve(tmp_path, "llama")
    other = resolve(tmp_path, "llama", lambda writer: write_vocabulary(writer, template="{{ messages }}"))
    assert other.bundle["chat_template.jinja"] == b"{{ messages }}"
    assert other.tokenizer_hash != before.tokenizer_hash


def test_sampling_and_the_release_that_converts_are_part_of_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former isn't in the vocabulary; a newer release may convert better."""
    kept = tmp_path / "cache" / "tokenizers"

    def warmer(writer: gguf.GGUFWriter) -> None:
        write_vocabulary(writer)
        writer.add_float32("general.sampling.temp", 0.5)

    counts = []
    for vocabulary, release in ((None, "5.24.0"), (warmer, "5.24.0"), (warmer, "5.24.1"), (warmer, "5.24.1")):
        monkeypatch.setattr("importlib.metadata.version", lambda _, release=release: release)
        resolve(tmp_path, "llama", vocabulary)
        counts.append(sum(path.is_dir() for path in kept.iterdir()))
    assert counts == [1, 2, 3, 3]


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_whatever_a_converter_made_a_text_begins_as_it_should(begins: bool, before: bool) -> None:
    tokenizer = Tokenizer(BPE({"<s>": 0, "a": 1, "b": 2}, []))
    if before:
        special = [("<s>", 0)]
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B:1", special_tokens=special
        )
    gguf_tokenizer._begin_texts(tokenizer, 0, begins)
    assert tokenizer.encode("ab").ids == ([0] if begins else []) + [1, 2]


@pytest.mark.parametrize("said", [True, False])
def test_what_a_converter_made_of_the_beginning_is_set_right_in_what_is_kept(
    said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(tokenizer: Tokenizer, *_: object) -> None:
        token = tokenizer.id_to_token(1)
        tokenizer.post_processor = TemplateProcessing(
            single="$A" if said else f"{token} $A", pair="$A $B:1", special_tokens=[(token, 1)]
        )

    monkeypatch.setattr(gguf_tokenizer, "_add_own_tokens", mistaken)  # the last that is done before
    source = resolve(tmp_path, "llama", lambda writer: (write_vocabulary(writer), writer.add_add_bos_token(said))[0])
    assert (ours(source).encode("the cat").ids[0] == 1) is said


def test_no_vocabulary_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        BrokenModel, match=r"tiny\.gguf can't be used: its metadata has no tokenizer; use a file"
    ):
        resolve(tmp_path, "llama", lambda writer: None)


def test_a_vocabulary_that_cannot_be_converted_is_refused_in_one_line(tmp_path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("strange\nkind")
        writer.add_token_list(["a"] * VOCABULARY)

    with pytest.raises(
        UnsupportedModel, match=r"the tokenizer of tiny\.gguf can't be converted \(.*\); "
    ) as caught:
        resolve(tmp_path, "llama", vocabulary)
    assert "\n" not in str(caught.value)
    kept = tmp_path / "cache" / "tokenizers"
    assert [path for path in kept.iterdir() if path.suffix != ".lock"] == []
