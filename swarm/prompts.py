"""What a user may ask with: messages, raw text, stop strings. Everything else is a UsageError; nothing was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.errors import UsageError

MAX_MESSAGES = 4096
MAX_PROMPT_CHARACTERS = 4 << 20  # more than fits any context; keeps a mistake from filling the memory
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # all of it is held back at worst, and compared at every token

Prompt = str | Sequence[Mapping[str, str]]


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Raises UsageError on stop strings that are empty, too long or too many."""
    stops = (stop,) if isinstance(stop, str) else stop
    sound = isinstance(stops, Sequence) and len(stops) <= MAX_STOP_STRINGS
    if not sound or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in stops):
        bounds = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise UsageError(f"stop takes {bounds}, got {str(stop)[:80]!r}")
    return tuple(stops)


def checked_messages(prompt: Prompt) -> list[dict[str, str]]:
    """What a template may see: plain dicts of strings. Raises UsageError."""
    if isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or not 0 < len(prompt) <= MAX_MESSAGES:
        raise UsageError(f"a prompt is a string or a list of 1 to {MAX_MESSAGES} messages")
    messages = [_checked_message(place, message) for place, message in enumerate(prompt)]
    characters = sum(len(text) for message in messages for text in message.values())
    if characters > MAX_PROMPT_CHARACTERS:
        raise UsageError(f"the prompt has {characters} characters, at most {MAX_PROMPT_CHARACTERS} are taken")
    return messages


def _checked_message(place: int, message: object) -> dict[str, str]:
    where = f"message {place} of the prompt"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} has to be a dict with role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content", *plain):
        value = plain.get(key)
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"{where} needs a string as {key!r}")
        if not _encodable(value):
            raise UsageError(
                f"the {key} of {where} has half of a surrogate pair in it, which no encoding has"
            )
    return _with_reasoning(plain)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_reasoning(message: dict[str, str]) -> dict[str, str]:
    """Reasoning under the names that templates read (transformers' _alias_reasoning_fields)."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def raw_text(prompt: Prompt, messages: Sequence[Mapping[str, str]], raw: bool) -> tuple[str, str | None]:
    """The text of a prompt without a chat template, and a note for the user if that isn't what was asked for."""
    if raw:
        if not isinstance(prompt, str):
            raise UsageError("a raw prompt is a string; messages need the model's chat template")
        return prompt, None
    text = "\n\n".join(message["content"] for message in messages)
    return text, "this model has no chat template: the prompt was given to it as it is (raw)"
