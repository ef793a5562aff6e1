"""When silence is too long, and what puts that off."""

from __future__ import annotations

from swarm.deadline import Deadline
from swarm.effects import HopKey
from swarm.identity import PeerId

KEY = HopKey(PeerId("a" * 52), 0)


def test_it_is_over_after_the_wait() -> None:
    deadline = Deadline()
    assert deadline.at is None
    deadline.begin(2.0, 100.0)
    assert deadline.at == 102.0
    deadline.stop()
    assert deadline.at is None


def test_a_hop_that_computes_puts_it_off_but_no_further_than_five_waits() -> None:
    deadline = Deadline()
    deadline.begin(2.0, 100.0)
    deadline.progress(100.0)
    for now, at in ((101.0, 103.0), (102.5, 104.5), (107.0, 109.0), (109.0, 110.0), (109.9, 110.0)):
        deadline.still_working(KEY, 5, 2.0, now)
        assert deadline.at == at


def test_a_figure_that_grows_starts_the_five_waits_over() -> None:
    deadline = Deadline()
    deadline.begin(2.0, 100.0)
    deadline.progress(100.0)
    deadline.still_working(KEY, 5, 2.0, 104.0)
    deadline.still_working(KEY, 6, 2.0, 109.0)  # so now until 119
    deadline.still_working(KEY, 6, 2.0, 116.0)
    assert deadline.at == 118.0
    deadline.still_working(KEY, 6, 2.0, 118.5)
    assert deadline.at == 119.0
    deadline.still_working(KEY, 7, 2.0, 118.0)  # ten more, counted from 109
    deadline.still_working(KEY, 7, 2.0, 127.5)
    assert deadline.at == 128.0


def test_the_figures_of_an_older_epoch_show_no_progress_in_this_one() -> None:
    deadline = Deadline()
    deadline.begin(2.0, 100.0)
    deadline.still_working(KEY, 5, 2.0, 100.0)
    deadline.new_epoch()
    deadline.begin(2.0, 101.0)
    deadline.progress(101.0)
    deadline.still_working(KEY, 9, 2.0, 110.0)  # the first that is heard: of nothing more than life
    assert deadline.at == 111.0


def test_word_of_a_hop_begins_nothing() -> None:
    deadline = Deadline()
    deadline.still_working(KEY, 5, 2.0, 100.0)
    assert deadline.at is None


def test_it_never_comes_earlier_for_a_hop_that_works() -> None:
    deadline = Deadline()
    deadline.begin(8.0, 100.0)
    deadline.still_working(KEY, 5, 2.0, 100.5)
    assert deadline.at == 108.0
