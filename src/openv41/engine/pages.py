"""The pages of the cache: who holds each, and which are free."""

from collections import Counter
from collections.abc import Iterable

from openv41.errors import OpenV41Error


class OutOfPages(OpenV41Error, RuntimeError):  # noqa: N818 - a state to react to, not a fault
    """Fewer pages are free than were asked for."""


class PageAllocator:
    """Hands out pages by number and counts the holders of each.

    A page covers the state of ``page_size`` consecutive token positions; the last holder to release
    it frees it. Holders that only cache a page, for whoever may come, are also counted apart.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"num_pages is {num_pages}"
        self._references = [0] * num_pages
        self._cached: Counter[int] = Counter()  # those of the references that caches hold
        self._free = list(reversed(range(num_pages)))  # a stack: what was freed last is still warm

    @property
    def free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of pages that caches hold, each counted once."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Take free pages, with one reference each; all of them or, with OutOfPages, none."""
        assert count >= 0, f"cannot take {count} pages"
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages were asked for, {len(self._free)} of {len(self._references)} are "
                "free; run fewer or shorter requests at a time, or give the cache more pages"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert not self._references[page], f"page {page} was free and held at the same time"
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that somebody holds already."""
        for page in pages:
            self._check_held(page, "shared")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give back a reference to each page; the last one frees the page."""
        for page in pages:
            self._check_held(page, "released")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def cache(self, page: int) -> None:
        """Add a cache's reference to a page that somebody holds already."""
        self.share([page])
        self._cached[page] += 1

    def uncache(self, page: int) -> bool:
        """Give a cache's reference back; return whether that freed the page."""
        assert page in self._cached, f"page {page} is uncached, but no cache holds it"
        self._cached[page] -= 1
        if not self._cached[page]:
            del self._cached[page]
        self.release([page])
        return not self._references[page]

    def is_only_cached(self, page: int) -> bool:
        """Whether all holders of a page are caches."""
        return self.references(page) == self._cached[page]

    def references(self, page: int) -> int:
        """Count the holders of a page; 0 for a free one."""
        assert 0 <= page < len(self._references), (
            f"page {page} does not exist, there are {len(self._references)}"
        )
        return self._references[page]

    def _check_held(self, page: int, action: str) -> None:
        assert self.references(page) > 0, f"page {page} is {action}, but nobody holds it"
