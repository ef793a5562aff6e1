"""What a client is handed, compared with what transformers makes of the same files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from peer import tokenizer_bundle
from peer.source import ModelSource, resolve_model
from swarm.errors import BrokenModel, UnsupportedModel
from swarm.tokenizer import bundle_hash
from tests.tiny_model import TEMPLATE, change_json, write_json, write_tiny_model

SENTENCES = [
    "the cat sat on the mat and the dog ran after the cat",
    "a swarm of peers holds a model that no peer could hold alone",
    "numbers 1 2 3 and 2024, punctuation! (brackets) and UPPER case",
    "every layer has a peer and every peer has a span of layers",
]
TEXTS = [*SENTENCES, "", " ", "  two  spaces ", "line\nbreak\ttab", "unseen: é 你好 🙂", "<s> the </s> cat"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def sentencepiece_model(model: Path, tmp_path: Path) -> Path:
    """The tiny model with a tokenizer that exists only as SentencePiece."""
    text, prefix = tmp_path / "text.txt", tmp_path / "spm"
    text.write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(prefix), vocab_size=320, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, minloglevel=2, num_threads=1, hard_vocab_limit=False,
    )  # fmt: skip
    (model / "tokenizer.json").unlink()
    prefix.with_suffix(".model").rename(model / "tokenizer.model")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    write_json(model / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **special})
    return model


def resolve(model: Path, cache: Path) -> ModelSource:
    return resolve_model(str(model), cache=cache)


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("tokenizer.json", b"[]", "tokenizer.json is not a JSON object"),
        ("tokenizer.json", b'{"model": {"type": "Unheard"}}', "tokenizer.json is unusable"),
        ("tokenizer_config.json", b"nothing", "tokenizer_config.json of"),
        ("generation_config.json", b'{"do_sample": true, "temperature": -3}', "temperature is not a number from 0"),
        ("generation_config.json", b'{"repetition_penalty": 0}', "repetition_penalty is not a number from"),
    ],
)
def test_what_no_client_could_use_is_refused_by_the_peer(
    model: Path, cache: Path, file: str, content: bytes, fault: str
) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(BrokenModel, match=re.escape(fault)) as caught:
        resolve(model, cache)
    assert str(model) in str(caught.value) and "that the peer sent" not in str(caught.value)


def test_half_a_character_in_a_template_is_replaced(model: Path, cache: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    change_json(model / "tokenizer_config.json", chat_template="a\ud800b")
    assert resolve(model, cache).tokenizer_files()["chat_template.jinja"] == b"a?b"


def test_a_tokenizer_is_tried_once_on_a_machine(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    real = tokenizer_bundle.read_bundle
    monkeypatch.setattr(tokenizer_bundle, "read_bundle", lambda files: tried.append(files) or real(files))
    resolve(model, cache)
    resolve(model, cache)
    assert len(tried) == 1
    write_json(model / "generation_config.json", {"eos_token_id": 3})
    resolve(model, cache)
    assert len(tried) == 2


def test_ids_that_no_vocabulary_has_end_nothing(model: Path, cache: Path) -> None:
    """-1 is how some say that nothing does."""
    write_json(model / "generation_config.json", {"eos_token_id": [-1, True, 2, 10**12]})
    assert facts(model, cache)["eos_token_ids"] == [2]


def facts(model: Path, cache: Path) -> dict[str, object]:
    loaded = json.loads(resolve(model, cache).tokenizer_files()["model.json"])
    assert isinstance(loaded, dict)
    return loaded


def test_files_are_handed_out_as_they_are(model: Path, cache: Path) -> None:
    bundle = resolve(model, cache).tokenizer_files()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert bundle[name] == (model / name).read_bytes()
    assert set(bundle) == {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "model.json",
    }  # fmt: skip


def test_the_hash_follows_every_file_of_the_bundle(model: Path, cache: Path) -> None:
    source = resolve(model, cache)
    bundle = source.tokenizer_files()
    assert source.tokenizer_hash == bundle_hash(dict(reversed(bundle.items())))
    changed = {bundle_hash({**bundle, name: bundle[name] + b" "}) for name in bundle}
    assert len({source.tokenizer_hash, *changed}) == len(bundle) + 1


def test_weights_do_not_change_the_tokenizers_hash(model: Path, cache: Path) -> None:
    before = resolve(model, cache)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    after = resolve(model, cache)
    assert before.tokenizer_hash == after.tokenizer_hash
    assert before.fingerprint != after.fingerprint


# -- the chat template -----------------------------------------------------------------------------------


def test_a_template_inside_the_tokenizers_config_is_taken_out(model: Path, cache: Path) -> None:
    assert resolve(model, cache).tokenizer_files()["chat_template.jinja"].decode() == TEMPLATE


def test_a_template_file_goes_before_one_in_the_config(model: Path, cache: Path) -> None:
    (model / "chat_template.jinja").write_text("file")
    assert resolve(model, cache).tokenizer_files()["chat_template.jinja"] == b"file"


def test_a_template_in_json_is_taken_out(model: Path, cache: Path) -> None:
    write_json(model / "chat_template.json", {"chat_template": "json"})
    assert resolve(model, cache).tokenizer_files()["chat_template.jinja"] == b"json"


def test_of_several_templates_the_default_is_taken(model: Path, cache: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change_json(model / "tokenizer_config.json", chat_template=several)
    assert resolve(model, cache).tokenizer_files()["chat_template.jinja"] == b"plain"


def test_a_model_without_a_template_has_none(model: Path, cache: Path) -> None:
    change_json(model / "tokenizer_config.json", chat_template=None)
    assert "chat_template.jinja" not in resolve(model, cache).tokenizer_files()


# -- model.json ------------------------------------------------------------------------------------------


def test_the_facts_come_from_config_and_generation_config(model: Path, cache: Path) -> None:
    assert facts(model, cache) == {
        "model_type": "llama",
        "vocab_size": 64,
        "context_length": 128,
        "bos_token_id": 1,
        "eos_token_ids": [2, 5],
        "sampling": {},
    }


def test_without_a_generation_config_the_config_says_what_ends_a_text(model: Path, cache: Path) -> None:
    (model / "generation_config.json").unlink()
    assert facts(model, cache)["eos_token_ids"] == [2]
    assert "generation_config.json" not in resolve(model, cache).tokenizer_files()


def test_sampling_values_without_do_sample_are_no_defaults(model: Path, cache: Path) -> None:
    change_json(model / "generation_config.json", temperature=0.6, top_p=0.9)
    assert facts(model, cache)["sampling"] == {}


def test_sampling_defaults_are_those_of_transformers_where_left_out(model: Path, cache: Path) -> None:
    from transformers import GenerationConfig

    change_json(model / "generation_config.json", do_sample=True, temperature=0.6)
    assert facts(model, cache)["sampling"] == {"temperature": 0.6, "top_k": 50, "top_p": 1.0}
    change_json(model / "generation_config.json", do_sample=True, min_p=0.05, repetition_penalty=1.1)
    assert facts(model, cache)["sampling"]["min_p"] == 0.05
    assert facts(model, cache)["repetition_penalty"] == 1.1
    theirs = GenerationConfig.from_pretrained(model)
    assert theirs.temperature == 0.6
    assert (theirs.top_k, theirs.top_p) in [(50, 1.0), (None, None)]  # None: filled in by generate itself


def test_a_broken_generation_config_is_named(model: Path, cache: Path) -> None:
    (model / "generation_config.json").write_text("{,}")
    with pytest.raises(BrokenModel, match=r"generation_config\.json of .* isn't JSON \(line 1, column 2"):
        resolve(model, cache)


# -- conversion ------------------------------------------------------------------------------------------


def test_a_sentencepiece_tokenizer_is_converted_to_the_same_ids(sentencepiece_model: Path, cache: Path) -> None:
    from transformers import AutoTokenizer

    bundle = resolve(sentencepiece_model, cache).tokenizer_files()
    ours = Tokenizer.from_str(bundle["tokenizer.json"].decode())
    theirs = AutoTokenizer.from_pretrained(sentencepiece_model)
    trained = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model / "tokenizer.model"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    for text in SENTENCES:
        assert ours.encode(text, add_special_tokens=False).ids == trained.encode(text), text


def test_a_conversion_is_done_once(sentencepiece_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    before = resolve(sentencepiece_model, cache)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    after = resolve(sentencepiece_model, cache)
    assert after.tokenizer_files() == before.tokenizer_files()
    assert [path.name[0] for path in (cache / "tokenizers").iterdir()] != ["."]


def test_a_tokenizer_that_cannot_be_converted_is_refused_with_what_helps(
    sentencepiece_model: Path, cache: Path
) -> None:
    (sentencepiece_model / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(UnsupportedModel, match=r"can't be converted .*; use a version .* tokenizer\.json") as caught:
        resolve(sentencepiece_model, cache)
    assert "\n" not in str(caught.value)
    assert list((cache / "tokenizers").iterdir()) == []
