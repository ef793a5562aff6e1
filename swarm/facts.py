"""What a model's "model.json" says of it, read from a stranger. `peer/tokenizer_bundle.py` describes and makes it."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.codecs import MAX_POSITION
from swarm.json_fields import Fields, json_object
from swarm.messages import MAX_REPETITION, MAX_STOP_IDS, MIN_REPETITION
from swarm.vocabulary import MAX_VOCABULARY


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation config asks for, in the terms of `messages.Sampling` (0 is greedy)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """model.json, validated. `context`: positions the model was made for, None if it doesn't say."""

    model_type: str
    vocab_size: int
    context: int | None
    eos_ids: tuple[int, ...]
    sampling: SamplingDefaults

    @classmethod
    def from_bytes(cls, data: bytes) -> ModelFacts:
        """Raises MessageError. Unknown keys are ignored: a newer peer may add some."""
        facts = Fields("model.json", json_object("model.json", data))
        return cls(
            model_type=facts.text("model_type", 64),
            vocab_size=facts.integer("vocab_size", 1, MAX_VOCABULARY),
            context=facts.integer_or_none("context_length", 1, MAX_POSITION),
            # one beyond this vocabulary (a cut model with the config of a whole one) is never generated
            eos_ids=facts.integers("eos_token_ids", 0, MAX_VOCABULARY, MAX_STOP_IDS),
            sampling=_sampling(facts.nested("sampling"), facts),
        )


def _sampling(fields: Fields, facts: Fields) -> SamplingDefaults:
    """A repetition penalty holds for greedy answers too, so it stands outside of what only sampling needs."""
    repetition = facts.number("repetition_penalty", MIN_REPETITION, MAX_REPETITION, missing=1.0)
    if not fields.names():
        return SamplingDefaults(repetition_penalty=repetition)
    return SamplingDefaults(
        temperature=fields.number("temperature", 0.0, 100.0),
        top_k=fields.integer("top_k", 0, MAX_POSITION),
        top_p=fields.number("top_p", 0.0, 1.0),
        min_p=fields.number("min_p", 0.0, 1.0, missing=0.0),
        repetition_penalty=repetition,
    )
