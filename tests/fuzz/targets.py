"""The parsers that read what strangers wrote: how to make an input for each, and what may come of it.

`feed` returns whether the input was accepted. It raises one of `errors` to refuse it; anything else that it
raises is a fault, as is what it asserts: that what was accepted comes back equal when it is written and read
again, that a handshake accepts nothing but its own bytes, that a connection holds no more than its limits.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgpack

from peer import fingerprint, hub
from peer.directory import DirectoryFiles
from peer.gguf_header import read_gguf_header
from peer.layout import load_config, read_layout
from peer.safetensors_header import parse_header
from swarm import addresses, confined, messages, packing, template, tokenizer, tokenizer_worker
from swarm.errors import (
    BrokenModel,
    IdentityError,
    MessageError,
    ModelError,
    RemoteError,
    SwarmError,
    TemplateFailed,
    TokenizerFailed,
    UsageError,
)
from swarm.facts import ModelFacts
from swarm.identity import Identity, PeerId
from swarm.messages import Delta, Message, Told, Where
from swarm.noise import Handshake
from swarm.records import SIGNATURE_BYTES, check_signature, open_record, read_record, sign_record
from swarm.registry import Kind, Registry
from swarm.state import KnownHosts, StateDir, _load_key
from swarm.tensors import read_floats, read_ids
from swarm.wire import Closed, Connection, MessageReceived, Priority, StreamReset
from tests.fuzz import samples, values
from tests.fuzz.mutate import ODD_FOR_JSON, ODD_FOR_MSGPACK, mutated_bytes, mutated_tree

Errors = tuple[type[SwarmError], ...]


@dataclass(frozen=True)
class Target:
    """inputs: how many plain pytest feeds. corpus: what has to be accepted. make: an input from randomness alone;
    where there is none, bytes of the corpus are changed."""

    name: str
    inputs: int
    errors: Errors
    corpus: Callable[[], Sequence[bytes]]
    feed: Callable[[bytes], bool]
    make: Callable[[random.Random], bytes] | None = None


def input_of(target: Target, seed: int, number: int) -> bytes:
    """The same bytes for the same three, on every machine."""
    rng = random.Random(f"{seed}/{target.name}/{number}")
    return target.make(rng) if target.make is not None else from_bytes(target.corpus, rng)


def accepts(target: Target, data: bytes) -> bool:
    """Whether `data` was accepted; refusing it with one of the target's errors is as good."""
    try:
        return target.feed(data)
    except target.errors:
        return False


def from_bytes(corpus: Callable[[], Sequence[bytes]], rng: random.Random) -> bytes:
    return mutated_bytes(rng, rng.choice(corpus()), corpus())


# ---------------------------------------------------------------- the handshake

DIALLER = Identity.from_seed(bytes(range(32)))
LISTENER = Identity.from_seed(bytes(range(1, 33)))


def dialler() -> Handshake:
    return Handshake("initiator", DIALLER, "main", rng=random.Random(1).randbytes)


def listener() -> Handshake:
    return Handshake("responder", LISTENER, "main", rng=random.Random(2).randbytes)


@cache
def transcript() -> tuple[bytes, bytes]:
    """(what the dialler says, what the listener says) when nobody interferes."""
    one, other = dialler(), listener()
    first = one.data_to_send()
    other.receive(first)
    answer = other.data_to_send()
    one.receive(answer)
    return first + one.data_to_send(), answer


def feed_handshake(make: Callable[[], Handshake], heard: int, data: bytes) -> bool:
    side = make()
    for chunk in chunks(data):
        if side.done is None:
            side.receive(chunk)
            side.data_to_send()
    if side.done is not None:
        assert data.startswith(transcript()[heard]), "a changed handshake was accepted"
    return side.done is not None


def chunks(data: bytes) -> list[bytes]:
    """Cut somewhere, the same way for the same bytes."""
    rng = random.Random(data)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 3))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# ---------------------------------------------------------------- records of the wire, frames, streams


