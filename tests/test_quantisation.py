"""Quantised checkpoints as they are published, against transformers' own dequantisation and sums by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel
from transformers.quantizers import quantizer_finegrained_fp8
from transformers.utils import logging

from peer.attention import Row
from peer.capacity import plan_memory
from peer.dequantise import exponents, fill_fp8, fill_mxfp4
from peer.model import PackedStep, SpanModel
from peer.source import ModelSource, resolve_model
from peer.weights import load_span, span_prices, span_tensors
from routing.spans import Span
from swarm.errors import BrokenModel, ModelError, UnsupportedModel
from tests import published
from tests.tiny_model import VOCAB, change_json, write_tiny_model

torch.set_num_threads(1)
TOLERANCE = 1e-4
PUBLISHERS: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "gpt-oss": (published.publish_gpt_oss, Mxfp4Config),
    "deepseek-v3": (published.publish_deepseek_v3, FineGrainedFP8Config),
}


@pytest.fixture(scope="module", params=sorted(PUBLISHERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("published")
    return {name: publish(parent / name) for name, (publish, _) in PUBLISHERS.items()}


@pytest.fixture(scope="module")
def directory(name: str, originals: dict[str, Path]) -> Path:
    return originals[name]


@pytest.fixture
def copy(name: str, originals: dict[str, Path], tmp_path: Path) -> Path:
    """One that a test may spoil."""
    return shutil.copytree(originals[name], tmp_path / name)


@pytest.fixture(scope="module")
def source(directory: Path) -> ModelSource:
    return resolve_model(str(directory), cache=directory.parent / "cache")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers asks for accelerate before it reads fp8, and then doesn't use it on a CPU."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(before)


def uncut(name: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model, dequantised by transformers."""
    how = PUBLISHERS[name][1](dequantize=True)
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=how, dtype=dtype).eval()


def chain_logits(hops: list[SpanModel], ids: list[int]) -> Tensor:
    hidden = None
    for hop in hops:
        cache = hop.new_cache(len(ids))
        cache.begin(0, len(ids))
        row = Row(cache, 0, len(ids), logits=len(ids))
        given = {"ids": torch.tensor(ids)} if hidden is None else {"hidden": hidden}
        out = hop.forward(PackedStep(hop.span, [row], **given))
        hidden = out.hidden
    assert out.logits is not None
    return out.logits


# ---------------------------------------------------------------- as published


def test_three_uneven_spans_give_the_logits_of_the_uncut_model(
    name: str, directory: Path, source: ModelSource, quiet: None
) -> None:
    model = uncut(
        name, directory, torch.float32
    ).float()  # 5.17 leaves experts in bfloat16, which is exact for mxfp4
    layers = source.layers
    hops = [load_span(source, span, torch.float32) for span in (Span(0, 1), Span(1, 4), Span(4, layers))]
    ids = [(7 * i + i * i) % VOCAB for i in range(19)]
    with torch.inference_mode():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0]
    ours = chain_logits(hops, ids)
    assert (ours - theirs).abs().max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tensor_is_bit_for_bit_what_transformers_makes_of_it(
    name: str, directory: Path, source: ModelSource, dtype: torch.dtype, quiet: None
) -> None:
    """Types included: both families keep some tensors in float32, one of them in float16 only."""
    model = uncut(name, directory, dtype)
    loaded = tensors_of(load_span(source, Span(0, source.layers), dtype))
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    for tensor, value in expected.items():
        if ".experts." in tensor and value.dtype == torch.bfloat16:  # 5.17 leaves mxfp4 so, whatever was asked for
            value = value.to(dtype)
        assert loaded[tensor].dtype == value.dtype, tensor
        assert torch.equal(loaded[tensor], value), tensor


def tensors_of(hop: SpanModel) -> dict[str, Tensor]:
    loaded = dict(hop.shell.state_dict())
    for i, layer in enumerate(hop.layers):
        prefix = f"{hop.outline.layers_path}.{i}."
        loaded |= {prefix + name: value for name, value in layer.state_dict().items()}
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_span_is_priced_by_what_it_takes_once_it_is_dequantised(
    source: ModelSource, dtype: torch.dtype
) -> None:
    prices = span_prices(source, dtype)
    for span in (Span(0, 1), Span(1, 4), Span(4, source.layers)):
        assert sum(held.nbytes for held in tensors_of(load_span(source, span, dtype)).values()) == prices(
            span
        )
    plan = plan_memory(
        source, prices, device="cpu", dtype=str(dtype)[6:], budget=1 << 30, sessions=1, context=64, chunk=8
    )
    assert plan.prices(Span(1, 4)) == prices(Span(1, 4))
    stored = sum(
        spec.nbytes for tensor, spec in source.tensors.items() if tensor.startswith("model.layers.1.")
    )
    assert prices(Span(1, 2)) > 1.5 * stored  # published, it is a half or a quarter of what it takes


