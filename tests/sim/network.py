"""Virtual time and a virtual network for any core: hosts, streams, and everything that goes wrong between them.

    host     an address, two clocks (monotonic with its own zero, and a wall clock that may be wrong), and
             a `Shell` around a core
    stream   two `End`s; what is sent is really encoded, packed, unpacked and decoded, so limits hold
    weather  delays, and what becomes of messages; `cut` stops a direction between hosts, `sleep` a host

Two kinds of weather. *Ordered*, as TCP does it: a lost packet is a delay, messages stay in order, and a
stream may break as a whole, with all that is on its way. *Disorderly*, as datagrams would be: each message
after a stream's first may be lost, doubled or overtaken; nothing of ours travels so, but a core that stands
it owes its health to no luck of the order. In both, a cut holds messages up; if it lasts, each side finds
out by itself (`DEAD_S`, as pings do in wire.py) and the other one as soon as a word gets through again.

Invariants: everything that happens follows from the seed, in one order (`trace` is a hash over it); a
direction holds at most WINDOW messages that haven't arrived, so back-pressure reaches the core; a shell
gets one `turn` for all that happened to it at one instant.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarm.errors import MessageError
from swarm.messages import Message, decode, encode
from swarm.packing import pack, unpack

DIAL_TIMEOUT_S = 5.0  # transport.py
DEAD_S = (15.0, 20.0)  # wire.py: 15 s after a ping that nobody answered
WINDOW = 32  # a stream's credit, in messages


@dataclass(frozen=True)
class Weather:
    """delay_s: one way, drawn anew for each message. loss, doubling: shares of messages (ordered: a lost
    one comes late, none is doubled). overtaking: share of messages that take up to ten times as long.
    breaks_per_s: how often a stream ends with all that is on its way."""

    delay_s: tuple[float, float] = (0.02, 0.02)
    ordered: bool = True
    loss: float = 0.0
    doubling: float = 0.0
    overtaking: float = 0.0
    breaks_per_s: float = 0.0


CALM = Weather()
RESENT_S = (0.2, 1.0)  # what a lost packet costs an ordered stream


class Shell(Protocol):
    """What drives a core on a host, as node.py does on a real one."""

    def opened(self, end: End) -> None:
        """Somebody opened a stream to us; its first message follows."""

    def received(self, end: End, message: Message) -> None:
        """Raises MessageError: then the stream is reset and `ended`."""

    def ended(self, end: End) -> None:
        """The stream is gone. Called once, unless we ended it."""

    def turn(self) -> None:
        """Something happened, or the alarm rang: tick, act, send, set the alarm anew."""


@dataclass(eq=False)
class End:
    """One side of a stream. tag: whatever the shell knows it by."""

    host: Host
    opened_here: bool
    tag: Any = None
    open: bool = True
    known: bool = True  # whether the shell has been told of it
    in_flight: int = 0
    arriving_at: float = 0.0
    silent_since: float | None = None  # nothing can come from the other side since then
    held_up: list[tuple[bytes, float]] = field(default_factory=list)  # for the other side, while cut off
    reading: bool = True  # False: takes nothing more, so that the other side's window fills up
    transit_s: float = 0.0  # how long the message that is handed over now was on its way
    other: End = field(init=False)

    @property
    def writable(self) -> bool:
        return self.in_flight < WINDOW

    @property
    def peer(self) -> Host:
        return self.other.host

    def send(self, message: Message) -> None:
        """Raises ValueError for a message above its limit: the sender's own bug."""
        values, tensors = encode(message)
        self.send_bytes(b"".join(pack(values, tensors)))

    def send_bytes(self, data: bytes) -> None:
        """Whatever a hostile peer likes to send."""
        self.host.network._send(self, data)

    def close(self) -> None:
        """A polite end: what is on its way still arrives."""
        self.host.network._close(self, politely=True)

    def reset(self) -> None:
        self.host.network._close(self, politely=False)


