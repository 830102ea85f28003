"""Versions of two streams that belong together, such as the states of two trainers at one step. Pure.

Each version says in its meta which pair it belongs to, by a name that its publisher was given: no two versions of a
stream have the same name unless they are the same. The beginning has a name of its own, and the second stream has it
without a version: what it begins with is not published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic_rl.config.groups import ACTOR, CRITIC
from elastic_rl.etcd.records import Version

PAIRED: tuple[tuple[str, str], ...] = ((ACTOR.state, CRITIC.state),)
"""Streams whose versions belong together."""
META_KEY = "pair"


def pair_name(step: int, step_id: str) -> str:
    """``step_id``: a new one each time that the step is made; empty at the beginning, step 0."""
    return f"{step}/{step_id}"


BEGINNING = pair_name(0, "")


def names_of(versions: Sequence[Version]) -> dict[int, str]:
    """The name of the pair of each version that has one, by number."""
    return {v.number: str(v.meta[META_KEY]) for v in versions if META_KEY in v.meta}


def newest_pair(first: Mapping[int, str], second: Mapping[int, str]) -> tuple[int, int] | None:
    """The newest version of the first stream that one of the second belongs to, with the newest such one; 0 for the
    beginning, which has no version. None when there is no such pair. ``first``, ``second``: numbers → names of pairs.
    """
    newest_of = {second[number]: number for number in sorted(second)}
    newest_of.setdefault(BEGINNING, 0)
    return next(((number, newest_of[first[number]]) for number in sorted(first, reverse=True)
                 if first[number] in newest_of), None)


def in_newest_pairs(versions: Mapping[str, Sequence[Version]], paired: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The version of each paired stream that is in the newest pair; 0 for the beginning. ``versions``: the versions of
    each stream, those that are there."""
    found: dict[str, int] = {}
    for streams in paired:
        names = [names_of(versions.get(stream, ())) for stream in streams]
        if (newest := newest_pair(names[0], names[1])) is not None:
            found |= dict(zip(streams, newest, strict=True))
    return found
