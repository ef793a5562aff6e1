"""A server on loopback that speaks as much of the hub's interface as fetching a model needs.

Paths and headers as huggingface_hub reads them: model_info with blobs, and resolve with ETag,
X-Repo-Commit, X-Error-Code and byte ranges. Large files can come from a second server (`Storage`), as the hub's do:
a redirect with X-Linked-ETag and X-Linked-Size to an address that is signed and good for one download.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")  # these are in large file storage, with SHA-256; all else is a git blob


@dataclass
class Repo:
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False  # described to all, its files only to the token
    stated: dict[str, str] = field(default_factory=dict)  # hashes that aren't those of the content
    gone: frozenset[str] = frozenset()  # files that are described and not there
    commit: str = COMMIT
    branches: dict[str, Repo] = field(default_factory=dict)  # other content, by revision

    @classmethod
    def of(cls, directory: Path) -> Repo:
        return cls({path.name: path.read_bytes() for path in directory.iterdir()})

    def at(self, revision: str) -> Repo | None:
        """By branch, tag or commit."""
        if revision in (*self.revisions, self.commit):
            return self
        return next((b for name, b in self.branches.items() if revision in (name, b.commit)), None)


@dataclass
class FakeHub:
    repos: dict[str, Repo] = field(default_factory=dict)
    token: str = "hf_right"
    status: int = 0  # answer everything so
    break_after: int | None = None  # hang up after so many bytes of a file
    pause: Pause | None = None
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, byte range
    storage: Storage | None = None

    def start(self) -> str:
        self.server, address = _serve(self.answer)
        return address

    def stop(self) -> None:
        self.server.stop()
        if self.storage is not None:
            self.storage.server.stop()

    def use_storage(self) -> Storage:
        self.storage = Storage()
        self.storage.server, address = _serve(self.storage.answer)
        # another host, not only another port: that is what huggingface_hub goes by
        self.storage.address = address.replace("127.0.0.1", "localhost")
        return self.storage

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
        return self._file(request, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _entry(self, repo: Repo, file: str) -> dict[str, object]:
        large = {"oid": _etag(repo, file), "size": len(repo.files[file]), "pointerSize": 130}
        entry = {"type": "file", "path": file, "oid": "0" * 40, "size": len(repo.files[file])}
        return {**entry, "lfs": large} if file.endswith(LARGE) else {**entry, "oid": _etag(repo, file)}

    def _describe(self, request: BaseHTTPRequestHandler, name: str, revision: str, tree: bool) -> None:
        repo = self.repos.get(name)
        if repo is None:
            return _reply(request, 404, {"X-Error-Code": "RepoNotFound"})
        repo = repo.at(revision)
        if repo is None:
            return _reply(request, 404, {"X-Error-Code": "RevisionNotFound"})
        if tree:
            return _reply(
                request, 200, {}, json.dumps([self._entry(repo, file) for file in repo.files]).encode()
            )
        siblings = [self._sibling(repo, file) for file in repo.files]
        body = {"id": name, "sha": repo.commit, "siblings": siblings}
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
        repo = self.repos[name].at(revision)
        assert repo is not None and revision == repo.commit, (
            "files are fetched from the commit that was described"
        )
        if repo.gated and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _reply(request, 403, {"X-Error-Code": "GatedRepo"})
        if file in repo.gone:
            return _reply(request, 404, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{_etag(repo, file)}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if self.storage is not None and file.endswith(LARGE):
            linked = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(repo.files[file]))}
            location = self.storage.sign(repo.files[file])
            return _reply(
                request, 302, {**headers, "ETag": '"of-the-redirect"', **linked, "Location": location}
            )
        return _send(request, repo.files[file], headers, self.break_after, self.pause)


@dataclass
class Storage:
    """Where the hub keeps large files. seen: of each request the byte range and what it said of who it is."""

    address: str = ""
    break_after: int | None = None
    seen: list[tuple[str, str]] = field(default_factory=list)
    _signed: dict[str, bytes] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def sign(self, content: bytes) -> str:
        path = f"/blob/{next(self._numbers)}"
        self._signed[path] = content
        return f"{self.address}{path}?signature=1"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        content = self._signed.pop(urlsplit(request.path).path, None)
        if content is None:
            return _reply(request, 403, {}, b"expired")
        self.seen.append((request.headers.get("Range", ""), request.headers.get("Authorization", "")))
        return _send(request, content, {"ETag": '"of-the-storage"'}, self.break_after)


class _Server:
    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        server.daemon_threads = True
        self._thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _serve(answer: Callable[[BaseHTTPRequestHandler], None]) -> tuple[_Server, str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # header and body are two writes

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    return _Server(server), f"http://127.0.0.1:{server.server_port}"


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


@dataclass
class Pause:
    """Send so many bytes of a file and then nothing until `over`."""

    after: int
    over: threading.Event = field(default_factory=threading.Event)


def _send(
    request: BaseHTTPRequestHandler,
    content: bytes,
    headers: dict[str, str],
    break_after: int | None = None,
    pause: Pause | None = None,
) -> None:
    """A file, or the part of it that was asked for."""
    status, asked = 200, request.headers.get("Range")
    if asked:
        first, last = asked.removeprefix("bytes=").split("-")
        stop = min(int(last) + 1 if last else len(content), len(content))
        headers = {**headers, "Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"}
        content, status = content[int(first) : stop], 206
    _reply(request, status, headers, content, break_after, pause if asked is None else None)


def _reply(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    break_after: int | None = None,
    pause: Pause | None = None,
) -> None:
    request.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        try:
            if pause is not None and len(body) > pause.after:
                request.wfile.write(body[: pause.after])
                pause.over.wait()
                raise ConnectionAbortedError
            request.wfile.write(body[:break_after])
            request.close_connection = break_after is not None
        except ConnectionError:
            request.close_connection = True  # the client gave up, as some tests want
