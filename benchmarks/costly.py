"""The dearest inputs that could be thought of, for `benchmarks.parsers`: within every limit, and nothing but work.

Each function gives (what it is, make): `make()` brings everything into the state in which the input arrives and
returns what the event loop then does in one go.
"""

from __future__ import annotations

import json
import os
import random
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from threading import Thread
from typing import Any

import msgpack

from peer.checkpoint import no_progress
from peer.directory import DirectoryFiles
from peer.fingerprint import FileHashes
from peer.gguf_header import read_gguf_header
from peer.layout import read_layout
from peer.safetensors_header import parse_header
from swarm import addresses as address_module
from swarm import messages, packing
from swarm.bundles import _checked
from swarm.confined import Said, read_answer
from swarm.flow import DATA, END, MAX_PART, RESET, WINDOW, Priority
from swarm.identity import Identity, PeerId
from swarm.link import RECEIVE_SLICE
from swarm.messages import Ask, Delta, Digest, GossipHello, Message, Offer, Told
from swarm.noise import Handshake, Preamble
from swarm.records import open_record
from swarm.registry import Kind, Registry, in_parts
from swarm.tensors import RawTensor, check_ids, ids_tensor, read_ids
from swarm.tokenizer import MAX_FILE_BYTES, Loaded, bundle_hash, ids_of
from swarm.vocabulary import MAX_SPELLINGS_BYTES, MAX_VOCABULARY, TEXT
from swarm.wire import LAST
from tests.fuzz import samples, targets
from tests.fuzz.targets import scratch, written
from tests.wire_pair import Pair, connected

Work = Callable[[], object]
Cases = Iterator[tuple[str, Callable[[], Work]]]
PEERS = 10_000  # that the registry knows which hostile gossip reaches


# ---------------------------------------------------------------- before an identity is proved


def handshakes() -> Cases:
    """The whole handshake of an impostor, in one read and byte by byte, and the longest preamble."""
    many = Preamble(1, "main", tuple(f"s{number}" for number in range(120))).encode()

    def listening() -> Handshake:
        return Handshake("responder", samples_identity(1), "main", rng=random.Random(2).randbytes)

    yield "a preamble of 120 suites", lambda: partial(listening().receive, many[:512])
    yield "a right message 1: two exchanges, a signature", lambda: partial(listening().receive, _first_message())
    yield "message 3 with another's proof", _impostors_last
    yield "message 1 in single bytes", lambda: partial(_byte_by_byte, listening(), _first_message())


def samples_identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


def _first_message() -> bytes:
    return Handshake("initiator", samples_identity(2), "main", rng=random.Random(1).randbytes).data_to_send()


def _impostors_last() -> Work:
    """Proved with a key that isn't the claimed one."""

    class Impostor:
        peer_id = samples_identity(3).peer_id

        def sign(self, domain: bytes, data: bytes) -> bytes:
            return samples_identity(2).sign(domain, data)

    rng = random.Random(3).randbytes
    here = Handshake("responder", samples_identity(1), "main", rng=rng)
    there = Handshake("initiator", Impostor(), "main", rng=rng)  # type: ignore[arg-type]
    here.receive(there.data_to_send())
    there.receive(here.data_to_send())
    return partial(here.receive, there.data_to_send())


def _byte_by_byte(handshake: Handshake, data: bytes) -> None:
    for at in range(len(data)):
        handshake.receive(data[at : at + 1])


# ---------------------------------------------------------------- records and frames of somebody proved


def slices() -> Cases:
    """What a link hands over in one go: RECEIVE_SLICE of small records, or one large one."""
    head = framed({"kind": "renew", "epoch": 1})
    yield "a slice of streams opened", lambda: _slice((DATA, LAST, 2 * n + 1, head) for n in range(400))
    yield "a slice of messages on one stream", lambda: _slice((DATA, LAST, 1, head) for _ in range(400))
    yield "a slice of half messages", lambda: _slice(
        (DATA, Priority.BULK << 1, 2 * n + 1, b"\0") for n in range(400)
    )
    yield "a slice of ends", lambda: _slice((END, 0, 2 * n + 1, b"") for n in range(400))
    yield "a slice of resets", lambda: _slice((RESET, 0, 2 * n + 1, b"") for n in range(400))
    yield "a slice of windows", lambda: _slice((WINDOW, 0, 1, struct.pack(">I", 1)) for _ in range(400))
    yield "a slice of unknown kinds", lambda: _slice(
        (DATA, LAST, 1, framed({"kind": f"x{n}"})) for n in range(400)
    )
    yield "streams as far apart as may be", lambda: _slice((DATA, LAST, 8189 * n + 1, head) for n in range(2))
    for label, value in largest_maps():
        yield f"a record: {label}", lambda value=value: _record(framed(value))  # type: ignore[misc]
    yield "a record of a part of a large message", lambda: _record(step_head(1_000_000), last=False)
    yield "the last of 1 MiB in parts", _last_part


