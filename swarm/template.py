"""Chat templates: strangers' code, rendered in a process of its own (`confined.py`).

jinja2's sandbox is the first fence, the process the second. `template_worker.py` is what runs in it;
`tokenizer.py` has one renderer per model, so that two models never share a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.confined import Confined, Job, Limits, Said, one_line
from swarm.errors import TemplateFailed, UsageError

MAX_TEMPLATE_BYTES = 256 << 10  # the longest on the hub are some 30 KiB


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may cost. All of it is generous: real templates need milliseconds and kilobytes."""

    render_s: float = 5.0
    start_s: float = 30.0  # importing jinja2 on a busy machine
    memory_bytes: int = 512 << 20
    output_bytes: int = 4 << 20  # a million tokens


class TemplateRenderer:
    """Renders templates in one process. Safe to use from several threads, one rendering at a time."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        allowed = Limits(self.limits.memory_bytes, self.limits.output_bytes, self.limits.start_s)
        job = Job("swarm.template_worker", ("jinja2", "markupsafe"), TemplateFailed)
        self._confined = Confined(job, allowed)

    def start(self) -> None:
        """Have the process ready, so that the first rendering needn't wait for it. Raises TemplateFailed."""
        self._confined.start()

    def render(self, template: str, variables: Mapping[str, object]) -> str:
        """The text. Blocks, at most `start_s + render_s`; other callers wait for their turn.

        Raises UsageError with the template's own words when it refuses the messages, and TemplateFailed
        when it is broken or reaches a limit. Either way the next rendering is not affected.
        """
        if len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise TemplateFailed(f"it is longer than {MAX_TEMPLATE_BYTES >> 10} KiB")
        request = Said({"template": template, "variables": dict(variables)})
        return text_of(self._confined.ask(request, self.limits.render_s))

    async def render_async(self, template: str, variables: Mapping[str, object]) -> str:
        """`render` for asyncio code: waits in a thread, which may outlive a cancellation by `render_s`."""
        return await asyncio.to_thread(self.render, template, variables)

    def close(self) -> None:
        """End the process, and with it a rendering in flight. A later rendering starts another."""
        self._confined.close()


def text_of(answer: Said) -> str:
    """What was rendered. Raises UsageError, TemplateFailed."""
    if "raised" in answer.fields:
        raise UsageError(f"the model's chat template refuses these messages: {one_line(answer.fields['raised'])}")
    if "failed" in answer.fields or len(answer.blobs) != 1:
        raise TemplateFailed(one_line(answer.fields.get("failed", "no answer")))
    try:
        return answer.blobs[0].decode()
    except UnicodeDecodeError:
        raise TemplateFailed("it wrote half of a surrogate pair") from None