class _Plain:
    """A cipher that encrypts nothing: what is fuzzed is what stands behind it."""

    def encrypt(self, plaintext: bytes) -> bytes:
        return bytes(plaintext) + bytes(16)

    def decrypt(self, ciphertext: memoryview) -> bytes:
        return bytes(ciphertext[: max(len(ciphertext) - 16, 0)])


def connection(role: Any) -> Connection:
    """Right behind its handshake, unencrypted."""
    made = Connection(role, LISTENER, "main", rng=random.Random(3).randbytes)
    made._handshake, made.peer = None, DIALLER.peer_id
    made._sender = made._receiver = _Plain()  # type: ignore[assignment]
    return made


def sent_by(side: Connection) -> bytes:
    return b"".join(iter(side.data_to_send, b""))


@cache
def conversations() -> list[bytes]:
    """What a side says on a connection: every kind of frame, and every kind of message."""
    said = []
    every = values.examples(values.any_message, 60)
    for start in range(0, len(every), 6):
        side = connection("initiator")
        stream, other = side.open_stream(), side.open_stream()
        for place, message in enumerate(every[start : start + 6]):
            side.send((stream, other)[place % 2], message, Priority(place % 4))
        side.ping(1.0)
        side.end(stream)
        sent = sent_by(side)
        side.reset(other, GIVEN_UP)
        said.append(sent + sent_by(side))
    side = connection("initiator")
    stream = side.open_stream()
    side.send(stream, messages.Step({"hidden": samples.tensor(66_000)}, epoch=1), Priority.BULK)
    said.append(sent_by(side))
    framed = (b"\1\0\0\0\0\1\0\0\4\0", b"\5\0\0\0\0\0" + bytes(8), b"\6\0\0\0\0\0bye")
    said.append(b"".join((len(one) + 16).to_bytes(2, "big") + one + bytes(16) for one in framed))
    return said


GIVEN_UP = "over"


def feed_frames(data: bytes) -> bool:
    side = connection("responder")
    limits, good = side.limits, True
    for now, chunk in enumerate(chunks(data)):
        side.receive_data(chunk, float(now))
        for event in side.events():
            if isinstance(event, MessageReceived):
                side.consumed(event)
            elif isinstance(event, Closed):
                assert event.error is None or isinstance(event.error, RemoteError), event
                good = event.error is None
            elif isinstance(event, StreamReset):
                good &= event.reason == GIVEN_UP  # else it is what this side thinks of it
        assert side._held <= limits.held_bytes + limits.max_message_bytes
        assert side.streams <= 2 * limits.max_streams and len(side._urgent) <= 4096
        sent_by(side)
    return good and (side.closed or not side._buffer)


# ---------------------------------------------------------------- messages and tensor headers


@cache
def packed_messages() -> list[bytes]:
    return [packed(message) for message in values.examples(values.any_message, 150)]


@cache
def packed_with_tensors() -> list[bytes]:
    return [data for data in packed_messages() if packing.unpack(data)[1]]


def packed(message: Message) -> bytes:
    return b"".join(packing.pack(*messages.encode(message)))


def message_with_another_map(rng: random.Random) -> bytes:
    """The tree of the map is another; its encoding and the tensors' bytes are as they were."""
    data = rng.choice(packed_messages())
    size = int.from_bytes(data[:2], "big")
    tree = mutated_tree(rng, msgpack.unpackb(data[2 : 2 + size]), ODD_FOR_MSGPACK)
    return framed_map(tree) + data[2 + size :]


def message_with_other_tensors(rng: random.Random) -> bytes:
    data = rng.choice(packed_with_tensors())
    size = int.from_bytes(data[:2], "big")
    tree = msgpack.unpackb(data[2 : 2 + size])
    tree["#"] = mutated_tree(rng, tree["#"], ODD_FOR_MSGPACK)
    return framed_map(tree) + data[2 + size :]


def framed_map(tree: Any) -> bytes:
    body: bytes = msgpack.packb(tree)
    return min(len(body), 65_535).to_bytes(2, "big") + body


