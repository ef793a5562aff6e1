"""Model files on the Hugging Face hub: described first, fetched only when asked, verified when fetched.

huggingface_hub does the talking, so HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean
everywhere. What the hub said of one commit (names, sizes, hashes, tensor headers) is kept as a small
`Listing`, so that a peer which holds two of a model's thirty shards still starts without a network.

Invariant: a file that `local` returns has the content whose hash the hub stated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from peer.checkpoint import Progress, TensorSpec, broken
from peer.directory import DirectoryFiles, read_piece
from peer.fingerprint import FileHashes
from peer.layout import ModelFiles
from peer.resumable import download, fetch_piece
from peer.safetensors_header import merged, parse
from swarm.errors import BrokenModel, CapacityError, GatedModel, ModelError, ModelNotFound
from swarm.state import atomic_write

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# a disk filled to the last byte breaks other programs, and the file system needs a little itself
DISK_RESERVE_BYTES = 256 << 20
# headers are a few hundred kB each: enough at once to hide the latency, few enough not to be throttled
HEADER_REQUESTS = 8
FIRST_HEADER_BYTES = 100_000  # asked for at first: longer headers are those of a mixture of experts
METADATA_TIMEOUT_S = 30.0
# beyond it the hub serves a file through its own chunked storage only, which resumes by itself
MAX_PLAIN_BYTES = 50_000_000_000
# of this machine's disk, not of the way to the hub
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})


@dataclass(frozen=True, slots=True)
class HubFile:
    size: int
    git_sha1: str  # of git's blob, for small files
    sha256: str | None  # stated for files in large file storage, which all weights are


@dataclass(frozen=True)
class Listing:
    """What the hub says of one commit."""

    repo: str
    commit: str
    files: Mapping[str, HubFile]
    tensors: Mapping[str, Mapping[str, TensorSpec]]  # by weight file, as far as read


@dataclass
class HubFiles:
    listing: Listing
    revision: str | None
    cache: Path
    hashes: FileHashes

    @property
    def label(self) -> str:
        return self.listing.repo

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: file.size for name, file in self.listing.files.items()}

    def fetch(self, names: Iterable[str], progress: Progress) -> None:
        """Download what is missing, smallest trouble first: disk space is checked before any byte."""
        wanted = list(dict.fromkeys(names))
        missing = [name for name in wanted if self._cached(name) is None]
        if missing:
            self._check_disk(missing)
            for name in missing:
                self._download(name, progress)
        for name in wanted:
            self._verify(name, progress)

    def local(self, name: str) -> Path:
        path = self._cached(name)
        if path is None:
            raise BrokenModel(f"{name} of {self.label} isn't on this machine; start again with a network")
        return path

    def sha256(self, name: str, progress: Progress) -> bytes:
        stated = self.listing.files[name].sha256
        return bytes.fromhex(stated) if stated else self.hashes.sha256(self.local(name), progress)

    @property
    def is_remote(self) -> bool:
        return True

    def read(self, name: str, start: int, stop: int) -> bytes:
        """From the file where it is here, else from the hub, and kept: it is asked for at every start."""
        from huggingface_hub import hf_hub_url

        path = self._cached(name)
        if path is not None:
            return read_piece(path, name, start, stop)
        stated = self.listing.files[name].sha256 or self.listing.files[name].git_sha1
        kept = _folder(self.cache, self.label) / "pieces" / f"{stated}-{start}-{stop}"
        if not kept.is_file():
            url = hf_hub_url(self.label, name, revision=self.listing.commit)
            with self._errors():
                atomic_write(kept, fetch_piece(url, start, stop))
            _keep(self.cache, self.revision, self.listing)
        return kept.read_bytes()

    def headers(self, names: Collection[str], progress: Progress) -> dict[str, TensorSpec]:
        missing = [name for name in names if name not in self.listing.tensors]
        if missing:
            known = {**self.listing.tensors, **self._read_headers(missing, progress)}
            self.listing = Listing(self.listing.repo, self.listing.commit, self.listing.files, known)
            _keep(self.cache, self.revision, self.listing)
        return merged(self.listing.tensors[name] for name in names)

    def _read_headers(self, names: list[str], progress: Progress) -> dict[str, dict[str, TensorSpec]]:
        found: dict[str, dict[str, TensorSpec]] = {}
        with ThreadPoolExecutor(HEADER_REQUESTS) as pool, self._errors():
            for name, tensors in zip(names, pool.map(self._read_header, names), strict=True):
                found[name] = tensors
                progress("reading tensor headers", len(found), len(names))
        return found

    def _read_header(self, name: str) -> dict[str, TensorSpec]:
        """Almost always in one request, and never more than a header may have."""
        from huggingface_hub import hf_hub_url

        url, size = hf_hub_url(self.label, name, revision=self.listing.commit), self.listing.files[name].size
        if not size:
            raise broken(name, "it is empty")
        first = fetch_piece(url, 0, min(size, FIRST_HEADER_BYTES))

        def read(start: int, stop: int) -> bytes:
            return first[start:stop] if stop <= len(first) else fetch_piece(url, start, stop)

        return parse(read, size, name).tensors

    def _cached(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.label, name, revision=self.listing.commit)
        return Path(path) if isinstance(path, str) else None

    def _check_disk(self, names: list[str]) -> None:
        from huggingface_hub import constants

        needed = sum(self.listing.files[name].size for name in names)
        kept = sum(path.stat().st_size for path in map(self._partial, names) if path.exists())
        remedy = "free some, or set HF_HOME to a larger disk"
        check_disk(Path(constants.HF_HUB_CACHE), needed - kept, f"{self.label} needs", remedy)

    def _download(self, name: str, progress: Progress) -> None:
        from huggingface_hub import hf_hub_download

        stated = self.listing.files[name]
        with self._errors():
            if stated.sha256 and stated.size <= MAX_PLAIN_BYTES:
                self._download_blob(name, progress)
            # makes the snapshot's link to the blob; downloads what isn't there yet
            hf_hub_download(
                self.label,
                name,
                revision=self.listing.commit,
                tqdm_class=_reporting(f"downloading {name}", stated.size, progress),
            )

    def _download_blob(self, name: str, progress: Progress) -> None:
        """Into huggingface_hub's cache, under the hash that is the blob's name there."""
        from filelock import FileLock
        from huggingface_hub import hf_hub_url

        size, partial = self.listing.files[name].size, self._partial(name)
        partial.parent.mkdir(parents=True, exist_ok=True)
        url = hf_hub_url(self.label, name, revision=self.listing.commit)
        with FileLock(partial.with_suffix(".lock")):  # of peers of one machine, one downloads
            blob = partial.with_suffix("")
            if not blob.exists():
                download(url, partial, size, lambda done: progress(f"downloading {name}", done, size))
                os.replace(partial, blob)

    def _partial(self, name: str) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.label, repo_type="model")
        blob = self.listing.files[name].sha256 or self.listing.files[name].git_sha1
        return Path(constants.HF_HUB_CACHE) / folder / "blobs" / f"{blob}.layerswarm"

    def _verify(self, name: str, progress: Progress) -> None:
        stated, path = self.listing.files[name], self.local(name)
        if stated.sha256:
            sound = self.hashes.sha256(path, progress).hex() == stated.sha256
        else:
            sound = git_blob_sha1(path.read_bytes()) == stated.git_sha1
        if not sound:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise broken(
                f"{name} of {self.label}", "its hash isn't the one that the hub states (now deleted)"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with hub_errors(self.label, self.revision):
            yield


def open_hub(repo: str, revision: str | None, cache: Path, hashes: FileHashes) -> ModelFiles:
    """Describe a model of the hub, or of the local cache in offline mode. Raises ModelError."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        return _offline(repo, revision, cache, hashes)
    try:
        with hub_errors(repo, revision):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=METADATA_TIMEOUT_S)
        listing = _listing(repo, info)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # as the library takes what it doesn't expect
        raise ModelError(
            f"what answers at {constants.ENDPOINT} says something that isn't the hub's ({type(error).__name__}); does "
            "this network want you to log in, in a browser?"
        ) from error
    known = _kept(cache, repo, revision)
    if known is not None and known.commit == listing.commit:
        listing = Listing(repo, listing.commit, listing.files, known.tensors)
    return HubFiles(listing, revision, cache, hashes)


