"""What loading a span takes: little more than the span, whatever it comes from and however large the files are."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import psutil
import pytest

from tests.processes import ROOT, environment
from tests.tiny_model import write_json

SLACK, FIXED_BYTES = 1.15, 64 << 20  # of a span's bytes; and whatever its size
HEADERS_BYTES = 4 << 20  # read besides the tensors: headers, configs, /proc
LAYERS = 4
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> safetensors' dtype, shape


class Case(NamedTuple):
    """config: of transformers; in a GGUF file (is_gguf) its metadata, after the architecture's name. kept: matrices
    stay in the bfloat16 that they are published in."""

    config: dict[str, Any]
    tensors: Tensors
    dtype: str = "float32"
    layers: tuple[int, int] = (1, 2)
    is_gguf: bool = False
    kept: bool = False


def llama(vocab: int = 64, width: int = 1536, inner: int = 6144) -> Case:
    tensors: Tensors = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.self_attn.{name}_proj.weight": ("BF16", (width, width)) for name in "qkvo"}
        tensors |= {f"{at}.mlp.{name}_proj.weight": ("BF16", (inner, width)) for name in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = ("BF16", (width, inner))
        tensors |= norms(at, width)
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": 12,
    }
    return Case({**config, "vocab_size": vocab}, tensors | ends(vocab, width))


def widened() -> Case:
    """With one matrix in float32, so that all will be."""
    case = llama()
    return case._replace(tensors=case.tensors | {"lm_head.weight": ("F32", (64, 1536))})


def mixtral() -> Case:
    width, inner, experts = 1024, 3072, 4
    tensors: Tensors = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.self_attn.{name}_proj.weight": ("BF16", (width, width)) for name in "qkvo"}
        tensors[f"{at}.block_sparse_moe.gate.weight"] = ("BF16", (experts, width))
        for expert in range(experts):
            of = f"{at}.block_sparse_moe.experts.{expert}"
            tensors |= {f"{of}.{name}.weight": ("BF16", (inner, width)) for name in ("w1", "w3")}
            tensors[f"{of}.w2.weight"] = ("BF16", (width, inner))
        tensors |= norms(at, width)
    config = {
        "model_type": "mixtral",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": 8,
    }
    config |= {"num_key_value_heads": 8, "num_local_experts": experts, "vocab_size": 64}
    return Case(config, tensors | ends(64, width))


def deepseek_v3() -> Case:
    """In blocks of fp8. Attention is small here: what counts are the experts, and in layer 0 matrices of 25 MB."""
    width, inner, experts, low, heads, dim, dense = 1024, 1024, 12, 128, 4, 32, 24 << 10
    plain = {
        "self_attn.q_a_proj": (low, width),
        "self_attn.q_b_proj": (heads * 2 * dim, low),
        "self_attn.kv_a_proj_with_mqa": (low + dim, width),
        "self_attn.kv_b_proj": (heads * 2 * dim, low),
        "self_attn.o_proj": (width, heads * dim),
    }
    tensors: Tensors = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes = {f"{at}.{name}": shape for name, shape in plain.items()}
        parts = {f".experts.{expert}": inner for expert in range(experts)} | {".shared_experts": inner}
        for part, size in parts.items() if layer else [("", dense)]:
            shapes |= {f"{at}.mlp{part}.{name}_proj": (size, width) for name in ("gate", "up")}
            shapes[f"{at}.mlp{part}.down_proj"] = (width, size)
        for name, (rows, columns) in shapes.items():
            tensors[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
            tensors[f"{name}.weight_scale_inv"] = ("F32", (-(-rows // 128), -(-columns // 128)))
        if layer:
            tensors[f"{at}.mlp.gate.weight"] = ("BF16", (experts, width))
            tensors[f"{at}.mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        tensors |= {f"{at}.self_attn.{name}_a_layernorm.weight": ("BF16", (low,)) for name in ("q", "kv")}
        tensors |= norms(at, width)
    config = {"model_type": "deepseek_v3", "hidden_size": width, "moe_intermediate_size": inner}
    config |= {"n_routed_experts": experts, "num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {"q_lora_rank": low, "kv_lora_rank": low, "qk_nope_head_dim": dim, "qk_rope_head_dim": dim}
    config |= {
        "v_head_dim": dim,
        "first_k_dense_replace": 1,
        "intermediate_size": dense,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 64,
    }
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return Case(config, tensors | ends(64, width))


def gpt_oss() -> Case:
    """In mxfp4."""
    width, inner, experts, heads, dim = 1024, 1024, 12, 4, 64
    tensors: Tensors = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", heads * dim), ("k", heads * dim), ("v", heads * dim), ("o", width)):
            columns = heads * dim if name == "o" else width
            tensors[f"{at}.self_attn.{name}_proj.weight"] = ("BF16", (rows, columns))
            tensors[f"{at}.self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        tensors[f"{at}.self_attn.sinks"] = ("BF16", (heads,))
        tensors[f"{at}.mlp.router.weight"] = ("BF16", (experts, width))
        tensors[f"{at}.mlp.router.bias"] = ("BF16", (experts,))
        for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            of = f"{at}.mlp.experts.{name}"
            tensors[f"{of}_blocks"] = ("U8", (experts, rows, columns // 32, 16))
            tensors[f"{of}_scales"] = ("U8", (experts, rows, columns // 32))
            tensors[f"{of}_bias"] = ("BF16", (experts, rows))
        tensors |= norms(at, width)
    config = {"model_type": "gpt_oss", "hidden_size": width, "intermediate_size": inner, "head_dim": dim}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "num_local_experts": experts}
    config |= {"num_experts_per_tok": 4, "vocab_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    return Case(config, tensors | ends(64, width))


def gguf_llama(kind: str, width: int = 1536, vocab: int = 64, experts: int = 0) -> Case:
    """Or mixtral, where there are experts."""
    inner = 3072 if experts else 6144
    tensors: Tensors = {"token_embd.weight": (kind, (vocab, width))}
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        tensors |= {f"{at}.attn_{name}.weight": (kind, (width, width)) for name in ("q", "k", "v", "output")}
        of, stacked = ("_exps", (experts,)) if experts else ("", ())
        tensors |= {f"{at}.ffn_{name}{of}.weight": (kind, (*stacked, inner, width)) for name in ("gate", "up")}
        tensors[f"{at}.ffn_down{of}.weight"] = (kind, (*stacked, width, inner))
        tensors |= {f"{at}.{name}_norm.weight": ("F32", (width,)) for name in ("attn", "ffn")}
        if experts:
            tensors[f"{at}.ffn_gate_inp.weight"] = ("F32", (experts, width))
    tensors |= {"output_norm.weight": ("F32", (width,)), "output.weight": (kind, (vocab, width))}
    metadata = {"embedding_length": width, "feed_forward_length": inner, "attention.head_count": width // 128}
    metadata |= {"expert_count": experts, "expert_used_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    return Case(metadata, tensors, is_gguf=True)


def norms(at: str, width: int) -> Tensors:
    return {f"{at}.{name}_layernorm.weight": ("BF16", (width,)) for name in ("input", "post_attention")}


def ends(vocab: int, width: int) -> Tensors:
    table = ("BF16", (vocab, width))
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": ("BF16", (width,)),
        "lm_head.weight": table,
    }


def write_sparse_gguf(directory: Path, case: Case) -> Path:
    """One file of zeros that take no room on the disk, in the order in which they are listed."""
    writer = gguf.GGUFWriter(directory / "sparse.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    for key, value in case.config.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    size = 0
    for name, (kind, shape) in case.tensors.items():
        number = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        nbytes = math.prod(shape) // block * block_bytes
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_dtype=number)
        size += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with (directory / "sparse.gguf").open("ab") as stream:
        stream.truncate(stream.tell() + size + 32)
    return directory


def write_sparse(directory: Path, case: Case) -> Path:
    """Two shards of zeros that take no room on the disk: the embedding's and the span's, and the head's."""
    directory.mkdir()
    if case.is_gguf:
        return write_sparse_gguf(directory, case)
    config = {"num_hidden_layers": LAYERS, "pad_token_id": 0, "max_position_embeddings": 128, **case.config}
    write_json(directory / "config.json", config)
    last = [
        name
        for name in case.tensors
        if name.startswith((f"model.layers.{LAYERS - 1}.", "model.norm", "lm_head"))
    ]
    shards = {"one.safetensors": [name for name in case.tensors if name not in last], "two.safetensors": last}
    for file, names in shards.items():
        header, size = {}, 0
        for name in sorted(names, key=lambda name: "layers" in name):  # the embedding lies before the layers
            dtype, shape = case.tensors[name]
            end = size + math.prod(shape) * SIZES[dtype]
            header[name], size = {"dtype": dtype, "shape": shape, "data_offsets": [size, end]}, end
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + size)
    weight_map = {name: file for file, names in shards.items() for name in names}
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory


