"""A span of any decoder model as one callable over packed rows of several sessions.

Invariant: over any cut of the layers into spans, the same tokens give the same numbers as the uncut
model of transformers (float32: to rounding).

How. The whole model is built without memory behind its parameters (`outline.py`); only the claim's layers, and
what precedes layer 0 or follows the last layer if the claim has them, are given memory (`weights.py`). What
runs is a *view*: a shallow copy of the modules around the layers, whose list of layers is the sub-span
that a session wants, in which the first layer is given our hidden states whatever the model computed before it
(`_Entry`), and the last layer's output is taken before anything follows (`_Exit`). Attention is `attention.py`'s.
Layers shaped like Llama's don't need their modules (`fused.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peer.attention import Row, StepSlot
from peer.cache import SessionCache
from peer.families import Way, family, original_context
from peer.fused import FusedSpan, fuse
from peer.kv import REACH, Reach
from peer.matrix import widen_as_read
from peer.outline import Outline
from peer.own_cache import PlacesCache, RowCache
from peer.trial import accepted, cache_argument, inner_attribute
from routing.spans import Span
from swarm.tensors import RawTensor

MAX_VIEWS = 32  # sub-spans in use at once; a view is a few Python objects, the bound only keeps it finite


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Rows that run over the same layers. ids: [total] int64 if span.start is 0, else hidden: [total, width].

    between: called between two layers where the model can (`SpanModel.pauses`); it may run other steps, and what it
    raises ends this one.
    """

    span: Span
    rows: Sequence[Row]
    ids: Tensor | None = None
    hidden: Tensor | None = None
    between: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """hidden: [total, width] after the span's last layer, before any final norm. Where that ends the model, of tokens
    whose logits aren't wanted it may be what the last layer was given: only their keys and values matter there.
    logits: [sum of the rows' `logits`, vocab] float32, None if none was wanted or the span isn't last."""

    hidden: Tensor
    logits: Tensor | None


# ---------------------------------------------------------------- running