def _listing(repo: str, info: ModelInfo) -> Listing:
    files = {
        sibling.rfilename: HubFile(
            sibling.size or 0, sibling.blob_id or "", sibling.lfs.sha256 if sibling.lfs else None
        )
        for sibling in info.siblings or ()
        if "/" not in sibling.rfilename or sibling.rfilename.endswith(".gguf")
    }
    if not info.sha:
        raise ModelError(f"the hub doesn't say which commit of {repo} it has; try again later")
    return Listing(repo, info.sha, files, {})


def _offline(repo: str, revision: str | None, cache: Path, hashes: FileHashes) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    listing = _kept(cache, repo, revision)
    if listing is not None:
        return HubFiles(listing, revision, cache, hashes)
    try:  # fetched by another program, so as a whole
        snapshot = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ModelNotFound(
            f"{repo} isn't in the local cache, and HF_HUB_OFFLINE forbids fetching it; "
            "unset HF_HUB_OFFLINE, or set HF_HOME to where the model is"
        ) from None
    sizes = {entry.name: entry.stat().st_size for entry in snapshot.iterdir() if entry.is_file()}
    return DirectoryFiles(repo, snapshot, sizes, hashes)


def _folder(cache: Path, repo: str) -> Path:
    return cache / "hub" / quote(repo, safe="")