def beyond_memory() -> Case:
    """Each of the two files is twice as large as this machine's memory; the span lies behind the embedding."""
    return llama(vocab=2 * psutil.virtual_memory().total // (1536 * 2))._replace(layers=(1, 3), kept=True)


CASES: Mapping[str, Case] = {
    "bfloat16 to float32": widened(),
    "bfloat16 for float32": llama()._replace(layers=(1, 3), kept=True),
    "bfloat16 as it is": llama()._replace(dtype="bfloat16", layers=(1, 3)),
    "a large embedding": llama(vocab=96 << 10, width=768, inner=768)._replace(layers=(0, 1), kept=True),
    "merged experts": mixtral(),
    "experts in fp8": deepseek_v3(),
    "large matrices in fp8": deepseek_v3()._replace(layers=(0, 1)),
    "mxfp4": gpt_oss(),
    "files beyond memory": beyond_memory(),
    "GGUF, Q4_K": gguf_llama("Q4_K"),
    "GGUF, Q6_K, experts, bfloat16": gguf_llama("Q6_K", 1024, experts=8)._replace(dtype="bfloat16"),
    "a GGUF file beyond memory": gguf_llama("Q8_0", vocab=2 * psutil.virtual_memory().total // 1536),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """The figures of every case, from one process: importing takes longer than loading."""
    parent = tmp_path_factory.mktemp("sparse")
    cases = []
    for name, case in CASES.items():
        directory = write_sparse(parent / name, case)
        beyond = "beyond memory" in name
        given = {"directory": str(directory), "layers": case.layers, "dtype": case.dtype}
        cases.append({**given, "address_space": allowed(span_bytes(case)) if beyond else 0})
    done = subprocess.run(
        [sys.executable, "-m", "tests.loader", json.dumps(cases)],
        cwd=ROOT,
        env=environment(parent),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


def span_bytes(case: Case) -> int:
    """By hand, from the shapes that were written: two numbers a byte in mxfp4, one a byte in fp8."""
    total, item = 0, {"float32": 4, "bfloat16": 2}[case.dtype]
    stem = "blk" if case.is_gguf else "model.layers"
    layers = tuple(f"{stem}.{layer}." for layer in range(*case.layers))
    layers += ("model.embed_tokens.", "token_embd.") if case.layers[0] == 0 else ()
    for name, (_, shape) in case.tensors.items():
        if name.startswith(layers) and "scale" not in name:
            narrow = case.kept and len(shape) > 1
            total += math.prod(shape) * (2 if name.endswith("_blocks") else 1) * (2 if narrow else item)
    return total


def allowed(span: int) -> int:
    return int(SLACK * span) + FIXED_BYTES


on_linux = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="memory is read from /proc")


@on_linux
@pytest.mark.parametrize("name", CASES)
def test_a_span_takes_little_more_than_its_bytes_while_it_is_loaded(
    name: str, loaded: dict[str, dict[str, int]]
) -> None:
    figures, span = loaded[name], span_bytes(CASES[name])
    print(
        {key: f"{value / 2**20:.1f} MiB" for key, value in figures.items()},
        f"{figures['peak'] / span:.3f} of the span",
    )
    assert span > 2 * FIXED_BYTES  # or the fixed part would hide a second copy
    assert figures["price"] == span
    assert span <= figures["held"] < span + (1 << 20)
    assert figures["peak"] <= allowed(span)


@on_linux
@pytest.mark.parametrize("name", CASES)
def test_no_more_is_read_than_the_span(name: str, loaded: dict[str, dict[str, int]]) -> None:
    """Or a span of a file of any size would take any time."""
    assert (
        loaded[name]["read"] <= 1.07 * loaded[name]["stored"] + HEADERS_BYTES
    )  # scales are a sixteenth of mxfp4
