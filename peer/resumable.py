"""One large file over HTTP into a partial file that the next start goes on with.

huggingface_hub forgets a partial download when its process ends; a shard is several gigabytes and a
volunteer's line is thin. Invariant: `partial` is always a prefix of the file, as far as the server is
honest; whoever renames it checks its hash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

# a line that fails this often in a row without one more byte isn't coming back by itself
ATTEMPTS_WITHOUT_PROGRESS = 4
RETRY_PAUSE_S = 1.0


def download(url: str, partial: Path, size: int, report: Callable[[int], None]) -> None:
    """Complete `partial` to `size` bytes; `report` gets the bytes that are there.

    Raises the errors of huggingface_hub and of HTTP; what was received stays in `partial`.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    idle = 0
    have = _kept_bytes(partial, size)
    while have < size:
        try:
            _receive(url, partial, have, report)
        except HTTPError as error:
            if getattr(error, "response", None) is not None or idle >= ATTEMPTS_WITHOUT_PROGRESS:
                raise
        before, have = have, _kept_bytes(partial, size)
        idle = 0 if have > before else idle + 1
        if idle > ATTEMPTS_WITHOUT_PROGRESS:
            raise ConnectionError(f"the server sends no more than {have:,} of {size:,} bytes")
        if have < size:
            time.sleep(RETRY_PAUSE_S)


def _kept_bytes(partial: Path, size: int) -> int:
    if not partial.exists():
        return 0
    have = partial.stat().st_size
    if have > size:
        partial.unlink()  # no prefix of this file
        return 0
    return have


def fetch_piece(url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, and no others. Raises the errors of huggingface_hub and of HTTP."""
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    location, headers = _place(url)
    headers["Range"] = f"bytes={start}-{stop - 1}"
    piece = bytearray()
    with get_session().stream("GET", location, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        if start and response.status_code != 206:
            raise ConnectionError("the server knows no byte ranges")
        for chunk in response.iter_bytes():
            piece += chunk
            if len(piece) >= stop - start:  # or it sends the whole file
                break
    if len(piece) < stop - start:
        raise ConnectionError(f"the server sends {len(piece):,} of {stop - start:,} bytes")
    return bytes(piece[: stop - start])


def _place(url: str) -> tuple[str, dict[str, str]]:
    """Where the file really is, and the headers with which to ask there."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.utils import build_hf_headers

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    location = get_hf_file_metadata(url).location
    if urlsplit(location).netloc != urlsplit(url).netloc:
        headers = _without_token(headers)  # the storage behind the hub has no business with it
    return location, headers


def _receive(url: str, partial: Path, have: int, report: Callable[[int], None]) -> None:
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    location, headers = _place(url)
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream("GET", location, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        resumed = response.status_code == 206
        done = have if resumed else 0
        with _named(partial), partial.open("ab" if resumed else "wb") as sink:
            for chunk in response.iter_bytes():  # as they come: what is waited for is lost with the line
                sink.write(chunk)
                sink.flush()  # or with the process
                done += len(chunk)
                report(done)
            os.fsync(sink.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the disk says while a file is written names no file: a full disk could be any."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _without_token(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() != "authorization"}
