import re

import pytest

from openv41.engine.pages import OutOfPages, PageAllocator
from openv41.errors import OpenV41Error

pytestmark = pytest.mark.shapes


def test_pages_go_round():
    allocator = PageAllocator(5)
    a, b = allocator.take(3), allocator.take(2)
    assert sorted(a + b) == [0, 1, 2, 3, 4]
    assert allocator.free == 0
    allocator.release(b)
    assert allocator.free == 2
    assert sorted(allocator.take(2)) == sorted(b)
    assert allocator.take(0) == []


def test_the_last_holder_frees():
    allocator = PageAllocator(2)
    (page,) = allocator.take(1)
    allocator.share([page])
    assert allocator.references(page) == 2
    allocator.release([page])
    assert (allocator.references(page), allocator.free) == (1, 1)
    assert allocator.take(1) != [page]
    allocator.release([page])
    assert (allocator.references(page), allocator.free) == (0, 1)


def test_too_many_pages_take_nothing():
    allocator = PageAllocator(4)
    held = allocator.take(1)
    text = re.escape("4 pages were asked for, 3 of 4 are free; run fewer or shorter requests")
    with pytest.raises(OutOfPages, match=text) as caught:
        allocator.take(4)
    assert isinstance(caught.value, OpenV41Error)
    assert allocator.free == 3
    assert sorted(held + allocator.take(3)) == [0, 1, 2, 3]


def test_references_of_caches_are_counted_apart():
    allocator = PageAllocator(3)
    first, second = allocator.take(2)
    for page in (first, first, second):
        allocator.cache(page)
    assert (allocator.num_cached, allocator.references(first)) == (2, 3)
    assert not allocator.is_only_cached(first)
    allocator.release([first])
    assert allocator.is_only_cached(first)
    assert [allocator.uncache(first) for _ in range(2)] == [False, True]
    assert not allocator.uncache(second), "the one who took it holds it"
    assert (allocator.num_cached, allocator.free) == (0, 2)


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda a: a.release([0, 0]), "page 0 is released, but nobody holds it"),
        (lambda a: a.share([1]), "page 1 is shared, but nobody holds it"),
        (lambda a: a.release([2]), "page 2 does not exist, there are 2"),
        (lambda a: a.uncache(0), "page 0 is uncached, but no cache holds it"),
        (lambda a: a.references(-1), "page -1 does not exist"),
        (lambda a: a.take(-1), "cannot take -1 pages"),
    ],
)
def test_misuse_is_caught(misuse, text):
    allocator = PageAllocator(2)
    assert allocator.take(1) == [0]
    with pytest.raises(AssertionError, match=text):
        misuse(allocator)
