"""The prefix tree against a model that knows nothing of trees: a dict from prefix to page."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openv41.engine import prefix_tree
from openv41.engine.pages import PageAllocator
from openv41.engine.prefix_tree import PrefixTree

pytestmark = pytest.mark.shapes

NUM_PAGES = 24


def build(page_size, *, num_pages=NUM_PAGES, **options):
    allocator = PageAllocator(num_pages)
    return allocator, PrefixTree(allocator, page_size, **options)


def insert(allocator, cache, tokens):
    """Insert fresh pages and let go of them; return their numbers."""
    pages = allocator.take(-(-len(tokens) // cache._page_size))
    cache.insert(tokens, pages)
    allocator.release(pages)
    return pages


def attach(cache, tokens, snapshot):
    """Attach a snapshot where known tokens end."""
    length, path = cache._walk(tuple(tokens))
    return length == len(tokens) and cache.attach(path[-1], snapshot)


def test_match_is_token_granular():
    allocator, cache = build(4)
    a = insert(allocator, cache, "abcdefghij")
    for length in range(11):
        match = cache.match("abcdefghij"[:length] + "XYZ")
        assert (match.length, match.pages) == (length, a[: -(-length // 4)])
    assert cache.match("").pages == cache.match("bcd").pages == []


def test_a_match_does_not_leap_over_an_unknown_key():
    allocator, cache = build(4)
    a = insert(allocator, cache, "abcdefgh")
    assert (cache.match("abef").length, cache.match("abef").pages) == (2, a[:1])


def test_two_prefixes_part_within_a_page():
    allocator, cache = build(4)
    a = insert(allocator, cache, "abcdefgh")
    b = insert(allocator, cache, "abcdeXYZ")
    assert allocator.free == NUM_PAGES - 3  # the first page is known; the second is not
    assert cache.match("abcdefgh").pages == a
    assert cache.match("abcdeXYZ").pages == [a[0], b[1]]
    match = cache.match("abcdeQ")
    assert match.length == 5
    assert match.pages in (a, [a[0], b[1]])


def test_a_fuller_page_replaces_a_partly_filled_one():
    allocator, cache = build(4)
    short = insert(allocator, cache, "abcdef")
    other = insert(allocator, cache, "abcde")  # fewer tokens: what is there stays
    full = insert(allocator, cache, "abcdefgX")
    assert cache.match("abcdefgXY").pages == [short[0], full[1]]
    assert allocator.references(short[1]) == allocator.references(other[1]) == 0
    longer = insert(allocator, cache, "abcdefgXYZ")
    assert cache.match("abcdefgXYZ").pages == [short[0], full[1], longer[2]]
    assert len(cache) == 3


def test_the_same_page_filled_further_stays_held():
    allocator, cache = build(4)
    pages = allocator.take(1)
    cache.insert("ab", pages)
    allocator.release(pages)
    cache.insert("abc", pages)
    assert allocator.references(pages[0]) == 1
    assert cache.match("abcd").length == 3


def test_eviction_starts_with_the_least_recently_used_leaf():
    allocator, cache = build(2)
    for tokens in ("abcdef", "abX", "PQ"):
        insert(allocator, cache, tokens)
    cache.match("abX")
    cache.match("abcd")  # not ef
    for left in (["abX", "abcd", "PQ"], ["abX", "abcd"], ["abcd"], ["ab"], []):
        assert cache.evict(1) == 1
        lengths = [cache._walk(tuple(t))[0] for t in left]
        assert lengths == [len(t) for t in left]
        assert len(cache) == len({t[: i + 2] for t in left for i in range(0, len(t), 2)})
    assert cache.evict(1) == 0
    assert allocator.free == NUM_PAGES


def test_eviction_spares_what_others_hold():
    allocator, cache = build(2)
    insert(allocator, cache, "abcdef")
    insert(allocator, cache, "PQRS")
    held = cache.match("abcd").pages
    allocator.share(held)
    assert cache.evict(100) == 3  # ef, PQ, RS
    assert cache.match("abcdef").pages == held
    cache.clear()
    assert allocator.free == NUM_PAGES - 2
    allocator.release(held)
    assert allocator.free == NUM_PAGES


def test_pages_let_go_are_evicted_leaves_first():
    allocator, cache = build(2)
    for tokens in ("abcdef", "abXY"):
        insert(allocator, cache, tokens)
    held = cache.match("abcdef").pages + cache.match("abXY").pages
    allocator.share(held)
    assert cache.evict(1) == 0
    allocator.release(held)
    for left in (3, 2, 1, 0):
        assert cache.evict(1) == 1
        assert len(cache) == left
        assert cache._walk(tuple("abQ"))[0] == (2 if left else 0)


def test_a_page_of_two_trees_is_free_when_both_let_go():
    allocator, first = build(2)
    second = PrefixTree(allocator, 2)
    pages = insert(allocator, first, "abcd")
    second.insert("abcd", pages)
    _, own = insert(allocator, second, "abxy")
    assert allocator.num_cached == 3
    assert list(second.evictable()) == [pages[1], own, pages[0]]
    assert second.evict(1) == 1, "what is freed counts, not what is let go of"
    assert allocator.free == NUM_PAGES - 2
    assert (first.match("abcd").length, second.match("abcd").length) == (4, 2)
    assert (second.evict(9), first.evict(9)) == (0, 2)
    assert (allocator.free, allocator.num_cached) == (NUM_PAGES, 0)


def test_branches_that_stay_are_found_after_one_is_dropped():
    """Down to one branch, nothing parts there any more; then it parts in another place."""
    allocator, cache = build(8)
    pages = {tokens: insert(allocator, cache, tokens) for tokens in ("abcdX", "abcdY", "abZ")}
    for dropped, known in [("abcdX", {"abcdY": 5, "abZ": 3}), ("abcdY", {"abZ": 3})]:
        assert cache.evict(1) == 1
        assert cache._walk(tuple(dropped))[0] == {"abcdX": 4, "abcdY": 2}[dropped]
        for tokens, length in known.items():
            found, path = cache._walk(tuple(tokens))
            assert (found, [node.page for node in path]) == (length, pages[tokens])
    pages["aQ"] = insert(allocator, cache, "aQ")
    for tokens in ("abZ", "aQ"):
        assert (cache.match(tokens).length, cache.match(tokens).pages) == (
            len(tokens),
            pages[tokens],
        )
    assert cache.evict(5) == 2
    assert cache.match("abc").length == 0


def test_clear_forgets():
    allocator, cache = build(2)
    insert(allocator, cache, "abcd")
    assert attach(cache, "ab", 1)
    cache.clear()
    assert (len(cache), cache.num_snapshots, allocator.free) == (0, 0, NUM_PAGES)
    assert cache.match("abcd").pages == list(cache.snapshots("abcd", 4)) == []
    insert(allocator, cache, "ab")
    assert cache.match("abcd").length == 2


def test_a_held_page_keeps_the_prefix_before_it():
    allocator, cache = build(2)
    pages = insert(allocator, cache, "abcdef")
    allocator.share(pages[1:2])
    assert cache.evict(100) == 1
    assert cache.match("abcdef").pages == pages[:2]


def test_snapshots_come_deepest_first_and_go_with_their_page():
    allocator, cache = build(2)
    insert(allocator, cache, "abcdef")
    insert(allocator, cache, "abcdXY")
    assert attach(cache, "abcd", "at 4")
    assert attach(cache, "ab", "at 2")
    assert attach(cache, "abcdef", "at 6")
    assert not attach(cache, "abcQ", "unknown")
    assert list(cache.snapshots("abcdef", 6)) == [(6, "at 6"), (4, "at 4"), (2, "at 2")]
    assert list(cache.snapshots("abcdef", 5)) == [(4, "at 4"), (2, "at 2")]
    assert list(cache.snapshots("abcde", 6)) == [(4, "at 4"), (2, "at 2")]
    assert list(cache.snapshots("abcdXY", 6)) == [(4, "at 4"), (2, "at 2")]
    assert list(cache.snapshots("abcQ", 4)) == [(2, "at 2")]
    assert cache.evict(1) == 1  # ef
    assert cache.num_snapshots == 2
    insert(allocator, cache, "abcdef")
    assert list(cache.snapshots("abcdef", 6)) == [(4, "at 4"), (2, "at 2")]


def test_the_least_recently_used_snapshot_makes_room():
    allocator, cache = build(1, max_snapshots=2)
    insert(allocator, cache, "abc")
    assert attach(cache, "a", 1)
    assert attach(cache, "ab", 2)
    assert next(cache.snapshots("a", 1)) == (1, 1)  # 1 is used, 2 is not
    assert attach(cache, "abc", 3)
    assert list(cache.snapshots("abc", 3)) == [(3, 3), (1, 1)]
    assert attach(cache, "abc", 4)  # used, and not there twice
    assert attach(cache, "ab", 5)
    assert list(cache.snapshots("abc", 3)) == [(3, 4), (2, 5)]


def test_no_room_for_snapshots():
    allocator, cache = build(1, max_snapshots=0)
    insert(allocator, cache, "a")
    assert not attach(cache, "a", 1)
    assert cache.num_snapshots == 0


def test_misuse_is_caught():
    allocator, cache = build(4)
    with pytest.raises(AssertionError, match="5 tokens fill 2 pages of 4, got 1"):
        cache.insert("abcde", allocator.take(1))
    node = cache.insert("abcde", allocator.take(2))
    with pytest.raises(AssertionError, match="the end of a page of 4, not to 5"):
        cache.attach(node, None)
    with pytest.raises(AssertionError, match="nothing follows a page filled up to 5"):
        cache.insert("f", allocator.take(1), after=node)
    cache.clear()
    with pytest.raises(AssertionError, match="the node that ends at 5 was dropped"):
        cache.attach(node, None)
    with pytest.raises(AssertionError, match="the node that ends at 5 was dropped"):
        cache.insert("f", allocator.take(1), after=node)


def test_cost_does_not_grow_with_the_tree(monkeypatch):
    """400 sequences that all part at one place within a page; others hold the older half."""
    allocator, cache = build(64, num_pages=800)
    sequences = [(*range(50), 1_000 + i, *range(20)) for i in range(400)]
    for tokens in sequences:
        insert(allocator, cache, tokens)
    allocator.share(range(400))
    calls = {"compare": 0, "references": 0}

    def count(owner, name, what):
        real = getattr(owner, name)

        def counted(*args):
            calls[what] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, counted)

    count(prefix_tree, "_common", "compare")
    count(allocator, "references", "references")
    for tokens in sequences[:200]:
        assert cache.match(tokens).length == 71
        assert cache.evict(1) == 1
    assert calls["compare"] == 3 * 200  # two parts of a page, and the next page
    assert calls["references"] <= 400 + 200  # those held are met once


class Model:
    """What the tree should do, with one flat dict and loops over it."""

    def __init__(self, page_size, max_snapshots):
        self.page_size, self.max_snapshots = page_size, max_snapshots
        self.page = {}  # all tokens up to the page's last one -> page
        self.used = {}  # the same -> when, as a tuple to sort by: a leaf before what is above it
        self.now = 0
        self.snapshots = {}  # the same, least recently used first

    def prefixes(self, tokens):
        ends = range(self.page_size, len(tokens) + self.page_size, self.page_size)
        return [tokens[:end] for end in ends]

    def slot(self, prefix):
        return (len(prefix) - 1) // self.page_size

    def covers(self, prefix):
        """All entries whose page holds the last tokens of ``prefix``."""
        alike = (p for p in self.page if self.slot(p) == self.slot(prefix))
        return [p for p in alike if p[: len(prefix)] == prefix]

    def length(self, tokens):
        lengths = range(len(tokens) + 1)
        return max(n for n in lengths if all(map(self.covers, self.prefixes(tokens[:n]))))

    def touch(self, entries):
        self.now += 1
        self.used.update({entry: (self.now, -len(entry)) for entry in entries})

    def insert(self, tokens, pages):
        for prefix, page in zip(self.prefixes(tokens), pages, strict=True):
            if self.covers(prefix):
                continue
            extended = [p for p in self.page if self.slot(p) == self.slot(prefix)]
            for entry in extended:
                if prefix[: len(entry)] == entry:
                    self.drop(entry)
            self.page[prefix] = page

    def drop(self, entry):
        del self.page[entry]
        self.used.pop(entry, None)
        self.snapshots.pop(entry, None)

    def evict(self, count, references):
        dropped, kept = 0, []
        self.now += 1
        while dropped < count and self.page:
            entry = min(self.page, key=self.used.get)
            if entry in kept:
                break
            if references(self.page[entry]) == 1:
                self.drop(entry)
                dropped += 1
            else:
                kept += [p for p in reversed(self.prefixes(entry)) if p not in kept]
                self.used |= {p: (self.now, -len(p), i) for i, p in enumerate(kept)}
        return dropped

    def attach(self, tokens, snapshot):
        if tokens not in self.page:
            return False
        self.snapshots.pop(tokens, None)
        self.snapshots[tokens] = snapshot
        if len(self.snapshots) > self.max_snapshots:
            del self.snapshots[next(iter(self.snapshots))]
        return tokens in self.snapshots

    def found_snapshots(self, tokens, up_to):
        for prefix in reversed(self.prefixes(tokens[:up_to])):
            if prefix in self.snapshots:
                self.snapshots[prefix] = self.snapshots.pop(prefix)
                yield len(prefix), self.snapshots[prefix]


class Run:
    """The tree, the model and other users of the same pages, one operation at a time."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.allocator, self.cache = build(page_size, max_snapshots=3)
        self.model = Model(page_size, 3)
        self.content = {}  # page -> the tokens up to its last one, as written by its taker
        self.users = []  # lists of pages
        self.reached = {}  # tokens -> the node that their insertion returned

    def do(self, name, tokens, number):
        getattr(self, name)(tokens, number)
        self.check()

    def match(self, tokens, number):
        match = self.cache.match(tokens)
        assert match.length == self.model.length(tokens)
        prefixes = self.model.prefixes(tokens[: match.length])
        assert len(match.pages) == len(prefixes)
        for prefix, page in zip(prefixes, match.pages, strict=True):
            assert self.content[page][: len(prefix)] == prefix
        self.model.touch(p for p, page in self.model.page.items() if page in match.pages)
        return match

    def insert(self, tokens, number):
        """As a request does: share what is known in full, compute the rest, remember it."""
        match = self.match(tokens, number)
        known = match.pages[: match.length // self.page_size]
        self.allocator.share(known)
        missing = len(self.model.prefixes(tokens)) - len(known)
        if missing > self.allocator.free:
            self.evict(tokens, missing - self.allocator.free)
        if missing > self.allocator.free:
            self.allocator.release(known)
            return
        pages = known + self.allocator.take(missing)
        for prefix, page in zip(self.model.prefixes(tokens), pages, strict=True):
            if page not in known:
                self.content[page] = prefix
        begin, after = self.begun(tokens) if number % 3 else (0, None)
        node = self.cache.insert(tokens[begin:], pages[begin // self.page_size :], after=after)
        if len(tokens) % self.page_size == 0:
            self.reached[tokens] = node
        self.model.insert(tokens, pages)
        found = self.cache._walk(tokens)[1]
        self.model.touch(p for p, q in self.model.page.items() if q in {n.page for n in found})
        self.users.append(pages)
        if number % 2:
            self.leave(tokens, -1)

    def begun(self, tokens):
        """Where the tree has a part of tokens already, as far as an insertion told."""
        for end in range(len(tokens) - 1, 0, -1):
            node = self.reached.get(tokens[:end])
            if node is not None and node in self.cache:
                return end, node
        return 0, None

    def share(self, tokens, number):
        pages = self.match(tokens, number).pages
        self.allocator.share(pages)
        self.users.append(pages)

    def leave(self, tokens, number):
        if self.users:
            self.allocator.release(self.users.pop(number % len(self.users)))

    def evict(self, tokens, number):
        before = self.allocator.free
        promised = len(list(islice(self.cache.evictable(), number)))
        expected = self.model.evict(number, self.allocator.references)
        assert promised == expected
        assert self.cache.evict(number) == expected
        assert self.allocator.free == before + expected

    def attach(self, tokens, number):
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        if tokens:
            assert attach(self.cache, tokens, number) == self.model.attach(tokens, number)

    def snapshots(self, tokens, number):
        found = list(self.cache.snapshots(tokens, number))
        assert found == list(self.model.found_snapshots(tokens, number))

    def clear(self, tokens, number):
        if number == 13:  # rarely
            self.cache.clear()
            self.model.__init__(self.page_size, 3)

    def check(self):
        """Every page is held once by the tree if it should be, and once by each user of it."""
        owned = list(self.model.page.values())
        assert len(self.cache) == len(owned) == len(set(owned))
        assert self.cache.num_snapshots == len(self.model.snapshots)
        for page in range(NUM_PAGES):
            users = sum(page in pages for pages in self.users)
            assert self.allocator.references(page) == users + (page in owned)
        for prefix, page in self.model.page.items():
            assert self.content[page] == prefix


OPERATIONS = ["match", "insert", "insert", "insert", "share", "leave", "leave"]
OPERATIONS += ["evict", "attach", "attach", "snapshots", "clear"]


@pytest.mark.property
@settings(max_examples=15)
@given(
    page_size=st.integers(1, 4),
    operations=st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS),
            st.integers(2, 2**14 - 1).map(lambda n: tuple(f"{n:b}"[1:])),  # 1 to 13 keys, 0 or 1
            st.integers(0, 13),
        ),
        min_size=30,
        max_size=60,
    ),
)
def test_cache_equals_the_model(page_size, operations):
    run = Run(page_size)
    for operation in operations:
        run.do(*operation)
    run.cache.clear()
    for pages in run.users:
        run.allocator.release(pages)
    assert run.allocator.free == NUM_PAGES
