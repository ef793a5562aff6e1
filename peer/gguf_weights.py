"""The weights of GGUF files: which stored tensors make up one of the model's, and reading them.

What a tensor is called follows from the gguf package's tables (`TensorNameMap`); what llama.cpp's converter
did to it on the way in (https://github.com/ggml-org/llama.cpp/tree/master/conversion) is undone here.
Each such change but one is a matter of places, so a part is a *view of the model's tensor* in the order in
which the file has its numbers (`Place`): they are written straight there, a piece at a time, and nothing is
permuted afterwards. The one: norms that llama.cpp stores with 1 added.

Invariant: besides the memory that is filled, a few pieces of PIECE numbers are held, however large a tensor
is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from peer.checkpoint import Checkpoint, Part, TensorSpec, broken
from peer.gguf_config import ARCHITECTURES
from peer.gguf_header import read_open_gguf
from peer.outline import Outline
from peer.weight_files import Location, StoredTensor, WeightFiles
from swarm.errors import BrokenModel, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# numbers that are dequantised at once: with a few megabytes of temporaries, as fast as with more
PIECE = 1 << 19
# computed from, not loaded: see peer.gguf_config
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

Place = Callable[[Tensor], Tensor]  # the model's tensor -> a view of it, its numbers in the file's order


@dataclass(frozen=True, slots=True)
class GgufPart:
    """A stored tensor, or `rows` of it (first, last), and its place. plus: what is added to every number."""

    name: str
    place: Place
    rows: tuple[int, int] | None = None
    plus: float = 0.0


class GgufFormat:
    """The `WeightFormat` of *.gguf."""

    def sources(self, checkpoint: Checkpoint, plan: Outline) -> dict[str, list[GgufPart]]:
        """As `WeightFormat` says. Every part has been checked to fit its place.

        Raises UnsupportedModel too where the file has a tensor for which the model has no use: without it,
        the answers would be wrong.
        """
        names = _Names(checkpoint.config, len(plan.layers))
        sources = {name: names.parts(name, shape) for name, shape in plan.shapes.items()}
        used = {part.name for parts in sources.values() for part in parts}
        for stored, spec in checkpoint.tensors.items():
            if stored not in used and stored not in COMPUTED:
                raise UnsupportedModel(
                    f"{spec.file} can't be served: it has a tensor {stored}, for which transformers' "
                    f"{checkpoint.config.model_type} model has no place"
                )
        found = {
            name: parts
            for name, parts in sources.items()
            if all(part.name in checkpoint.tensors for part in parts)
        }
        for name, parts in found.items():
            _check(parts, name, plan.shapes[name], checkpoint)
        return found

    def open(self, checkpoint: Checkpoint) -> GgufFiles:
        return GgufFiles(checkpoint)


# ---------------------------------------------------------------- names and places


class _Names:
    """Of one model: its tensors' parts, by its own name of each."""

    def __init__(self, config: PretrainedConfig, layers: int) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        known = next(one for one in ARCHITECTURES.values() if config.model_type in one.types)
        number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == known.gguf)
        self._map, self._config = get_tensor_name_map(number, layers), config
        self._rules = RULES.get(config.model_type, ())

    def parts(self, name: str, shape: tuple[int, ...]) -> list[GgufPart]:
        for pattern, rule in self._rules:
            match = re.search(pattern, name)
            if match:
                return rule(self, name, match, shape)
        return [GgufPart(self.stored(name), lambda final: final)]

    def stored(self, name: str) -> str:
        """What the file calls a tensor, as far as the gguf package knows."""
        base, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, dot, suffix = name, ".", "weight"
        found = self._map.get_name(base) or self._map.get_name(
            base.partition(".")[2]
        )  # some lack the first word
        return f"{found or base}{dot}{suffix}"

    def layer(self, name: str) -> int:
        found = re.search(r"\.(\d+)\.", name)
        assert found
        return int(found[1])

    @property
    def heads(self) -> int:
        return int(self._config.num_attention_heads)

    @property
    def key_heads(self) -> int:
        config = self._config
        found = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None)
        return int(found or config.num_attention_heads)


Rule = Callable[[_Names, str, "re.Match[str]", tuple[int, ...]], list[GgufPart]]


