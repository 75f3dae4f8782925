"""One answer for all ranks of an engine: each gets its cache from kvpad, or none does.

Whether a worker can be served is found out in its own process, from the environment
and the files there; on another node they can differ. Ranks that start up in different
ways wait for each other in collectives that only some of them enter. So each rank
says, before any of them relies on it, whether something stands against kvpad there.

A rank where kvpad is not even loaded can say nothing and takes part in no vote. What
is said therefore lies in the process group's store, which needs nobody's answer, and
a rank that has said nothing counts as an objection.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

_NO_OBJECTION = ""

_PATIENCE_SECONDS = 30.0
"""How long a rank may take to announce itself after another one has loaded its model.

Ranks announce themselves when their devices are initialised, which none of them ends
long before the others: it creates their process groups.
"""


class Verdict(NamedTuple):
    """What the ranks of an engine have agreed on.

    Attributes:
        objections: Why kvpad supplies no cache, one phrase a rank; empty if it does.
        speaker: The first rank where kvpad is loaded, to speak for all in the log.
    """

    objections: list[str]
    speaker: int


def announce(objection: str | None) -> None:
    """Say whether this rank can get its cache from kvpad.

    To be called once the worker's device, and so its process group, is initialised.

    Args:
        objection: Why it cannot, or None.
    """
    import torch.distributed as dist

    if _is_alone():
        return
    _store().set(_key(dist.get_rank()), objection or _NO_OBJECTION)


def verdict(patience: float = _PATIENCE_SECONDS) -> Verdict:
    """Return what holds for every rank; the same on each that asks.

    Args:
        patience: Seconds to wait for ranks that have said nothing.
    """
    import torch.distributed as dist

    if _is_alone():
        return Verdict([], speaker=0)
    store = _store()
    ranks = range(dist.get_world_size())
    deadline = time.monotonic() + patience
    while not store.check([_key(rank) for rank in ranks]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    said = {
        rank: store.get(_key(rank)).decode()
        for rank in ranks
        if store.check([_key(rank)])
    }
    objections = [
        f"rank {rank}: {said.get(rank, 'kvpad is not loaded, or switched off')}"
        for rank in ranks
        if said.get(rank) != _NO_OBJECTION
    ]
    # Whoever comes first decides: a rank that speaks up late finds it was not heard.
    speaker = min(said, default=dist.get_rank())
    mine = json.dumps(Verdict(objections, speaker))
    return Verdict(*json.loads(store.compare_set("kvpad/verdict", "", mine)))


def global_rank() -> int:
    """This worker's rank as verdicts count them; 0 where there is only one."""
    import torch.distributed as dist

    return 0 if _is_alone() else dist.get_rank()


def _key(rank: int) -> str:
    return f"kvpad/{rank}"


def _is_alone() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_world_size() == 1


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
