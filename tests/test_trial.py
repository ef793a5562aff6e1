"""What a mask hides, read off transformers' own mask functions."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as masks

from peer.trial import UnlikeMask, reach_of

NONE = torch.zeros(1, dtype=torch.long)  # left padding


def test_a_causal_mask_reaches_back_to_the_start() -> None:
    assert reach_of(masks.causal_mask_function) == (None, False)


@pytest.mark.parametrize("window", [1, 2, 6, 4096, 131_072, 1 << 20])
def test_a_window_is_as_wide_as_its_mask_says(window: int) -> None:
    assert reach_of(masks.sliding_window_causal_mask_function(window)) == (window, False)


@pytest.mark.parametrize("size", [2, 3, 8192, 100_000])
def test_chunks_are_told_from_windows(size: int) -> None:
    assert reach_of(masks.chunked_causal_mask_function(size, NONE)) == (size, True)


def test_chunks_whose_mask_is_on_meta_have_the_size_that_comes_with_it() -> None:
    assert reach_of(masks.chunked_causal_mask_function(7, NONE.to("meta")), local_size=7) == (7, True)


@pytest.mark.parametrize(
    "other",
    [
        masks.bidirectional_mask_function,
        masks.sliding_window_bidirectional_mask_function(6),
        masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k < 4),  # a prefix that all see
        masks.or_masks(masks.sliding_window_causal_mask_function(6), lambda b, h, q, k: k == 0),  # and its start
        masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0),  # every other one
        masks.or_masks(masks.sliding_window_causal_mask_function(6), lambda b, h, q, k: q - k == 9),  # one before it
        masks.and_masks(masks.sliding_window_causal_mask_function(6), lambda b, h, q, k: q - k != 2),  # a hole in it
        masks.and_masks(masks.sliding_window_causal_mask_function(4096), lambda b, h, q, k: q - k != 1234),
        masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: q - k != 77),
        masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k == q + 2),
    ],
)
def test_any_other_mask_is_not_taken_for_one_of_these(other: object) -> None:
    with pytest.raises(UnlikeMask):
        reach_of(other)  # type: ignore[arg-type]
