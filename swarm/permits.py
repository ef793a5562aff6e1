"""Whom a stranger's word may make us dial, and how often. Pure; the rule itself is `addresses.may_dial`.

What is known here is where peers were met: the address from which each was connected with a proved identity, and
what it says of where it is. Blocks in which both agree are where our swarm lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache

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
    """listed: the addresses that a peer says are its own. own: those that we say are ours, () before we say any."""

    def __init__(self, listed: Callable[[PeerId], Sequence[str]], own: Callable[[], Sequence[str]]) -> None:
        self._listed, self._own = listed, own
        self._met: OrderedDict[PeerId, str] = OrderedDict()  # where
        self._for_others = BucketTable(DIALS_FOR_OTHERS_PER_S, DIALS_FOR_OTHERS_BURST)

    def saw(self, peer: PeerId, host: str) -> None:
        """A connection with this peer stands, to or from `host`."""
        self._met.pop(peer, None)
        self._met[peer] = host
        if len(self._met) > MAX_MET:
            self._met.popitem(last=False)

    def by_record(self, peer: PeerId) -> MayDial:
        """For addresses that this peer's record lists."""

        def check(host: str) -> bool:
            return may_dial(
                host, met_at=self._met.get(peer), at_home=self._home_of(host), we_are_public=self._we_are_public()
            )

        return check

    def for_client(self, peer: PeerId, asker: str) -> MayDial:
        """For a hop that a client at `asker` named. One on the internet reaches no local address of another hop, so
        its chains have none, and it can't use us to look into our network."""
        by_record = self.by_record(peer)
        return lambda host: by_record(host) and (is_public(host) or not is_public(asker))

    def back(self, asker: str) -> MayDial:
        """For a peer at `asker` that wants to know where it is reached: only itself, or its own local network and
        ours. This machine is the network of whoever comes from this machine."""

        def check(host: str) -> bool:
            if is_public(host):
                return read_ip(host) == read_ip(asker)
            home = {block_of(host)} if block_of(asker) in (block_of(host), Block.LOOPBACK) else set()
            return may_dial(host, met_at=asker, at_home=home, we_are_public=self._we_are_public())

        return check

    def may_dial_for(self, group: str, addresses: int, now: float) -> bool:
        """Count addresses that clients of this group make us dial. False: too many lately."""
        return self._for_others.take(group, now, float(addresses))

    def _we_are_public(self) -> bool:
        """Whether we are only to be found on the internet: strangers who seem to be on this machine then come through
        a tunnel. Who also lists an address of a local network lives there too."""
        own = tuple(self._own())
        return bool(own) and _blocks(own) == {Block.PUBLIC}

    def _home_of(self, host: str) -> set[Block]:
        """The block of `host` if our swarm lives there: somebody was met in it who also says that it is there, or
        was met on this machine and says so."""
        block = block_of(host)
        near = {block, Block.LOOPBACK}
        lives = block in LOCAL and any(
            block_of(at) in near and block in _blocks(tuple(self._listed(peer))) for peer, at in self._met.items()
        )
        return {block} if lives else set()


@lru_cache(2 * MAX_MET)
def _blocks(addresses: tuple[str, ...]) -> frozenset[Block]:
    """Of what a peer lists. A name counts as public: what it stands for here may be anything."""
    found = set()
    for text in addresses:
        try:
            host = parse_address(text).host
        except UsageError:  # a stranger's record may list nonsense
            continue
        found.add(Block.LOOPBACK if host == "localhost" else Block.PUBLIC if read_ip(host) is None else block_of(host))
    return frozenset(found)
