"""What the hops of one epoch are told: where they stand, and from where each goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.identity import PeerId
from swarm.messages import HopRef, Open, Prepare, Resume, bias_tensors
from swarm.plans import Plan
from swarm.session_config import SessionConfig
from swarm.tensors import ids_tensor


@dataclass(frozen=True)
class Epoch:
    """One chain of one session. index: of a hop in it."""

    number: int
    plan: Plan
    config: SessionConfig

    def prepare(self, index: int) -> Prepare:
        return Prepare(**self._place(index))

    def open(self, index: int) -> Open:
        return Open(**self._place(index), fingerprint=self.config.fingerprint, reserve=self.config.reserve)

    def _place(self, index: int) -> dict[str, Any]:
        """What both of them say."""
        hops, descriptors = self.plan.route.hops, self.plan.descriptors
        refs = [HopRef(PeerId(hop.peer), hop.span.start, descriptors.get(PeerId(hop.peer), b"")) for hop in hops]
        return {
            "session": self.config.session,
            "epoch": self.number,
            "span": hops[index].span,
            "previous": refs[index - 1] if index else None,
            "next": refs[index + 1] if index + 1 < len(refs) else None,
            "first": refs[0],
            "last": refs[-1],
        }

    def resume(self, index: int, has: Sequence[int], resume_at: int, ids: list[int], credit: int) -> Resume:
        """has: positions that each hop keeps. resume_at: the first that the ring computes. ids: all that are known."""
        first, last = index == 0, index == len(has) - 1
        resume = Resume(self.number, has[index], resume_at if last else has[index + 1], resume_at)
        if first or last:
            # A hop knows the ids of every position that it finished, so it needs those from there on.
            resume = dataclasses.replace(resume, ids_from=has[index], ids=ids_tensor(ids[has[index] :]))
        if last:
            bias_ids, bias = bias_tensors(self.config.sampling)
            resume = dataclasses.replace(
                resume,
                credit=credit,
                limit=self.config.limit,
                stop_ids=self.config.stop_ids,
                sampling=self.config.sampling,
                bias_ids=bias_ids,
                bias=bias,
            )
        return resume