def _listing_path(cache: Path, repo: str, revision: str | None) -> Path:
    return _folder(cache, repo) / (quote(revision or "main", safe="") + ".json")


def _keep(cache: Path, revision: str | None, listing: Listing) -> None:
    atomic_write(_listing_path(cache, listing.repo, revision), json.dumps(asdict(listing)).encode())


def _kept(cache: Path, repo: str, revision: str | None) -> Listing | None:
    try:
        raw: dict[str, Any] = json.loads(_listing_path(cache, repo, revision).read_bytes())
        files = {name: HubFile(**file) for name, file in raw["files"].items()}
        tensors = {
            file: {
                name: TensorSpec(spec["dtype"], tuple(spec["shape"]), spec["nbytes"], spec["file"])
                for name, spec in specs.items()
            }
            for file, specs in raw["tensors"].items()
        }
        return Listing(raw["repo"], raw["commit"], files, tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # never kept, or by another release: ask the hub


def git_blob_sha1(content: bytes) -> str:
    """The id that git gives a file's content (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def check_disk(directory: Path, needed: int, who: str, remedy: str) -> None:
    """Raise CapacityError unless `needed` bytes fit where `directory` is, or will be."""
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < needed + DISK_RESERVE_BYTES:
        raise CapacityError(
            f"{who} {needed / 1e9:.2f} GB of disk and {DISK_RESERVE_BYTES / 1e9:.2f} GB to spare, "
            f"{free / 1e9:.2f} GB are free at {directory}; {remedy}"
        )


def _disk_failed(error: OSError, path: Path) -> CapacityError:
    """While files were fetched, after `check_disk` had found room enough."""
    present = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(present).free
    return CapacityError(
        f"{path} can't be written ({(error.strerror or str(error)).lower()}; {free / 1e9:.2f} GB are free there); "
        "free some, or set HF_HOME to another disk, and start again: what was fetched stays"
    )


def _reporting(what: str, total: int, progress: Progress) -> type[Any]:
    """A progress bar class that draws nothing and reports to `progress` instead."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            progress(what, min(self._done, total), total)

    return Reporting


@contextmanager
def hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Whatever the hub or the way to it does wrong, as one of our errors, with the remedy."""
    from huggingface_hub import constants, errors

    page = f"https://huggingface.co/{repo}"
    gated = GatedModel(
        f"{repo} is gated: accept its licence at {page}, then set HF_TOKEN to a token of that account"
    )
    absent = ModelNotFound(
        f"no model {repo} on the hub ({constants.ENDPOINT}), and no such directory here; "
        "check the spelling, or set HF_TOKEN if it is private"
    )
    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError:
        raise gated from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(
            f"{repo} has no revision {revision!r}; see {page}/tree/main for those it has"
        ) from None
    except errors.RepositoryNotFoundError:
        raise absent from None
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo} is no name of a model on the hub: {error}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise gated from None
        if status == 404 and not isinstance(error, errors.EntryNotFoundError):  # a mirror may not say what it lacks
            raise absent from None
        raise ModelError(f"the hub answered {status} for {repo}; try again later") from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, OSError) as error:  # type: ignore[attr-defined]
        if getattr(error, "errno", None) in DISK_ERRORS:
            raise _disk_failed(error, Path(error.filename or constants.HF_HUB_CACHE)) from error
        raise ModelError(
            f"can't reach the hub at {constants.ENDPOINT} ({type(error).__name__}); check the network, "
            "or use a local directory, or HF_HUB_OFFLINE=1 for a model that was fetched before"
        ) from error
