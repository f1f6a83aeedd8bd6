"""Who reads what of a plan, and what all ranks that load together must have in common."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from headrace._partition import assign_owners
from headrace._peers import Peers
from headrace._plan import Plan, format_nbytes
from headrace._progress import Progress
from headrace._terms import ALONE


@dataclass(frozen=True, slots=True)
class Share:
    """What of a plan is exchanged, and who reads what.

    Attributes:
        rounds: indices of the plan's reads that are exchanged, in order. `owners`: their ranks.
        own_nbytes: bytes that this rank reads.
    """

    rounds: list[int]
    owners: list[int]
    own_nbytes: int


def share_reads(plan: Plan, sliced: frozenset[str], rank: int, size: int, policy: str) -> Share:
    """Divide a plan's reads: those of sliced tensors stay with each rank, all others get an owner.

    Args:
        policy: 'chunks' (read by read), 'spans' (a large tensor, or a run of small ones, by one rank) or 'files'.
    """
    names = plan.tensors.names
    rounds = [i for i, read in enumerate(plan.reads) if names[plan.spans[read.span].first] not in sliced]
    keys = {
        "chunks": rounds,
        "spans": [plan.reads[i].span for i in rounds],
        "files": [plan.reads[i].shard for i in rounds],
    }[policy]
    owners = assign_owners(keys, [plan.reads[i].nbytes for i in rounds], size)
    exchanged = dict(zip(rounds, owners, strict=True))
    own_nbytes = sum(read.nbytes for i, read in enumerate(plan.reads) if exchanged.get(i, rank) == rank)
    return Share(rounds, owners, own_nbytes)


def stay_alone(peers: Peers, plan: Plan, sliced: frozenset[str], progress: Progress) -> None:
    """Each rank reads for itself. They are about to load the same all the same; afterwards nobody waits for another one.

    Raises:
        PeerError: another rank failed, or is about to load something else.
    """
    peers.agree(plan=digest_of(plan, share_reads(plan, sliced, peers.rank, peers.size, "chunks")))
    peers.close()
    progress.rank, progress.ranks = peers.rank, peers.size
    progress.partition, progress.exchange = "each rank reads for itself", ALONE


def describe(progress: Progress, peers: Peers, plan: Plan, share: Share, policy: str, *, over_memory: bool) -> None:
    """Say in the counters what the ranks do."""
    progress.rank, progress.ranks, progress.total_nbytes = peers.rank, peers.size, share.own_nbytes
    nbytes = [0] * peers.size
    for i, owner in zip(share.rounds, share.owners, strict=True):
        nbytes[owner] += plan.reads[i].nbytes
    shown = [f"rank {rank} reads {format_nbytes(each)}" for rank, each in enumerate(nbytes)]
    rest = f" and {peers.size - 8} more" if peers.size > 8 else ""
    local = share.own_nbytes - nbytes[peers.rank]
    slices = f", and each rank its own slices, here {format_nbytes(local)}" if local else ""
    progress.partition = f"{policy}: {', '.join(shown[:8])}{rest} for all{slices}"
    progress.exchange = (
        "over the shared memory of their node"
        if over_memory
        else "over Gloo, since they do not share memory: they are on several nodes, or in several containers"
    )


def digest_of(plan: Plan, share: Share, blocked: frozenset[str] = frozenset()) -> str:
    """What all ranks must have in common: names, dtypes and shapes of what is exchanged, and the reads of it.

    Of tensors that are read in blocks each rank may have a shape and a dtype of its own.
    """
    tensors, seen = plan.tensors, hashlib.sha256()
    spans = {plan.reads[i].span for i in share.rounds}
    for index in sorted(spans):
        span = plan.spans[index]
        for row in range(span.first, span.last):
            name = tensors.names[row]
            dense = (tensors.dtypes[row], tuple(tensors.shapes[row]), tensors.positions[row])
            seen.update(repr((name, tensors.sources[row] if name in blocked else dense)).encode())
    for i, owner in zip(share.rounds, share.owners, strict=True):
        read = plan.reads[i]
        seen.update(repr((read.shard, read.offset, read.nbytes, read.position, read.copy, owner)).encode())
    return seen.hexdigest()
