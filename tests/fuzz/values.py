"""Any value that a message or a record may hold, drawn from the codecs that its fields travel by.

The bounds are read out of the codecs themselves (the variables that their readers close over), so that a new
message is covered from its first day, and a codec that isn't known here fails the tests by its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from routing.spans import Span
from swarm import records
from swarm.codecs import MAX_LAYERS, Codec
from swarm.errors import MessageError
from swarm.identity import Identity, peer_id
from swarm.messages import MAX_NAMES_TOLD, MAX_RECORD_BYTES, REGISTERED, Message, ModelSeen, NamedTensors, Told
from swarm.records import Descriptor, Heartbeat, Leave, Record
from swarm.tensors import ITEM_BYTES, RawTensor, tensor_bytes

Strategy = st.SearchStrategy[Any]

SIGNER = Identity.from_seed(bytes(range(32)))
MOST_ITEMS = 5  # of a list: more would teach a parser nothing


def closed_over(codec: Codec) -> dict[str, Any]:
    """The bounds of a codec, by the names that it was made with."""
    reader: Any = codec.read
    cells = [cell.cell_contents for cell in reader.__closure__ or ()]
    return dict(zip(reader.__code__.co_freevars, cells, strict=True))


def of_codec(codec: Codec) -> Strategy:
    """Values that travel by `codec`."""
    kind = codec.read.__qualname__.partition(".")[0]
    assert kind in _STRATEGIES, f"say in _STRATEGIES how to draw what {kind} reads"
    return _STRATEGIES[kind](closed_over(codec))


def _octets(bounds: dict[str, Any]) -> Strategy:
    return st.binary(min_size=bounds["least"], max_size=min(bounds["most"], bounds["least"] + 40))


def _exact_text(bounds: dict[str, Any]) -> Strategy:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=min(bounds["most"], 40))


def _text(bounds: dict[str, Any]) -> Strategy:
    return _shown(closed_over(bounds["exact"])["most"])


def _shown(most: int) -> Strategy:
    """What is said to people comes back as it was only if it is printable."""
    plain = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
    return st.text(plain, max_size=min(most, 40))


def _printable(bounds: dict[str, Any]) -> Strategy:
    most = min(closed_over(bounds["plain"])["most"], 40)
    return st.text(st.characters(exclude_categories=["C", "Z"]), max_size=most)


def _list(bounds: dict[str, Any]) -> Strategy:
    return st.lists(of_codec(bounds["item"]), max_size=min(bounds["most"], MOST_ITEMS)).map(tuple)


def _packed(bounds: dict[str, Any]) -> Strategy:
    one = st.binary(min_size=bounds["size"], max_size=bounds["size"])
    return st.lists(one, max_size=min(bounds["most"], MOST_ITEMS)).map(tuple)


def _span(_: dict[str, Any]) -> Strategy:
    ends = st.lists(st.integers(0, MAX_LAYERS), min_size=2, max_size=2, unique=True).map(sorted)
    return ends.map(lambda pair: Span(*pair))


def _told(_: dict[str, Any]) -> Strategy:
    signed = st.binary(min_size=64, max_size=100)
    ages = st.integers(0, 4 * 10**6).map(lambda quarters: quarters / 4)  # others are rounded up to a millisecond
    return st.builds(Told, signed, ages, st.none() | signed)


def _model(_: dict[str, Any]) -> Strategy:
    names = st.lists(_shown(40), min_size=1, max_size=MAX_NAMES_TOLD).map(tuple)
    return st.builds(ModelSeen, st.binary(min_size=32, max_size=32), names, st.integers(0, 1 << 20))


def _figures(count: int) -> Strategy:
    """What is sent is rounded to what 2 bytes can say, so that it comes back as it was."""
    whole = st.tuples(*[st.floats(0, 9e5)] * count)
    return whole.map(lambda figures: records.Speed(*records.from_brief(records.brief(figures))))


_STRATEGIES: dict[str, Callable[[dict[str, Any]], Strategy]] = {
    "integer": lambda bounds: st.integers(bounds["low"], bounds["high"]),
    "number": lambda bounds: st.floats(bounds["low"], bounds["high"]),
    "text": _text,
    "_printable": _printable,
    "exact_text": _exact_text,
    "octets": _octets,
    "list_of": _list,
    "packed": _packed,
    "optional": lambda bounds: st.none() | of_codec(bounds["inner"]),
    "one_of": lambda bounds: st.sampled_from(bounds["choices"]),
    "nested": lambda bounds: of_fields(bounds["cls"]),
    "_read_flag": lambda _: st.booleans(),
    "_read_span": _span,
    "_read_peer": lambda _: st.binary(min_size=32, max_size=32).map(peer_id),
    "_read_told": _told,
    "_read_model": _model,
    "_read_speed": lambda _: _figures(len(dataclasses.fields(records.Speed))),
    "_read_state": lambda _: st.sampled_from(records.STATES),
}


def of_fields(cls: type[Any], **fixed: Strategy) -> Strategy:
    """Instances of a dataclass whose fields carry codecs."""
    drawn = {
        field.name: of_codec(field.metadata["codec"])
        for field in dataclasses.fields(cls)
        if "codec" in field.metadata
    }
    return st.builds(cls, **(drawn | fixed))


# ---------------------------------------------------------------- tensors, messages, records


def _tensor(dtype: str, shape: tuple[int, ...], byte: int) -> RawTensor:
    return RawTensor(dtype, shape, bytes([byte]) * tensor_bytes(dtype, shape))


tensors: Strategy = st.builds(
    _tensor,
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 255),
)
ids: Strategy = st.builds(_tensor, st.just("int32"), st.integers(0, 9).map(lambda n: (n,)), st.just(0))
names: Strategy = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def messages(cls: type[Message]) -> Strategy:
    """Messages of one kind, as a careful sender would make them."""
    if issubclass(cls, NamedTensors):
        return of_fields(cls, tensors=st.dictionaries(names, tensors, max_size=3))
    carried = {name: ids if name == "ids" else st.none() | ids | tensors for name in cls.TENSORS}
    return of_fields(cls, **carried).filter(_sound)


def _sound(message: Any) -> bool:
    try:
        if hasattr(message, "check"):
            message.check()
    except MessageError:
        return False
    return True


any_message: Strategy = st.one_of([messages(REGISTERED[kind]) for kind in sorted(REGISTERED)])


def _fits(record: Record) -> bool:
    try:
        return len(records.sign_record(SIGNER, record)) <= MAX_RECORD_BYTES
    except Exception:  # larger than a record may be, or a claim beyond the model's layers
        return False


any_record: Strategy = st.one_of(
    [of_fields(cls, peer=st.just(SIGNER.peer_id)) for cls in (Descriptor, Heartbeat, Leave)]
).filter(_fits)


def examples(strategy: Strategy, count: int) -> list[Any]:
    """The same `count` examples in every run."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    found: list[Any] = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found[:count]