def message_input(rng: random.Random) -> bytes:
    return message_with_another_map(rng) if rng.random() < 0.6 else from_bytes(packed_messages, rng)


def feed_message(data: bytes) -> bool:
    message = messages.decode(*packing.unpack(data))
    for tensor in packing.unpack(data)[1].values():
        for read in (read_ids, read_floats):
            with contextlib.suppress(MessageError):
                read(tensor)
    if isinstance(message, messages.Tokens):
        with contextlib.suppress(MessageError):
            message.likelihoods()
    with contextlib.suppress(ValueError):  # defaults that were left out may not fit any more
        assert messages.decode(*packing.unpack(packed(message))) == message
    return True


# ---------------------------------------------------------------- records, and the registry that takes them


@cache
def signed_records() -> list[bytes]:
    return [sign_record(values.SIGNER, record) for record in values.examples(values.any_record, 60)]


def record_input(rng: random.Random) -> bytes:
    signed = rng.choice(signed_records())
    if rng.random() < 0.4:
        return from_bytes(signed_records, rng)
    tree = mutated_tree(rng, msgpack.unpackb(signed[SIGNATURE_BYTES:]), ODD_FOR_MSGPACK)
    payload: bytes = msgpack.packb(tree)
    return values.SIGNER.sign(b"record", payload) + payload


def feed_record(data: bytes) -> bool:
    record = read_record(data)
    check_signature(record, data)
    if record.peer == values.SIGNER.peer_id:
        with contextlib.suppress(UsageError):  # written without what an older release doesn't know, or longer
            once = open_record(sign_record(values.SIGNER, record))
            assert open_record(sign_record(values.SIGNER, once)) == once
    return True


REGISTRY_KINDS = (messages.GossipHello, messages.Subscribe, messages.Offer, messages.Ask, Delta, messages.Digest)


def gossip() -> list[bytes]:
    return [msgpack.packb([msgpack.unpackb(packed(one)[2:]) for one in samples.gossip(values.SIGNER)])]


@cache
def registry_messages() -> list[Message]:
    heads = [signed for signed in signed_records() if not isinstance(read_record(signed), values.Descriptor)]
    descriptors = [signed for signed in signed_records() if isinstance(read_record(signed), values.Descriptor)]
    deltas: list[Message] = [
        Delta((Told(head, 0.0, None), Told(head, 5.0, descriptors[place % len(descriptors)])))
        for place, head in enumerate(heads)
    ]
    others = [one for kind in REGISTRY_KINDS for one in values.examples(values.messages(kind), 8)]
    return deltas + others + samples.gossip(values.SIGNER)


def registry_input(rng: random.Random) -> bytes:
    """Several messages, some of them changed."""
    said = []
    for _ in range(rng.choice((1, 3, 6))):
        data = packed(rng.choice(registry_messages()))
        tree = msgpack.unpackb(data[2:])
        said.append(mutated_tree(rng, tree, ODD_FOR_MSGPACK) if rng.random() < 0.3 else tree)
    return bytes(msgpack.packb(said))


def feed_registry(data: bytes) -> bool:
    try:
        said = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError):  # libFuzzer makes what holds no messages at all
        return False
    registry = Registry(Identity.from_seed(b"r" * 32), now=0.0, rng=random.Random(4))
    registry.attach(1, DIALLER.peer_id, Kind.GOSSIP, opened_here=True, now=0.0)
    registry.attach(2, LISTENER.peer_id, Kind.GOSSIP, opened_here=False, now=0.0)
    registry.attach(3, PeerId("client"), Kind.SUBSCRIBER, opened_here=False, now=0.0)
    good = True
    for place, tree in enumerate(said if isinstance(said, list) else []):
        try:
            message = messages.decode(*packing.unpack(framed_map(tree)))
            key = 3 if isinstance(message, messages.Subscribe) or place % 5 == 4 else 1 + place % 2
            registry.receive(key, message, float(place))
        except MessageError:
            good = False
        for _, answer in registry.drain(place + 0.5):
            assert len(packed(answer)) <= 2 + packing.MAX_MAP_BYTES
        registry.tick(place + 0.5)
        registry.actions()
    registry.tick(10_000.0)
    return good


