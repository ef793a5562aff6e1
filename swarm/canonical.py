"""One hash over a set of files: the same on every peer and in every release.

    SHA-256( domain || entry* )      domain: ASCII, ends with a newline; what the hash is for
    entry = u16 len(role) || role || u16 len(name) || name || 32 bytes SHA-256 of the file's content

with the entries sorted by (role, name), numbers big-endian and text in UTF-8 (protocol.md, "Model identity").
A model's fingerprint (`peer/fingerprint.py`) and the hash of its tokenizer (`tokenizer.bundle_hash`) are such.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class FileHash:
    role: str
    name: str
    sha256: bytes


def canonical_hash(domain: bytes, files: Iterable[FileHash]) -> bytes:
    """The 32 bytes described above."""
    digest = hashlib.sha256(domain)
    for file in sorted(files):
        for text in (file.role.encode(), file.name.encode()):
            digest.update(len(text).to_bytes(2, "big") + text)
        assert len(file.sha256) == 32, file
        digest.update(file.sha256)
    return digest.digest()
