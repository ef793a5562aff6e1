"""Loading a span: the right bytes, no others, and what is said when they aren't there."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from peer.outline import outline
from peer.safetensors_weights import SafetensorsFormat
from peer.weight_files import Location, StoredTensor
from peer.weights import load_span, span_prices, span_tensors
from routing.spans import Span
from swarm.errors import BrokenModel
from tests.tiny import LAYERS, FolderCheckpoint, tiny_model

torch.set_num_threads(1)


def saved(model: PreTrainedModel, folder: Path, shard: str = "50GB") -> FolderCheckpoint:
    model.save_pretrained(folder, max_shard_size=shard)
    return FolderCheckpoint(folder, model.config)


@pytest.fixture
def llama(tmp_path: Path) -> FolderCheckpoint:
    return saved(tiny_model("llama"), tmp_path)


def rewrite(checkpoint: FolderCheckpoint, tensors: dict[str, torch.Tensor]) -> FolderCheckpoint:
    save_file(tensors, checkpoint.folder / "model.safetensors")
    return FolderCheckpoint(checkpoint.folder, checkpoint.config)


def test_a_span_needs_its_layers_and_the_ends_it_has(llama: FolderCheckpoint) -> None:
    first = set(span_tensors(llama, Span(0, 2)))
    middle = set(span_tensors(llama, Span(2, 4)))
    last = set(span_tensors(llama, Span(4, LAYERS)))
    assert {name for name in middle if not name.startswith(("model.layers.2.", "model.layers.3."))} == set()
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last and "model.norm.weight" in last
    assert first | middle | last == set(llama.tensors)
    assert len(first) + len(middle) + len(last) == len(llama.tensors)


def test_the_price_of_a_span_is_what_it_takes_in_memory(llama: FolderCheckpoint) -> None:
    for span in (Span(0, 2), Span(2, 5), Span(4, LAYERS), Span(0, LAYERS)):
        for dtype in (torch.float32, torch.bfloat16):
            held = sum(p.nbytes for p in load_span(llama, span, dtype).parameters())
            assert span_prices(llama, dtype)(span) == held


def test_tied_ends_are_paid_at_both_ends_but_once_by_who_has_both(tmp_path: Path) -> None:
    checkpoint = saved(tiny_model("llama-tied"), tmp_path)
    assert "lm_head.weight" not in checkpoint.tensors
    prices = span_prices(checkpoint, torch.float32)
    table = 97 * 32 * 4
    assert prices(Span(5, 6)) == prices(Span(4, 5)) + table + 32 * 4  # the head, and the final norm
    assert prices(Span(0, 1)) == prices(Span(1, 2)) + table
    assert prices(Span(0, 6)) == prices(Span(0, 5)) + prices(Span(5, 6)) - table
    assert "model.embed_tokens.weight" in span_tensors(checkpoint, Span(5, 6))
    for span in (Span(0, 6), Span(5, 6)):
        assert sum(p.nbytes for p in load_span(checkpoint, span, torch.float32).parameters()) == prices(span)


def test_a_span_of_a_sharded_checkpoint_touches_only_its_own_files(tmp_path: Path) -> None:
    checkpoint = saved(tiny_model("llama"), tmp_path, shard="40KB")
    span = Span(3, 4)
    needed = {checkpoint.tensors[name].file for name in span_tensors(checkpoint, span)}
    files = {spec.file for spec in checkpoint.tensors.values()}
    assert len(files) > 3 and needed < files
    for file in files - needed:
        (tmp_path / file).unlink()
    load_span(checkpoint, span, torch.float32)


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "gpt-neox"])
def test_weights_arrive_whatever_the_checkpoint_calls_them(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    hop = load_span(saved(model, tmp_path), Span(0, LAYERS), torch.float32)
    loaded = {**hop.shell.state_dict()}
    for i, layer in enumerate(hop.layers):
        prefix = f"{hop.outline.layers_path}.{i}."
        loaded |= {prefix + name: value for name, value in layer.state_dict().items()}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name


def test_what_is_loaded_depends_on_no_file_any_more(llama: FolderCheckpoint) -> None:
    hop = load_span(llama, Span(0, 2), torch.float32)
    before = [p.clone() for p in hop.parameters()]
    path = llama.folder / "model.safetensors"
    with path.open("r+b") as file:  # in place: a mapping would show it
        size = path.stat().st_size
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert all(torch.equal(a, b) for a, b in zip(before, hop.parameters(), strict=True))


def test_progress_counts_up_to_the_price(llama: FolderCheckpoint) -> None:
    seen: list[tuple[int, int]] = []
    load_span(llama, Span(1, 3), torch.bfloat16, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (span_prices(llama, torch.bfloat16)(Span(1, 3)),) * 2


def test_a_missing_tensor_is_named(llama: FolderCheckpoint) -> None:
    tensors = load_file(llama.folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    broken = rewrite(llama, tensors)
    with pytest.raises(BrokenModel, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_span(broken, Span(2, 3), torch.float32)
    load_span(broken, Span(0, 2), torch.float32)  # the others can still be served


def test_a_tensor_of_another_shape_is_named_with_its_file(llama: FolderCheckpoint) -> None:
    tensors = load_file(llama.folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:8].contiguous()
    with pytest.raises(BrokenModel, match=r"k_proj\.weight in model\.safetensors has shape \[8, 32\]"):
        load_span(rewrite(llama, tensors), Span(1, 2), torch.float32)


def test_a_file_that_was_cut_since_it_was_described_is_named_with_its_bytes(llama: FolderCheckpoint) -> None:
    path = llama.folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1000])
    facts = rf"model\.safetensors can't be used: it is truncated: {size - 1000:,} of {size:,} bytes"
    with pytest.raises(BrokenModel, match=facts):
        load_span(llama, Span(4, 5), torch.float32)


def test_a_file_that_is_cut_while_it_is_read_is_named_with_the_tensor(llama: FolderCheckpoint) -> None:
    """A mapping would end the process here (SIGBUS)."""
    plan = outline(llama.config)
    name = "model.layers.5.mlp.up_proj.weight"
    parts = SafetensorsFormat().sources(llama, plan)
    with SafetensorsFormat().open(llama) as files:
        files.fill(torch.empty(48, 32), parts[name][0])
        os.truncate(llama.folder / "model.safetensors", 4000)
        with pytest.raises(BrokenModel, match=r"up_proj\.weight can't be read from model\.safetensors \(it ends 6,144"):
            files.fill(torch.empty(48, 32), parts[name][0])


def test_a_file_that_is_gone_when_it_is_needed_is_named(llama: FolderCheckpoint) -> None:
    (llama.folder / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"model\.safetensors can't be used: it can't be read \(No such file"):
        load_span(llama, Span(0, 2), torch.float32)


def test_a_disk_that_refuses_is_told_with_the_tensor(tmp_path: Path) -> None:
    with FileIO(tmp_path / "x", "w") as unreadable:
        tensor = StoredTensor(unreadable, "x.safetensors", "embed", Location("F32", (1,), 0))
        with pytest.raises(BrokenModel, match=r"tensor embed can't be read from x\.safetensors \("):
            tensor.read_into(memoryview(bytearray(4)), 0)


def test_a_file_that_became_another_while_it_was_in_use_is_named(llama: FolderCheckpoint) -> None:
    tensors = load_file(llama.folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.bfloat16)}, llama.folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"up_proj\.weight was F32 \[48, 32\] and is BF16 \[48, 32\] now"):
        load_span(llama, Span(2, 3), torch.float32)


def test_missing_experts_are_counted(tmp_path: Path) -> None:
    checkpoint = saved(tiny_model("mixtral"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if ".layers.3." in name and ".experts.2." in name)
    del tensors[gone]
    with pytest.raises(BrokenModel, match=r"7 of 8 expert tensors of model\.layers\.3\."):
        load_span(rewrite(checkpoint, tensors), Span(3, 4), torch.float32)
