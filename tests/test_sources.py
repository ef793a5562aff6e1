"""sources.py: what a client's sources say of their swarm."""

from __future__ import annotations

from swarm.identity import PeerId
from swarm.messages import ModelList, ModelSeen
from swarm.sources import SOURCES_REMEMBERED, Sources


def a_list(*names: str, here: tuple[str, ...] = ()) -> ModelList:
    return ModelList(tuple(ModelSeen(name.encode() * 32, (name,), 1) for name in names), here)


def names(said: Sources) -> set[str]:
    return {name for model in said.models() for name in model.names}


def test_models_are_those_of_all_sources_that_are_there() -> None:
    said = Sources()
    said.told(1, PeerId("p"), a_list("x", "y"))
    said.told(2, PeerId("q"), a_list("y", "z"))
    assert names(said) == {"x", "y", "z"} and said.version == 2
    said.told(1, PeerId("p"), a_list("w"))
    assert names(said) == {"w", "y", "z"} and said.version == 3
    assert said.gone(2) and names(said) == {"w"} and said.version == 4
    assert not said.gone(2) and said.version == 4


def test_where_a_source_listens_is_known_when_it_is_gone_but_of_the_latest_only() -> None:
    said = Sources()
    for n in range(1, 2 * SOURCES_REMEMBERED):
        said.told(n, PeerId("p0"), a_list(here=("10.0.0.0:7070",)))  # it is there all the time
        said.told(n, PeerId(f"p{n}"), a_list(here=(f"10.0.0.{n}:7070",)))
        said.gone(n)
        assert said.places_of(PeerId("p0")) == ("10.0.0.0:7070",)
    known = [n for n in range(1, 2 * SOURCES_REMEMBERED) if said.places_of(PeerId(f"p{n}"))]
    assert known == list(range(SOURCES_REMEMBERED + 1, 2 * SOURCES_REMEMBERED))
