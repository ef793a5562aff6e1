"""Weights out of GGUF files, against the model that was written, the gguf package and transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from peer import gguf_weights
from peer.attention import Row
from peer.checkpoint import TensorSpec
from peer.gguf_weights import GgufFiles, GgufFormat, GgufPart
from peer.model import PackedStep
from peer.outline import outline
from peer.source import ModelSource, resolve_model
from peer.weights import load_span, span_prices, span_tensors
from routing.spans import Span
from swarm.errors import BrokenModel, UnsupportedModel
from tests.gguf_files import FAMILIES, VOCABULARY, Kind, converted, make_model, write_gguf
from tests.tiny import rounded

torch.set_num_threads(1)
IDS = [(7 * i + i * i) % VOCABULARY for i in range(24)]  # longer than every window
READABLE = sorted(gguf_weights._readable())


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer has tests of its own: converting takes longer than all else here."""
    monkeypatch.setattr("peer.gguf_source.make_gguf_bundle", lambda *_: {})
    monkeypatch.setattr("peer.source.check_usable", lambda *_: None)


def resolve(path: Path) -> ModelSource:
    return resolve_model(str(path), cache=path.parent / "cache")


def loaded(source: ModelSource) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its name there."""
    plan, form = outline(source.config), GgufFormat()
    sources, found = form.sources(source, plan), {}
    with form.open(source) as files:
        for name, shape in plan.shapes.items():
            parts = sources.get(name) or sources.get(plan.ties.get(name, ""))
            assert parts, name
            found[name] = torch.full(shape, torch.nan)
            for part in parts:
                files.fill(found[name], part)
    return found


def rebuilt(source: ModelSource) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(loaded(source))
    return model.eval()


def logits(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


# -- against the model that was written ------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", family)
    source = resolve(tmp_path / "tiny.gguf")
    found = loaded(source)
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        # norms that were stored with 1 added lose their last bits
        assert torch.allclose(found[name], value, rtol=0, atol=2e-7 if "norm" in name else 0), name
    again = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32, attn_implementation="eager")
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again.eval()), logits(model))  # so the config is right, too


# -- against transformers reading the same file ----------------------------------------------------------

# Whose file transformers reads into what was written. Of the others it drops what is needed (rotary scalings,
# widths of experts, a window), or doesn't know them.
READ_BY_TRANSFORMERS = (
    "llama",
    "llama, tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "starcoder2",
    "stablelm",
    "nemotron",
    "falcon",
    "bloom",
)
# of these the config too, so that the logits can be compared
CONFIGURED_BY_TRANSFORMERS = ("llama", "llama, tied", "qwen2", "qwen3", "stablelm", "nemotron", "falcon")


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_tensors(family: str, tmp_path: Path) -> None:
    """Half of them quantised, so that dequantising is compared as well."""
    write_gguf(tmp_path / "tiny.gguf", family, Kind.Q4_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    source = resolve(tmp_path / "tiny.gguf")
    found = loaded(source)
    for name, value in theirs.state_dict().items():
        assert torch.equal(found[name], value), name
    if family in CONFIGURED_BY_TRANSFORMERS:
        theirs.set_attn_implementation("eager")
        assert torch.equal(logits(rebuilt(source)), logits(theirs.eval()))


# -- kinds of numbers ------------------------------------------------------------------------------------


class OneFile:
    """As much of a checkpoint as reading needs: one file, one tensor."""

    def __init__(self, path: Path, kind: str, shape: tuple[int, ...], nbytes: int) -> None:
        self._path, self.tensors = path, {"t": TensorSpec(kind, shape, nbytes, path.name)}

    def path(self, file: str) -> Path:
        return self._path


def write_blocks(path: Path, kind: Kind, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor of random bytes, whatever numbers these are."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(7).integers(0, 256, (*shape[:-1], shape[-1] // block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


PLACES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "as it is": ((12, 512), lambda final: final),
    "three dimensions": ((3, 4, 512), lambda final: final),
    "transposed": ((512, 12), lambda final: final.t()),
    "halves of heads": ((12, 512), lambda final: final.unflatten(0, (2, 2, 3)).transpose(1, 2)),
    "every other row": ((24, 512), lambda final: final[::2]),
}


@pytest.mark.parametrize("kind", READABLE)
def test_all_kinds_are_read_as_the_gguf_package_reads_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of all sizes, to all kinds of places."""
    raw = write_blocks(tmp_path / "t.gguf", Kind[kind], (12, 512))
    with np.errstate(all="ignore"):
        right = torch.from_numpy(np.array(gguf.dequantize(raw, Kind[kind]), np.float32)).view(-1)
        for piece in (1, 512, 1_100, 1 << 20):
            monkeypatch.setattr(gguf_weights, "PIECE", piece)
            for shape, place in PLACES.values():
                final = torch.zeros(shape)
                with GgufFiles(OneFile(tmp_path / "t.gguf", kind, (12, 512), raw.nbytes)) as files:
                    files.fill(final, GgufPart("t", place))
                found = place(final).reshape(-1)
                assert torch.equal(found.view(torch.int32), right.view(torch.int32)), (piece, shape)


