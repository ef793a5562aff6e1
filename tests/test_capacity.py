"""Memory arithmetic against sums written out by hand, and machines made of files."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer import capacity
from peer.capacity import (
    BUFFER_BYTES,
    WORKSPACE_SLACK,
    MemoryPlan,
    ModelShape,
    available_ram,
    describe_device,
    memory_budget,
    numerics_class,
    parse_memory,
    pick_context,
    pick_dtype,
    plan_memory,
    show,
)
from peer.kv import LayerKV
from peer.matrix import PIECE_BYTES
from peer.weights import span_prices
from routing.placement import windows
from routing.spans import Span
from swarm.errors import CapacityError, UsageError
from tests.tiny import LAYERS, MemoryCheckpoint, tiny_model

MIB = 1 << 20
SHAPE = ModelShape(width=64, inner=256, vocab=1000, heads=4, kv=(LayerKV(2, 32, 32),) * 10)


def prices(span: Span) -> int:
    """8 MiB a layer; the ends are heavy, as SmolLM2's are."""
    return (8 * len(span) + 40 * (span.start == 0) + 40 * (span.stop == 10)) * MIB


def plan(budget: int, sessions: int = 2, context: int = 1000) -> MemoryPlan:
    return MemoryPlan(SHAPE, prices, budget, item_bytes=4, sessions=sessions, context=context, chunk=32)


# ---------------------------------------------------------------- what people type


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("800MiB", 800 * MIB),
        ("1.5gib", 3 << 29),
        ("75%", 15 * 10**9),
        ("123", 123),
        ("2 G", 2 * 10**9),
    ],
)
def test_memory_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_memory(text, available=20 * 10**9) == size


@pytest.mark.parametrize("text", ["", "lots", "6 bananas", "-1GB", "GB", "1e9"])
def test_nonsense_for_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="6GB, 800MiB or 75%"):
        parse_memory(text, 10**10)


def test_more_memory_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"64GB asks for 59\.6 GiB, 18\.6 GiB are free"):
        parse_memory("64GB", 20 * 10**9)


def test_defaults_leave_the_owner_of_a_machine_half_of_it() -> None:
    assert memory_budget(None, "cpu", 1000) == 500
    assert memory_budget(None, "cuda:0", 1000) == 900
    assert memory_budget("10%", "cuda:0", 1000) == 100


def test_sizes_are_shown_with_three_digits() -> None:
    assert [show(n) for n in (5, 2048, 123 * MIB, 5 << 40)] == ["5 B", "2 KiB", "123 MiB", "5 TiB"]


def test_dtypes_and_numerics_classes() -> None:
    assert pick_dtype(None, "cpu", "bfloat16") == "float32"
    assert pick_dtype(None, "cuda:0", "float16") == "float16"
    assert pick_dtype(None, "cuda:0", None) == "bfloat16"
    assert pick_dtype("bfloat16", "cpu", None) == "bfloat16"
    with pytest.raises(UsageError, match="float32, bfloat16, float16"):
        pick_dtype("int8", "cpu", None)
    assert numerics_class("cpu", "float32") == "cpu/float32"
    assert numerics_class("cuda:1", "float32", "q4", tf32=True) == "cuda/float32/q4/tf32"


def test_a_context_beyond_the_models_is_refused() -> None:
    assert pick_context(None, 2048) == 2048
    assert pick_context(None, 131072) == capacity.DEFAULT_CONTEXT
    assert pick_context(300, None) == 300
    with pytest.raises(UsageError, match="beyond the 2048 positions"):
        pick_context(4096, 2048)


# ---------------------------------------------------------------- what fits


def test_the_sum_of_all_that_is_held_decides() -> None:
    span = Span(3, 6)
    made = plan(0)
    kv = made.least_tokens * 3 * 128 * 4
    journal = made.least_tokens * 64 * 4
    expected = 24 * MIB + kv + journal + made.workspace(span) + capacity.BUFFER_BYTES
    assert made.needed(span) == expected
    assert plan(expected).fits(span) and not plan(expected - 1).fits(span)


def test_a_gpus_memory_holds_no_journal() -> None:
    on_gpu = MemoryPlan(SHAPE, prices, 0, 4, 2, 1000, 32, on_host=False)
    assert on_gpu.sizes.bytes(1, Span(3, 6)) == 3 * 128 * 4
    assert plan(0).sizes.bytes(1, Span(3, 6)) == (3 * 128 + 64) * 4


def test_kv_takes_what_is_wanted_where_there_is_room_and_never_more_than_there_is() -> None:
    span = Span(3, 6)
    assert plan(10**10).kv_tokens(span) == 2000
    tight = plan(plan(0, sessions=50).needed(span), sessions=50)
    assert tight.kv_tokens(span) == tight.least_tokens
    assert tight.least_tokens == int(0.5 * 8 * MIB / (128 * 4))


def test_one_session_of_full_context_is_the_least() -> None:
    assert plan(0, sessions=3, context=50_000).least_tokens == 50_000
    assert plan(0, sessions=1, context=100).least_tokens == 100


@given(st.integers(0, 300 * MIB), st.integers(1, 8), st.integers(2, 4000))
def test_what_is_planned_is_never_more_than_the_budget(budget: int, sessions: int, context: int) -> None:
    made = plan(budget, sessions, context)
    for start in range(10):
        for stop in range(start + 1, 11):
            span = Span(start, stop)
            if made.fits(span):
                held = made.fixed_bytes(span) + made.pool_bytes(span)
                assert held <= budget and made.kv_tokens(span) >= made.least_tokens
                inner = [Span(a, b) for a, b in ((start, stop - 1), (start + 1, stop)) if a < b]
                assert all(made.fits(part) for part in inner)


