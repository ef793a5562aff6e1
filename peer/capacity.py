"""Free bytes -> which spans fit, and how many KV positions come with them.

Invariant: what a plan says fits is the sum of everything that the peer will ever hold at once on that
device: weights, KV, workspace, and where the host's memory is the device's, journals and buffers too.

The upper half is arithmetic; the lower half asks the machine. A span's cost is not a sum over equal layers
(embedding and head make the ends heavy), so a cost is always asked of a function of the span.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from peer.kv import WHOLE_CHUNK, KvSizes, LayerKV, Reach
from routing.placement import Capacity
from routing.spans import Span
from swarm.errors import CapacityError, UsageError
from swarm.tensors import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from peer.checkpoint import Checkpoint
    from peer.weights import SpanPrices

DEFAULT_CONTEXT = 4096  # positions a session may have, where the model allows more and nobody asked
ACCELERATOR_SHARE = 0.9  # of free device memory: what remains covers fragmentation and the driver
CPU_SHARE = 0.5  # of available host memory: its owner wants to go on using the machine
KV_PER_WEIGHT = 0.5  # KV takes up to half of its layers' weight bytes before it costs another layer
BUFFER_BYTES = 32 << 20  # streams, messages in flight and the interpreter's own growth
WORKSPACE_SLACK = 1.5  # estimate over a measured step's live tensors (SmolLM2, 256 tokens: 13 MiB)
DTYPES = ("float32", "bfloat16", "float16")

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}{end}": 1000**n for n, letter in enumerate("KMGT", 1) for end in ("", "B")}
_UNITS |= {f"{letter}I{end}": 1024**n for n, letter in enumerate("KMGT", 1) for end in ("", "B")}


# ---------------------------------------------------------------- arithmetic


def check_memory(text: str | None) -> None:
    """Raises UsageError for what can't be an amount of memory on any machine."""
    if text is not None:
        _amount(text)


def _amount(text: str) -> tuple[float, str]:
    """A number and its unit, in capitals."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise UsageError(f"--memory is written as 6GB, 800MiB or 75%, got {text!r}")
    number = float(match[1])
    if number == 0 or (unit == "%" and number > 100):
        raise UsageError(f"--memory is more than nothing and at most 100%, got {text!r}")
    return number, unit


def parse_memory(text: str, available: int) -> int:
    """Bytes of `6GB`, `800MiB`, `75%` (of `available`). Raises UsageError; CapacityError above `available`."""
    number, unit = _amount(text)
    wanted = int(number / 100 * available) if unit == "%" else int(number * _UNITS[unit])
    if wanted > available:
        raise CapacityError(f"--memory {text} asks for {show(wanted)}, {show(available)} are free")
    return wanted


def show(size: int) -> str:
    """Bytes for people, three digits."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model the arithmetic needs. kv: what each of its layers keeps. original: as `KvSizes` has it."""

    width: int
    inner: int
    vocab: int
    heads: int
    kv: tuple[LayerKV, ...]
    original: int | None = None

    @property
    def layers(self) -> int:
        return len(self.kv)


