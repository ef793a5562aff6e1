"""Every family of `peer.families`: packed and cut into spans it gives the numbers of transformers' own uncut model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from peer.attention import Row
from peer.cache import KvPool, SessionCache
from peer.families import FAMILIES, TESTED_TRANSFORMERS, Way, served_config
from peer.kv import KvSizes
from peer.model import PackedStep
from peer.proof import proven_outline
from swarm.errors import UnsupportedModel
from tests import models_page
from tests.chain import Chain
from tests.tiny import random_model
from tests.tiny_families import (
    CASES,
    CHUNKS,
    EXPERTS,
    FEATURES,
    GROUPED,
    LEARNED,
    MLA,
    MULTI_QUERY,
    REFUSED,
    SCALED_ROPE,
    SINKS,
    SOFT_CAPS,
    TIED,
    WINDOWS,
    Case,
    Refused,
)

torch.set_num_threads(1)
# of the largest logit, float32: the shapes of the products differ, so sums are ordered differently; seen: 2e-6
TOLERANCE = 1e-5
RESERVED = 40  # positions of a session
LENGTHS = (23, 9, 14)
CHUNKED = ((13, 5, 14), (10, 4, 0))  # prefill of the three texts in two uneven chunks; the third is done after one
DECODED = 8
REWOUND, OTHER = 11, [5, 6, 7]  # then the first text goes on from there, with other ids

# gpt_bigcode of transformers 5.17 does so when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


class Session:
    """A text, its caches on each hop, and the logits that were computed for each of its positions."""

    def __init__(self, caches: list[SessionCache], ids: Sequence[int]) -> None:
        self.caches, self.ids = caches, list(ids)
        self.rows: list[Tensor] = []

    def part(self, tokens: int) -> tuple[list[SessionCache], int, list[int]]:
        return self.caches, len(self.rows), self.ids[len(self.rows) : len(self.rows) + tokens]


def run(chain: Chain, sessions: Sequence[Session], tokens: Sequence[int]) -> None:
    """One packed step of so many tokens of each session; those with none stay out of it."""
    steps = [(session, session.part(n)) for session, n in zip(sessions, tokens, strict=True) if n]
    logits = chain.step([part for _, part in steps])
    start = 0
    for session, (_, _, new) in steps:
        session.rows += logits[start : start + len(new)]
        start += len(new)


def check(model: torch.nn.Module, sessions: Sequence[Session]) -> None:
    """Every position against the uncut model. What fills a text up comes after it, so that it changes nothing there;
    but it makes the text as long as the session, which rope scaled by that length sees."""
    filled = [session.ids + [3] * (RESERVED - len(session.ids)) for session in sessions]
    with torch.inference_mode():
        exact = model(torch.tensor(filled), use_cache=False).logits
    for session, theirs in zip(sessions, exact, strict=True):
        ours = torch.stack(session.rows)
        theirs = theirs[: len(ours)]
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()
        assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@dataclass(frozen=True)
class Tiny:
    """A case's uncut model, and the same cut into three uneven spans."""

    case: Case
    model: PreTrainedModel
    chain: Chain


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def tiny_family(request: pytest.FixtureRequest) -> Tiny | None:
    """Built once for all tests of a case. None where this transformers hasn't got the family, being older than the
    one that the table names for it."""
    case = request.param
    if not case.exists:
        assert release(transformers.__version__) < release(FAMILIES[case.family].tested_from)
        return None
    model = random_model(case.config(), attention=case.attention)
    return Tiny(case, model, Chain(model, cuts=[1, 4]))


