"""Which of some GGUF files are meant, from names alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peer.gguf_choice import gguf_parts, served_stem
from swarm.errors import BrokenModel, ModelNotFound, UsageError

PUBLISHED = [
    "README.md",
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
    "BF16/Qwen3-8B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3-8B-BF16-00002-of-00002.gguf",
    "Qwen3-8B-Q4_K.gguf",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-UD-Q4_K_XL.gguf",
    "Qwen3-8B-Q8_0.gguf",
]


def files(*names: str, remote: bool = True) -> Any:
    return SimpleNamespace(sizes=dict.fromkeys(names, 1), is_remote=remote, label="org/name")


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("Q4_K", ["Qwen3-8B-Q4_K.gguf"]),
        ("Q4_K_M", ["Qwen3-8B-Q4_K_M.gguf"]),
        ("q4_k_m", ["Qwen3-8B-Q4_K_M.gguf"]),
        ("UD-Q4_K_XL", ["Qwen3-8B-UD-Q4_K_XL.gguf"]),
        ("BF16", PUBLISHED[3:5]),
        ("Qwen3-8B-Q8_0.gguf", ["Qwen3-8B-Q8_0.gguf"]),
        ("BF16/Qwen3-8B-BF16-00002-of-00002.gguf", PUBLISHED[3:5]),
    ],
)
def test_one_of_many_is_named_by_a_word_of_its_name_or_by_its_whole_name(
    wanted: str, meant: list[str]
) -> None:
    assert list(gguf_parts(files(*PUBLISHED), wanted)) == meant


@pytest.mark.parametrize(
    "wanted", ["Q4", "4_K_M", "Q4_K_", "BF16x", "other.gguf", "BF16/x-00001-of-00002.gguf"]
)
def test_a_piece_of_a_word_names_nothing(wanted: str) -> None:
    with pytest.raises(ModelNotFound, match=r"org/name has no .*; there are Qwen3-8B-BF16, Qwen3-8B-Q4_K, "):
        gguf_parts(files(*PUBLISHED), wanted)


def test_what_an_error_says_can_be_typed() -> None:
    with pytest.raises(
        UsageError, match=r"has 5 models .*\(BF16, Q4_K, Q4_K_M, Q8_0, UD-Q4_K_XL\)"
    ) as caught:
        gguf_parts(files(*PUBLISHED), None)
    said = str(caught.value).rpartition("say which: ")[2]
    assert list(gguf_parts(files(*PUBLISHED), said.partition(":")[2])) == PUBLISHED[3:5]


@pytest.mark.parametrize("wanted", ["Q4_K_M", "q4_k_m", "tiny-Q4_K_M"])
def test_a_name_that_ends_another_name_is_still_a_name(wanted: str) -> None:
    there = files("tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    assert list(gguf_parts(there, wanted)) == ["tiny-Q4_K_M.gguf"]


def test_where_a_word_names_two_the_file_is_said() -> None:
    with pytest.raises(UsageError, match=r"say which: org/name/a/tiny-Q8_0\.gguf$"):
        gguf_parts(files("a/tiny-Q8_0.gguf", "b/tiny-Q8_0.gguf"), "Q8_0")


def test_on_a_disk_the_path_is_said() -> None:
    with pytest.raises(UsageError, match=r"say which: org.name.a-1\.gguf$"):
        gguf_parts(files("a-1.gguf", "a-2.gguf", remote=False), None)


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json"])
def test_hugging_face_layout_goes_first_where_nothing_is_named(weights: str) -> None:
    both = files("config.json", weights, "x.gguf")
    assert gguf_parts(both, None) == ()
    assert gguf_parts(both, "x.gguf") == ("x.gguf",)
    assert gguf_parts(files("config.json", "x.gguf"), None) == ("x.gguf",)
    assert gguf_parts(files("config.json", "README.md"), None) == ()


def test_a_missing_part_is_named_whichever_is_asked_for() -> None:
    there = files(*(f"m-0000{i}-of-00004.gguf" for i in (1, 3)))
    for wanted in (None, "m", "m-00001-of-00004.gguf", "m-00002-of-00004.gguf"):
        with pytest.raises(
            BrokenModel, match=r"lacks m-00002-of-00004\.gguf and 1 more of the 4 parts of m; fetch"
        ):
            gguf_parts(there, wanted)


def test_a_model_is_called_by_its_files_name_alone() -> None:
    assert served_stem("a/b/tiny-Q8_0.gguf") == "tiny-Q8_0"
    assert served_stem("a/Big.Q4_0-00003-of-00012.gguf") == "Big.Q4_0"