def test_the_kinds_are_those_that_the_issue_wants() -> None:
    wanted = (
        "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S "
    )
    wanted += "IQ3_XXS IQ3_S IQ4_NL IQ4_XS MXFP4"
    assert set(wanted.split()) <= set(READABLE)


def test_a_model_may_mix_them_and_be_wanted_in_another_type(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", Kind.Q5_1)
    source = resolve(tmp_path / "tiny.gguf")
    assert {spec.dtype for spec in source.tensors.values()} == {"F32", "Q5_1"}
    whole = loaded(source)
    hop = load_span(source, Span(1, 2), torch.bfloat16)
    held = dict(hop.layers[0].named_parameters())
    for name, value in held.items():
        assert torch.equal(value, whole[f"model.layers.1.{name}"].bfloat16()), name
    assert sum(value.nbytes for value in held.values()) == span_prices(source, torch.bfloat16)(Span(1, 2))


# -- spans -----------------------------------------------------------------------------------------------


def run(source: ModelSource, cuts: list[int], ids: list[int]) -> torch.Tensor:
    """All positions of one session through spans that end at `cuts`."""
    hidden = None
    for start, stop in zip([0, *cuts], [*cuts, source.layers], strict=True):
        hop = load_span(source, Span(start, stop), torch.float32)
        cache = hop.new_cache(len(ids))
        cache.begin(0, len(ids))
        row = Row(cache, 0, len(ids), logits=len(ids))
        out = hop.forward(
            PackedStep(hop.span, [row], ids=torch.tensor(ids) if start == 0 else None, hidden=hidden)
        )
        hidden = out.hidden
    assert out.logits is not None
    return out.logits


@pytest.mark.parametrize("family", ["llama, tied", "mixtral", "gpt2", "gemma3", "gpt-oss"])
def test_three_spans_of_a_file_give_the_logits_of_the_model_that_was_written(
    family: str, tmp_path: Path
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", family)
    ours, theirs = run(resolve(tmp_path / "tiny.gguf"), [1, 2], IDS), logits(model)
    assert (ours - theirs).abs().max() < 1e-4
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


def test_matrices_in_bfloat16_stay_so_and_give_the_logits_of_float32(tmp_path: Path) -> None:
    """Beside norms that are float32, as they are in such files."""
    model = write_gguf(tmp_path / "tiny.gguf", "llama", Kind.BF16, model=rounded(make_model("llama")))
    source = resolve(tmp_path / "tiny.gguf")
    assert span_prices(source, torch.float32).weight_dtype == torch.bfloat16
    ours, theirs = run(source, [1, 2], IDS), logits(model)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_a_span_of_a_split_model_touches_only_its_own_parts(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", split=4)
    parts = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert len(parts) == 8
    source = resolve(tmp_path / parts[3])
    needed = source.files_of(span_tensors(source, Span(1, 2)))
    assert 0 < len(needed) < len(parts)
    for part in set(parts) - set(needed):
        (tmp_path / part).unlink()
    hop = load_span(source, Span(1, 2), torch.float32)
    for name, value in hop.layers[0].named_parameters():
        assert torch.equal(value, model.state_dict()[f"model.layers.1.{name}"]), name


# -- what goes wrong -------------------------------------------------------------------------------------


def rewrite(path: Path, family: str, change: Callable[[dict[str, Any]], None]) -> ModelSource:
    """The family's file with other tensors."""
    model = make_model(family)
    tensors = converted(model, family)
    change(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gguf_files.converted", lambda *_: tensors)
        write_gguf(path, family, model=model)
    return resolve(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = rewrite(tmp_path / "tiny.gguf", "llama", lambda tensors: tensors.pop("blk.1.ffn_up.weight"))
    with pytest.raises(BrokenModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_span(source, Span(1, 2), torch.float32)


def test_half_of_an_experts_matrix_is_none(tmp_path: Path) -> None:
    source = rewrite(
        tmp_path / "tiny.gguf", "mixtral", lambda tensors: tensors.pop("blk.1.ffn_up_exps.weight")
    )
    with pytest.raises(BrokenModel, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load_span(source, Span(1, 2), torch.float32)


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_k.weight"] = tensors["blk.1.attn_k.weight"][:16]

    source = rewrite(tmp_path / "tiny.gguf", "llama", cut)
    with pytest.raises(
        BrokenModel, match=r"tiny\.gguf .*blk\.1\.attn_k\.weight has shape \[16, 64\].*\[32, 64\]"
    ):
        load_span(source, Span(1, 2), torch.float32)


def test_a_tensor_of_the_same_size_in_another_shape_is_refused(tmp_path: Path) -> None:
    def turn(tensors: dict[str, Any]) -> None:
        tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"].T.copy()

    source = rewrite(tmp_path / "tiny.gguf", "llama", turn)
    with pytest.raises(BrokenModel, match=r"has shape \[64, 96\], and its metadata makes .* \[96, 64\]"):
        load_span(source, Span(1, 2), torch.float32)


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """Left out without a word, it would make the answers wrong."""

    def add(tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_q_norm.weight"] = np.ones(16, np.float32)

    source = rewrite(tmp_path / "tiny.gguf", "qwen2", add)
    with pytest.raises(
        UnsupportedModel, match=r"a tensor blk\.1\.attn_q_norm\.weight, for which transformers' qwen2"
    ):
        span_tensors(source, Span(0, 1))


def test_a_kind_that_cannot_be_dequantised_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", Kind.Q8_0)
    source = resolve(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_weights, "_readable", lambda: frozenset({"F32"}))
    with pytest.raises(UnsupportedModel, match=r"is of type Q8_0, which .* pip install -U gguf"):
        span_tensors(source, Span(0, 1))


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[ModelSource]:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    yield resolve(tmp_path / "tiny.gguf")


def test_a_file_that_was_cut_meanwhile_is_named(llama: ModelSource) -> None:
    path = llama.path("tiny.gguf")
    path.write_bytes(path.read_bytes()[:-40_000])
    with pytest.raises(BrokenModel, match=r"tiny\.gguf can't be used: it is truncated"):
        load_span(llama, Span(0, 1), torch.float32)


def test_a_file_that_is_cut_while_it_is_read_is_named_with_the_tensor(llama: ModelSource) -> None:
    path, form = llama.path("tiny.gguf"), GgufFormat()
    plan = outline(llama.config)
    part = form.sources(llama, plan)["model.layers.2.mlp.down_proj.weight"][0]
    with form.open(llama) as files:
        final = torch.empty(plan.shapes["model.layers.2.mlp.down_proj.weight"])
        files.fill(final, part)  # opens it
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size // 2)
        with pytest.raises(
            BrokenModel, match=r"blk\.2\.ffn_down\.weight can't be read from tiny\.gguf \(it ends .* too early"
        ):
            files.fill(final, part)


def test_a_file_that_became_another_meanwhile_is_noticed(llama: ModelSource) -> None:
    write_gguf(llama.path("tiny.gguf"), "llama", Kind.Q8_0)
    with pytest.raises(BrokenModel, match=r"tiny\.gguf was changed while it was in use: .* is Q8_0"):
        load_span(llama, Span(0, 1), torch.float32)


def test_what_is_loaded_depends_on_no_file_any_more_and_leaves_it_as_it_was(llama: ModelSource) -> None:
    path = llama.path("tiny.gguf")
    content = path.read_bytes()
    hop = load_span(llama, Span(0, 2), torch.float32)
    assert path.read_bytes() == content
    before = [value.clone() for value in hop.parameters()]
    path.write_bytes(bytes(len(content)))
    assert all(torch.equal(a, b) for a, b in zip(before, hop.parameters(), strict=True))