def test_a_span_needs_the_files_of_its_numbers_and_of_their_scales(copy: Path, tmp_path: Path) -> None:
    span = Span(2, 3)
    resolved = resolve_model(str(copy), cache=tmp_path / "cache")
    needed = set(resolved.files_of(span_tensors(resolved, span)))
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    assert needed == {file for tensor, file in index.items() if tensor.startswith("model.layers.2.")}
    for path in copy.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    assert len(list(copy.glob("*.safetensors"))) < len(set(index.values()))
    load_span(resolved, span, torch.float32)


def test_a_weight_and_its_scales_may_lie_in_different_files(source: ModelSource) -> None:
    apart = [spec for spec in source.tensors.values() if len(spec.files) == 2]
    assert apart  # or the tests above say less than they seem to
    assert all(spec.quantised is not None for spec in apart)


def test_the_fingerprint_covers_the_published_numbers_and_scales(
    copy: Path, source: ModelSource, tmp_path: Path
) -> None:
    assert resolve_model(str(copy), cache=tmp_path / "cache").fingerprint == source.fingerprint
    spec = next(spec for spec in source.tensors.values() if spec.quantised is not None)
    for tensor in (spec.quantised.numbers, spec.quantised.scales):
        path, tensors = next((path, held) for path, held in published.stored(copy) if tensor in held)
        before = path.read_bytes()
        published.replace_tensors(
            copy, {tensor: tensors[tensor].clone().flatten().roll(1).view_as(tensors[tensor])}
        )
        assert resolve_model(str(copy), cache=tmp_path / "cache").fingerprint != source.fingerprint
        path.write_bytes(before)


# ---------------------------------------------------------------- sums by hand


def test_mxfp4_numbers_are_those_of_the_standard() -> None:
    """OCP Microscaling Formats 1.0: table 5 (e2m1), 5.4.1 (e8m0): each of the 16 codes times 2 ** (scale - 127)."""
    codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    low_first = [code | (15 - code) << 4 for code in range(16)]  # a byte holds code c, then code 15 - c
    goal = torch.empty(32, 3)
    packed = torch.tensor([low_first] * 3, dtype=torch.uint8)
    fill_mxfp4(
        goal,
        lambda first, last: packed[first:last],
        exponents(torch.tensor([[127], [130], [0]], dtype=torch.uint8)),
    )
    by_hand = [number for code in range(16) for number in (codes[code], codes[15 - code])]
    assert goal[:, 0].tolist() == by_hand
    assert goal[:, 1].tolist() == [8 * number for number in by_hand]
    assert goal[:, 2].tolist() == [number * 2.0**-127 for number in by_hand]
    assert [math.copysign(1, n) for n in goal[:, 0].tolist()] == [math.copysign(1, n) for n in by_hand]


