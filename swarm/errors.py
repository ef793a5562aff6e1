"""The whole error tree.

    SwarmError
    ├── UsageError               the caller asked for something impossible; nothing was sent
    │   ├── PromptTooLong
    │   ├── UnknownModel
    │   └── AmbiguousModel
    ├── ModelError               a model on disk or on the hub can't be served; nothing is advertised
    │   ├── ModelNotFound
    │   ├── UnsupportedModel
    │   ├── BrokenModel          a file or tensor is missing, truncated or unreadable
    │   └── GatedModel
    ├── CapacityError            memory or disk is too small; nothing was allocated
    │   └── CacheFull            a KV reservation is exhausted; KV unchanged
    ├── OutOfStep                a step starts beyond the KV's length; KV unchanged
    ├── CannotRewind             a step starts before what attention windows have kept; KV unchanged
    ├── StepFailed               this peer couldn't finish one session's step; the others are unaffected
    │   └── BadInput             since what it got for it can't be right: the sender's fault
    ├── EngineStopped            this peer's engine takes no more steps
    ├── Unreachable              nobody answers at an address
    │   └── PortTaken
    ├── IdentityError            a key file or a proved identity isn't what it has to be
    ├── NoRoute                  no live chain covers the model; nothing was sent
    ├── GenerationFailed         repairs were tried and ran out; the text so far is kept in it
    ├── Refused                  the peer said no (full, draining, wrong model): re-plan, no blame
    ├── PeerFailed               a peer is dead or stuck: re-route, counted locally
    ├── LinkFailed               two peers can't reach each other: blames neither
    ├── StepRejected             the same step failed on two peers: the request's own fault
    ├── SendQueueFull            a stream's other side takes nothing; the message wasn't queued
    └── RemoteError              what came from the network breaks the protocol
        ├── VersionMismatch      costs the connection
        ├── HandshakeError       costs the connection
        │   └── StrangeProgram   the other side speaks another protocol: dropped without a word
        ├── FramingError         costs the connection
        ├── Flooded              too much of what is cheap to send: costs the connection, and a time outside
        ├── MessageError         costs the stream only
        ├── TemplateFailed       the model's chat template is broken or reached a limit; nothing was sent
        ├── TokenizerFailed      the model's tokenizer is broken or reached a limit; nothing was sent
        └── StreamClosed         the other side ended or reset this stream

Three failures are never mixed: `PeerFailed`/`LinkFailed`, `Refused`, and our own bugs, which are
ordinary exceptions (AssertionError, TypeError, ...) and propagate: never retried, never blamed on a peer.
Every error keeps its facts as fields and says them, with the remedy, in its text.
"""

from __future__ import annotations

from collections.abc import Sequence


class SwarmError(Exception):
    """Everything that this package raises on purpose."""


class UsageError(SwarmError):
    """The caller asked for something impossible. Nothing was sent."""


class PromptTooLong(UsageError):
    def __init__(self, tokens: int, context: int) -> None:
        self.tokens, self.context = tokens, context
        super().__init__(
            f"the prompt has {tokens} tokens and this chain's context is {context}; "
            f"shorten it by at least {tokens - context + 1} tokens"
        )


class UnknownModel(UsageError):
    """model: "" where any would have done."""

    def __init__(self, model: str, known: Sequence[str]) -> None:
        self.model, self.known = model, tuple(known)
        if known:
            text = f"no peer serves {model!r}; this swarm serves {', '.join(known)}"
        else:
            what = f"{model!r} or any other model" if model else "any model"
            text = f"no peer serves {what} here; start one with: swarm peer MODEL --join ADDR"
        super().__init__(text)


class AmbiguousModel(UsageError):
    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = tuple(choices)
        super().__init__(f"several models are live, name one (--model, or model=): {', '.join(choices)}")


class ModelError(SwarmError):
    """A model can't be served. Nothing was advertised."""


