"""wishes.py: who is asked for everything at once, and when that is done."""

from __future__ import annotations

from swarm.budget import Budget
from swarm.digests import Models
from swarm.identity import Identity
from swarm.messages import GossipHello, Subscribe
from swarm.neighbour import Kind, Neighbour
from swarm.wishes import SNAPSHOT_STALL_S, Wishes

A, B = b"a" * 32, b"b" * 32


def sources(count: int, *, opened_here: bool = True, kind: Kind = Kind.SOURCE) -> dict[int, Neighbour]:
    share = Budget(0.0).of_neighbour(0.0)
    peers = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, count + 1)]
    return {n: Neighbour(n, peer, kind, opened_here, 0.0, share) for n, peer in enumerate(peers, 1)}


def sent(one: Neighbour) -> Subscribe | GossipHello | None:
    """Its greeting goes out."""
    greeting, one.greeting = one.greeting, None
    return greeting


def test_one_neighbour_is_asked_for_all_and_the_others_for_nothing() -> None:
    there = sources(3)
    wishes = Wishes(there, (A,), 0.0)
    assert wishes.deadline is None
    for _ in range(2):
        wishes.find_teller(0.0, empty=True)
    assert [one.snapshots_owed for one in there.values()] == [1, 0, 0]
    assert sent(there[1]) == Subscribe((A,), True) and wishes.is_teller(1)
    assert wishes.deadline == SNAPSHOT_STALL_S
    assert wishes.told(there[1]) and wishes.complete and not wishes.is_teller(1)
    wishes.find_teller(1.0, empty=False)
    assert wishes.deadline is None and not wishes.told(there[2])


def test_only_whom_we_dialled_is_asked_for_all() -> None:
    wishes = Wishes(sources(2, opened_here=False, kind=Kind.GOSSIP), None, 0.0)
    wishes.find_teller(0.0, empty=True)
    assert wishes.deadline is None


def test_a_teller_that_goes_on_is_not_replaced_and_one_that_stalls_is_by_another() -> None:
    there = sources(2)
    there[2].snapshots_owed = 5  # whatever else it owes
    wishes = Wishes(there, None, 0.0)
    wishes.find_teller(0.0, empty=True)
    wishes.heard(1, 2.0)
    wishes.heard(2, 2.9)  # that is somebody else
    wishes.tick(SNAPSHOT_STALL_S, empty=False)
    assert wishes.is_teller(1)
    wishes.tick(2.0 + SNAPSHOT_STALL_S, empty=False)
    assert wishes.is_teller(2) and there[2].snapshots_owed == 6
    wishes.lost(1, 6.0, empty=False)
    assert wishes.is_teller(2)
    del there[2]
    wishes.lost(2, 6.0, empty=False)
    assert wishes.is_teller(1) and wishes.deadline == 6.0 + SNAPSHOT_STALL_S


def test_a_teller_that_stalls_is_forgotten_when_all_is_here_anyway() -> None:
    """It was asked because everybody had gone, and others have come since."""
    there = sources(2)
    wishes = Wishes(there, None, 0.0)
    wishes.find_teller(0.0, empty=True)
    assert wishes.told(there[1])
    wishes.find_teller(100.0, empty=True)
    assert wishes.is_teller(1)
    wishes.tick(100.0 + SNAPSHOT_STALL_S, empty=False)
    assert wishes.deadline is None and there[2].snapshots_owed == 0


def test_a_greeting_that_has_not_gone_out_is_replaced_with_what_it_asks_for() -> None:
    there = sources(1)
    wishes = Wishes(there, (A,), 0.0)
    wishes.find_teller(0.0, empty=True)
    assert wishes.want((B, A))
    wishes.find_teller(0.0, empty=True)
    wishes.seek("named")
    assert sent(there[1]) == Subscribe((A, B), True, "named")
    assert there[1].snapshots_owed == 1 and there[1].only == Models((A, B))
    assert wishes.told(there[1])


def test_what_is_wanted_now_is_told_to_every_source_and_asked_of_one() -> None:
    there = sources(2)
    wishes = Wishes(there, (A,), 0.0)
    wishes.find_teller(0.0, empty=True)
    assert wishes.told(there[1]) and [sent(one) is None for one in there.values()] == [False, True]
    assert not wishes.want((A,)) and sent(there[2]) is None
    assert wishes.want((B,)) and not wishes.complete
    wishes.find_teller(1.0, empty=False)
    assert [sent(one) for one in there.values()] == [Subscribe((B,), True), Subscribe((B,), False)]
    assert wishes.told(there[1])
    assert not wishes.want(())  # less is here already
    assert wishes.complete and [sent(one) for one in there.values()] == [Subscribe((), False)] * 2
    assert wishes.want(None)


def test_a_snapshot_of_what_was_wanted_before_completes_nothing_unless_it_holds_what_is_wanted_now() -> None:
    there = sources(2)
    wishes = Wishes(there, (A,), 0.0)
    wishes.find_teller(0.0, empty=True)
    sent(there[1])
    wishes.want((B,))
    wishes.find_teller(0.5, empty=True)
    assert wishes.is_teller(2)
    assert not wishes.told(there[1]) and not wishes.complete
    assert wishes.told(there[2])
    wishes.want(None)
    wishes.find_teller(1.0, empty=False)
    sent(there[1])
    wishes.want((A,))
    assert wishes.told(there[1]) and wishes.complete