def framed(value: object) -> bytes:
    body: bytes = msgpack.packb(value)
    return struct.pack(">H", len(body)) + body


def step_head(size: int) -> bytes:
    values = {"kind": "step", "epoch": 1, "position": 0, "#": [["hidden", "uint8", [size]]]}
    return framed(values) + bytes(MAX_PART - len(framed(values)))


def _sealed(pair: Pair, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    sealed = pair.a._sender.encrypt(struct.pack(">BBI", kind, flags, stream) + payload)
    return struct.pack(">H", len(sealed)) + sealed


def _slice(frames: Iterator[tuple[int, int, int, bytes]]) -> Work:
    pair, data = connected(), b""
    for frame in frames:
        sealed = _sealed(pair, *frame)
        if len(data) + len(sealed) > RECEIVE_SLICE:
            break
        data += sealed
    return lambda: (pair.b.receive_data(data, 0.0), pair.b.events())


def _record(payload: bytes, last: bool = True) -> Work:
    pair = connected()
    priority = Priority.CONTROL if len(payload) < 20_000 else Priority.BULK
    data = _sealed(pair, DATA, last | priority << 1, 1, payload)
    return lambda: (pair.b.receive_data(data, 0.0), pair.b.events())


def _last_part() -> Work:
    """A message of as much as a stream takes, of which all but the end is here."""
    pair = connected()
    head, total = step_head(1_000_000), 1_000_000
    start = len(head) - (MAX_PART - 60)
    pair.b.receive_data(_sealed(pair, DATA, Priority.BULK << 1, 1, head), 0.0)
    left = total + start - len(head)
    while left > MAX_PART:
        pair.b.receive_data(_sealed(pair, DATA, Priority.BULK << 1, 1, bytes(MAX_PART)), 0.0)
        left -= MAX_PART
    data = _sealed(pair, DATA, LAST | Priority.BULK << 1, 1, bytes(left))
    return lambda: (pair.b.receive_data(data, 0.0), pair.b.events())


# ---------------------------------------------------------------- messages


def largest_maps() -> list[tuple[str, object]]:
    """Of 16 KiB, or of as many items as are accepted."""
    nested: Any = 1
    for _ in range(5):
        nested = {"": nested}
    many = packing.MAX_MAP_ITEMS - 40
    ids = bytes(8 * messages.MAX_IDS)
    return [
        ("nested maps", {"kind": "renew", "epoch": 1, "x": [nested] * (many // 11)}),
        ("empty maps", {"kind": "renew", "epoch": 1, "x": [{}] * many}),
        ("empty lists", {"kind": "renew", "epoch": 1, "x": [[]] * many}),
        ("as many keys as there may be", {"kind": "renew", "epoch": 1} | {f"{n}": 0 for n in range(many // 2)}),
        ("one long text", {"kind": "renew", "epoch": 1, "x": "\u202e" * 5_400}),
        ("a reason that isn't printable", {"kind": "refused", "epoch": 1, "reason": "\x1b" * 512}),
        ("a kind of 16 KiB", {"kind": "k" * 16_000}),
        ("an offer", {"kind": "offer", "renewals": ids, "changes": ids}),
        ("an ask", {"kind": "ask", "heads": ids, "full": ids}),
        ("a digest", {"kind": "digest", "sums": bytes(8 * messages.MAX_BUCKETS)}),
        ("tensors of nothing", {"kind": "files", "#": [[f"{n}", "uint8", [0]] for n in range(1000)]}),
        ("tensors of one name", {"kind": "files", "#": [["n", "uint8", [0]] for n in range(1000)]}),
        ("tensors of many dimensions", {"kind": "files", "#": [["n", "uint8", [1] * 3900]]}),
    ]


def maps() -> Cases:
    for label, value in largest_maps():
        yield label, lambda value=value: partial(_decoded, framed(value))  # type: ignore[misc]
    for count, whole in ((15, True), (90, False)):
        data = targets.packed(_told(count, whole))
        yield f"a delta of {count}", lambda data=data: partial(_decoded, data)  # type: ignore[misc]


def _decoded(data: bytes) -> Message:
    return messages.decode(*packing.unpack(data))


def tensors() -> Cases:
    """A step of 64 MiB, whose parts have arrived, and tensors of every shape that is none."""
    big = bytearray(64 << 20)
    head = framed({"kind": "step", "epoch": 1, "position": 0, "#": [["hidden", "float32", [2048, 8192]]]})
    yield "a step of 2048 rows of 32 KiB", lambda: partial(_decoded_step, bytearray(head) + big)
    wild = {"kind": "step", "epoch": 1, "#": [["hidden", "float32", [1 << 31, 1 << 31, 0, 1 << 31]]]}
    yield "a shape of 2**93 elements and none", lambda: partial(_decoded, framed(wild))


def _decoded_step(data: bytearray) -> object:
    from peer.model import from_raw

    message = _decoded(data)  # type: ignore[arg-type]
    assert isinstance(message, messages.Step)
    return from_raw(message.tensors["hidden"])


def sessions() -> Cases:
    """What a hop reads of a prompt as long as a large context, and a client of the longest `Tokens`."""
    ids = ids_tensor([number % 49_152 for number in range(131_072)])
    yield "a resume of 131,072 ids", lambda: partial(_resumed, ids)
    yield "the longest tokens with 20 likelihoods each", lambda: partial(_read_tokens, _longest_tokens())


def _resumed(ids: RawTensor) -> None:
    message = messages.Resume(1, 0, 0, 0, ids=ids, limit=9)
    check_ids(ids, 49_152)
    read_ids(ids)
    message.complete_sampling()


def _longest_tokens() -> bytes:
    count, wide = messages.MAX_IDS_TOLD, messages.MAX_LOGPROBS
    rows = [messages.Likelihoods(-1.0, tuple((number, -2.0) for number in range(wide)))] * count
    tensors = messages.likelihood_tensors(rows)
    return targets.packed(messages.Tokens(1, 0, ids=ids_tensor([1] * count), **tensors))


def _read_tokens(data: bytes) -> None:
    message = _decoded(data)
    assert isinstance(message, messages.Tokens) and message.ids is not None
    read_ids(message.ids)
    message.likelihoods()


# ---------------------------------------------------------------- records and gossip


def _told(count: int, whole: bool) -> Delta:
    """Of peers that nobody knows yet. whole: with their descriptors, as large as they come."""
    told = [_of(number, "x" * 60) for number in range(count)]
    return Delta(tuple(told if whole else (Told(one.head, one.age_s) for one in told)))


def _of(number: int, name: str = "") -> Told:
    signer = Identity.from_seed(number.to_bytes(32, "big"))
    made = tuple(f"[2001:db8:{number:x}::{n}]:7070" for n in range(8)) if name else ("198.51.100.7:7070",)
    return samples.told(signer, addresses=made, model=name or "smollm2-135m")


def records() -> Cases:
    signed = _of(1, "x" * 60)
    assert signed.descriptor is not None
    yield "the largest descriptor", lambda: partial(open_record, signed.descriptor)  # type: ignore[arg-type]
    forged = bytes(64) + signed.descriptor[64:]
    yield "one that nobody signed", lambda: partial(open_record, forged)
    yield "1 KiB of nested lists", lambda: partial(open_record, bytes(64) + b"\x91" * 960)
    yield "1 KiB of numbers", lambda: partial(open_record, bytes(64) + b"\xdc\x03\xb0" + b"\1" * 944)


@cache
def _table() -> Sequence[Told]:
    return [_of(number) for number in range(1, PEERS + 1)]


def crowded() -> Registry:
    """A registry with PEERS entries, a neighbour (1) and a client (3)."""
    registry = Registry(samples_identity(9), now=0.0, rng=random.Random(4), check=lambda record, data: None)
    for told in _table():
        registry.table.accept(told, 0.0)
    registry.attach(1, samples_identity(7).peer_id, Kind.GOSSIP, opened_here=False, now=0.0)
    registry.attach(3, PeerId("client"), Kind.SUBSCRIBER, opened_here=False, now=0.0)
    registry.receive(1, GossipHello(False), 0.0)
    registry.tick(1.0)
    return registry


def gossip() -> Cases:
    """Each message as a shell hands it over (`in_parts`), and the one answer that follows."""
    known = tuple(told for told in _table())
    random_ids = tuple(random.Random(5).randbytes(8) for _ in range(messages.MAX_IDS))
    held = _held_ids()
    said: list[tuple[str, int, Message]] = [
        ("an offer of what nobody has", 1, Offer(random_ids, random_ids)),
        ("an ask for all that there is", 1, Ask(held, held)),
        ("an ask for what nobody has", 1, Ask(random_ids, random_ids)),
        ("a digest that is wrong everywhere", 1, Digest(tuple(random.Random(6).randbytes(8) for _ in range(512)))),
        ("a part of a delta of strangers", 1, next(iter(in_parts(_delta(range(PEERS + 1, PEERS + 41)))))),
        ("a part of a delta of what is known", 1, next(iter(in_parts(Delta(known[:40]))))),
        ("a wish for a snapshot", 1, GossipHello(True)),
        ("a client that wants all", 3, messages.Subscribe(None, snapshot=True)),
    ]
    for label, key, message in said:
        yield label, lambda key=key, message=message: _heard(key, message)  # type: ignore[misc]
    yield "the next message of a snapshot", _snapshot_on_its_way
    yield "everybody's lease over at once", lambda: partial(crowded().tick, 1000.0)


def _delta(numbers: range) -> Delta:
    return Delta(tuple(_of(number, "x" * 60) for number in numbers))


def _held_ids() -> tuple[bytes, ...]:
    registry = crowded()
    return tuple(one.head_id for one in registry.table.held())[: messages.MAX_IDS]


def _heard(key: int, message: Message) -> Work:
    registry = crowded()
    if isinstance(message, Delta):
        registry._check = registry.table._check = open_check  # type: ignore[misc]

    def work() -> None:
        registry.receive(key, message, 1.0)
        registry.tick(1.0)
        registry.sendable(1.0)
        registry.next_message(key, 1.0)

    return work


def open_check(record: Any, data: bytes) -> None:
    from swarm.records import check_signature

    check_signature(record, data)


def _snapshot_on_its_way() -> Work:
    registry = crowded()
    registry.receive(3, messages.Subscribe(None, snapshot=True), 1.0)
    return lambda: registry.next_message(3, 1.0)


# ---------------------------------------------------------------- small texts and files


def addresses() -> Cases:
    for label, text in (
        ("a host of 255 letters that aren't ASCII", "ü" * 250 + ":70"),
        ("a host of dots", "." * 254),
        ("64 KiB", "a" * 65_000),
        ("64 KiB of @", "@" * 65_000),
        ("an address of many zones", "fe80::1" + "%" * 240),
    ):
        yield label, lambda text=text: partial(_read_address, text)  # type: ignore[misc]


def _read_address(text: str) -> None:
    found = address_module.parse_address(text)
    address_module.may_dial(found.host)
    address_module.address_group(found.host)


def facts() -> Cases:
    deep = b'{"model_type": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    many = json.dumps({f"k{n}": n for n in range(5_000)}).encode()
    digits = b'{"vocab_size": ' + b"9" * 60_000 + b"}"
    for label, data in (("nested 30,000 deep", deep), ("5,000 keys", many), ("a number of 60,000 digits", digits)):
        yield label, lambda data=data: partial(targets.feed_facts, data[: 64 << 10])  # type: ignore[misc]


def safetensors() -> Cases:
    entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    many = "{" + ",".join(entry.format(number) for number in range(65_536)) + "}"
    long = "{" + ",".join(entry.format(f"{number:0200}") for number in range(48_000)) + "}"
    wide = '{"__metadata__":{' + ",".join(f'"{n}":"{n}"' for n in range(60_000)) + "}}"
    deep = '{"a":' + "[" * 1_000_000
    spaces = "{" + " " * 12_000_000 + "}"
    for label, text in (
        ("65,536 tensors", many),
        ("48,000 tensors with names of 200 letters", long),
        ("a MiB of metadata", wide),
        ("nested a million deep", deep),
        ("12 MB of spaces", spaces),
    ):
        yield label, lambda text=text: partial(_parsed, text.encode())  # type: ignore[misc]


def bundles() -> Cases:
    """What a client reads, in threads, of the tokenizer that a peer hands out, and of the process that reads it."""
    files = {name: bytes(most) for name, most in MAX_FILE_BYTES.items()}
    wanted = bundle_hash(files)
    sent = {name: RawTensor("uint8", (len(data),), memoryview(data)) for name, data in files.items()}
    yield "files as large as may be", lambda: partial(_checked, messages.Files(sent), PeerId("somebody"), wanted)
    count = MAX_VOCABULARY
    ends = array("I", range(16, 16 * count + 1, 16)).tobytes()
    known = (bytes(MAX_SPELLINGS_BYTES), ends, bytes([TEXT]) * count, b"")
    deep = {"variables": {f"{n}": "" for n in range(4_000)}, "x": [[]] * 40_000}
    yield "as many tokens as may be", lambda: partial(_answered, {"variables": {}}, known, Loaded.of)
    yield "an answer full of empty lists", lambda: partial(_answered, deep, known, Loaded.of)
    many = array("I", range(131_072)).tobytes()  # of a short text they are refused
    yield "131,072 ids", lambda: partial(_answered, {}, (many,), partial(ids_of, most=131_072))


def _answered(fields: dict[str, Any], blobs: Sequence[bytes], read: Callable[[Said], object]) -> None:
    """From a pipe, as the process would send it."""
    head = json.dumps({**fields, "sizes": [len(blob) for blob in blobs]}, separators=(",", ":")).encode() + b"\n"
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        Thread(target=_write, args=(writing, [head, *blobs])).start()
        answer = read_answer(pipe, 128 << 20)
        assert answer is not None
        read(answer)


def _write(descriptor: int, parts: Sequence[bytes]) -> None:
    with open(descriptor, "wb") as pipe:
        pipe.writelines(parts)


def _parsed(header: bytes) -> object:
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    with targets.written("model.safetensors", data).open("rb") as stream:
        return parse_header(stream, "model.safetensors")


def gguf() -> Cases:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    strings = start + text(b"k") + struct.pack("<IIQ", 9, 8, 8_000_000) + bytes(64_000_000)
    tensor = b"".join(text(b"%d" % n) + struct.pack("<IQIQ", 1, 0, 0, 0) for n in range(65_536))
    tensors = b"GGUF" + struct.pack("<IQQ", 3, 65_536, 0) + tensor
    numbers = b"".join(text(b"k%d" % n) + struct.pack("<IIQ", 9, 12, 1024) + bytes(8192) for n in range(128))
    many = b"GGUF" + struct.pack("<IQQ", 3, 0, 128) + numbers
    texts = b"".join(text(b"k%d" % n) + struct.pack("<I", 8) + text(b"\xc3\xbc" * 500_000) for n in range(4))
    long = b"GGUF" + struct.pack("<IQQ", 3, 0, 4) + texts
    for label, data in (
        ("8,000,000 strings", strings),
        ("65,536 tensors", tensors),
        ("131,072 numbers in lists", many),
        ("4 MB of text", long),
    ):
        yield label, lambda data=data: partial(read_gguf_header, data, "tiny.gguf")  # type: ignore[misc]


def configurations() -> Cases:
    """config.json, and the index of weights, as large as they may be."""
    empty = '{"model_type": "llama", "x": [' + "[]," * 174_000 + "0]}"
    deep = '{"model_type": ' + "[" * 100_000
    for label, text in (("512 KiB of empty lists", empty), ("nested 100,000 deep", deep)):
        yield label, lambda text=text: partial(targets.feed_config, text.encode())  # type: ignore[misc]
    weight = '"model.layers.{0}.mlp.experts.{0}.down_proj.weight":"m{1}.safetensors"'
    many = ",".join(weight.format(n, n % 3) for n in range(250_000))
    lists = "[]," * 7_000_000
    for label, text in (("an index of 250,000 tensors", many), ("an index of 21 MB of empty lists", lists)):
        yield label, lambda text=text: partial(_indexed, f'{{"weight_map": {{{text}}}}}')  # type: ignore[misc]


def _indexed(text: str) -> None:
    written("model/model.safetensors.index.json", text.encode())
    shards = {f"m{number}.safetensors": 1 for number in range(3)}
    sizes = {"config.json": 2, "model.safetensors.index.json": len(text), **shards}
    read_layout(DirectoryFiles("indexed", scratch() / "model", sizes, FileHashes(scratch() / "hashes")), no_progress)
