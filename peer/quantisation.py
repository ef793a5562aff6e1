"""Quantised checkpoints as they are published: what a config says, and which stored tensors are one weight.

    fp8     each weight is `x.weight` (one byte a number, e4m3) and scales `x.weight_scale_inv` or
            `x.weight_scale`: one for each block of rows and columns, for each row, or for all of it
            (deepseek-ai/DeepSeek-V3; fbgemm_fp8; compressed-tensors' float-quantized)
    mxfp4   experts' matrices are `x_blocks` [experts, out, groups, 16], two 4-bit numbers a byte, and `x_scales`
            [experts, out, groups], one exponent for each 32 numbers (openai/gpt-oss-20b)

They are computed with in the peer's dtype: `peer.dequantise` does the arithmetic when a span is loaded.
Everything else is refused here, from the config alone. Invariant: `weights_of` leaves nothing of a
quantisation but TensorSpecs whose shape is the model's, so that spans are priced by what they take in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from peer.checkpoint import Quantised, TensorSpec
from swarm.errors import BrokenModel, UnsupportedModel

FP8, MXFP4 = "F8_E4M3", "MXFP4"  # TensorSpec.dtype; the first is safetensors' own spelling
SCALE_SUFFIXES = ("_scale_inv", "_scale")
BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS_PER_BYTE = 2  # of mxfp4
# what quantisers write beside a config that says nothing itself
SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a config says. block: rows and columns that share an fp8 scale, where it names them."""

    method: str
    block: tuple[int, int] | None = None


def read_quantisation(
    label: str, config: Mapping[str, object], files: Collection[str]
) -> Quantisation | None:
    """Of a config.json and the names of the files beside it; None if the weights are plain.

    Raises UnsupportedModel for what can't be read, BrokenModel for a description that makes no sense.
    """
    said = config.get("quantization_config", config.get("compression_config"))
    if said is None:
        beside = next((name for name in SIDE_FILES if name in files), None)
        if beside is not None:
            raise _refused(label, f"{beside} is beside its config")
        return None
    if not isinstance(said, dict):
        raise _refused(label, "unknown")
    method = said.get("quant_method")
    if method == "mxfp4":
        return Quantisation("mxfp4")
    if method == "fp8" and said.get("fmt", "e4m3") == "e4m3":
        return Quantisation("fp8", _block(label, said.get("weight_block_size")))
    if method == "fbgemm_fp8":
        return Quantisation("fbgemm_fp8")
    if method == "compressed-tensors":
        return Quantisation("compressed-tensors", _float_groups(label, said))
    details = [f"{said[key]}-bit" for key in ("bits", "w_bit", "num_bits") if isinstance(said.get(key), int)]
    raise _refused(label, ", ".join([str(method or "unknown"), *details, *_named(said, "fmt", "quant_algo")]))


def _named(said: Mapping[str, Any], *keys: str) -> list[str]:
    return [str(said[key]) for key in keys if isinstance(said.get(key), str)]


def _block(label: str, said: object) -> tuple[int, int] | None:
    if said is None:
        return None
    sound = isinstance(said, (list, tuple)) and len(said) == 2 and all(type(n) is int and n > 0 for n in said)
    if not sound:
        raise BrokenModel(
            f"config.json of {label} has a weight_block_size of {said!r} where two numbers of rows and columns "
            "belong; fetch that file again"
        )
    rows, columns = said  # type: ignore[misc]
    return rows, columns


def _float_groups(label: str, said: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block size of compressed-tensors' fp8. Raises UnsupportedModel for what isn't fp8 throughout."""
    groups = said.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups]
    blocks = set()
    for group in weights:
        if not isinstance(group, dict) or (group.get("type"), group.get("num_bits")) != ("float", 8):
            bits = (
                f"{group.get('num_bits')}-bit {group.get('type')}"
                if isinstance(group, dict)
                else "no weights"
            )
            raise _refused(label, f"compressed-tensors, {bits}")
        if group.get("strategy") not in ("tensor", "channel", "block") or not group.get("symmetric", True):
            how = group.get("strategy") if group.get("symmetric", True) else "with zero points"
            raise _refused(label, f"compressed-tensors, fp8 {how}")
        blocks.add(_block(label, group.get("block_structure") if group.get("strategy") == "block" else None))
    sparse = said.get("sparsity_config") not in (None, {}, {"format": "dense"})
    if not weights or said.get("format") not in _FLOAT_FORMATS or sparse or said.get("transform_config"):
        extra = ["sparse"] * sparse + ["transformed"] * bool(said.get("transform_config"))
        raise _refused(label, ", ".join(["compressed-tensors", *_named(said, "format"), *extra]))
    if len(blocks) > 1:
        raise _refused(label, "compressed-tensors, fp8 in blocks of several sizes")
    return blocks.pop()


def _refused(label: str, method: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{label} is quantised ({method}), which can't be read here; use its unquantised version, or one in fp8, "
        "mxfp4 or GGUF"
    )


# ---------------------------------------------------------------- stored tensors -> weights


def weights_of(
    stored: Mapping[str, TensorSpec], quantisation: Quantisation | None
) -> Mapping[str, TensorSpec]:
    """The tensors of a checkpoint with each quantised weight as one of them, under the name of the whole weight."""
    if quantisation is None:
        return stored
    weights = dict(stored)
    for name, spec in stored.items():
        if quantisation.method == "mxfp4":
            _join_mxfp4(weights, name, spec)
        elif spec.dtype == FP8 and len(spec.shape) > 1:
            _join_fp8(weights, name, spec, quantisation.block)
    return weights


def _join_fp8(
    weights: dict[str, TensorSpec], name: str, spec: TensorSpec, block: tuple[int, int] | None
) -> None:
    scales = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in weights), None)
    if scales is not None:
        weights[name] = replace(spec, quantised=Quantised(name, scales, weights.pop(scales), spec, block))


def _join_mxfp4(weights: dict[str, TensorSpec], name: str, spec: TensorSpec) -> None:
    """The model's matrices are [experts, in, out]: the other way round than they are stored."""
    whole = name.removesuffix(BLOCKS)
    scales = whole + SCALES
    if whole == name or scales not in weights or len(spec.shape) != 4:
        return
    experts, out, groups, packed = spec.shape
    shape = (experts, groups * packed * NUMBERS_PER_BYTE, out)
    quantised = Quantised(name, scales, weights.pop(scales), weights.pop(name), None)
    weights[whole] = TensorSpec(MXFP4, shape, spec.nbytes, spec.file, quantised)


def scale_block(name: str, spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a matrix of fp8 numbers that share a scale.

    Raises BrokenModel, with both shapes, where the scales don't fit the weight.
    """
    assert spec.quantised is not None
    scales, block = spec.quantised.scales_spec, spec.quantised.block
    *leading, rows, columns = spec.shape
    grid = scales.shape
    if all(n == 1 for n in grid):
        return rows, columns  # one for all of it
    if block is None:
        if grid == (rows,):
            return 1, columns
        if len(grid) == len(leading) + 2 and grid[-2] in (1, rows) and grid[-1] in (1, columns):
            block = rows // grid[-2], columns // grid[-1]
    if block is None or grid != (*leading, -(-rows // block[0]), -(-columns // block[1])):
        asked = f"blocks of {block[0]} x {block[1]}" if block else "one for each row, or for all of it"
        raise BrokenModel(
            f"tensor {spec.quantised.scales} in {scales.file} holds scales of shape {list(grid)} for {name}, which "
            f"is {list(spec.shape)}: that isn't {asked}; fetch the files again"
        )
    return block