def test_heavy_ends_make_the_windows_at_the_ends_shorter() -> None:
    made = plan(plan(0).needed(Span(2, 8)))
    found = windows(10, made.capacity().fits)
    assert Span(2, 8) in found
    assert all(len(span) == 6 for span in found if span.start > 0 and span.stop < 10)
    assert [len(span) for span in found if span.start == 0] == [] or found[0] == Span(0, len(found[0]))
    assert len(next(span for span in found if span.start == 0)) < 6


def test_too_little_for_one_layer_says_how_much_one_needs() -> None:
    error = plan(10 * MIB).nothing_fits()
    needed = plan(0).needed(Span(1, 2))
    assert isinstance(error, CapacityError)
    assert show(needed) in str(error) and "10 MiB" in str(error) and "--memory" in str(error)


def test_layers_that_were_asked_for_are_checked() -> None:
    with pytest.raises(UsageError, match="the model has 10 layers"):
        plan(10**10).check(Span(5, 11))
    with pytest.raises(CapacityError, match="layers 0-9 need"):
        plan(100 * MIB).check(Span(0, 10))
    plan(10**10).check(Span(0, 10))


def test_a_measured_workspace_that_breaks_the_plan_is_told_before_serving() -> None:
    span = Span(3, 6)
    made = plan(plan(0).needed(span))
    made.check_workspace(span, made.workspace(span))
    made.check_workspace(span, None)
    with pytest.raises(CapacityError, match=r"took 0\.977 GiB of workspace"):
        made.check_workspace(span, 1000 * MIB)
    plan(10**10).check_workspace(span, 100 * MIB)  # larger than estimated, but there is room


def test_a_pass_over_the_whole_model_has_its_memory() -> None:
    """Of 1,024 tokens, others of 32 here; what a trial of 32 takes beyond the plan, it takes as often."""
    whole, part, made = Span(0, 10), Span(1, 10), plan(0)
    row = (8 * 64 + 4 * 256) * 4
    more = made.workspace(whole) - made.workspace(part)
    assert more == pytest.approx(WORKSPACE_SLACK * (1024 - 32) * row, abs=2)
    roomy, small = plan(plan(0).needed(whole) + 31 * MIB), int(WORKSPACE_SLACK * 32 * row) + 4 * MIB
    roomy.check_workspace(whole, small - 4 * MIB)
    with pytest.raises(CapacityError, match="workspace"):
        roomy.check_workspace(whole, small)


def test_a_plan_for_a_real_checkpoint_uses_its_headers() -> None:
    checkpoint = MemoryCheckpoint(tiny_model("llama-tied"))
    prices = span_prices(checkpoint, torch.bfloat16)
    made = plan_memory(
        checkpoint, prices, device="cpu", dtype="bfloat16", budget=10**9, sessions=2, context=None, chunk=16
    )
    checkpoint.close()
    assert made.context == 128 and made.kv_tokens(Span(0, LAYERS)) == 256
    assert made.prices is prices and made.piece_bytes == 0
    assert made.kv_bytes(1, Span(1, 3)) == 2 * 1 * (8 + 8) * 2  # 2 layers, one KV head, 8 + 8 numbers of 2 bytes


@pytest.mark.parametrize(("stored", "piece"), [(torch.float32, 0), (torch.bfloat16, PIECE_BYTES)])
def test_a_piece_of_what_is_widened_has_its_memory(stored: torch.dtype, piece: int) -> None:
    made = []
    for dtype in ("float32", "bfloat16"):
        checkpoint = MemoryCheckpoint(tiny_model("llama"), stored)
        prices = span_prices(checkpoint, getattr(torch, dtype))
        options = {"budget": 10**9, "sessions": 2, "context": None, "chunk": 16}
        made.append(plan_memory(checkpoint, prices, device="cpu", dtype=dtype, **options))
        checkpoint.close()
    row, mask = (8 * 32 + 4 * 48), 16 * 128
    for plan, item, more in ((made[0], 4, piece), (made[1], 2, 0)):
        hand = int(WORKSPACE_SLACK * (16 * row * item + mask * item + 4 * 128 * 4)) + more
        assert plan.fixed_bytes(Span(1, 2)) == hand + plan.prices(Span(1, 2)) + BUFFER_BYTES


# ---------------------------------------------------------------- machines made of files


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_machine_ram", lambda: 64 << 30)


@pytest.mark.usefixtures("large_machine")
def test_the_tightest_control_group_above_us_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.current": "5\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{4 << 30}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{3 << 30}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {1 << 30}\n",
        },
    )
    assert available_ram(root) == 2 << 30


@pytest.mark.usefixtures("large_machine")
def test_control_groups_of_version_1_count_too(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 << 30}\n",  # in a container the mount is the group
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 << 30}\n",
        },
    )
    assert available_ram(root) == 1 << 30


@pytest.mark.usefixtures("large_machine")
def test_without_control_groups_the_machine_itself_decides(tmp_path: Path) -> None:
    assert available_ram(tmp_path) == 64 << 30


def test_this_machine_has_memory() -> None:
    assert 0 < available_ram() <= psutil.virtual_memory().total


def test_impossible_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="cpu, cuda, cuda:N, mps"):
        describe_device("tpu")
    with pytest.raises(UsageError, match="--device cuda:99"):
        describe_device("cuda:99")
    assert describe_device("cpu").device == "cpu"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_gpu_that_this_torch_can_not_use_is_explained(tmp_path: Path) -> None:
    write(tmp_path, {"dev/nvidia0": ""})
    assert "built without CUDA" in capacity.why_no_gpu(tmp_path)
