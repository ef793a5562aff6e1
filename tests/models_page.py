"""docs/models.md, made of what the tests test: python -m tests.models_page > docs/models.md

Nothing on the page depends on the transformers that is installed.
"""

from __future__ import annotations

import sys

from peer.families import FAMILIES, TESTED_TRANSFORMERS, Way
from tests.test_multimodal import WRAPPERS
from tests.tiny_families import CASES, FEATURES, REFUSED, Case, Refused

OLDEST, NEWEST = TESTED_TRANSFORMERS
HEAD = f"""# Models

Made by `python -m tests.models_page > docs/models.md`; a test fails when this page is stale.

A family is a `model_type` of transformers. {len(FAMILIES)} of them are tested, with transformers {OLDEST} and {NEWEST}:
a small random model of each, with what is named beside it, is cut into three uneven spans; three sessions of different
lengths run through them in the same steps, prefill in two chunks, eight tokens are decoded, one session is taken back
and goes on differently. Every logit equals transformers' own uncut forward to 1e-5 of the largest, in float32, and
all greedy ids are equal.

**Any other family** of transformers is tried when a peer is asked to serve it, before its weights are downloaded: a
small random model of the same shape, cut and packed against uncut, in about a second. It is served if the numbers are
equal, and refused with the difference if they aren't. With a transformers newer than {NEWEST} the families below are
tried so too. Seen to be refused: `sarvam_moe`, whose checkpoints have queries, keys and values in one tensor that would
have to be split as it is loaded; and with transformers 5.17 `doge`, whose attention chooses keys among those of tokens
that are still to come there (with 5.24 it is served).

## Tested

Steps of several sessions run as one, but for the families marked *one at a time*, whose sessions take turns.

| family | its small models have | |
|---|---|---|
"""
LENGTH = """
**Rope scaled by the length of the text** (`dynamic`, `longrope`): transformers takes the length anew at each step, so
that old keys and new queries of one text disagree, differently with every way to cut it into steps. Here the length is
what the session has reserved, from its first token to its last: the numbers are transformers' own for a text of that
length. A session within the model's original context gets what transformers gives for any text within it; an answer
that is made longer than that (`rewind` with more tokens) is computed anew from its first token. The `generate` of
Phi-3 begins a long answer as if it were to stay within the original context, and computes all of it anew when it
doesn't: it agrees where prompt and answer together fit the original context, or the prompt alone exceeds it.
With `dynamic`, the original context is all that a peer serves.
"""
MULTIMODAL = """
## Multimodal checkpoints

The language model in one is served for text, if its own family can be; nothing of the rest is loaded.
Tested with: {wrappers}.
"""
REFUSED_HEAD = """
## Refused, for now

Before any weights are downloaded, with the reason.

| kind | such as | what is said |
|---|---|---|
"""


def page() -> str:
    tested = "".join(_row(family) for family in sorted(FAMILIES))
    refused = "".join(_refused(kind) for kind in dict.fromkeys(each.kind for each in REFUSED))
    wrappers = ", ".join(f"`{kind}` ({text})" for kind, (text, *_) in sorted(WRAPPERS.items()))
    return HEAD + tested + LENGTH + MULTIMODAL.format(wrappers=wrappers) + REFUSED_HEAD + refused


def _row(family: str) -> str:
    cases = [case for case in CASES if case.family == family]
    notes = []
    if any(case.way is Way.OWN_CACHE for case in cases):
        notes.append("*one at a time*" + (": " + FAMILIES[family].why if FAMILIES[family].why else ""))
    if FAMILIES[family].tested_from != OLDEST:
        notes.append(f"transformers {FAMILIES[family].tested_from} and newer")
    return f"| `{family}` | {'; or '.join(map(_shows, cases))} | {'; '.join(notes)} |\n"


def _shows(case: Case) -> str:
    words = ", ".join(word for word in FEATURES if word in case.shows) or "nothing special"
    return words + (" (*one at a time*)" if case.way is Way.ALONE else "")


def _refused(kind: str) -> str:
    said: list[Refused] = [each for each in REFUSED if each.kind == kind]
    reasons = "; ".join(dict.fromkeys(f"\"{each.reason}\"" for each in said))
    return f"| {kind} | {said[0].such_as} | {reasons} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
