"""The pool of processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


class Pool:
    """``Ranks`` that are started at the first use, and again after a job has failed."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def __call__(self) -> Ranks:
        if self.ranks is not None and self.ranks.broken:
            self.close()
        if self.ranks is None:
            self.ranks = Ranks()
        return self.ranks

    def close(self) -> list[int | None]:
        codes = [] if self.ranks is None else self.ranks.close()
        self.ranks = None
        return codes


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def ranks(pool: Pool) -> Ranks:
    return pool()