def _rotary(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """llama.cpp interleaves the two halves of each query and key head; here one comes after the other."""
    heads = names.heads if match[1] == "q" else names.key_heads

    def place(final: Tensor) -> Tensor:
        return final.unflatten(0, (heads, 2, -1)).transpose(1, 2)

    return [GgufPart(names.stored(name), place)]


def _less_one(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """These families' norms multiply by 1 + w, and llama.cpp stores that sum."""
    return [GgufPart(names.stored(name), lambda final: final, plus=-1.0)]


def _transposed(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """GPT-2's Conv1D holds its matrix the other way round."""
    return [GgufPart(names.stored(name), lambda final: final.t())]


def _merged_experts(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """[experts, gate and then up, width], which the file has apart."""
    prefix, half = f"blk.{names.layer(name)}.ffn", shape[1] // 2
    return [
        GgufPart(f"{prefix}_gate_exps.weight", lambda final: final[:, :half]),
        GgufPart(f"{prefix}_up_exps.weight", lambda final: final[:, half:]),
    ]


def _gpt_oss_experts(
    names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]
) -> list[GgufPart]:
    """[experts, width, gate and up in turn], and its biases; the file has them apart, the other way round."""
    prefix = f"blk.{names.layer(name)}.ffn"
    if match[2]:
        return [
            GgufPart(f"{prefix}_gate_exps.bias", lambda final: final[:, 0::2]),
            GgufPart(f"{prefix}_up_exps.bias", lambda final: final[:, 1::2]),
        ]
    return [
        GgufPart(f"{prefix}_gate_exps.weight", lambda final: final.transpose(1, 2)[:, 0::2]),
        GgufPart(f"{prefix}_up_exps.weight", lambda final: final.transpose(1, 2)[:, 1::2]),
    ]


def _gpt_oss_down(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    prefix = f"blk.{names.layer(name)}.ffn_down_exps"
    if match[1]:
        return [GgufPart(f"{prefix}.bias", lambda final: final)]
    return [GgufPart(f"{prefix}.weight", lambda final: final.transpose(1, 2))]


def _falcon_qkv(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """For each key head its queries, the key, its value, where the file has all queries, keys, values."""
    heads, keys = names.heads, names.key_heads
    size = shape[0] // (heads + 2 * keys)
    stored, queries, ends = names.stored(name), heads * size, (heads + keys) * size

    def groups(final: Tensor) -> Tensor:
        return final.unflatten(0, (keys, heads // keys + 2, size))

    return [
        GgufPart(stored, lambda final: groups(final)[:, :-2], rows=(0, queries)),
        GgufPart(stored, lambda final: groups(final)[:, -2], rows=(queries, ends)),
        GgufPart(stored, lambda final: groups(final)[:, -1], rows=(ends, shape[0])),
    ]


def _bloom_qkv(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """Query, key and value of each head in turn, where the file has all queries, keys, values."""
    third = shape[0] // 3

    def which(number: int) -> Place:
        return lambda final: final.unflatten(0, (names.heads, 3, -1))[:, number]

    stored = names.stored(name)
    return [GgufPart(stored, which(i), rows=(i * third, (i + 1) * third)) for i in range(3)]


def _norm_of_head(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
    """A row of the table in which the file has all heads' norms."""
    head = int(match[2])
    stored = f"blk.{names.layer(name)}.attn_{match[1]}_norm.weight"
    return [GgufPart(stored, lambda final: final, rows=(head, head + 1))]


def _renamed(pattern: str) -> Rule:
    """pattern: the file's name, with the layer's number as {}."""

    def rule(names: _Names, name: str, match: re.Match[str], shape: tuple[int, ...]) -> list[GgufPart]:
        return [GgufPart(pattern.format(names.layer(name)), lambda final: final)]

    return rule


_ROTARY = (r"self_attn\.([qk])_proj\.(weight|bias)$", _rotary)
_EXPERTS = (r"mlp\.experts\.gate_up_proj$", _merged_experts)
_LESS_ONE = (r"norm\.weight$", _less_one)

# By transformers' model type: (what of a model's names, how it is stored). All else only has another name.
RULES: Mapping[str, tuple[tuple[str, Rule], ...]] = {
    "llama": (_ROTARY,),
    "mixtral": (_ROTARY, _EXPERTS),
    "qwen2_moe": (_EXPERTS,),
    "qwen3_moe": (_EXPERTS,),
    "minimax_m2": (_EXPERTS, (r"e_score_correction_bias$", _renamed("blk.{}.exp_probs_b.bias"))),
    "gemma": (_LESS_ONE,),
    "gemma2": (_LESS_ONE,),
    "gemma3_text": (_LESS_ONE,),
    "nemotron": (_LESS_ONE,),
    "gpt2": ((r"\.(c_attn|c_proj|c_fc)\.weight$", _transposed),),
    "stablelm": ((r"\.([qk])_layernorm\.norms\.(\d+)\.weight$", _norm_of_head),),
    "falcon": ((r"query_key_value\.(weight|bias)$", _falcon_qkv),),
    "bloom": ((r"query_key_value\.(weight|bias)$", _bloom_qkv),),
    "gpt_oss": (
        (r"mlp\.experts\.(gate_up_proj)(_bias)?$", _gpt_oss_experts),
        (r"mlp\.experts\.down_proj(_bias)?$", _gpt_oss_down),
    ),
}


def _check(parts: list[GgufPart], name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> None:
    """Every part fits its place, and all places together are the whole tensor."""
    final, filled = torch.empty(shape, device="meta"), 0
    for part in parts:
        spec = checkpoint.tensors[part.name]
        first, last = part.rows or (0, spec.shape[0])
        there = prod((last - first, *spec.shape[1:])) if last <= spec.shape[0] else -1
        try:
            goal = part.place(final).shape
        except RuntimeError:  # it can't be seen that way at all
            goal = torch.Size((0,))
        filled += goal.numel()
        # the same rows in both, or a row of plain numbers, which can be seen in other ways
        alike = goal[-1:] == spec.shape[-1:] or (
            len(spec.shape) == 1 and spec.dtype in ("F32", "F16", "BF16")
        )
        if goal.numel() != there or not alike:
            raise _misshapen(part.name, spec, name, shape)
        if spec.dtype not in _readable():
            raise UnsupportedModel(
                f"tensor {part.name} in {spec.file} is of type {spec.dtype}, "
                "which the installed gguf package can't dequantise; a newer one may: pip install -U gguf"
            )
    if filled != final.numel():
        raise _misshapen(parts[0].name, checkpoint.tensors[parts[0].name], name, shape)


def _misshapen(stored: str, spec: TensorSpec, name: str, shape: tuple[int, ...]) -> BrokenModel:
    return broken(
        spec.file,
        f"its tensor {stored} has shape {list(spec.shape)}, and its metadata makes {name} {list(shape)}",
    )


# ---------------------------------------------------------------- reading


class GgufFiles(WeightFiles):
    """Open *.gguf."""

    @staticmethod
    def locate(handle: FileIO, file: str) -> dict[str, Location]:
        tensors = read_open_gguf(handle, file).tensors
        return {name: Location(there.kind, there.shape, there.offset) for name, there in tensors.items()}

    def fill(self, final: Tensor, part: Part) -> None:
        """As `OpenWeights` says."""
        assert isinstance(part, GgufPart)
        spec = self.checkpoint.tensors[part.name]
        stored = self.stored(part.name, spec)
        at = 0 if part.rows is None else part.rows[0] * prod(spec.shape[1:])
        for goal in _pieces(part.place(final)):
            values = _numbers(stored, at, goal.numel())
            if part.plus:
                values = values + np.float32(part.plus)
            goal.copy_(torch.from_numpy(values).view(goal.shape))
            at += goal.numel()


def _pieces(goal: Tensor) -> Iterator[Tensor]:
    """Views that make up `goal` in its order, of at most PIECE numbers each, whole rows at least."""
    each = prod(goal.shape[1:])
    if goal.numel() <= PIECE or goal.dim() == 1:
        yield from goal.split(PIECE) if goal.dim() == 1 else (goal,)
    elif each > PIECE and goal.dim() > 2:
        for one in goal:
            yield from _pieces(one)
    else:
        yield from goal.split(max(1, PIECE // each))


def _numbers(stored: StoredTensor, first: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[count] numbers from the first-th on, in the file's order; both are bounds of blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[stored.at.kind]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    assert first % block == count % block == 0, "checked when the model was described"
    raw = np.empty(count // block * block_bytes, np.uint8)
    stored.read_into(memoryview(raw), first // block * block_bytes)
    # as a single row: blocks know nothing of rows, and the package takes few rows at a time
    return np.asarray(dequantize(raw[None], kind), np.float32).reshape(-1)


@cache
def _readable() -> frozenset[str]:
    """Names of the types that can be made numbers: found by trying, since the package has no list."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    found = set()
    for kind, (_, block_bytes) in GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError):
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            found.add(kind.name)
    return frozenset(found)