# ---------------------------------------------------------------- headers of weight files


def json_or_bytes(texts: Callable[[], Sequence[bytes]], rng: random.Random) -> bytes:
    """JSON that says something else, or that is none any more."""
    text = rng.choice(texts())
    if rng.random() < 0.4:
        return mutated_bytes(rng, text, texts())
    return json.dumps(mutated_tree(rng, json.loads(text), ODD_FOR_JSON)).encode("utf-8", "surrogatepass")


def safetensors_files() -> list[bytes]:
    header, data = samples.safetensors_header()
    return [len(header).to_bytes(8, "little") + header + data]


def safetensors_input(rng: random.Random) -> bytes:
    header, data = samples.safetensors_header()
    if rng.random() < 0.3:
        return from_bytes(safetensors_files, rng)
    changed = json_or_bytes(lambda: [header], rng)
    return len(changed).to_bytes(8, "little") + changed + data


@cache
def scratch() -> Path:
    """A directory for files, gone with the process; in memory where there is such a place, for writes are flushed."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="layerswarm-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def written(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def feed_safetensors(data: bytes) -> bool:
    with written("model.safetensors", data).open("rb") as stream:
        header = parse_header(stream, "model.safetensors")
    for name, spec in header.tensors.items():
        assert 8 <= header.starts[name] <= header.starts[name] + spec.nbytes <= len(data)
    return True


def feed_gguf(data: bytes) -> bool:
    header = read_gguf_header(data, "tiny.gguf")
    assert header.nbytes <= len(data)
    assert all(0 < one.offset <= one.offset + one.nbytes <= len(data) for one in header.tensors.values())
    return True


# ---------------------------------------------------------------- a model's small files


def feed_config(data: bytes) -> bool:
    """config.json and the index of shards, as of a directory or repository that somebody else filled."""
    written("model/config.json", data)
    written("model/model.safetensors.index.json", data)
    sizes = {"config.json": len(data), "model.safetensors.index.json": len(data), "model-1.safetensors": 1}
    files = DirectoryFiles("fuzzed", scratch() / "model", sizes, fingerprint.FileHashes(scratch() / "hashes"))
    load_config(files, lambda *_: None)
    read_layout(files, lambda *_: None)
    return True


def config_input(rng: random.Random) -> bytes:
    return json_or_bytes(samples.configs, rng)


def facts_input(rng: random.Random) -> bytes:
    return json_or_bytes(samples.facts, rng)


def feed_facts(data: bytes) -> bool:
    ModelFacts.from_bytes(data)
    return True


# ---------------------------------------------------------------- tokenizers and templates


def tokenizers() -> list[bytes]:
    return [bytes(msgpack.packb(files)) for files in samples.bundles()]


def tokenizer_input(rng: random.Random) -> bytes:
    files = dict(rng.choice(samples.bundles()))
    name = rng.choice(["tokenizer.json"] * 4 + ["tokenizer_config.json", "special_tokens_map.json", "model.json"])
    if rng.random() < 0.2:
        files[name] = mutated_bytes(rng, files[name], [files[name]])
    else:
        tree = mutated_tree(rng, json.loads(files[name]), ODD_FOR_JSON)
        files[name] = json.dumps(tree).encode("utf-8", "surrogatepass")
    return bytes(msgpack.packb(files))


def feed_tokenizer(data: bytes) -> bool:
    """What the process does that reads a tokenizer, and what is done here with its answer."""
    files: dict[str, bytes] = msgpack.unpackb(data)
    facts, worker = tokenizer.checked_facts(files), tokenizer_worker.Made()
    wanted = {name: content for name, content in files.items() if name != "model.json"}
    answer = asked(worker, {"do": "load", "names": list(wanted)}, *wanted.values())
    loaded = tokenizer.Loaded.of(answer)
    text = "The quick brown fox, 你好 👋🏽\n\x00".encode()
    ids = tokenizer.ids_of(asked(worker, {"do": "encode", "special": True}, text), 1 << 20)
    codec = tokenizer.TextCodec(facts, loaded, tokenizer.TokenizerProcess(), template.TemplateRenderer())
    answer_text = codec.detokenizer(["fox"])
    for token in (*ids, 0, 1, 2, 5, 300, 4095):
        answer_text.push([token])
    answer_text.finish()
    codec.decode(ids)
    return True


def asked(worker: tokenizer_worker.Made, request: dict[str, object], *blobs: bytes) -> confined.Said:
    fields, sent = worker.answer(request, list(blobs))
    answer = confined.Said(json.loads(json.dumps(fields)), tuple(sent))
    tokenizer._usable(answer)
    return answer


@cache
def renderer() -> template.TemplateRenderer:
    made = template.TemplateRenderer(template.TemplateLimits(render_s=1.0, memory_bytes=256 << 20))
    atexit.register(made.close)
    return made


def feed_template(data: bytes) -> bool:
    renderer().render(data.decode("utf-8", "surrogateescape"), samples.CHAT)
    return True


TEXT = b"hello"
VOCABULARY = (b"hello world", b"\x05\0\0\0\x0b\0\0\0", b"\1\2", b"{{ messages }}")
DECODER = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}]}
LOADED = {"variables": {"bos_token": "world"}, "cleaned": True, "decoder": DECODER, "template": True}
REPLIES: tuple[tuple[dict[str, object], tuple[bytes, ...]], ...] = (
    ({}, (TEXT,)),
    ({"raised": "roles must alternate"}, ()),
    ({"failed": "it ran out of memory", "ends": True}, ()),
    ({"ready": True}, ()),
    ({"unusable": "tokenizer.json is not JSON"}, ()),
    (LOADED, VOCABULARY),
)


def reply(fields: dict[str, object], blobs: tuple[bytes, ...]) -> bytes:
    return json.dumps({**fields, "sizes": [len(blob) for blob in blobs]}).encode() + b"\n" + b"".join(blobs)


def rendered() -> list[bytes]:
    return [reply(*REPLIES[0])]


def loaded() -> list[bytes]:
    return [reply(*REPLIES[-1])]


def reply_input(rng: random.Random) -> bytes:
    fields, blobs = rng.choice(REPLIES)
    if rng.random() < 0.3:
        return mutated_bytes(rng, reply(fields, blobs), [reply(*one) for one in REPLIES])
    tree = mutated_tree(rng, fields, ODD_FOR_JSON)
    sent = tuple(mutated_bytes(rng, blob, [blob]) if rng.random() < 0.3 else blob for blob in blobs)
    if not isinstance(tree, dict):
        return json.dumps(tree).encode("utf-8", "surrogatepass") + b"\n" + b"".join(sent)
    return reply(tree, sent)


def said(data: bytes) -> confined.Said:
    answer = confined.read_answer(io.BytesIO(data), 1 << 20)
    if answer is None:
        raise TokenizerFailed("it broke its process")
    return answer


def feed_rendered(data: bytes) -> bool:
    """What the process that renders templates says, should a template have taken it over."""
    template.text_of(said(data))
    return True


def feed_loaded(data: bytes) -> bool:
    """The same of the one that reads tokenizers."""
    answer = said(data)
    tokenizer._usable(answer)
    vocabulary = tokenizer.Loaded.of(answer).vocabulary
    vocabulary.decode([0, 1, 2, 1 << 40])
    vocabulary.special(1)
    return True


# ---------------------------------------------------------------- addresses and files of the state

ADDRESSES = ("10.0.0.5", "host:81", "[fe80::1%eth0]:82", "::1", "é.de", f"{DIALLER.peer_id}@peer.example.org:7070")


def feed_address(data: bytes) -> bool:
    text = data.decode("utf-8", "surrogateescape")
    addresses.block_of(text)
    addresses.address_group(text)
    found = addresses.parse_address(text)
    assert addresses.parse_address(str(found)) == found
    addresses.may_dial(found.host)
    addresses.address_group(found.host)
    return True


STATE = (
    json.dumps({"192.0.2.1:7070": DIALLER.peer_id, "[2001:db8::1]:7070": ""}).encode(),
    json.dumps({"main 192.0.2.1:7070": LISTENER.peer_id}).encode(),
    b"1764000000000",
    DIALLER.seed().hex().encode() + b"\n",
)


@cache
def kept_files() -> list[bytes]:
    """What is on disk, whichever of our files: each is fed to every reader, which must survive the others' too."""
    return [*STATE, *samples.kept_listings()]