def test_a_family_cut_and_packed_gives_the_numbers_of_the_uncut_model(tiny_family: Tiny | None) -> None:
    if tiny_family is None:
        return
    model, chain = tiny_family.model, tiny_family.chain
    vocab = model.config.vocab_size
    sessions = [
        Session(chain.open(RESERVED), [(7 * s + 3 * i + i * i) % vocab for i in range(n)])
        for s, n in enumerate(LENGTHS)
    ]
    for chunk in CHUNKED:
        run(chain, sessions, chunk)
    for _ in range(DECODED):
        for session in sessions:
            session.ids.append(int(session.rows[-1].argmax()))
        run(chain, sessions, [1, 1, 1])
    check(model, sessions)

    sessions[0].ids[REWOUND:], sessions[0].rows[REWOUND:] = OTHER, []
    for session in sessions[1:]:
        session.ids.append(4)
    run(chain, sessions, [len(OTHER), 1, 1])
    check(model, sessions)


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_every_family_of_the_table_has_a_tiny_model_and_no_other_has() -> None:
    assert {case.family for case in CASES} == set(FAMILIES)
    assert len(FAMILIES) >= 40


def test_everything_that_a_decoder_can_ask_for_is_asked_for_by_some_case() -> None:
    assert {word for case in CASES for word in case.shows} == set(FEATURES)


def test_a_case_shows_what_it_says(tiny_family: Tiny | None) -> None:
    if tiny_family is None:
        return
    case, config = tiny_family.case, served_config(tiny_family.case.config())
    plan = tiny_family.chain.hops[0].outline
    own_masks = plan.way is Way.OWN_CACHE  # then windows are the family's own business, and nothing of them is seen
    heads = {kv.heads for kv in plan.kv}
    names = " ".join(plan.shapes)
    seen = {
        TIED: bool(plan.ties),
        MULTI_QUERY: heads == {1},
        GROUPED: bool(heads - {1, config.num_attention_heads}),
        WINDOWS: WINDOWS in case.shows if own_masks else any(kv.window and not kv.chunked for kv in plan.kv),
        CHUNKS: any(kv.chunked for kv in plan.kv),
        EXPERTS: "experts" in names,
        MLA: bool(getattr(config, "kv_lora_rank", None)),
        SINKS: "sink" in names,
        SOFT_CAPS: bool(getattr(config, "attn_logit_softcapping", None)),
        LEARNED: any(word in names for word in ("wpe", "embed_positions", "position_embed")),
        SCALED_ROPE: plan.way is Way.ALONE,
    }
    assert {word for word, there in seen.items() if there} == set(case.shows) & set(seen)
    if release(transformers.__version__) == release(TESTED_TRANSFORMERS[1]):
        assert plan.way is case.way
    else:  # a family's attention goes through the interface from one release on
        assert plan.way is case.way or Way.ALONE not in (plan.way, case.way)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_what_can_not_work_is_refused_with_the_reason(refused: Refused) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(refused.reason)) as caught:
        proven_outline(served_config(refused.config()))
    assert str(caught.value).endswith("; docs/models.md lists families that can")


def test_what_a_family_with_a_cache_of_its_own_keeps_is_in_the_sessions_reservation() -> None:
    case = next(case for case in CASES if case.family == "bloom")
    hop = Chain(random_model(case.config()), cuts=[2]).hops[1]
    assert hop.way is Way.OWN_CACHE
    sizes = KvSizes(hop.kv, hop.dtype.itemsize, context=RESERVED, start=hop.span.start)
    pool = KvPool(sizes, hop.span, sizes.bytes(RESERVED, hop.span), dtype=hop.dtype)
    cache = pool.reserve("session", RESERVED)
    assert (cache.nbytes, pool.free_positions) == (pool.ledger.total, 0)
    for layer in cache.layers:
        layer.keys.fill_(torch.nan)
    cache.begin(0, 5)
    hop.forward(PackedStep(hop.span, [Row(cache, 0, 5)], hidden=torch.randn(5, hop.width)))
    assert [layer.keys.isnan().all(dim=(0, 1, 3)).tolist() for layer in cache.layers] == [
        [False] * 5 + [True] * (RESERVED - 5)
    ] * len(hop.span)


def test_the_page_of_models_is_what_the_tests_say() -> None:
    page = Path(__file__).parent.parent / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == models_page.page(), (
        "docs/models.md is stale: python -m tests.models_page > docs/models.md"
    )
