"""Whether a family that no test knows can be split: tried on a small random model of the same shape.

Invariant: what is served was shown to give the numbers of transformers' own forward: by tests/test_families.py
with the versions that it was run with (`families.FAMILIES`), or else here, before anything of it is fetched.

The small model has the config with every width divided by one power of two, which keeps all proportions (heads
times head size is still the width, grouped heads stay grouped), few experts, thresholds of a few positions, and so
many layers that each kind is there. Two sessions run over uneven spans, in two chunks, and one of them rewinds.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from peer.attention import Row
from peer.families import FAMILIES, TESTED_TRANSFORMERS, Way, family, refused
from peer.model import PackedStep, SpanModel
from peer.outline import Outline, Said, build_full, build_whole, outline, put_tensor
from routing.spans import Span
from swarm.errors import UnsupportedModel

TOLERANCE = 1e-4  # of the largest logit, in float32: sums are ordered differently
MOST_PARAMETERS = 120_000_000  # of a small model: half a GiB, a second or two
LEAST_HEAD = 8  # elements: rotary embedding of a quarter of it still has one pair
VOCABULARY = 64
POSITIONS = 2048  # tables of learned positions are no larger
THRESHOLD, CHOSEN = 4, 2  # positions of windows, chunks, blocks; how many are chosen: the texts are much longer
EXPERTS = 8
FIRST_LAYERS, KINDS = 4, 8  # the first few layers, and the first of each of so many kinds

_WIDTH = re.compile(
    r".*_(size|dim|rank|channels|width)|(size|dim|rank|channels|width)_.*|d_(model|ff|kv|inner)|n_(embd|inner)|dff"
)
_NO_WIDTH = re.compile(r"patch|image|codebook|kernel|conv|type_|max_|num_|ngram|per_layer|group|expand")
_THRESHOLD = re.compile(r"window|chunk|block|floor|extent|threshold|local_attention|top_?k")
_EXPERTS = re.compile(r"(num|n)_.*experts")


def proven_outline(config: PretrainedConfig) -> Outline:
    """How the config's model is taken apart and run, shown to be right. Worked out once per config.

    Raises UnsupportedModel with what was measured. Takes under a second or two for a family that isn't in
    `FAMILIES`, or with a transformers newer than those that it was tested with.
    """
    return _proven(Said.of(config))


@lru_cache(maxsize=4)
def _proven(said: Said) -> Outline:
    config, known = said.config, family(said.config)
    tested = config.model_type in FAMILIES
    if tested and _minor(transformers.__version__) <= _minor(TESTED_TRANSFORMERS[1]):
        return outline(config, known.way)
    try:
        way = _shown_right(config, known.way)
    except _CannotTry as error:
        if tested:  # nothing was measured against it
            return outline(config, known.way)
        raise refused(
            config, f"it isn't a tested family, and no small model of its shape could be made to try it with ({error})"
        ) from error
    return outline(config, way)


def _shown_right(config: PretrainedConfig, way: Way | None) -> Way | None:
    """The way in which a small model is right. Raises UnsupportedModel if there is none, or _CannotTry."""
    failures: list[str] = []
    for attention in ("eager", None):
        trial = _Trial.of(config, attention)
        for tried in dict.fromkeys((way, Way.OWN_CACHE)):
            fault = trial.fault(tried)
            if fault is None:
                return tried
            failures.append(fault)
    raise refused(
        config,
        f"a small random model of its shape, cut into spans, doesn't give the numbers of the whole ({failures[0]})",
    )


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _minor(version: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


class _CannotTry(Exception):
    """No small model of this shape runs, in transformers itself."""


def small_model(config: PretrainedConfig, way: Way) -> tuple[PretrainedConfig, Outline, Mapping[str, Tensor]]:
    """A small one of the config's shape: its own config, its outline run that way, and random weights for it.

    Raises what a family's code raises that can't be so small.
    """
    trial = _Trial.of(config, "eager")
    return trial.config, outline(trial.config, way), trial.weights


# ---------------------------------------------------------------- a small model of the same shape


def shrunk(config: PretrainedConfig, divisor: int) -> PretrainedConfig:
    """The same model with every width divided, and few of what comes in numbers."""
    raw, total = config.to_dict(), config.num_hidden_layers
    canonical = {theirs: ours for ours, theirs in config.attribute_map.items()}
    chosen = _layers_tried(raw, total)
    small = {
        name: _small(canonical.get(name, name), value, divisor, total, chosen) for name, value in raw.items()
    }
    _fit_experts(small)
    for name in ("transformers_version", "architectures", "dtype", "quantization_config"):
        small.pop(name, None)
    return type(config).from_dict(small)


def _small(name: str, value: Any, divisor: int, total: int, chosen: Sequence[int]) -> Any:
    match value:
        case list() if len(value) == total and total > 1:
            return [value[i] for i in chosen]
        case list() if "layers" in name and all(isinstance(v, int) for v in value):  # layers by their index
            return [chosen.index(v) for v in value if v in chosen]
        case dict() if name == "per_layer_config":
            return {
                chosen.index(int(layer)): {k: _small(k, v, divisor, total, chosen) for k, v in differs.items()}
                for layer, differs in value.items()
                if int(layer) in chosen
            }
        case dict() if "rope" in name:
            return _small_rope(value, divisor)
        case bool():
            return value
        case int():
            return _small_number(name, value, divisor, len(chosen))
    return value


def _small_number(name: str, value: int, divisor: int, layers: int) -> int:
    if name == "num_hidden_layers":
        return layers
    if name == "vocab_size":
        return VOCABULARY
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCABULARY - 1)
    if name in ("max_position_embeddings", "max_seq_len"):
        return min(value, POSITIONS)
    if name.startswith("first_k_"):  # layers without experts
        return min(value, 1)
    if _THRESHOLD.search(name) and not name.endswith("_dim"):
        return min(value, CHOSEN if "top" in name else THRESHOLD)
    if _WIDTH.fullmatch(name) and not _NO_WIDTH.search(name) and value % divisor == 0:
        return value // divisor
    return value


def _small_rope(rope: Mapping[str, Any], divisor: int) -> dict[str, Any]:
    """A factor per frequency, of which there are fewer."""
    made: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            made[key] = _small_rope(value, divisor)
        elif isinstance(value, list) and key in ("short_factor", "long_factor"):
            made[key] = value[: len(value) // divisor]
        else:
            made[key] = value
    return made


def _layers_tried(raw: Mapping[str, Any], total: int) -> list[int]:
    """The first few layers, and the first of each kind that the config's lists tell apart."""
    lists = [value for value in raw.values() if isinstance(value, list) and len(value) == total]
    kinds: dict[str, int] = {}
    for i in range(total):
        kinds.setdefault(json.dumps([value[i] for value in lists], default=str), i)
    return sorted({*range(min(total, FIRST_LAYERS)), *list(kinds.values())[:KINDS]})


