"""Valid files, small ones, as strangers hand them out: what is then changed."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from peer import hub
from routing.spans import Span
from swarm.identity import Identity
from swarm.messages import Delta, Message, Told
from swarm.records import Descriptor, Heartbeat, Leave, record_hash, sign_record
from swarm.tensors import RawTensor


def tensor(size: int) -> RawTensor:
    return RawTensor("uint8", (size,), random.Random(size).randbytes(size))


# ---------------------------------------------------------------- records


def descriptor(signer: Identity, seq: int = 1, **changes: Any) -> Descriptor:
    made: dict[str, Any] = {
        "peer": signer.peer_id,
        "seq": seq,
        "addresses": ("198.51.100.7:7070", "[2001:db8::7]:7070"),
        "fingerprint": bytes(range(32)),
        "model": "smollm2-135m",
        "layers": 30,
        "width": 576,
        "vocab": 49152,
        "context": 2048,
        "span": Span(0, 12),
        "numerics": "cpu/float32/none/-",
        "kv_tokens": 4096,
        "tokenizer_hash": bytes(32),
        "name": "laptop",
    }
    return Descriptor(**(made | changes))


def told(signer: Identity, seq: int = 1, age_s: float = 0.0, **changes: Any) -> Told:
    """A descriptor and the heartbeat that renews it."""
    data = sign_record(signer, descriptor(signer, seq, **changes))
    beat = Heartbeat(
        peer=signer.peer_id, seq=seq + 1, descriptor_hash=record_hash(data)[:16], issued_ms=5, lease_s=15.0
    )
    return Told(sign_record(signer, beat), age_s, data)


def gossip(signer: Identity) -> list[Message]:
    """Deltas that a registry takes: news, a renewal, a leave."""
    leave = Told(sign_record(signer, Leave(signer.peer_id, 40, 15.0)), 1.0)
    return [
        Delta((told(signer, 10),)),
        Delta((told(signer, 20, age_s=3.0), told(signer, 10)), complete=True),
        Delta((Told(told(signer, 20).head, 0.5),)),
        Delta((leave,)),
    ]


# ---------------------------------------------------------------- weight files


@cache
def safetensors_header() -> tuple[bytes, bytes]:
    """(header, the tensors' bytes)"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "note": '}"]'}}
    at = 0
    for name, dtype, shape, size in (("a", "F32", [3, 5], 60), ("b.é", "BF16", [7], 14), ("c", "I64", [], 8)):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header["empty"] = {"dtype": "U8", "shape": [0, 4], "data_offsets": [at, at]}
    return json.dumps(header, ensure_ascii=False).encode() + b"   ", bytes(at)


@cache
def gguf_files() -> list[bytes]:
    import gguf
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("tiny ☃")
        writer.add_context_length(256)
        writer.add_rope_freq_base(1e4)
        writer.add_add_bos_token(True)
        writer.add_head_count_kv([1, 2, 3])
        writer.add_token_list(["a", "bc", "é"])
        writer.add_token_scores([float(n) for n in range(1_100)])
        writer.add_chat_template("{{ messages[0].content }}")
        writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
        blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        whole = path.read_bytes()
    text = struct.pack("<Q", 1) + b"k"
    by_hand = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text + struct.pack("<IB", 7, 1)
    by_hand += struct.pack("<Q", 1) + b"n" + struct.pack("<IIQ", 9, 8, 2) + text + text + bytes(64)
    return [whole, by_hand]


# ---------------------------------------------------------------- configurations and facts

