"""What ranks that load together tell each other before they plan, and what follows for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace._blocks import choose_blocked
from headrace._header import TensorInfo
from headrace._slices import Index

if TYPE_CHECKING:
    from headrace._peers import Peers  # imports torch

ALONE = "none: every rank has all of the files in its node's memory, and takes them from there"


class Offer(NamedTuple):
    """What one rank comes with.

    Attributes:
        slices: that it takes.
        given: {tensor: the kind of memory that its caller gave for it}.
        node: what tells its node from others.
        cast_at: where it would convert dtypes. `may_move`: whether another place will do.
        needs_no_others: whether it gains nothing by another rank's reading.
    """

    slices: Mapping[str, Index]
    given: Mapping[str, object]
    node: object
    cast_at: str
    may_move: bool
    needs_no_others: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all ranks.

    Attributes:
        slices: of each rank. `sliced`: names of tensors that any of them slices, or gives other memory for than another one.
        blocked: those that are read in blocks.
        cast_at: where dtypes are converted.
        alone: whether each rank reads for itself.
    """

    slices: tuple[Mapping[str, Index], ...] = ()
    sliced: frozenset[str] = frozenset()
    blocked: Mapping[str, TensorInfo] = field(default_factory=dict)
    cast_at: str = ""
    alone: bool = False


def agree_on_terms(peers: Peers, offer: Offer, infos: Mapping[str, TensorInfo]) -> Terms:
    """Collective.

    All convert in the same place: on the host where fewer bytes then cross a narrow bus, or go from node to node; each node
    converts only what it reads. To host memory ranks do without each other where all have in memory what they read:
    one that reads for the others would copy it once more (`scripts/bench ranks --cases warm_full`: twice the time). Blocks they
    read for each other all the same, since each would read nearly all of them.

    Args:
        infos: every tensor.
    """
    offers: list[Offer] = peers.gather(offer, about="slices")
    slices = tuple(theirs.slices for theirs in offers)
    sliced = frozenset(name for each in slices for name in each) | _given_otherwise([theirs.given for theirs in offers])
    narrow = len({theirs.node for theirs in offers}) > 1 or any(theirs.cast_at == "bus" for theirs in offers)
    cast_at = "bus" if offer.may_move and narrow else offer.cast_at
    of_sliced = {name: infos[name] for name in sorted(sliced)}
    names = choose_blocked(of_sliced, slices)
    blocked = {name: info for name, info in of_sliced.items() if name in names}
    alone = not blocked and all(theirs.needs_no_others for theirs in offers)
    return Terms(slices, sliced, blocked, cast_at, alone)


def _given_otherwise(given: Sequence[Mapping[str, object]]) -> set[str]:
    """Tensors for which not all ranks have been given the same kind of memory: each of them plans these in another way."""
    first, *others = given
    names = {name for each in given for name in each}
    return {name for name in names if any(each.get(name) != first.get(name) for each in others)}
