"""A process that loads spans of sparse checkpoints and says what memory that took: `python -m tests.loader CASES`.

Each span is loaded in a fork of its own, so that its high-water mark begins where the imports ended. CASES is a JSON
list of {"directory", "layers": [start, stop], "dtype", "address_space"}; one line of JSON is printed for each.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import gguf  # noqa: F401
import torch
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import peer.gguf_source
from peer.checkpoint import no_progress
from peer.compiled import prepare
from peer.directory import open_directory
from peer.fingerprint import FileHashes
from peer.gguf_choice import gguf_parts
from peer.layout import load_config, quantisation_of, read_layout
from peer.quantisation import weights_of
from peer.source import ModelSource
from peer.weights import load_span, span_prices, span_tensors
from routing.spans import Span


def describe(directory: Path) -> ModelSource:
    """As `resolve_model` does, but for the fingerprint: hashing isn't loading, and these files are huge."""
    files = open_directory(str(directory), FileHashes(directory / "hashes"))
    parts = gguf_parts(files, None)
    if parts:
        peer.gguf_source.make_gguf_bundle = lambda *_: {}
        config, cache = lambda config: config, directory / "cache"
        model = peer.gguf_source.describe_gguf(files, parts, config, cache, no_progress)
        return ModelSource("sparse", b"", model.config, model.tensors, files, {})
    layout = read_layout(files, no_progress)
    tensors = weights_of(files.headers(layout.weights, no_progress), quantisation_of(files))
    return ModelSource("sparse", b"", load_config(files, no_progress), tensors, files, {})


def figures(case: dict[str, Any]) -> dict[str, int]:
    """Bytes, of this process: held before, at most and at the end; read from files; and what the span is priced at."""
    dtype, span = getattr(torch, case["dtype"]), Span(*case["layers"])
    for held in (dtype, torch.bfloat16):
        prepare(held, dtype)  # as a peer does before it looks at its memory
    before, read_before = status("VmRSS"), characters_read()
    if case["address_space"]:  # nothing that is mapped may go beyond what the span may take
        limit = status("VmSize") + case["address_space"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    source = describe(Path(case["directory"]))
    hop = load_span(source, span, dtype)
    read = characters_read() - read_before
    modules = (hop.shell, *hop.layers)
    tensors = {id(t): t for t in chain.from_iterable((*m.parameters(), *m.buffers()) for m in modules)}
    return {
        "peak": status("VmHWM") - before,
        "anonymous": status("RssAnon"),
        "mapped": status("RssFile"),
        "read": read,
        "held": sum(t.nbytes for t in tensors.values() if t.device.type == "cpu"),
        "price": span_prices(source, dtype)(span),
        "stored": sum(source.tensors[name].nbytes for name in span_tensors(source, span)),
    }


def status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def characters_read() -> int:
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def main(cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for case in cases:
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(figures(case)), flush=True)
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{case['directory']} wasn't loaded")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