@dataclass(frozen=True)
class MemoryPlan:
    """What fits into `budget` bytes of one device.

    prices: bytes of a span's weights. sessions × context: tokens for whose KV there should be room; less is taken
    where memory is short, but one session's context at least. chunk: tokens of a prefill step. piece_bytes: of a matrix
    that is widened, a piece at a time.
    """

    model: ModelShape
    prices: Callable[[Span], int]
    budget: int
    item_bytes: int
    sessions: int
    context: int
    chunk: int
    on_host: bool = True
    piece_bytes: int = 0

    @cached_property
    def sizes(self) -> KvSizes:
        """Of sessions here: KV, and on a host their journals, which have a row for every position."""
        row_bytes = self.model.width * self.item_bytes if self.on_host else 0
        return KvSizes(
            self.model.kv,
            self.item_bytes,
            self.context,
            row_bytes=row_bytes,
            reach=Reach(chunk=self.chunk),
            original=self.model.original,
        )

    def kv_bytes(self, tokens: int, span: Span) -> int:
        """Of the KV alone of so many tokens over the span."""
        return replace(self.sizes, row_bytes=0).bytes_for(tokens, span)

    def fixed_bytes(self, span: Span) -> int:
        """Everything but KV and what grows with it."""
        return self.prices(span) + self.workspace(span) + (BUFFER_BYTES if self.on_host else 0)

    def workspace(self, span: Span) -> int:
        """Estimated bytes of a pass's own tensors; `check_workspace` compares it with a real one."""
        return self._workspace(span, self.pass_tokens(span))

    def _workspace(self, span: Span, tokens: int) -> int:
        model = self.model
        rows = tokens * (8 * model.width + 4 * model.inner) * self.item_bytes
        masks = self.chunk * self.context * self.item_bytes + model.heads * self.context * 4
        logits = 3 * self.sessions * model.vocab * 4 if span.stop == model.layers else 0
        return int(WORKSPACE_SLACK * (rows + masks)) + logits + self.piece_bytes

    def pass_tokens(self, span: Span) -> int:
        """Most tokens of prompts in one pass."""
        return max(self.chunk, WHOLE_CHUNK) if len(span) == self.model.layers else self.chunk

    @cached_property
    def least_tokens(self) -> int:
        """Tokens below which rather fewer layers are taken: at least one session of full context.

        The same for every span, so that a part of what fits always fits.
        """
        model, middle = self.model, Span(self.model.layers // 2, self.model.layers // 2 + 1)
        weights = self.prices(middle) * model.layers
        cheap = replace(self.sizes, row_bytes=0).tokens(int(KV_PER_WEIGHT * weights), Span(0, model.layers))
        return min(self.sessions * self.context, max(self.context, cheap))

    def needed(self, span: Span) -> int:
        """Bytes with which this span can be served."""
        return self.fixed_bytes(span) + self.sizes.bytes_for(self.least_tokens, span)

    def fits(self, span: Span) -> bool:
        return self.needed(span) <= self.budget

    def pool_bytes(self, span: Span) -> int:
        """What sessions may take: all that is wanted, or what the span leaves room for."""
        wanted = self.sizes.bytes_for(self.sessions * self.context, span)
        return min(wanted, self.budget - self.fixed_bytes(span))

    def kv_tokens(self, span: Span) -> int:
        """Tokens that fit into the pool, in sessions of full context."""
        return self.sizes.tokens(self.pool_bytes(span), span)

    def capacity(self, tokens_per_s: float | None = None) -> Capacity:
        """As the placement wants it."""
        return Capacity(self.fits, self.prices, tokens_per_s)

    def check(self, span: Span) -> None:
        """Raises UsageError for layers the model hasn't got, CapacityError if they don't fit."""
        if span.stop > self.model.layers:
            raise UsageError(
                f"--layers {span.start}:{span.stop}: the model has {self.model.layers} layers, 0:{self.model.layers}"
            )
        if not self.fits(span):
            raise CapacityError(
                f"layers {span} need {show(self.needed(span))} ({self._split(span)}), the budget is "
                f"{show(self.budget)}; ask for fewer with --layers, or lower --context or --max-sessions"
            )

    def nothing_fits(self) -> CapacityError:
        """The error when not even the cheapest layer fits."""
        spans = [Span(i, i + 1) for i in range(self.model.layers)]
        cheapest = min(spans, key=self.needed)
        return CapacityError(
            f"memory is too small for one layer: layer {cheapest} needs {show(self.needed(cheapest))} "
            f"({self._split(cheapest)}), the budget is {show(self.budget)}; "
            "give more with --memory, or lower --context or --max-sessions"
        )

    def check_workspace(self, span: Span, measured: int | None) -> None:
        """Compare a trial step of `chunk` tokens with the estimate. Raises CapacityError if the plan no longer fits."""
        planned = self._workspace(span, self.chunk)
        if measured is None or measured <= planned:
            return
        more = (measured - planned) * self.pass_tokens(span) // self.chunk  # the longest pass needs so much more too
        total = self.fixed_bytes(span) + more + self.pool_bytes(span)
        if total > self.budget:
            raise CapacityError(
                f"a prefill step over layers {span} took {show(measured)} of workspace, {show(planned)} "
                f"were planned; that is {show(total - self.budget)} more than the budget: lower --context, or give "
                "more with --memory"
            )

    def _split(self, span: Span) -> str:
        kv = self.sizes.bytes_for(self.least_tokens, span)
        rest = self.fixed_bytes(span) - self.prices(span)
        return f"weights {show(self.prices(span))}, KV for {self.least_tokens} tokens {show(kv)}, work {show(rest)}"


def pick_context(wanted: int | None, model_limit: int | None) -> int:
    """Positions of a session. Raises UsageError beyond what the model was trained for."""
    if wanted is None:
        return min(DEFAULT_CONTEXT, model_limit or DEFAULT_CONTEXT)
    if model_limit is not None and wanted > model_limit:
        raise UsageError(f"--context {wanted} is beyond the {model_limit} positions of this model")
    return wanted


def check_dtype(wanted: str | None) -> None:
    """Raises UsageError for an unknown one."""
    if wanted is not None and wanted not in DTYPES:
        raise UsageError(f"--dtype is one of {', '.join(DTYPES)}, got {wanted!r}")


def pick_dtype(wanted: str | None, device: str, checkpoint: str | None) -> str:
    """float32 on a CPU, the checkpoint's own on an accelerator. Raises UsageError for an unknown one."""
    check_dtype(wanted)
    if wanted is not None:
        return wanted
    if device == "cpu":
        return "float32"
    return checkpoint if checkpoint in DTYPES else "bfloat16"


def numerics_class(device: str, dtype: str, quantisation: str = "", tf32: bool = False) -> str:
    """How a peer computes (protocol.md): chains and repairs stay within one class where they can.

    quantisation: of what is computed with. Weights that were dequantised as they were loaded name none: the
    fingerprint and the dtype say what numbers they became.
    """
    parts = [device.partition(":")[0], dtype, quantisation, "tf32" if tf32 else ""]
    return "/".join(part for part in parts if part)


def uses_tf32(device: str, dtype: str) -> bool:
    """Whether float32 products are rounded to 10 bits: a newer CUDA GPU does so where torch was told to allow it."""
    import torch

    return device.startswith("cuda") and dtype == "float32" and torch.get_float32_matmul_precision() != "highest"


# ---------------------------------------------------------------- the machine: memory


def available_ram(root: Path = Path("/")) -> int:
    """Bytes that a process here may still take: what the machine has, within every cgroup above us."""
    limits = [_machine_ram(), *_cgroup_room(root)]
    return max(0, min(limits))


def _machine_ram() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _cgroup_room(root: Path) -> list[int]:
    """Room left in our control groups, version 2 and 1. Empty where there are none or no limit is set."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            rooms += _rooms_up(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _rooms_up(root / "sys/fs/cgroup/memory", path, *names)
    return rooms


def _rooms_up(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """The room in a group and in all above it. In a container the path may not exist: the mount is the group."""
    own = mount / path.strip("/")
    groups = [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return [room for group in groups if (room := _room(group, limit, usage, reclaimable)) is not None]


def _room(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
    except (OSError, ValueError):  # `max`: no limit
        return None
    return most - used + _statistic(group / "memory.stat", reclaimable)


def _statistic(path: Path, name: str) -> int:
    """Page cache that the kernel gives up when asked counts as free."""
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)
    except (OSError, StopIteration, IndexError, ValueError):
        return 0


def free_memory(device: str) -> int:
    """Free bytes of a device, before any share of it is taken."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    ram = available_ram()
    if device == "mps":
        return min(ram, int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()))
    return ram


