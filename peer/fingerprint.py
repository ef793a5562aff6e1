"""Which model exactly: one SHA-256 over the files that decide what a model computes.

It is `swarm.canonical.canonical_hash` under MODEL_DOMAIN. Roles are "config", "generation", "tokenizer",
"template" and "weights" (`layout.Layout.hashes`). Every weight file of the whole model counts, whichever span
is served; an index of shards doesn't, since the shards name their tensors themselves.

Files on this disk are hashed once and remembered by path, size and times of change (`FileHashes`). A peer
verifies what it reads: what was hashed when the model was described is looked at again before a span is loaded, and
after (`FileHashes.verify`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from peer.checkpoint import Progress, no_progress
from swarm.errors import BrokenModel
from swarm.state import atomic_write

MODEL_DOMAIN = b"layerswarm model fingerprint 1\n"
_CHUNK_BYTES = 1 << 20  # large enough to keep hashing, not calls, the cost; small enough to show progress


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 of local files, remembered in `directory`, one small JSON file for each.

    A file that keeps its size and both its times of change to the nanosecond is taken to be unchanged. The second
    one (ctime) can't be set back, as copying programs do with the first.
    """

    directory: Path
    said: dict[Path, bytes] = field(default_factory=dict, compare=False, repr=False)  # by this process

    def sha256(self, path: Path, progress: Progress = no_progress) -> bytes:
        """Raises BrokenModel for a file that is still being written."""
        name, path = path.name, path.resolve()  # in the hub's cache a link: what it leads to is called by its hash
        facts = _facts(path)
        memory = self.directory / (hashlib.sha256(os.fsencode(path)).hexdigest() + ".json")
        known = _remembered(memory, facts)
        if known is None:
            known = hash_file(path, progress, name)
            if {**_facts(path), "ctime_ns": 0} != {**facts, "ctime_ns": 0}:
                raise BrokenModel(f"{path} changes while it is read; start again when it is completely written")
            atomic_write(memory, json.dumps({**facts, "sha256": known.hex()}).encode())
        self.said[path] = known
        return known

    def verify(self, path: Path, progress: Progress = no_progress) -> None:
        """Raises BrokenModel if the file isn't what `sha256` said of it before. Hashes it only if it was touched."""
        before = self.said.get(path.resolve())
        if before is not None and self.sha256(path, progress) != before:
            raise BrokenModel(
                f"{path} was changed since this peer started: its SHA-256 was {before.hex()[:16]}... and is "
                f"{self.said[path.resolve()].hex()[:16]}... now; start the peer again, or put the file back"
            )


def _facts(path: Path) -> dict[str, object]:
    state = path.stat()
    times = {"mtime_ns": state.st_mtime_ns, "ctime_ns": state.st_ctime_ns}
    return {"path": str(path), "size": state.st_size, **times}


def _remembered(memory: Path, facts: dict[str, object]) -> bytes | None:
    try:
        entry = json.loads(memory.read_bytes())
        if {key: entry.get(key) for key in facts} == facts:
            known = bytes.fromhex(entry["sha256"])
            return known if len(known) == 32 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # never hashed, or a damaged memory: hash it again
    return None


def hash_file(path: Path, progress: Progress = no_progress, name: str | None = None) -> bytes:
    """name: what the progress calls it, if not what the path does."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while done <= total and (chunk := stream.read(_CHUNK_BYTES)):  # one that grows has no end
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {name or path.name}", done, total)
    return digest.digest()