class ModelNotFound(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class BrokenModel(ModelError):
    pass


class GatedModel(ModelError):
    pass


class CapacityError(SwarmError):
    """Memory or disk is too small. Nothing was allocated."""


class CacheFull(CapacityError):
    def __init__(self, wanted: int, reserved: int) -> None:
        self.wanted, self.reserved = wanted, reserved
        super().__init__(f"the step needs {wanted} KV positions, {reserved} are reserved; extend it first")


class OutOfStep(SwarmError):
    def __init__(self, position: int, length: int) -> None:
        self.position, self.length = position, length
        super().__init__(f"a step at position {position} would leave a hole: the KV holds {length}")


class CannotRewind(SwarmError):
    """`oldest`: a step may start there or later, or at 0."""

    def __init__(self, position: int, oldest: int) -> None:
        self.position, self.oldest = position, oldest
        super().__init__(
            f"a step at position {position} attends to what this model's windows have let go: it may start at "
            f"{oldest} or later, or at 0 with everything computed again"
        )


class StepFailed(SwarmError):
    """A step gave nothing usable. The session's KV is at the step's position, its neighbours are unaffected."""

    def __init__(self, layers: str, reason: str) -> None:
        self.layers, self.reason = layers, reason
        super().__init__(f"layers {layers} couldn't finish a step: {reason}")


class BadInput(StepFailed):
    """What came for a step can't be right: its sender is at fault. Nothing was run, the session's KV is as before."""


class EngineStopped(SwarmError):
    """The engine was stopped. The step didn't run."""

    def __init__(self) -> None:
        super().__init__("this peer's engine was stopped; open the session on another peer")


class Unreachable(SwarmError):
    def __init__(self, address: str, reason: str, remedy: str = "is a peer running there?") -> None:
        self.address, self.reason = address, reason
        super().__init__(f"nobody answers at {address} ({reason}); {remedy}")


class PortTaken(Unreachable):
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        SwarmError.__init__(
            self, f"port {port} on {host} is already taken; leave out --port to use the next free one"
        )


class IdentityError(SwarmError):
    pass


class NoRoute(SwarmError):
    """No live chain covers the model. Nothing was sent. why: in place of "no live peer serves" the gap."""

    def __init__(self, model: str, gap: str, alive: int, known: int, remedy: str, why: str = "") -> None:
        self.model, self.gap, self.alive, self.known = model, gap, alive, known
        why = why or f"no live peer serves layers {gap} of {model}"
        super().__init__(f"{why} ({alive} of {known} known peers alive); {remedy}")


class GenerationFailed(SwarmError):
    """Repairs ran out. `text` and `token_ids` hold what was generated until then."""

    def __init__(self, reason: str, text: str = "", token_ids: Sequence[int] = ()) -> None:
        self.reason, self.text, self.token_ids = reason, text, tuple(token_ids)
        super().__init__(f"{reason} (after {len(token_ids)} tokens)")


class Refused(SwarmError):
    """The peer said no, at once and politely. `retry_after_s` is its own estimate, 0 if it has none."""

    def __init__(self, peer: str, reason: str, retry_after_s: float = 0.0) -> None:
        self.peer, self.reason, self.retry_after_s = peer, reason, retry_after_s
        super().__init__(f"peer {peer[:8]} refused: {reason}")


class PeerFailed(SwarmError):
    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"peer {peer[:8]} failed: {reason}")


class LinkFailed(SwarmError):
    def __init__(self, a: str, b: str, reason: str) -> None:
        self.a, self.b, self.reason = a, b, reason
        super().__init__(f"the link {a[:8]} -> {b[:8]} failed: {reason}")


class StepRejected(SwarmError):
    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"two peers rejected the same step, so the request is at fault: {reason}")


class SendQueueFull(SwarmError):
    """Too much is waiting on this stream already. The message was not queued."""

    def __init__(self, queued: int, bound: int) -> None:
        self.queued, self.bound = queued, bound
        super().__init__(f"{queued} bytes wait on this stream, {bound} are allowed; await send() instead")


class RemoteError(SwarmError):
    """What came from the network breaks the protocol."""


class VersionMismatch(RemoteError):
    def __init__(self, ours: int, theirs: int) -> None:
        self.ours, self.theirs = ours, theirs
        older = "this program" if ours < theirs else "the other side"
        super().__init__(f"protocol {ours} here, {theirs} there; update {older}")


class HandshakeError(RemoteError):
    pass


class StrangeProgram(HandshakeError):
    """Not LayerSwarm at all (a browser, a scanner). Nothing was sent to it."""


class FramingError(RemoteError):
    pass


class Flooded(RemoteError):
    pass


class MessageError(RemoteError):
    pass


class TemplateFailed(RemoteError):
    """The chat template that came with the model is at fault. Nothing was sent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the model's chat template failed: {reason}; a raw prompt works without it")


class TokenizerFailed(RemoteError):
    """The tokenizer that came with the model is at fault. Nothing was sent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the model's tokenizer failed: {reason}; name the peers to use (only=...) if you know any")


class StreamClosed(RemoteError):
    """`reason` is what the other side gave, or why the connection is gone."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"stream closed: {reason}")
