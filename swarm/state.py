"""What outlives the process, and only that: identities, remembered peers, known hosts.

    home/                          SWARM_HOME, or where the platform keeps such things
        peers/<n>/key, lock, seq   one directory per peer that runs here at the same time
        remembered-<network>.json  addresses at which this network was found
        known_hosts.json           who was first seen at a bare host:port
        started                    exists once the first-start notice was shown
        cache/                     downloads; elsewhere (the platform's cache) without SWARM_HOME

Invariants: every write is atomic (written aside, flushed, put in place), so after SIGKILL or power
loss the next start just works; a state file that can't be read is set aside with a warning and
begun anew; a key file is created exclusively, is readable by its owner only, and is never
overwritten. `client.py` and `peer/service.py` open it; the cores know nothing of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from swarm.addresses import is_loopback
from swarm.errors import IdentityError, UsageError
from swarm.identity import Identity, PeerId
from swarm.records import MAX_SEQ

log = logging.getLogger(__name__)

APP = "layerswarm"
MAX_REMEMBERED = 64  # addresses per network; one a minute is tried, so within an hour all are
MAX_KNOWN_HOSTS = 4096  # the oldest go first
MAX_PEER_DIRS = 1024  # peers on one host; a search longer than that is a mistake
MAX_STATE_BYTES = 4 << 20  # no state file of ours comes near
SEQ_BLOCK = 1 << 16  # numbers reserved by one write: days of heartbeats
KEY_BYTES = 32


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path`, wholly or not at all, and durably. Raises OSError (path unchanged)."""
    aside = _write_aside(path, data, mode)
    try:
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def load_or_create_identity(directory: Path) -> Identity:
    """The identity whose key is in `directory`, made there if there is none.

    Raises IdentityError when the file is readable by others, or isn't a key.
    """
    path = directory / "key"
    if not path.exists():
        _create_key(path)
    return _load_key(path)


class PeerDir:
    """A locked identity directory: nobody else on this host is this peer while it is open."""

    def __init__(self, path: Path, lock: filelock.BaseFileLock, identity: Identity) -> None:
        self.path, self.identity = path, identity
        self._lock = lock

    @property
    def number(self) -> int:
        return int(self.path.name)

    def reserve_seq(self, at_least: int = 0) -> int:
        """The first of SEQ_BLOCK numbers that no run of this identity has used or will use.

        max(persisted + 1, unix ms, at_least), so a restart outranks the past even with a wrong clock.
        """
        first = max(self._persisted_seq() + 1, int(time.time() * 1000), at_least)
        atomic_write(self.path / "seq", str(first + SEQ_BLOCK - 1).encode())
        return first

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> PeerDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _persisted_seq(self) -> int:
        path = self.path / "seq"
        try:
            found = int(path.read_bytes()[:32])
        except FileNotFoundError:
            return 0
        except ValueError:
            found = -1
        if not 0 <= found <= MAX_SEQ - SEQ_BLOCK:  # no clock counts that far, and no record may
            _set_aside(path, "isn't the number of a record")
            return 0
        return found


class KnownHosts:
    """Who was first met at a bare host:port of one network. In memory only when `path` is None.

    Not on loopback: several peers of one machine change their ports among each other, and nobody
    else can stand there.
    """

    def __init__(self, path: Path | None = None, network: str = "main") -> None:
        self._path, self._network = path, network
        self._hosts: dict[str, str] = _texts(_read_json(path)) if path is not None else {}

    def check(self, address_text: str, peer: PeerId) -> None:
        """Remember `peer` for a new address. Raises IdentityError if another one was known there.

        Written at once; a disk that can't be written costs a warning.
        """
        if is_loopback(address_text.rpartition(":")[0].strip("[]")):
            return
        key = f"{self._network} {address_text}"
        known = self._hosts.setdefault(key, peer)
        while len(self._hosts) > MAX_KNOWN_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        if known != peer:
            where = f"remove that line from {self._path}, or " if self._path is not None else ""
            raise IdentityError(
                f"{address_text} was peer {known[:8]} before and is {peer[:8]} now: another machine, or one "
                f"set up anew; if you expect that, {where}join {peer}@{address_text}"
            )
        if self._path is not None and _read_json(self._path).get(key) != peer:
            self._save(self._path)

    def _save(self, path: Path) -> None:
        """Another process may have added some meanwhile."""
        self._hosts = _texts(_read_json(path)) | self._hosts
        _write_json(path, dict(list(self._hosts.items())[-MAX_KNOWN_HOSTS:]))


