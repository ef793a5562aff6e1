"""Strangers' tokenizers that want to hold or fill whoever reads them: each costs its limit and a typed error."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from swarm.errors import MessageError, TokenizerFailed
from swarm.template import TemplateRenderer
from swarm.tokenizer import TextCodec, TokenizerLimits, TokenizerProcess
from swarm.vocabulary import Vocabulary
from tests.test_tokenizer import FACTS, TEMPLATE, byte_fallback, byte_level

FOR_EVER = "(a+)+$"  # exponential in the number of a's
PROMPT = ("a" * 22 + "!") * 40  # each part stays under the limit on retries that the library's engine has
SHORT = TokenizerLimits(encode_s=0.5, load_s=0.5)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")


def bundle(tokenizer: Tokenizer | None = None, **changed: object) -> dict[str, bytes]:
    """changed: parts of tokenizer.json."""
    definition = json.loads((tokenizer or byte_level()).to_str())
    return {
        "tokenizer.json": json.dumps({**definition, **changed}).encode(),
        "model.json": json.dumps(FACTS).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


def in_the_normalizer() -> dict[str, bytes]:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace(Regex(FOR_EVER), "")
    return bundle(tokenizer)


def in_the_pre_tokenizer() -> dict[str, bytes]:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(FOR_EVER), "isolated"), pre_tokenizers.ByteLevel()]
    )
    return bundle(tokenizer)


ENDLESS = {"in the normalizer": in_the_normalizer, "in the pre-tokenizer": in_the_pre_tokenizer}


@pytest.fixture
def read() -> Iterator[Any]:
    """Reads a bundle with short limits; what was read is closed."""
    made: list[TextCodec] = []

    def reading(files: dict[str, bytes], limits: TokenizerLimits = SHORT) -> TextCodec:
        made.append(TextCodec.from_files(files, tokenizer=TokenizerProcess(limits)))
        return made[-1]

    yield reading
    for codec in made:
        codec.close()


@pytest.mark.parametrize("files", ENDLESS.values(), ids=ENDLESS)
def test_a_regular_expression_that_takes_for_ever_costs_its_limit_and_the_next_prompt_works(
    read: Any, files: Any
) -> None:
    codec = read(files())
    with pytest.raises(TokenizerFailed, match=r"longer than 1\.42 s"):
        codec.encode_prompt_blocking(PROMPT * 100, raw=True)  # a quarter of an hour, if nobody ends it
    assert codec.decode(codec.encode_prompt_blocking("The quick", raw=True).ids).strip() == "The quick"


def test_ids_without_number_for_a_short_text_are_refused_before_they_are_read(read: Any) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace("a", "b" * 4_000)
    codec = read(bundle(tokenizer))
    with pytest.raises(TokenizerFailed, match=r"made 4,000 ids of a text that can have 1,040 at most"):
        codec.encode_prompt_blocking("a", raw=True)
    assert codec.encode_prompt_blocking("The quick", raw=True).ids


@pytest.mark.parametrize("files", ENDLESS.values(), ids=ENDLESS)
async def test_the_event_loop_is_free_meanwhile_and_closing_ends_it(read: Any, files: Any) -> None:
    slow, quick = read(files(), TokenizerLimits(encode_s=600.0)), read(bundle())
    endless = asyncio.create_task(slow.encode_prompt(PROMPT, raw=True))
    for _ in range(20):
        assert (await quick.encode_prompt(PROMPT)).ids
    assert not endless.done()
    await slow.aclose()
    with pytest.raises(TokenizerFailed, match="broke its process"):
        await endless


def test_an_added_token_that_the_normalizer_never_finishes_costs_the_limit_of_reading(read: Any) -> None:
    """The library normalizes added tokens as soon as it reads them."""
    files = in_the_normalizer()
    definition = json.loads(files["tokenizer.json"])
    token = {"id": 700, "content": PROMPT, "special": False, "normalized": True}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    definition["added_tokens"].append(token)
    with pytest.raises(TokenizerFailed, match="longer than"):
        read({**files, "tokenizer.json": json.dumps(definition).encode()})


@needs_linux
def test_a_giant_vocabulary_ends_within_its_memory(read: Any) -> None:
    vocabulary = {f"{number:x}": number for number in range(100_000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    with pytest.raises((TokenizerFailed, MessageError), match=r"broke its process|too much memory|unusable"):
        read(bundle(tokenizer), TokenizerLimits(load_s=60.0, memory_bytes=48 << 20))


def test_a_vocabulary_of_more_tokens_than_any_model_has_is_refused(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.vocabulary.MAX_VOCABULARY", 100)
    with pytest.raises(MessageError, match="a vocabulary of"):
        read(bundle())


def test_ids_without_bounds_are_not_counted_up_to(read: Any) -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": (1 << 32) - 1}, "unk_token": "a"}
    files = bundle(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), model=words)
    codec = read(files, TokenizerLimits(load_s=60.0))
    assert codec.decode([0, 1, (1 << 32) - 1]) == "a"
    with pytest.raises(MessageError, match="the model has 4096"):
        codec.encode_prompt_blocking("b", raw=True)


REPLACE_BY_REGEX = {"type": "Replace", "pattern": {"Regex": FOR_EVER}, "content": ""}
FUSE = {"type": "Fuse"}
DECODERS: dict[str, tuple[object, str]] = {
    "a regular expression": (REPLACE_BY_REGEX, "replaces by a regular expression"),
    "a regular expression far inside": (
        {"type": "Sequence", "decoders": [FUSE, {"type": "Sequence", "decoders": [REPLACE_BY_REGEX]}]},
        "replaces by a regular expression",
    ),
    "very many steps": ({"type": "Sequence", "decoders": [FUSE] * 100}, "no list of a few steps"),
    "a long pattern": (
        {"type": "Replace", "pattern": {"String": "a" * 65}, "content": ""}, "with 'aaaa",
    ),
    "one that bloats": ({"type": "Replace", "pattern": {"String": "aa"}, "content": "b" * 20}, "10 times as long"),
    "steps that bloat together": (
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaa"}] * 2},
        "9 times as long",
    ),
    "one that bloats from nothing": ({"type": "Replace", "pattern": {"String": ""}, "content": "b" * 9}, "10 times"),
    "a long suffix": ({"type": "BPEDecoder", "suffix": "a" * 65}, "BPEDecoder with 'aaaa"),
}  # fmt: skip


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Replace", "content": " "},
        {"type": "Replace", "pattern": {"String": -1}, "content": " "},
        {"type": "Replace", "pattern": {"String": True}, "content": " "},
        {"type": "Replace", "pattern": {"String": "a"}, "content": 3},
        {"type": "Replace", "pattern": {"String": "a"}},
    ],
)
def test_a_decoder_of_a_process_that_was_taken_over_is_refused_too(step: object) -> None:
    """The library itself would never have said such a thing."""
    with pytest.raises(MessageError, match="the decoder that the peer sent"):
        Vocabulary(b"", b"", b"", {"type": "Sequence", "decoders": [step]})


@pytest.mark.parametrize(("decoder", "words"), DECODERS.values(), ids=DECODERS)
def test_a_decoder_that_could_take_long_in_this_process_is_refused(read: Any, decoder: object, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        read(bundle(byte_fallback(), decoder=decoder))


@needs_linux
def test_the_process_has_no_environment_and_can_open_nothing(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker = psutil.Process(pid_of(read(bundle())))
    assert "HF_TOKEN" not in worker.environ()
    assert worker.rlimit(psutil.RLIMIT_NOFILE) == (3, 3)
    assert worker.rlimit(psutil.RLIMIT_AS) == (SHORT.memory_bytes, SHORT.memory_bytes)
    assert worker.net_connections() == []


def pid_of(codec: TextCodec) -> int:
    return codec._tokenizer._confined._processes[0]._process.pid


def test_a_process_that_is_killed_is_replaced_by_one_that_has_read_the_same_files(read: Any) -> None:
    codec = read(bundle())
    before = codec.encode_prompt_blocking("The quick", raw=True)
    psutil.Process(pid_of(codec)).kill()
    with pytest.raises(TokenizerFailed, match="broke its process"):
        codec.encode_prompt_blocking("The quick", raw=True)
    assert codec.encode_prompt_blocking("The quick", raw=True) == before


def test_the_processes_of_a_codec_end_with_it() -> None:
    codec = TextCodec.from_files(bundle())
    codec.start_rendering()
    workers = [psutil.Process(pid_of(codec)), psutil.Process(codec._renderer._confined._processes[0]._process.pid)]
    del codec
    for worker in workers:
        worker.wait(timeout=30)
        assert not worker.is_running()


def test_a_process_that_was_started_early_is_the_one_that_is_used(read: Any) -> None:
    process, renderer = TokenizerProcess(), TemplateRenderer()
    process.start()
    pid = process._confined._processes[0]._process.pid
    codec = TextCodec.from_files(bundle(), tokenizer=process)
    try:
        assert pid_of(codec) == pid and codec.encode_prompt_blocking("The quick", raw=True).ids
    finally:
        codec.close()
        renderer.close()


@pytest.mark.parametrize("name", ["tokenizer.json", "model.json"])
def test_files_that_can_not_be_read_leave_no_process_behind(name: str) -> None:
    process = TokenizerProcess()
    process.start()
    worker = psutil.Process(process._confined._processes[0]._process.pid)
    with pytest.raises(MessageError):
        TextCodec.from_files({**bundle(), name: b"{}"}, tokenizer=process)
    assert not worker.is_running()