@dataclass(eq=False)
class Host:
    """clock_s: what its monotonic clock shows at virtual time 0. wall_error_s: of its wall clock."""

    network: Network
    name: str
    address: str
    clock_s: float
    wall_error_s: float = 0.0
    up: bool = True
    asleep: bool = False
    dead_silently: bool = False  # no word of it reaches the others
    ends: dict[End, None] = field(default_factory=dict)  # a set in order
    shell: Shell = field(init=False)
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    _alarm_at: float = math.inf  # virtual time

    def clock(self) -> float:
        """Monotonic seconds, time asleep included."""
        return self.network.now + self.clock_s

    def wall_ms(self) -> int:
        return int((WALL_S + self.network.now + self.wall_error_s) * 1000)

    def alarm(self, at: float) -> None:
        """`turn` at this time of `clock` at the latest, in place of the last alarm."""
        self.network._set_alarm(self, at - self.clock_s)

    def dial(self, address: str, answer: Callable[[End | None], None]) -> None:
        """A stream to whoever is there, or None when nobody answers."""
        self.network._dial(self, address, answer)

    def mark(self) -> None:
        """Give the shell a turn at this instant."""
        self.network._dirty[self] = None


WALL_S = 1_764_000_000.0  # the true time at virtual time 0


class Network:
    """turn_s: times are rounded up to multiples of it, so that one turn answers more (0: not at all)."""

    def __init__(self, seed: object, weather: Weather = CALM, *, turn_s: float = 0.0) -> None:
        self.rng = random.Random(f"network {seed}")
        self.weather = weather
        self.now = 0.0
        self.hosts: dict[str, Host] = {}  # by address
        self.events = 0
        self.on_event: Callable[[str], None] | None = None  # told every event in words
        self._turn_s = turn_s
        self._cut: set[tuple[str, str]] = set()
        self._dirty: dict[Host, None] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._trace = hashlib.blake2b(digest_size=16)

    # ------------------------------------------------------------ hosts

    def add(self, name: str, address: str, *, wall_error_s: float = 0.0) -> Host:
        """A host that is up; its `shell` must be set before anything happens to it."""
        host = Host(self, name, address, clock_s=self.rng.uniform(0.0, 1e6), wall_error_s=wall_error_s)
        self.hosts[address] = host
        return host

    def crash(self, host: Host, *, silently: bool) -> None:
        """The process is gone. silently: and so is its machine, so that nobody is told."""
        self.note(f"{host.name} crashes{' silently' if silently else ''}")
        host.up, host.dead_silently = False, silently
        if self.hosts.get(host.address) is host:
            del self.hosts[host.address]
        for end in list(host.ends):
            self._forget(end)
            if silently:
                self._silence(end.other)
            else:
                self._tell_of_end(end.other)

    def sleep(self, host: Host) -> None:
        """Suspended: nothing runs and nothing arrives, while its clock goes on."""
        self.note(f"{host.name} falls asleep")
        host.asleep = True
        self._silence_across()

    def wake(self, host: Host) -> None:
        self.note(f"{host.name} wakes")
        host.asleep = False
        if host.up:
            self._dirty[host] = None
            self._reconnect()
            self._silence_across()

    # ------------------------------------------------------------ cuts

    def cut(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Nothing gets from these names to those. Cut both ways for a whole partition."""
        self._cut.update(itertools.product(senders, receivers))
        self._silence_across()

    def heal(self) -> None:
        self._cut.clear()
        self._reconnect()

    @property
    def is_cut(self) -> bool:
        return bool(self._cut)

    def passes(self, sender: Host, receiver: Host) -> bool:
        """Whether a word gets through now."""
        if sender.asleep or receiver.asleep or sender.dead_silently or receiver.dead_silently:
            return False
        return not self._cut or (sender.name, receiver.name) not in self._cut

    # ------------------------------------------------------------ time

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        if self._turn_s:
            time = math.ceil(time / self._turn_s) * self._turn_s
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), call, args))

    def run(self, until: float) -> None:
        """Let everything happen that happens before or at this virtual time."""
        while self.step(until):
            pass

    def step(self, until: float) -> bool:
        """Go on to the next instant at which something happens; False (and `now` is `until`) if none does."""
        self._give_turns()
        queue = self._queue
        if not queue or queue[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now = queue[0][0]
        while queue and queue[0][0] <= self.now:
            _, _, call, args = heapq.heappop(queue)
            call(*args)
        self._give_turns()
        return True

    def note(self, what: str, data: bytes = b"") -> None:
        """Part of the trace."""
        self.events += 1
        self._trace.update(f"{self.now!r} {what} {len(data)}\n".encode())
        self._trace.update(data)
        if self.on_event is not None:
            self.on_event(f"{self.now:10.3f}  {what}" + (f", {len(data)} bytes" if data else ""))

    def trace(self) -> str:
        """A hash over everything that happened: times, hosts, and the bytes of all messages."""
        return self._trace.hexdigest()

    def _give_turns(self) -> None:
        while self._dirty:
            host = next(iter(self._dirty))
            del self._dirty[host]
            if host.up and not host.asleep:
                host.shell.turn()

    def _set_alarm(self, host: Host, at: float) -> None:
        at = max(at, self.now + 1e-6)  # the two clocks may differ by a rounding
        if at < host._alarm_at or host._alarm_at <= self.now:
            host._alarm_at = at
            self.at(at, self._ring, host, at)
        # a later one needs no event: the old one rings, and the shell sets it anew

    def _ring(self, host: Host, at: float) -> None:
        if at == host._alarm_at:
            host._alarm_at = math.inf
            self._dirty[host] = None

    # ------------------------------------------------------------ streams

    def _delay(self, weather: Weather) -> float:
        low, high = weather.delay_s
        delay = low if low == high else self.rng.uniform(low, high)
        if weather.overtaking and self.rng.random() < weather.overtaking:
            delay *= self.rng.uniform(1.0, 10.0)
        return delay

    def _dial(self, caller: Host, address: str, answer: Callable[[End | None], None]) -> None:
        there = self.hosts.get(address)
        trip = sum(self._delay(self.weather) for _ in range(3))  # connect, and the handshake's three parts
        if there is None or (self.passes(caller, there) and self.passes(there, caller)):
            self.at(self.now + trip, self._answer_dial, caller, there, answer)
        else:
            self.at(self.now + DIAL_TIMEOUT_S, self._answer_dial, caller, None, answer)

    def _answer_dial(self, caller: Host, there: Host | None, answer: Callable[[End | None], None]) -> None:
        if not caller.up:
            return
        good = there is not None and there.up and self.passes(caller, there) and self.passes(there, caller)
        answer(self.connect(caller, there) if there is not None and good else None)
        self._dirty[caller] = None

    def connect(self, caller: Host, there: Host) -> End:
        """A stream, at once. The other side hears of it with the first message."""
        ours, theirs = End(caller, True), End(there, False, known=False)
        ours.other, theirs.other = theirs, ours
        caller.ends[ours] = there.ends[theirs] = None
        self._draw_break(ours)
        return ours

    def _draw_break(self, end: End) -> None:
        if self.weather.breaks_per_s > 0:
            after = self.rng.expovariate(self.weather.breaks_per_s)
            self.at(self.now + after, self._break, end)

    def storm(self, weather: Weather) -> None:
        """Other weather from now on, for the streams that are there too."""
        self.weather = weather
        for host in list(self.hosts.values()):
            for end in host.ends:
                if end.opened_here:
                    self._draw_break(end)

    def _break(self, end: End) -> None:
        if self.weather.breaks_per_s > 0 and end.open and end.other.open:
            self.note(f"the stream {end.host.name} > {end.peer.name} breaks")
            for side in (end, end.other):
                self._end(side)

    def _send(self, end: End, data: bytes) -> None:
        if not end.open:
            return
        host, other = end.host, end.other
        host.sent_bytes += len(data)
        host.sent_messages += 1
        first = not other.known and end.arriving_at == 0.0
        if not other.open:
            return  # nobody is there any more, and we shall hear of it
        copies, delay = self._fate(end, first)
        end.in_flight += 1
        if copies == 0:
            self.at(self.now + delay, self._taken, end)
        for n in range(copies):
            self.at(self.now + delay * (n + 1), self._arrive, other, data, self.now, n == 0)

    def _fate(self, end: End, first: bool) -> tuple[int, float]:
        """How many copies of a message arrive, and after how long."""
        weather, rng = self.weather, self.rng
        delay = self._delay(weather)
        if weather.ordered or first:
            if weather.loss and rng.random() < weather.loss:
                delay += rng.uniform(*RESENT_S)
            end.arriving_at = max(end.arriving_at, self.now + delay)
            return 1, end.arriving_at - self.now
        copies = 1 - (rng.random() < weather.loss) + (rng.random() < weather.doubling)
        return copies, max(delay, end.arriving_at - self.now if not end.other.known else 0.0)

    def _taken(self, end: End) -> None:
        """A message of its has arrived, or never will: there is room for another one."""
        end.in_flight -= 1
        if end.in_flight == WINDOW - 1:
            self._dirty[end.host] = None

    def _arrive(self, end: End, data: bytes, sent_at: float, counts: bool) -> None:
        sender = end.other
        if not end.reading and end.open:
            return
        if counts:
            self._taken(sender)
        if not end.open:
            return
        if not self.passes(sender.host, end.host):
            if counts and (self.weather.ordered or not end.known):
                sender.in_flight += 1
                sender.held_up.append((data, sent_at))
            return
        end.transit_s = self.now - sent_at
        self._hand_over(end, data)

    def _hand_over(self, end: End, data: bytes) -> None:
        host = end.host
        host.received_bytes += len(data)
        self.note(f"{end.peer.name} > {host.name}", data)
        self._dirty[host] = None
        try:
            message = decode(*unpack(data))
            if not end.known:
                end.known = True
                host.shell.opened(end)
            if end.open:
                host.shell.received(end, message)
        except MessageError as error:
            self.note(f"{host.name} resets {end.peer.name}: {error}")
            known, was_open = end.known, end.open
            self._close(end, politely=False)
            if known and was_open:
                host.shell.ended(end)

    # ------------------------------------------------------------ ends

    def _close(self, end: End, *, politely: bool) -> None:
        """Our shell doesn't want it any more. The other side hears of it when a word gets through."""
        if not end.open:
            return
        self._forget(end)
        if self.passes(end.host, end.peer):
            self._tell_of_end(end.other, after=end.arriving_at if politely else 0.0)

    def _tell_of_end(self, end: End, after: float = 0.0) -> None:
        self.at(max(self.now + self._delay(self.weather), after), self._hear_of_end, end)

    def _hear_of_end(self, end: End) -> None:
        if end.open and self.passes(end.peer, end.host):
            self._end(end)

    def _end(self, end: End) -> None:
        """The host finds out that the stream is gone."""
        if not end.open:
            return
        self._forget(end)
        self.note(f"{end.host.name} finds its stream with {end.peer.name} gone")
        if end.known:
            end.host.shell.ended(end)
        self._dirty[end.host] = None

    def _forget(self, end: End) -> None:
        end.open = False
        end.host.ends.pop(end, None)
        end.held_up.clear()

    def _silence_across(self) -> None:
        """Something was cut: whoever can't hear an other side any more gives it up after a while."""
        for host in list(self.hosts.values()):
            for end in host.ends:
                if end.silent_since is None and not self.passes(end.peer, host):
                    self._silence(end)

    def _silence(self, end: End) -> None:
        end.silent_since = self.now
        self.at(self.now + self.rng.uniform(*DEAD_S), self._give_up, end, self.now)

    def _give_up(self, end: End, since: float) -> None:
        if not end.open or end.silent_since != since:
            return
        if end.host.asleep:
            end.silent_since = None  # it counts from when it wakes
            return
        way_back = self.passes(end.host, end.peer)
        self._end(end)
        if way_back and end.other.open:
            self._tell_of_end(end.other)

    def _reconnect(self) -> None:
        """Something was healed: what was held up arrives, and what ended meanwhile is heard of."""
        for host in list(self.hosts.values()):
            for end in list(host.ends):
                if not self.passes(end.peer, host):
                    continue
                end.silent_since = None
                if not end.other.open:
                    self._tell_of_end(end)
                    continue
                held_up, end.other.held_up = end.other.held_up, []
                for data, sent_at in held_up:  # at once, before what was sent after it
                    self.at(self.now, self._arrive, end, data, sent_at, True)