def state_files() -> list[bytes]:
    return [STATE[-1]]


def state_input(rng: random.Random) -> bytes:
    texts = [text for text in kept_files() if text[:1] == b"{"]
    return json_or_bytes(lambda: texts, rng) if rng.random() < 0.5 else from_bytes(kept_files, rng)


def feed_state(data: bytes) -> bool:
    home = scratch() / "home"
    state = StateDir(home, home / "cache")
    written("home/remembered-main.json", data)
    for text, peer in state.remembered("main").items():
        assert isinstance(text, str) and isinstance(peer, str)
    with contextlib.suppress(IdentityError):  # another peer than the one that the file names
        KnownHosts(written("home/known_hosts.json", data)).check("192.0.2.1:7070", DIALLER.peer_id)
    hub._kept(written_listing(data).parents[2], "somebody/model", None)
    fingerprint._remembered(written("home/hash.json", data), {"path": "/x", "size": 1, "mtime_ns": 2})
    for aside in home.glob("*.broken-*"):
        aside.unlink()
    if data.strip():  # an empty one is begun anew
        key = written("home/key", data)
        key.chmod(0o600)
        _load_key(key)
    return True


def written_listing(data: bytes) -> Path:
    path = hub._listing_path(scratch() / "home" / "cache", "somebody/model", None)
    return written(str(path.relative_to(scratch())), data)


