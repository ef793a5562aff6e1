"""Whom a stranger's word may make us dial, and how often. Pure; the rule itself is `addresses.may_dial`.

What is known here is where peers were met: the address from which each was connected with a proved identity, and
what it says of where it is. Blocks in which both agree are where our swarm lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from swarm.addresses import Block, block_of, is_public, may_dial, parse_address, read_ip
from swarm.buckets import BucketTable
from swarm.errors import UsageError
from swarm.identity import PeerId

MAX_MET = 1024  # peers whose address is remembered; those met the longest ago go first
# Addresses that clients of one group may make us dial by what they open: a chain has a few hops that we don't know.
DIALS_FOR_OTHERS_PER_S = 0.5
DIALS_FOR_OTHERS_BURST = 32.0
LOCAL = frozenset(Block) - {Block.PUBLIC, Block.NEVER}

MayDial = Callable[[str], bool]  # of an IP address


def anywhere(host: str) -> bool:
    """For what a person typed."""
    return True


def on_the_lan(host: str) -> bool:
    """For what was heard on the local network: its own hosts, but none of this machine's services."""
    return block_of(host) not in (Block.LOOPBACK, Block.NEVER)


class Permits:
    """listed: the addresses that a peer says are its own. own: those that we say are ours."""

    def __init__(self, listed: Callable[[PeerId], Sequence[str]], own: Callable[[], Sequence[str]]) -> None:
        self._listed, self._own = listed, own
        self._met: OrderedDict[PeerId, tuple[str, Block]] = OrderedDict()  # where, and in which block that is
        self._for_others = BucketTable(DIALS_FOR_OTHERS_PER_S, DIALS_FOR_OTHERS_BURST)

    def saw(self, peer: PeerId, host: str) -> None:
        """A connection with this peer stands, to or from `host`."""
        self._met.pop(peer, None)
        self._met[peer] = host, block_of(host)
        if len(self._met) > MAX_MET:
            self._met.popitem(last=False)

    def by_record(self, peer: PeerId) -> MayDial:
        """For addresses that this peer's record lists."""

        def check(host: str) -> bool:
            block = block_of(host)
            if block not in LOCAL:
                return block is Block.PUBLIC
            met_at, _ = self._met.get(peer, (None, None))
            home = {block} if self._is_home(block) else set()
            return may_dial(host, met_at=met_at, at_home=home, we_are_public=self._we_are_public())

        return check

    def for_client(self, peer: PeerId, asker: str) -> MayDial:
        """For a hop that a client at `asker` named. One on the internet reaches no local address of another hop, so
        its chains have none, and it can't use us to look into our network."""
        by_record = self.by_record(peer)
        return lambda host: by_record(host) and (is_public(host) or not is_public(asker))

    def may_dial_for(self, group: str, addresses: int, now: float) -> bool:
        """Count addresses that clients of this group make us dial. False: too many lately."""
        return self._for_others.take(group, now, float(addresses))

    def _we_are_public(self) -> bool:
        return any(is_public(host) or (read_ip(host) is None and host != "localhost") for host in _hosts(self._own()))

    def _is_home(self, block: Block) -> bool:
        """Whether somebody was met in this block who also says it is there, or on this machine who says so."""
        return any(
            block in {block_of(host) for host in _hosts(self._listed(peer))}
            for peer, (_, met_in) in self._met.items()
            if met_in in (block, Block.LOOPBACK)
        )


def _hosts(addresses: Iterable[str]) -> list[str]:
    found = []
    for text in addresses:
        try:
            found.append(parse_address(text).host)
        except UsageError:  # a stranger's record may list nonsense
            continue
    return found
