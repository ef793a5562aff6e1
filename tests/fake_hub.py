"""A server on loopback that speaks as much of the hub's interface as fetching a model needs.

Paths and headers as huggingface_hub reads them: model_info with blobs, and resolve with ETag,
X-Repo-Commit, X-Error-Code and byte ranges.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"  # these are in large file storage, with SHA-256; all else is a git blob


@dataclass
class Repo:
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False  # described to all, its files only to the token
    stated: dict[str, str] = field(default_factory=dict)  # hashes that aren't those of the content

    @classmethod
    def of(cls, directory: Path) -> Repo:
        return cls({path.name: path.read_bytes() for path in directory.iterdir()})


@dataclass
class FakeHub:
    repos: dict[str, Repo] = field(default_factory=dict)
    token: str = "hf_right"
    status: int = 0  # answer everything so
    break_after: int | None = None  # hang up after so many bytes of a file
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, byte range

    def start(self) -> str:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # header and body are two writes

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def downloads(self, file: str) -> list[str]:
        """The byte ranges of the GETs of a file, "" for the whole."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith("/" + file)]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range", "")))
        if self.status:
            return _reply(request, self.status)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            revision, tree = (parts[5] if len(parts) > 5 else "main"), "tree" in parts[4:5]
            return self._describe(request, "/".join(parts[2:4]), revision, tree)
        return self._file(request, "/".join(parts[:2]), parts[3], parts[4])

    def _entry(self, repo: Repo, file: str) -> dict[str, object]:
        large = {"oid": _etag(repo, file), "size": len(repo.files[file]), "pointerSize": 130}
        entry = {"type": "file", "path": file, "oid": "0" * 40, "size": len(repo.files[file])}
        return {**entry, "lfs": large} if file.endswith(LARGE) else {**entry, "oid": _etag(repo, file)}

    def _describe(self, request: BaseHTTPRequestHandler, name: str, revision: str, tree: bool) -> None:
        repo = self.repos.get(name)
        if repo is None:
            return _reply(request, 404, {"X-Error-Code": "RepoNotFound"})
        if revision not in (*repo.revisions, COMMIT):
            return _reply(request, 404, {"X-Error-Code": "RevisionNotFound"})
        if tree:
            return _reply(
                request, 200, {}, json.dumps([self._entry(repo, file) for file in repo.files]).encode()
            )
        siblings = [self._sibling(repo, file) for file in repo.files]
        body = {"id": name, "sha": COMMIT, "siblings": siblings}
        return _reply(request, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _sibling(self, repo: Repo, file: str) -> dict[str, object]:
        size = len(repo.files[file])
        large = {"sha256": _etag(repo, file), "size": size, "pointerSize": 130}
        blob = "0" * 40 if file.endswith(LARGE) else _etag(repo, file)
        return {
            "rfilename": file,
            "size": size,
            "blobId": blob,
            "lfs": large if file.endswith(LARGE) else None,
        }

    def _file(self, request: BaseHTTPRequestHandler, name: str, revision: str, file: str) -> None:
        repo = self.repos[name]
        assert revision == COMMIT, "files are fetched from the commit that was described"
        if repo.gated and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _reply(request, 403, {"X-Error-Code": "GatedRepo"})
        content, status = repo.files[file], 200
        headers = {"ETag": f'"{_etag(repo, file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = request.headers.get("Range")
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content, status = content[int(first) : stop], 206
        return _reply(request, status, headers, content, self.break_after)


def _etag(repo: Repo, file: str) -> str:
    content = repo.files[file]
    if file in repo.stated:
        return repo.stated[file]
    if file.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return git_hash(content)


_git_hashes: dict[bytes, str] = {}


def git_hash(content: bytes) -> str:
    """As git itself says it."""
    if content not in _git_hashes:
        command = ["git", "hash-object", "--stdin"]
        said = subprocess.run(command, input=content, capture_output=True, check=True).stdout
        _git_hashes[content] = said.decode().strip()
    return _git_hashes[content]


def _reply(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    break_after: int | None = None,
) -> None:
    request.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        try:
            request.wfile.write(body[:break_after])
            request.close_connection = break_after is not None
        except ConnectionError:
            request.close_connection = True  # the client gave up, as some tests want