# ---------------------------------------------------------------- all of them

HANDSHAKE: Errors = (RemoteError, IdentityError)

REPLY: Errors = (TemplateFailed, TokenizerFailed, UsageError)

TARGETS: tuple[Target, ...] = (
    Target("handshake: a listener", 1_400, HANDSHAKE, lambda: [transcript()[0]], partial(feed_handshake, listener, 0)),
    Target("handshake: a dialler", 1_400, HANDSHAKE, lambda: [transcript()[1]], partial(feed_handshake, dialler, 1)),
    Target("records, frames and streams", 4_000, (), conversations, feed_frames),
    Target("messages", 3_500, (MessageError,), packed_messages, feed_message, message_input),
    Target("tensor headers", 1_500, (MessageError,), packed_with_tensors, feed_message, message_with_other_tensors),
    Target("signed records", 2_000, (MessageError,), signed_records, feed_record, record_input),
    Target("gossip", 1_000, (), gossip, feed_registry, registry_input),
    Target("safetensors headers", 1_200, (BrokenModel,), safetensors_files, feed_safetensors, safetensors_input),
    Target("GGUF headers", 1_200, (BrokenModel,), samples.gguf_files, feed_gguf),
    Target("model configurations", 300, (ModelError,), samples.configs, feed_config, config_input),
    Target("a model's facts", 500, (MessageError,), samples.facts, feed_facts, facts_input),
    Target("tokenizers", 400, (MessageError, TokenizerFailed, UsageError), tokenizers, feed_tokenizer, tokenizer_input),
    Target("chat templates", 200, REPLY, samples.templates, feed_template),
    Target("a taken renderer's replies", 400, REPLY, rendered, feed_rendered, reply_input),
    Target("a taken tokenizer's replies", 400, (MessageError, TokenizerFailed), loaded, feed_loaded, reply_input),
    Target("addresses", 1_000, (UsageError,), lambda: [a.encode() for a in ADDRESSES], feed_address),
    Target("state files", 300, (IdentityError,), state_files, feed_state, state_input),
)

assert Where.kind  # every message is registered once its module is there