def memory_budget(text: str | None, device: str, free: int) -> int:
    """What the peer may use: as asked for, else 90% of a GPU, or half of a host that somebody works on."""
    if text is not None:
        return parse_memory(text, free)
    return int(free * (ACCELERATOR_SHARE if device.startswith("cuda") else CPU_SHARE))


OUT_OF_MEMORY = r"out of memory|can't allocate memory"  # as torch says it


@contextmanager
def told_when_out_of_memory(span: Span) -> Iterator[None]:
    """Whatever torch or Python says when memory ends, as a CapacityError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not re.search(OUT_OF_MEMORY, text):
            raise
        raise CapacityError(
            f"memory ran out while layers {span} were loaded ({(text.splitlines() or ['no details'])[0][:200]}); "
            "something else took it: ask for less with --memory, or for fewer --layers"
        ) from error


# ---------------------------------------------------------------- the machine: devices


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """device: torch's name for it. name: for people. reason: why a GPU that is present isn't used, else "".
    idle: devices of the same kind that one more process each could use."""

    device: str
    name: str
    reason: str = ""
    idle: tuple[str, ...] = ()


def check_device(requested: str | None) -> None:
    """Raises UsageError for what is no device on any machine."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", (requested or "auto").lower()):
        raise UsageError(f"--device is one of cpu, cuda, cuda:N, mps, got {requested!r}")


