"""Which model exactly: one SHA-256 over the files that decide what a model computes.

It is `swarm.canonical.canonical_hash` under MODEL_DOMAIN. Roles are "config", "generation", "tokenizer",
"template" and "weights" (`layout.Layout.hashes`). Every weight file of the whole model counts, whichever span
is served; an index of shards doesn't, since the shards name their tensors themselves.

Files on this disk are hashed once and remembered by path, size and time of change (`FileHashes`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from peer.checkpoint import Progress, no_progress
from swarm.state import atomic_write

MODEL_DOMAIN = b"layerswarm model fingerprint 1\n"
_CHUNK_BYTES = 1 << 20  # large enough to keep hashing, not calls, the cost; small enough to show progress


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 of local files, remembered in `directory`, one small JSON file for each.

    A file that keeps its size and its time of change to the nanosecond is taken to be unchanged.
    """

    directory: Path

    def sha256(self, path: Path, progress: Progress = no_progress) -> bytes:
        path = path.resolve()
        state = path.stat()
        facts = {"path": str(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
        memory = self.directory / (hashlib.sha256(os.fsencode(path)).hexdigest() + ".json")
        known = _remembered(memory, facts)
        if known is None:
            known = hash_file(path, progress)
            atomic_write(memory, json.dumps({**facts, "sha256": known.hex()}).encode())
        return known


def _remembered(memory: Path, facts: dict[str, object]) -> bytes | None:
    try:
        entry = json.loads(memory.read_bytes())
        if {key: entry.get(key) for key in facts} == facts:
            known = bytes.fromhex(entry["sha256"])
            return known if len(known) == 32 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # never hashed, or a damaged memory: hash it again
    return None


def hash_file(path: Path, progress: Progress = no_progress) -> bytes:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.digest()