FACTS = {
    "model_type": "llama",
    "vocab_size": 4096,
    "context_length": 2048,
    "bos_token_id": 0,
    "eos_token_ids": [1],
    "sampling": {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": [2, 3],
    "auto_map": {"AutoConfig": "evil.Config"},
    "architectures": ["LlamaForCausalLM"],
    "weight_map": {"model.embed_tokens.weight": "model-1.safetensors"},
}


def facts() -> list[bytes]:
    greedy = {**FACTS, "sampling": {}, "context_length": None}
    return [json.dumps(FACTS).encode(), json.dumps(greedy).encode()]


def configs() -> list[bytes]:
    other = {**CONFIG, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
    return [json.dumps(CONFIG).encode(), json.dumps(other).encode()]


@cache
def kept_listings() -> list[bytes]:
    """What is remembered of a repository, and of a file's hash."""
    listing = {
        "repo": "somebody/model",
        "commit": "c" * 40,
        "files": {"config.json": {"size": 5, "git_sha1": "a" * 40, "sha256": None}},
        "tensors": {"m.safetensors": {"w": {"dtype": "F32", "shape": [1], "nbytes": 4, "file": "m.safetensors"}}},
    }
    assert set(hub.HubFile.__dataclass_fields__) == {"size", "git_sha1", "sha256"}
    remembered = {"path": "/x", "size": 1, "mtime_ns": 2, "sha256": "ab" * 32}
    return [json.dumps(listing).encode(), json.dumps(remembered).encode()]


# ---------------------------------------------------------------- tokenizers

LINES = ["The quick brown fox jumps over the lazy dog, doesn't it?", "你好,世界。 Two  spaces\n\tand a tab. 👋🏽"]
SPECIALS = ["<s>", "</s>", "<unk>"]


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


def _byte_fallback() -> Tokenizer:
    letters = [*sorted(set("".join(LINES)) - set("你好世界👋🏽\n\t ")), "▁"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "▁th", "▁the"]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _pieces() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}|\s+"), "isolated"), pre_tokenizers.BertPreTokenizer()]
    )
    made.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIALS, show_progress=False)
    made.train_from_iterator(LINES, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return made


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -2.0), ("b", -1.0), ("<0x41>", -3.0)], 0, True))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"


@cache
def bundles() -> list[Mapping[str, bytes]]:
    """What a peer sends of its tokenizer."""
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "default", "template": TEMPLATE}],
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}, "400": {"content": "<new>", "lstrip": True}},
        "additional_special_tokens": ["<extra>"],
        "image_token": "<image>",
        "clean_up_tokenization_spaces": True,
    }
    plain = {"bos_token": "<s>", "chat_template": TEMPLATE, "extra_special_tokens": {"image_token": "<image>"}}
    return [
        {
            "tokenizer.json": made().to_str().encode(),
            "tokenizer_config.json": json.dumps(config if place % 2 else plain).encode(),
            "special_tokens_map.json": json.dumps({"eos_token": "</s>", "pad_token": {"content": "<unk>"}}).encode(),
            "model.json": json.dumps(FACTS).encode(),
        }
        for place, made in enumerate((_byte_level, _byte_fallback, _pieces, _unigram))
    ]


# ---------------------------------------------------------------- templates

CHAT: Mapping[str, object] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 你好"}],
    "tools": None,
    "add_generation_prompt": True,
}


def templates() -> list[bytes]:
    return [
        TEMPLATE.encode(),
        b"{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}"
        b"{% endfor %}{{ ns.s|trim }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        b"{%- macro turn(role, text='') -%}<{{ role|upper }} {{ {'t': text, 'n': [1, 2.5]}|tojson(indent=2) }}>"
        b"{%- endmacro -%}{%- for m in messages -%}{{ turn(m.role, m.content) }}{{ loop.cycle('a', 'b') }}"
        b"{% if loop.last %}{% break %}{% endif %}{%- endfor -%}{{ strftime_now('%Y') }}",
        b"{{ messages | map(attribute='role') | join(',') }}{{ range(9)|list }}{{ 'a.b'.split('.')[-1] * 3 }}"
        b"{% if messages|length > 9 %}{{ raise_exception('too many') }}{% endif %}{{ '%s'|format(1) }}",
    ]