class _Entry(nn.Module):
    """The first layer of a view that doesn't start the model: it gets our hidden states."""

    def __init__(self, layer: nn.Module, slot: StepSlot) -> None:
        super().__init__()
        self.layer, self._slot = layer, slot

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(self._slot.hidden_in, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return inner_attribute(self, name)


class _Exit(nn.Module):
    """The last layer of a view: its output is kept before anything else sees it."""

    def __init__(self, layer: nn.Module, slot: StepSlot) -> None:
        super().__init__()
        self.layer, self._slot = layer, slot

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        self._slot.hidden_out = out[0] if isinstance(out, tuple) else out
        return out

    def __getattr__(self, name: str) -> Any:
        return inner_attribute(self, name)


class _WantedRows(nn.Module):
    """The LM head over the tokens whose logits are wanted, and no others."""

    def __init__(self, head: nn.Module, slot: StepSlot) -> None:
        super().__init__()
        self.head, self._slot = head, slot

    def forward(self, hidden: Tensor) -> Tensor:
        wanted = self._slot.wanted  # None: asked all the same, by a family whose base model is the whole one
        logits: Tensor = self.head(hidden[:, :0] if wanted is None else hidden[:, wanted])
        return logits


class SpanModel:
    """The claim's layers with memory behind them, callable over any sub-span. Not thread-safe: the engine's.

    Made by `weights.load_span`. dtype: what it computes in, of which matrices may be narrower (None: as they are).
    """

    def __init__(self, full: PreTrainedModel, span: Span, plan: Outline, dtype: torch.dtype | None = None) -> None:
        self.config, self.span, self.outline = full.config, span, plan
        self.layers_total = len(plan.layers)
        if not Span(0, self.layers_total).covers(span):
            raise ValueError(f"layers {span} of a model that has {self.layers_total}")
        self.width: int = full.config.hidden_size
        self.vocab: int = full.config.vocab_size
        self.kv = plan.kv[span.start : span.stop]
        self.way = plan.way
        self._accepted = accepted(full)
        self._counts_from_cache = family(full.config).counts_from_cache
        self._slot = StepSlot()
        self.layers = list(full.get_submodule(plan.layers_path))[span.start : span.stop]
        for layer in self.layers:
            for module in layer.modules():
                module.step_slot = self._slot
        if original_context(full.config) is not None:
            _fix_rotary(full, self._slot)
        self.shell = self._prune(full)
        self._views: dict[Span, PreTrainedModel] = {}
        parameter = next(self.layers[0].parameters())
        self.dtype, self.device = dtype or parameter.dtype, parameter.device
        widen_as_read(full, self.dtype)
        self.fused = fuse(self)
        self._views.clear()  # the trial's, of single layers

    @property
    def slot(self) -> StepSlot:
        """Of the step that runs on the modules now."""
        return self._slot

    @property
    def packs(self) -> bool:
        """Whether rows of several sessions run as one; if not, `forward` runs one after the other."""
        return self.way is Way.PACKED

    @property
    def pauses(self) -> bool:
        """Whether a pass lets others in between its layers. Not on an accelerator: what is launched there runs."""
        return self.fused is not None and self.device.type == "cpu"

    @property
    def takes_long(self) -> bool:
        """Whether passes of many tokens are right here: nobody has to wait for all of one, and memory is planned
        for them (`MemoryPlan.pass_tokens`)."""
        return self.fused is not None and len(self.span) == self.layers_total

    @torch.inference_mode()
    def forward(self, step: PackedStep) -> StepOutput:
        """Run `step.span` over new tokens, writing each session's KV (its `length` is left to the caller).

        The caches have been `begin`-ed. Raises what torch raises.
        """
        return self.run(step, self.fused)

    def run(self, step: PackedStep, fused: FusedSpan | None = None, shift: int = 0) -> StepOutput:
        """`forward` in either way. For it, and for the trial that decides between them.

        shift: added to what the tokens are told of their positions, not to where the caches have them.
        """
        if fused is not None:
            self._check_span(step.span)
            wanted = self._wanted(step.rows) if step.span.stop == self.layers_total else None
            return StepOutput(*fused.run(step, self._positions(step.rows) + shift, wanted))
        view = self._view(step.span)
        if self.packs or len(step.rows) == 1:
            return self._run(view, step, shift)
        outputs = [self._run(view, part, shift) for part in _one_by_one(step)]
        logits = [output.logits for output in outputs if output.logits is not None]
        hidden = torch.cat([output.hidden for output in outputs])
        return StepOutput(hidden, torch.cat(logits) if logits else None)

    def _run(self, view: PreTrainedModel, step: PackedStep, shift: int) -> StepOutput:
        slot = self._slot
        try:
            inputs = self._inputs(step, shift)
            slot.wanted = self._wanted(step.rows) if step.span.stop == self.layers_total else None
            logits = None
            if slot.wanted is not None:
                logits = view(**inputs).logits[0].float()
            else:
                view.base_model(**inputs)
            assert slot.hidden_out is not None
            return StepOutput(slot.hidden_out[0], logits)
        finally:
            slot.clear()

    def _inputs(self, step: PackedStep, shift: int) -> dict[str, Any]:
        """The arguments of the view's forward; what our own modules need goes to the slot."""
        slot, names = self._slot, self._accepted
        slot.rows = step.rows
        inputs: dict[str, Any] = {"use_cache": False}
        if "position_ids" in names:
            inputs["position_ids"] = self._positions(step.rows) + shift
        if self.way is Way.OWN_CACHE:
            inputs["use_cache"] = True
            inputs[cache_argument(names)] = RowCache(step.rows[0], self.layers_total)
        elif self._counts_from_cache:
            inputs[cache_argument(names)] = PlacesCache(inputs["position_ids"], self.layers_total)
        if step.span.start == 0:
            assert step.ids is not None
            inputs["input_ids"] = step.ids.to(self.device)[None]
        else:
            assert step.hidden is not None
            slot.hidden_in = step.hidden.to(self.device, self.dtype)[None]
            inputs["inputs_embeds"] = slot.hidden_in
        return inputs

    def new_cache(self, positions: int, span: Span | None = None, reach: Reach = REACH) -> SessionCache:
        """A cache outside of any pool, for trial steps and tests."""
        span = span or self.span
        kv = self.kv[span.start - self.span.start : span.stop - self.span.start]
        return SessionCache(span, kv, positions, dtype=self.dtype, device=self.device, reach=reach)

    def parameters(self) -> Iterator[Tensor]:
        """Every tensor that holds weights, each once."""
        seen: set[int] = set()
        for module in (self.shell, *self.layers):
            for parameter in module.parameters():
                if id(parameter) not in seen and parameter.device.type != "meta":
                    seen.add(id(parameter))
                    yield parameter

    def _positions(self, rows: Sequence[Row]) -> Tensor:
        if len(rows) == 1:
            row = rows[0]
            return torch.arange(row.position, row.position + row.tokens, device=self.device)[None]
        numbers = [p for row in rows for p in range(row.position, row.position + row.tokens)]
        return torch.tensor([numbers], device=self.device)

    def _wanted(self, rows: Sequence[Row]) -> Tensor | None:
        wanted: list[int] = []
        end = 0
        for row in rows:
            end += row.tokens
            wanted += range(end - row.logits, end)
        return torch.tensor(wanted, device=self.device) if wanted else None

    def _prune(self, full: PreTrainedModel) -> PreTrainedModel:
        """What surrounds the layers; parts that this claim doesn't have become no-ops."""
        absent = set(() if self.span.start == 0 else self.outline.before)
        absent |= set(() if self.span.stop == self.layers_total else self.outline.after)
        shell, copies = _copy_along(full, self.outline.layers_path)
        copies[-1]._modules[self.outline.layers_path.rpartition(".")[2]] = nn.ModuleList()
        for path in {name.rpartition(".")[0] for name in absent}:
            parent = shell.get_submodule(path.rpartition(".")[0])
            parent._modules[path.rpartition(".")[2]] = _stand_in(full.get_submodule(path))
        return shell

    def _view(self, span: Span) -> PreTrainedModel:
        view = self._views.get(span)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.pop(next(iter(self._views)))
            view = self._views[span] = self._make_view(span)
        return view

    def _check_span(self, span: Span) -> None:
        if not self.span.covers(span):
            raise ValueError(f"layers {span} are not within the claim {self.span}")

    def _make_view(self, span: Span) -> PreTrainedModel:
        self._check_span(span)
        layers: list[nn.Module] = self.layers[span.start - self.span.start : span.stop - self.span.start]
        layers[-1] = _Exit(layers[-1], self._slot)
        if span.start > 0:
            layers[0] = _Entry(layers[0], self._slot)
        view, copies = _copy_along(self.shell, self.outline.layers_path)
        config = _cut_config(self.config, span)
        for module in copies:
            if isinstance(getattr(module, "config", None), PretrainedConfig):
                module.config = config
        owner, _, name = self.outline.layers_path.rpartition(".")
        listed = nn.ModuleList()
        listed._modules = {str(i): layer for i, layer in enumerate(layers)}
        view.get_submodule(owner)._modules[name] = listed
        if span.stop == self.layers_total:
            head = view.get_output_embeddings()
            view.set_output_embeddings(_WantedRows(head, self._slot))
        return view


class _RotaryOfSession(nn.Module):
    """Rotary embedding whose frequencies depend on the length of the text: here, on what the session reserved.

    transformers takes the end of the step for that length, so that in one text keys of one scale would meet
    queries of another, differently with every way to cut it into steps. Told the length beforehand, it is what
    transformers gives for the whole text at once.
    """

    def __init__(self, rotary: nn.Module, slot: StepSlot) -> None:
        super().__init__()
        self.rotary, self._slot = rotary, slot

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in list(vars(self.rotary)):
            if name.endswith("max_seq_len_cached"):
                setattr(self.rotary, name, 0)  # else it is as long as the longest of all sessions
        last = self._slot.rows[0].cache.reserved - 1
        end = torch.full_like(position_ids[:, :1], last)
        made = self.rotary(x, torch.cat([position_ids, end], dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in made) if isinstance(made, tuple) else made[:, :-1]

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules["rotary"] if name == "rotary" else getattr(modules["rotary"], name)


def _fix_rotary(model: nn.Module, slot: StepSlot) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and hasattr(child, "rope_type"):
                parent._modules[name] = _RotaryOfSession(child, slot)


def _copy_along(model: PreTrainedModel, path: str) -> tuple[PreTrainedModel, list[nn.Module]]:
    """A copy of the modules from the top down to the owner of `path`; everything beside them is shared."""
    copies = [_shallow(model)]
    for name in path.split(".")[:-1]:
        child = _shallow(copies[-1]._modules[name])
        copies[-1]._modules[name] = child
        copies.append(child)
    return copies[0], copies


def _shallow(module: Any) -> Any:
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    made._modules = dict(module._modules)
    return made


class _Zeros(nn.Module):
    """Stands in for learned positions, which layer 0's peer has already added."""

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=positions.device)  # without dimensions: promotes no dtype


def _stand_in(module: nn.Module) -> nn.Module:
    return _Zeros() if isinstance(module, nn.Embedding) else nn.Identity()


def _cut_config(config: PretrainedConfig, span: Span) -> PretrainedConfig:
    """For the loop over the layers: their number, and the lists that it reads by its own counter."""
    cut, total = copy.deepcopy(config), config.num_hidden_layers
    for name, value in list(vars(cut).items()):
        if isinstance(value, list) and len(value) == total and "layer" in name:
            object.__setattr__(cut, name, value[span.start : span.stop])
    object.__setattr__(cut, cut.attribute_map.get("num_hidden_layers", "num_hidden_layers"), len(span))
    return cut


def _one_by_one(step: PackedStep) -> Iterator[PackedStep]:
    """Each row as a step of its own."""
    start = 0
    for row in step.rows:
        stop = start + row.tokens
        ids = None if step.ids is None else step.ids[start:stop]
        hidden = None if step.hidden is None else step.hidden[start:stop]
        yield PackedStep(step.span, [row], ids, hidden)
        start = stop


# ---------------------------------------------------------------- tensors on the wire


def to_raw(tensor: Tensor) -> RawTensor:
    """A CPU tensor as it travels. Copies, so that a packed step's other rows aren't kept alive."""
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def from_raw(raw: RawTensor) -> Tensor:
    """The reverse. Shares memory with `raw` where that is writable, else copies."""
    data, dtype = memoryview(raw.data), getattr(torch, raw.dtype)
    if not data.nbytes:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).reshape(raw.shape)
