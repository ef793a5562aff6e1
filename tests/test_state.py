"""state.py: what outlives the process. The right values are the file system's own (modes, inodes, bytes)."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from swarm.errors import IdentityError, UsageError
from swarm.identity import Identity
from swarm.state import (
    MAX_KNOWN_HOSTS,
    MAX_REMEMBERED,
    SEQ_BLOCK,
    KnownHosts,
    StateDir,
    atomic_write,
    load_or_create_identity,
)

posix = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "home")


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


def test_home_is_where_swarm_home_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "elsewhere"))
    opened = StateDir.open(None)
    assert opened.home == tmp_path / "elsewhere"
    assert opened.cache == tmp_path / "elsewhere" / "cache"


def test_opening_a_home_writes_nothing(tmp_path: Path) -> None:
    StateDir.open(tmp_path / "home")
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(UsageError, match="home is not a directory"):
        StateDir.open(tmp_path / "home")


def test_an_identity_is_made_once_and_found_again(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path)
    assert load_or_create_identity(tmp_path).peer_id == first.peer_id
    assert leftovers(tmp_path) == []


@posix
def test_a_key_file_is_for_its_owner_only(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    load_or_create_identity(tmp_path)
    key = tmp_path / "key"
    key.chmod(mode)
    with pytest.raises(IdentityError, match=f"mode {mode:04o}.*chmod 600 {key}"):
        load_or_create_identity(tmp_path)
    key.chmod(0o600)
    load_or_create_identity(tmp_path)


def test_a_key_lost_to_a_power_cut_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    atomic_write(tmp_path / "key", b"")
    with caplog.at_level(logging.WARNING):
        made = load_or_create_identity(tmp_path)
    assert load_or_create_identity(tmp_path).peer_id == made.peer_id
    assert "is empty" in caplog.text


def test_something_else_in_place_of_a_key_is_never_overwritten(tmp_path: Path) -> None:
    atomic_write(tmp_path / "key", b"my diary")
    with pytest.raises(IdentityError, match="isn't a key file"):
        load_or_create_identity(tmp_path)
    assert (tmp_path / "key").read_bytes() == b"my diary"


def test_a_key_that_appears_meanwhile_wins_over_the_one_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarm import state

    put = state._put_exclusively
    other = Identity.ephemeral()

    def late(aside: Path, path: Path) -> None:
        atomic_write(path, other.seed().hex().encode())
        put(aside, path)

    monkeypatch.setattr(state, "_put_exclusively", late)
    assert load_or_create_identity(tmp_path).peer_id == other.peer_id
    assert leftovers(tmp_path) == []


def test_a_file_system_without_links_still_creates_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    made = load_or_create_identity(tmp_path)
    assert load_or_create_identity(tmp_path).peer_id == made.peer_id


def test_a_full_disk_is_named_by_the_file_that_found_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as found:
        atomic_write(tmp_path / "seq", b"1")
    assert found.value.filename == str(tmp_path / "seq") and not leftovers(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic_write(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_two_peers_on_one_host_get_two_identities(state: StateDir) -> None:
    with state.lock_peer() as first, state.lock_peer() as second:
        assert (first.number, second.number) == (0, 1)
        assert first.identity.peer_id != second.identity.peer_id
    with state.lock_peer() as again:
        assert again.identity.peer_id == first.identity.peer_id


def test_new_makes_an_identity_even_where_one_is_free(state: StateDir) -> None:
    with state.lock_peer() as first:
        pass
    with state.lock_peer(new=True) as second:
        assert (first.number, second.number) == (0, 1)


def _lock_and_die(home: Path) -> None:
    StateDir.open(home).lock_peer()
    os._exit(9)


def test_the_lock_of_a_dead_process_does_not_count(state: StateDir) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_lock_and_die, args=(state.home,))
    process.start()
    process.join()
    assert process.exitcode == 9
    with state.lock_peer() as found:
        assert found.number == 0


def test_a_broken_key_does_not_keep_its_lock(state: StateDir) -> None:
    with state.lock_peer() as first:
        key = first.path / "key"
    atomic_write(key, b"nonsense")
    for _ in range(2):
        with pytest.raises(IdentityError):
            state.lock_peer()


def test_seq_outranks_every_earlier_block_even_with_the_clock_set_back(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with state.lock_peer() as peer:
        monkeypatch.setattr("time.time", lambda: 2_000_000.0)
        first = peer.reserve_seq()
        monkeypatch.setattr("time.time", lambda: 1_000_000.0)
        second = peer.reserve_seq()
        third = peer.reserve_seq(at_least=second + 10 * SEQ_BLOCK)
    assert first == 2_000_000_000
    assert second == first + SEQ_BLOCK
    assert third == second + 10 * SEQ_BLOCK


def test_a_broken_seq_is_set_aside_and_the_clock_serves(state: StateDir) -> None:
    with state.lock_peer() as peer:
        atomic_write(peer.path / "seq", b"\0\0\0")
        assert peer.reserve_seq() > 1_000_000_000_000
        assert (peer.path / "seq.broken-0").read_bytes() == b"\0\0\0"


@pytest.mark.parametrize("content", [b"9" * 32, b"-5", b"4611686018427387903"])
def test_a_seq_that_no_record_may_have_is_set_aside(state: StateDir, content: bytes) -> None:
    with state.lock_peer() as peer:
        atomic_write(peer.path / "seq", content)
        assert 1_000_000_000_000 < peer.reserve_seq() < 1 << 50
        assert (peer.path / "seq.broken-0").read_bytes() == content


def test_remembered_peers_are_kept_per_network_and_the_latest_come_first(state: StateDir) -> None:
    state.remember("main", {"a:7070": "p1", "b:7070": ""})
    state.remember("other", {"c:7070": "p3"})
    state.remember("main", {"a:7070": "p1"})
    assert list(state.remembered("main").items()) == [("a:7070", "p1"), ("b:7070", "")]
    assert state.remembered("other") == {"c:7070": "p3"}
    assert state.remembered("../evil") == {}


def test_remembered_peers_are_bounded(state: StateDir) -> None:
    state.remember("main", {f"h{n}:7070": "" for n in range(3 * MAX_REMEMBERED)})
    assert len(state.remembered("main")) == MAX_REMEMBERED


def test_a_network_name_cannot_leave_the_home(state: StateDir) -> None:
    state.remember("../../evil", {"a:1": ""})
    assert state.remembered("../../evil") == {"a:1": ""}
    assert [path.parent for path in state.home.rglob("remembered-*")] == [state.home]


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":'])
def test_a_broken_state_file_is_set_aside_with_a_warning(
    state: StateDir, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    state.remember("main", {"a:1": ""})
    (state.home / "remembered-main.json").write_bytes(broken)
    with caplog.at_level(logging.WARNING):
        assert state.remembered("main") == {}
    assert "can't be read; it is now remembered-main.json.broken-0" in caplog.text
    assert (state.home / "remembered-main.json.broken-0").read_bytes() == broken
    state.remember("main", {"b:1": ""})
    assert state.remembered("main") == {"b:1": ""}


def test_entries_of_the_wrong_shape_are_ignored(state: StateDir) -> None:
    atomic_write(state.home / "remembered-main.json", json.dumps({"a:1": 5, "b:1": "p"}).encode())
    assert state.remembered("main") == {"b:1": "p"}
    atomic_write(state.home / "remembered-main.json", b"[1, 2]")
    assert state.remembered("main") == {}


def test_known_hosts_are_trusted_on_first_use_and_remembered(state: StateDir) -> None:
    peer, other = Identity.ephemeral().peer_id, Identity.ephemeral().peer_id
    state.known_hosts("main").check("example.org:7070", peer)
    again = state.known_hosts("main")
    again.check("example.org:7070", peer)
    again.check("example.org:7071", other)
    state.known_hosts("other").check("example.org:7070", other)
    with pytest.raises(IdentityError, match=f"known_hosts.json, or join {other}@example.org:7070"):
        state.known_hosts("main").check("example.org:7070", other)


def test_two_processes_add_known_hosts_side_by_side(state: StateDir) -> None:
    peer, other = Identity.ephemeral().peer_id, Identity.ephemeral().peer_id
    one, two = state.known_hosts(), state.known_hosts()
    one.check("a:1", peer)
    two.check("b:1", peer)
    with pytest.raises(IdentityError):
        state.known_hosts().check("a:1", other)


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "[::1]:7070", "localhost:7070"])
def test_peers_of_this_machine_may_change_ports_among_each_other(state: StateDir, address: str) -> None:
    hosts = state.known_hosts()
    hosts.check(address, Identity.ephemeral().peer_id)
    hosts.check(address, Identity.ephemeral().peer_id)


def test_known_hosts_without_a_file_live_in_memory_and_are_bounded() -> None:
    hosts = KnownHosts()
    peer, other = Identity.ephemeral().peer_id, Identity.ephemeral().peer_id
    for port in range(1, MAX_KNOWN_HOSTS + 11):
        hosts.check(f"h:{port}", peer)
    hosts.check("h:10", other)
    with pytest.raises(IdentityError):
        hosts.check("h:12", other)


def test_a_disk_that_cannot_be_written_costs_a_warning_only(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def readonly(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", readonly)
    with caplog.at_level(logging.WARNING):
        state.remember("main", {"a:1": ""})
    assert "Read-only file system" in caplog.text


def test_the_first_start_is_first_only_once(state: StateDir) -> None:
    assert [state.first_start() for _ in range(3)] == [True, False, False]