def test_fp8_blocks_at_the_edges_are_cut_not_stretched() -> None:
    """576 rows in blocks of 128, as DeepSeek-V3 has them, are 4 blocks and a half."""
    torch.manual_seed(3)
    numbers, scales = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(3, 2)
    by_hand = np.empty((300, 200), np.float32)
    plain = numbers.float().numpy()
    for row, column in np.ndindex(300, 200):
        by_hand[row, column] = plain[row, column] * scales.numpy()[row // 128, column // 128]
    goal, raw = torch.empty(300, 200), numbers.view(torch.uint8)
    fill_fp8(goal, lambda first, last: raw[first:last], scales, (128, 128))
    assert np.array_equal(goal.numpy(), by_hand)


def test_a_long_matrix_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    numbers, scales = torch.randint(0, 127, (500, 64), dtype=torch.uint8), torch.rand(4, 1)
    packed, groups = torch.randint(0, 256, (500, 32), dtype=torch.uint8), torch.rand(500, 2)
    whole, turned = torch.empty(500, 64), torch.empty(64, 500)
    fill_fp8(whole, lambda first, last: numbers[first:last], scales, (128, 64))
    fill_mxfp4(turned, lambda first, last: packed[first:last], groups)
    monkeypatch.setattr("peer.dequantise.PIECE_BYTES", 7 * 64 * 4)
    pieces, seen = torch.empty(500, 64), []
    fill_fp8(pieces, lambda first, last: seen.append(last - first) or numbers[first:last], scales, (128, 64))
    assert torch.equal(pieces, whole) and max(seen) == 7
    turned_pieces = torch.empty(64, 500)
    fill_mxfp4(turned_pieces, lambda first, last: packed[first:last], groups)
    assert torch.equal(turned_pieces, turned)


# ---------------------------------------------------------------- other layouts of fp8


def quantised_llama(
    directory: Path, config: dict[str, Any], suffix: str, quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """A tiny llama whose linear layers are published as fp8. Returns the weights that it stands for, by hand."""
    write_tiny_model(directory)
    change_json(directory / "config.json", quantization_config=config)
    ((path, plain),) = published.stored(directory)
    tensors, meant = dict(plain), dict(plain)
    for name, weight in plain.items():
        if name.endswith("_proj.weight"):
            numbers, scales = quantise(weight)
            tensors[name], tensors[name.removesuffix("weight") + suffix] = numbers, scales
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(
                1
            )  # of activations: nothing to us
            rows, columns = weight.shape
            wide = torch.ones(rows, columns, dtype=torch.float64)
            for row, column in np.ndindex(rows, columns):
                wide[row, column] = scale_at(scales, row, column, weight)
            meant[name] = (numbers.double() * wide).float()
    published.save_file(tensors, path)
    return meant


def scale_at(scales: Tensor, row: int, column: int, weight: Tensor) -> float:
    if scales.dtype == torch.uint8:  # MX: groups of eight columns here
        return 2.0 ** (int(scales[row, column // 8]) - 127)
    if scales.numel() == 1:
        return float(scales)
    return float(scales[row, 0] if scales.ndim == 2 else scales[row])


def per_tensor(dtype: torch.dtype, *shape: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = (weight.abs().max() / 448).to(dtype)
        return (weight / scale.float()).to(torch.float8_e4m3fn), scale.reshape(shape)

    return quantise


def per_row(*shape: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = weight.abs().amax(1) / 448
        return (weight / scale[:, None]).to(torch.float8_e4m3fn), scale.reshape(len(weight), *shape)

    return quantise


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.view(len(weight), -1, 8)
    exponent = groups.abs().amax(-1).log2().floor() - 7
    return (groups / 2.0 ** exponent[..., None]).view_as(weight).to(torch.float8_e4m3fn), (exponent + 127).to(
        torch.uint8
    )


def groups_of(strategy: str, **other: object) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **other}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize(
    ("config", "suffix", "quantise"),
    [
        (FP8, "weight_scale", per_tensor(torch.float32, 1)),
        ({**FP8, "weight_block_size": None}, "weight_scale_inv", per_tensor(torch.bfloat16)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale", per_row(1)),
        ({**COMPRESSED, "format": "naive-quantized", "config_groups": groups_of("tensor")},
         "weight_scale", per_tensor(torch.bfloat16, 1)),
        ({**COMPRESSED, "config_groups": groups_of("channel")}, "weight_scale", per_row(1)),
        ({**COMPRESSED, "config_groups": groups_of("channel")}, "weight_scale", per_row()),
        ({**FP8, "weight_block_size": [1, 8], "scale_fmt": "ue8m0"}, "weight_scale_inv", in_groups),
    ],
)  # fmt: skip
def test_one_scale_for_a_matrix_for_a_row_or_for_a_group(
    config: dict[str, Any], suffix: str, quantise: Any, tmp_path: Path
) -> None:
    meant = quantised_llama(tmp_path / "model", config, suffix, quantise)
    source = resolve_model(str(tmp_path / "model"), cache=tmp_path / "cache")
    loaded = tensors_of(load_span(source, Span(0, source.layers), torch.float32))
    for name, value in meant.items():
        assert torch.equal(loaded[name], value), name


# ---------------------------------------------------------------- refused, or named


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised (gptq, 4-bit)"),
        ({"quant_method": "awq", "w_bit": 4}, "quantised (awq, 4-bit)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised (bitsandbytes)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantised (fp8, e5m2)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantised (modelopt, NVFP4)"),
        ({}, "quantised (unknown)"),
        ([], "quantised (unknown)"),
        ({**COMPRESSED, "format": "pack-quantized", "config_groups": groups_of("group", type="int", num_bits=4)},
         "quantised (compressed-tensors, 4-bit int)"),
        ({**COMPRESSED, "format": "mxfp8-quantized", "config_groups": groups_of("channel")},
         "quantised (compressed-tensors, mxfp8-quantized)"),
        ({**COMPRESSED, "config_groups": groups_of("group")}, "quantised (compressed-tensors, fp8 group)"),
        ({**COMPRESSED, "config_groups": {}}, "quantised (compressed-tensors, float-quantized)"),
        ({**COMPRESSED, "config_groups": {"g": None}}, "quantised (compressed-tensors, no weights)"),
        ({**COMPRESSED, "config_groups": groups_of("channel", symmetric=False)},
         "quantised (compressed-tensors, fp8 with zero points)"),
        ({**COMPRESSED, "config_groups": groups_of("channel"), "sparsity_config": {"format": "sparse-24-bitmask"}},
         "quantised (compressed-tensors, float-quantized, sparse)"),
        ({**COMPRESSED, "config_groups": groups_of("channel"), "transform_config": {"config_groups": {}}},
         "quantised (compressed-tensors, float-quantized, transformed)"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_its_name_with_what_can(
    config: object, says: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", quantization_config=config)
    text = refusal(tmp_path / "model", UnsupportedModel)
    assert says in text
    assert "use its unquantised version, or one in fp8, mxfp4 or GGUF" in text


@pytest.mark.parametrize("beside", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_quantisation_that_only_a_file_beside_the_config_tells_is_refused(
    beside: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / beside).write_text("{}")
    assert f"quantised ({beside} is beside its config)" in refusal(tmp_path / "model", UnsupportedModel)


@pytest.mark.parametrize("block", [128, [128], [128, 0], [True, 1], "128,128", {"0": 1, "1": 2}])
def test_a_block_size_that_is_none_is_named(block: object, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", quantization_config={**FP8, "weight_block_size": block})
    assert f"weight_block_size of {block!r}" in refusal(tmp_path / "model", BrokenModel)


def refusal(directory: Path, kind: type[ModelError]) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(str(directory), cache=directory.parent / "cache")
    assert type(caught.value) is kind
    return str(caught.value)


UP = "model.layers.1.mlp.up_proj.weight"
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))
DAMAGES: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor | None]], type[ModelError], str]] = [
    ("deepseek-v3", lambda _: {f"{UP}_scale_inv": None}, UnsupportedModel,
     f"tensor {UP} in model-00000-of-00004.safetensors is stored as F8_E4M3 without scales"),
    ("deepseek-v3", lambda _: {f"{UP}_scale_inv": torch.ones(3, 1)}, BrokenModel,
     f"tensor {UP}_scale_inv in model-00000-of-00004.safetensors holds scales of shape [3, 1] for {UP}, which is "
     "[384, 256]: that isn't blocks of 128 x 128"),
    ("deepseek-v3", lambda _: {f"{UP}_scale_inv": torch.ones(3, 2, dtype=torch.int64)}, BrokenModel,
     f"tensor {UP}_scale_inv in model-00000-of-00004.safetensors is I64 [3, 2], which aren't the scales of"),
    ("gpt-oss", lambda _: {SCALES: None}, BrokenModel,
     "model.layers.1.mlp.experts.down_proj is in none of the model's 5 weight files"),
    ("gpt-oss", lambda t: {SCALES: t[SCALES][:, :60].clone()}, BrokenModel,
     f"{SCALES} in model-00001-of-00004.safetensors is U8 [4, 60, 3], which aren't the scales of {BLOCKS}, "
     "U8 [4, 64, 3, 16]"),
    ("gpt-oss", lambda t: {SCALES: t[SCALES].float()}, BrokenModel, "is F32 [4, 64, 3], which aren't the scales"),
    ("gpt-oss", lambda t: {BLOCKS: t[BLOCKS][..., :8].clone()}, BrokenModel,
     "has shape [4, 48, 64], the config asks for [4, 96, 64]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "kind", "says"), DAMAGES)
def test_scales_that_do_not_belong_to_their_numbers_are_named_before_anything_is_loaded(
    copy: Path, damage: Any, kind: type[ModelError], says: str, tmp_path: Path
) -> None:
    tensors = {key: value for _, held in published.stored(copy) for key, value in held.items()}
    published.replace_tensors(copy, damage(tensors))
    source = resolve_model(str(copy), cache=tmp_path / "cache")
    with pytest.raises(kind) as caught:
        span_prices(source, torch.float32)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "scales", "value"), [("gpt-oss", SCALES, 255), ("deepseek-v3", f"{UP}_scale_inv", float("nan"))]
)
def test_a_scale_that_is_no_number_is_named(copy: Path, scales: str, value: float, tmp_path: Path) -> None:
    tensors = next(held for _, held in published.stored(copy) if scales in held)
    tensors[scales].view(-1)[1] = value
    published.replace_tensors(copy, {scales: tensors[scales]})
    source = resolve_model(str(copy), cache=tmp_path / "cache")
    with pytest.raises(
        BrokenModel, match=rf"tensor {scales} in model-\d+-of-00004\.safetensors holds a scale that isn't"
    ):
        load_span(source, Span(1, 2), torch.float32)