def describe_device(requested: str | None = None) -> DeviceChoice:
    """The device to use. Raises UsageError if the requested one isn't here or isn't known."""
    check_device(requested)
    import torch

    wanted = (requested or "auto").lower()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.startswith("cuda") or (wanted == "auto" and gpus):
        return _cuda_device(wanted, gpus)
    has_mps = torch.backends.mps.is_available()
    if wanted == "mps" or (wanted == "auto" and has_mps):
        if not has_mps:
            raise UsageError("--device mps: there is no Apple GPU that this torch can use")
        return DeviceChoice("mps", "Apple GPU")
    reason = why_no_gpu() if wanted == "auto" else ""
    return DeviceChoice("cpu", _cpu_name(), reason)


def _cuda_device(wanted: str, gpus: int) -> DeviceChoice:
    import torch

    index = int(wanted.partition(":")[2] or 0)
    if index >= gpus:
        there = f"there are {gpus}, counted from 0" if gpus else why_no_gpu() or "there is no such GPU here"
        raise UsageError(f"--device {wanted}: {there}")
    idle = tuple(f"cuda:{i}" for i in range(gpus) if i != index)
    return DeviceChoice(f"cuda:{index}", torch.cuda.get_device_name(index), "", idle)


def why_no_gpu(root: Path = Path("/")) -> str:
    """Why a GPU that this machine has can't be used by this torch; "" if it has none."""
    import torch

    if (root / "dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        if torch.version.cuda is None:
            return (
                "an NVIDIA GPU is here, but this torch was built without CUDA; see the README's install table"
            )
        return _cuda_complaint()
    if (root / "dev/kfd").exists() and torch.version.hip is None:
        return "an AMD GPU is here, but this torch was built without ROCm; see the README's install table"
    return ""


def _cuda_complaint() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"an NVIDIA GPU is here, but CUDA can't start: {(str(error).splitlines() or ['?'])[0]}"
    return "an NVIDIA GPU is here, but CUDA counts none (CUDA_VISIBLE_DEVICES?)"


def _cpu_name() -> str:
    """The processor's name for people, without what every name has: `Intel Xeon`, `AMD EPYC 7B13`."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    plain = re.sub(r"\((R|TM|tm)\)|\b(CPU|Processor)\b|@.*|\d+-Core", " ", name)
    return " ".join(plain.split()) or "CPU"


def physical_cores() -> int:
    """Cores that this process may use; hyper-threads share an arithmetic unit, so they don't count."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


# ---------------------------------------------------------------- a plan for this machine


def model_shape(checkpoint: Checkpoint) -> ModelShape:
    """Imports transformers."""
    from peer.families import original_context
    from peer.proof import proven_outline

    config = checkpoint.config
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape(
        width=config.hidden_size,
        inner=inner,
        vocab=config.vocab_size,
        heads=config.num_attention_heads,
        kv=proven_outline(config).kv,
        original=original_context(config),
    )


def torch_dtype(name: str) -> torch.dtype:
    import torch

    made = getattr(torch, name)
    assert isinstance(made, torch.dtype)
    return made


def plan_memory(
    checkpoint: Checkpoint,
    prices: SpanPrices,
    *,
    device: str,
    dtype: str,
    budget: int,
    sessions: int,
    context: int | None,
    chunk: int,
) -> MemoryPlan:
    """What of this model fits into `budget` here, at these prices. Raises ModelError or UsageError."""
    from peer.matrix import PIECE_BYTES

    config = checkpoint.config
    return MemoryPlan(
        model=model_shape(checkpoint),
        prices=prices,
        budget=budget,
        item_bytes=ITEM_BYTES[dtype],
        sessions=sessions,
        context=pick_context(context, getattr(config, "max_position_embeddings", None)),
        chunk=chunk,
        on_host=not device.startswith("cuda"),
        piece_bytes=PIECE_BYTES if prices.weight_dtype != torch_dtype(dtype) else 0,
    )