class StateDir:
    """The home directory. Made when it is first written to."""

    def __init__(self, home: Path, cache: Path) -> None:
        self.home, self.cache = home, cache

    @classmethod
    def open(cls, home: Path | None = None) -> StateDir:
        """`home`, or SWARM_HOME, or the platform's place; models and hashes in SWARM_CACHE, or in there.

        Raises UsageError if the home can't be a directory.
        """
        given = home or _directory_of("SWARM_HOME")
        root = given.expanduser().absolute() if given else Path(platformdirs.user_data_dir(APP))
        own_cache = root / "cache" if given else Path(platformdirs.user_cache_dir(APP))
        made = cls(root, _directory_of("SWARM_CACHE") or own_cache)
        if made.home.exists() and not made.home.is_dir():
            raise UsageError(f"{made.home} is not a directory; set SWARM_HOME to one")
        return made

    # ------------------------------------------------------------ identities

    def lock_peer(self, *, new: bool = False) -> PeerDir:
        """The first identity directory that nobody uses now, or with `new` one that never existed.

        Raises IdentityError when its key can't be used.
        """
        for number in range(MAX_PEER_DIRS):
            path = self.home / "peers" / str(number)
            if new and path.exists():
                continue
            found = self._try_lock(path, new)
            if found is not None:
                return found
        raise UsageError(f"{MAX_PEER_DIRS} identities under {self.home / 'peers'} are all in use")

    def _try_lock(self, path: Path, new: bool) -> PeerDir | None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=not new)
        except FileExistsError:  # somebody else's `--new` was faster
            return None
        lock = filelock.FileLock(path / "lock", blocking=False, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            return None
        try:
            return PeerDir(path, lock, load_or_create_identity(path))
        except BaseException:
            lock.release()
            raise

    # ------------------------------------------------------------ remembered peers

    def remembered(self, network: str) -> dict[str, str]:
        """address -> PeerId ("" where unknown), the latest first."""
        return dict(reversed(_texts(_read_json(self._remembered(network))).items()))

    def remember(self, network: str, peers: Mapping[str, str]) -> None:
        """Add address -> PeerId, as the latest. A disk that can't be written costs a warning."""
        before = _texts(_read_json(self._remembered(network)))
        merged = {address: peer for address, peer in before.items() if address not in peers} | dict(peers)
        kept = dict(list(merged.items())[-MAX_REMEMBERED:])
        if list(kept.items()) != list(before.items()):
            _write_json(self._remembered(network), kept)

    def _remembered(self, network: str) -> Path:
        plain = all(c.isascii() and (c.isalnum() or c in "-_") for c in network)
        return self.home / f"remembered-{network if plain else network.encode().hex()}.json"

    def known_hosts(self, network: str = "main") -> KnownHosts:
        return KnownHosts(self.home / "known_hosts.json", network)

    # ------------------------------------------------------------ first start

    def first_start(self) -> bool:
        """Whether this is the first call ever: the notice belongs on the screen now."""
        path = self.home / "started"
        if path.exists():
            return False
        try:
            _make(self.home)
            with contextlib.closing(_exclusive(path, 0o600)):
                return True
        except FileExistsError:
            return False
        except OSError as error:
            log.warning("can't write %s (%s)", path, error.strerror)
            return True


# ---------------------------------------------------------------- files


def _directory_of(variable: str) -> Path | None:
    named = os.environ.get(variable)
    return Path(named).expanduser().absolute() if named else None


def _make(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


class _Descriptor:
    """A file descriptor that `contextlib.closing` can close."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def _exclusive(path: Path, mode: int) -> _Descriptor:
    return _Descriptor(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


def _write_aside(path: Path, data: bytes, mode: int) -> Path:
    """A flushed temporary file in the same directory."""
    _make(path.parent)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)  # O_EXCL, 0600
    aside = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode != 0o600:
            aside.chmod(mode)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # which disk is full
        raise
    return aside


def _sync_directory(directory: Path) -> None:
    """So that the new name is on disk too. Not every platform can."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _create_key(path: Path) -> None:
    """Written aside and then linked, which fails if a key has appeared in the meantime: a key is
    complete from the moment it exists, and is never overwritten."""
    aside = _write_aside(path, Identity.ephemeral().seed().hex().encode() + b"\n", 0o600)
    try:
        with contextlib.suppress(FileExistsError):
            _put_exclusively(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _put_exclusively(aside: Path, path: Path) -> None:
    if os.name != "posix":  # rename refuses to replace there
        os.rename(aside, path)
        return
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: complete or not, but exclusive
        with contextlib.closing(_exclusive(path, 0o600)) as made:
            os.write(made.fd, aside.read_bytes())
            os.fsync(made.fd)


def _load_key(path: Path) -> Identity:
    _refuse_open_permissions(path)
    text = path.read_bytes()[: 2 * KEY_BYTES + 8]
    if not text.strip():  # nothing in it to lose: power went before the data reached the disk
        _set_aside(path, "is empty")
        _create_key(path)
        text = path.read_bytes()
    try:
        seed = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        seed = b""
    if len(seed) != KEY_BYTES:
        raise IdentityError(
            f"{path} isn't a key file ({2 * KEY_BYTES} hexadecimal digits); move it away for a new identity"
        )
    return Identity.from_seed(seed)


def _refuse_open_permissions(path: Path) -> None:
    if os.name != "posix":
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise IdentityError(
            f"{path} is open to others (mode {mode:04o}), so its key may be known to them; "
            f"if nobody has read it: chmod 600 {path}"
        )


def _set_aside(path: Path, why: str) -> None:
    """Rename what can't be read, so that it can be looked at and isn't in the way."""
    for number in itertools.count():
        aside = path.with_name(f"{path.name}.broken-{number}")
        if not aside.exists():
            break
    with contextlib.suppress(OSError):
        os.replace(path, aside)
        log.warning("%s %s; it is now %s, and a new one is begun", path, why, aside.name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise ValueError
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        _set_aside(path, "can't be read")
        return {}
    except OSError as error:
        log.warning("can't read %s (%s)", path, error.strerror)
        return {}


def _write_json(path: Path, values: Mapping[str, str]) -> None:
    try:
        atomic_write(path, json.dumps(dict(values), indent=1).encode())
    except OSError as error:
        log.warning("can't write %s (%s); it will be forgotten", path, error.strerror)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Only what has the right shape: a state file may come from another release."""
    return {k: v for k, v in values.items() if isinstance(k, str) and isinstance(v, str)}