def _fit_experts(small: dict[str, Any]) -> None:
    """Few experts: a whole number of groups of two or more, and as many as a token is sent to."""
    numbers = {name: v for name, v in small.items() if type(v) is int}
    sent = max([v for name, v in numbers.items() if re.search(r"per_tok|top_?k$|moe_k", name)], default=0)
    groups = numbers.get("n_group") or 1
    wanted = max(EXPERTS, 2 * groups, sent)
    for name, value in numbers.items():
        if _EXPERTS.fullmatch(name) and "shared" not in name and "per_" not in name:
            small[name] = min(value, -(-wanted // groups) * groups)


def _divisors(config: PretrainedConfig) -> Iterator[int]:
    """Powers of two that leave a head enough elements, the largest first."""
    try:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except Exception:  # heads that differ from layer to layer, or none
        head = 8 * LEAST_HEAD
    for divisor in (64, 32, 16, 8, 4, 2):
        if head % divisor == 0 and head // divisor >= LEAST_HEAD:
            yield divisor
    yield 1


_silence = threading.Lock()  # it is a whole process's


@contextmanager
def _nothing_said() -> Iterator[None]:
    """By transformers, of a model that nobody will meet: a context shorter than a rotary scaling's original one."""
    with _silence:
        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(before)


def random_weights(model: PreTrainedModel, plan: Outline, seed: int) -> dict[str, Tensor]:
    """For every tensor of a model: matrices that keep the scale of what goes through, vectors near 1 or 0."""
    source = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, like in model.state_dict().items():
        if not like.is_floating_point():
            continue
        if name in plan.ties:
            made[name] = made[plan.ties[name]]
            continue
        noise = torch.randn(like.shape, generator=source, dtype=torch.float32)
        if like.ndim > 1:
            made[name] = noise * like.shape[-1] ** -0.5
        else:
            made[name] = noise * 0.1 + name.endswith("weight")
    return made


@dataclass(frozen=True)
class _Trial:
    """A small model with its weights, and what the whole of it says about two texts: [tokens, vocabulary] each."""

    config: PretrainedConfig
    weights: Mapping[str, Tensor]
    texts: Sequence[Sequence[int]]
    exact: Sequence[Tensor]

    @staticmethod
    def of(config: PretrainedConfig, attention: str | None) -> _Trial:
        """The smallest that transformers itself can run. Raises _CannotTry, or UnsupportedModel."""
        fault: object = "it is too large"
        for divisor in _divisors(config):
            try:
                with _nothing_said():
                    small = shrunk(config, divisor)
                    whole = build_whole(small, attention)
                if sum(p.numel() for p in whole.parameters()) > MOST_PARAMETERS:
                    break  # and so are all that follow
                return _Trial._run(small, whole)
            except UnsupportedModel:
                raise
            except Exception as error:  # the config of a shape that it can't be
                fault = _line(error)
        raise _CannotTry(fault)

    @staticmethod
    def _run(config: PretrainedConfig, whole: PreTrainedModel) -> _Trial:
        plan = outline(config)
        weights = random_weights(whole, plan, seed=7)
        for name, tensor in weights.items():
            put_tensor(whole, plan, name, tensor)
        texts = [[(7 * s + 3 * i + i * i) % config.vocab_size for i in range(n)] for s, n in enumerate((14, 9))]
        with torch.inference_mode():
            exact = [whole(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
            cut_short = whole(torch.tensor([texts[0][:8]]), use_cache=False).logits[0]
        if (cut_short - exact[0][:8]).abs().max() > TOLERANCE * exact[0].abs().max():
            raise refused(config, "it attends in both directions")
        return _Trial(config, weights, texts, exact)

    def fault(self, way: Way | None) -> str | None:
        """What is wrong with running it that way; None: nothing."""
        try:
            off = self.difference(way)
        except UnsupportedModel as error:
            return str(error)
        except Exception as error:  # whatever a family's code says to what it doesn't expect
            return f"{type(error).__name__}: {_line(error)}"
        return None if off <= TOLERANCE else f"logits are off by {off:.1e} of the largest"

    def difference(self, way: Way | None) -> float:
        """Between logits of the cut model and the whole one: the largest, over the largest logit."""
        hops = self._hops(outline(self.config, way))
        caches = [[hop.new_cache(len(text)) for hop in hops] for text in self.texts]
        worst = 0.0
        for parts in ([(0, 0, 6), (1, 0, 8)], [(1, 8, 9), (0, 6, 13)], [(0, 13, 14), (1, 4, 5)]):
            ids = torch.tensor([i for s, start, stop in parts for i in self.texts[s][start:stop]])
            hidden = None
            for n, hop in enumerate(hops):
                rows = [Row(caches[s][n], start, stop - start, stop - start) for s, start, stop in parts]
                for row in rows:
                    row.cache.begin(row.position, row.tokens)
                out = hop.forward(PackedStep(hop.span, rows, ids if n == 0 else None, hidden))
                for row in rows:
                    row.cache.finish(row.position + row.tokens)
                hidden = out.hidden
            exact = torch.cat([self.exact[s][start:stop] for s, start, stop in parts])
            assert out.logits is not None
            off = float((out.logits - exact).abs().max() / exact.abs().max())
            worst = off if off != off else max(worst, off)  # NaN stays
        return worst

    def _hops(self, plan: Outline) -> list[SpanModel]:
        total = len(plan.layers)
        hops = []
        for span in (Span(a, b) for a, b in pairwise(sorted({0, 1, total - 1, total}))):
            full = build_full(self.config, torch.float32, plan.way)
            for name in plan.names(span):
                if name in self.weights:
                    put_tensor(full, plan, name, self.weights[name])
            hops.append(SpanModel(full, span, plan))
        return hops
