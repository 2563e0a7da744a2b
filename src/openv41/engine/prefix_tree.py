"""The tree of the prefix cache: over tokens, with the pages of finished prefixes."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from openv41.engine.pages import PageAllocator

Keys = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: its tokens, and the pages of their state.

    The last page may hold more positions than the match does: copy it before writing to it.
    """

    length: int
    pages: list[int]


@dataclass(eq=False, slots=True)
class Node:
    """A run of keys that ends at position ``end`` and does not cross the end of a page.

    A node with a page stands where that page's content ends: at the page's own end, or earlier (a
    partly filled page, always a leaf). A node without one stands where two pages of the same
    positions part, and has at least two children. The root alone has neither.
    """

    keys: Keys
    end: int
    parent: "Node | None" = None
    page: int | None = None
    children: "dict[Hashable, Node]" = field(default_factory=dict)

    def path(self) -> "Iterator[Node]":
        """Yield the nodes with a page from this one up to the root."""
        node: Node | None = self
        while node is not None:
            if node.page is not None:
                yield node
            node = node.parent

    def first_page(self) -> "Node":
        """Find a node whose page covers this node's keys."""
        node = self
        while node.page is None:
            node = next(iter(node.children.values()))
        return node


class PrefixTree:
    """Remembers which pages hold the state of which prefix, token by token.

    Keys of positions are token ids or any other hashable (an image's content). The tree holds one
    reference to each of its pages, as another tree may; a caller that uses the pages of a match
    shares them before the next call. Not for several threads at a time.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, *, max_snapshots: int = 64
    ) -> None:
        assert page_size > 0, f"page_size is {page_size}"
        assert max_snapshots >= 0, f"max_snapshots is {max_snapshots}"
        self._allocator = allocator
        self._page_size = page_size
        self._max_snapshots = max_snapshots
        self._root = Node((), 0)
        # Every node with a page, least recently used first. A node comes after all nodes below it,
        # so the first one is a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._snapshots: OrderedDict[Node, object] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Count the pages that the tree holds."""
        return len(self._order)

    def __contains__(self, node: Node) -> bool:
        """Whether a node that ``insert`` returned is still there."""
        return node in self._order

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots that the tree holds."""
        return len(self._snapshots)

    def match(self, tokens: Sequence[Hashable]) -> Match:
        """Find the longest known prefix of ``tokens`` and mark it as used."""
        length, path = self._walk(tuple(tokens))
        self._touch(path)
        return Match(length, [node.page for node in path if node.page is not None])

    def insert(
        self, tokens: Sequence[Hashable], pages: Sequence[int], *, after: Node | None = None
    ) -> Node:
        """Remember that ``pages`` hold the state of ``tokens``; share those not yet known.

        Known pages stay, except that a fuller page replaces a partly filled one that it extends.
        Returns the node reached; where it ends with a page, more may be inserted ``after`` it.
        """
        keys, size = tuple(tokens), self._page_size
        node = self._root if after is None else after
        assert node is self._root or node in self, f"the node that ends at {node.end} was dropped"
        assert node.end % size == 0, f"nothing follows a page filled up to {node.end}"
        assert len(pages) == -(-len(keys) // size), (
            f"{len(keys)} tokens fill {-(-len(keys) // size)} pages of {size}, got {len(pages)}"
        )
        for index, page in enumerate(pages):
            node = self._insert_page(node, keys[index * size : (index + 1) * size], page)
        for used in node.path():
            self._order.move_to_end(used)
        return node

    def evictable(self) -> Iterator[int]:
        """Yield the pages that ``evict`` would let go of, in that order."""
        kept: set[Node] = set()
        for node in self._order:
            assert node.page is not None, f"a node that ends at {node.end} is kept without a page"
            if node in kept:
                continue
            if self._allocator.is_only_cached(node.page):
                yield node.page
                continue
            for above in node.path():
                if above in kept:
                    break
                kept.add(above)

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages, least recently used prefixes first; return how many.

        A page that another tree holds too is let go of, and free once that tree does the same.
        Pages that requests hold stay, and so does the prefix before them: both count as used now.
        """
        freed = 0
        kept: dict[Node, None] = {}
        while freed < count and self._order and (node := next(iter(self._order))) not in kept:
            assert node.page is not None, f"a node that ends at {node.end} is kept without a page"
            if self._allocator.is_only_cached(node.page):
                freed += self._drop(node)
                continue
            for above in node.path():
                if above in kept:
                    break
                kept[above] = None
                self._order.move_to_end(above)
        self._touch(kept)
        return freed

    def clear(self) -> None:
        """Forget everything; pages that nobody else holds become free."""
        for node in self._order:
            if node.page is not None:
                self._allocator.uncache(node.page)
        self._order.clear()
        self._snapshots.clear()
        self._root.children.clear()

    def attach(self, node: Node, snapshot: object) -> bool:
        """Keep a snapshot of the state at a node, which ends with a page.

        It goes with its page, or when it is the least recently used of too many. Return whether it
        was kept.
        """
        assert node in self, f"the node that ends at {node.end} was dropped"
        assert node.end % self._page_size == 0, (
            f"a snapshot belongs to the end of a page of {self._page_size}, not to {node.end}"
        )
        self._snapshots[node] = snapshot
        self._snapshots.move_to_end(node)
        if len(self._snapshots) > self._max_snapshots:
            self._snapshots.popitem(last=False)
        return node in self._snapshots

    def snapshots(self, tokens: Sequence[Hashable], up_to: int) -> Iterator[tuple[int, object]]:
        """Yield position and snapshot along ``tokens``, at most at ``up_to``, the deepest first.

        A snapshot counts as used when it is yielded.
        """
        length, path = self._walk(tuple(tokens[:up_to]))
        for node in reversed(path):
            if node.end <= length and node in self._snapshots:
                self._snapshots.move_to_end(node)
                yield node.end, self._snapshots[node]

    def _walk(self, keys: Keys) -> tuple[int, list[Node]]:
        """Follow ``keys`` as far as they are known: how far, and one node for each page."""
        node, at, path = self._root, 0, []
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            same = _common(child.keys, keys[at : at + len(child.keys)])
            at += same
            node = child
            if node.page is not None:
                path.append(node)
            if same < len(node.keys):
                break
        if node.page is None and node is not self._root:
            path.append(node.first_page())
        return at, path

    def _insert_page(self, node: Node, keys: Keys, page: int) -> Node:
        """Find the node whose page covers ``keys`` below ``node``; if new, it owns ``page``."""
        while keys:
            child = node.children.get(keys[0])
            if child is None:
                partly_filled = node.page is not None and node.end % self._page_size
                return (self._refill if partly_filled else self._add)(node, keys, page)
            same = _common(child.keys, keys)
            if same < min(len(child.keys), len(keys)):
                child = _split(child, same)
            node, keys = child, keys[same:]
        return node.first_page()

    def _add(self, parent: Node, keys: Keys, page: int) -> Node:
        """Append a new page."""
        self._allocator.cache(page)
        node = Node(keys, parent.end + len(keys), parent, page)
        parent.children[keys[0]] = node
        self._order[node] = None
        return node

    def _refill(self, node: Node, keys: Keys, page: int) -> Node:
        """Put ``page``, which holds ``keys`` more, in the place of a partly filled page."""
        assert node.page is not None, f"no page to replace at {node.end}"
        self._allocator.cache(page)  # first: it may be the same page, filled further
        self._allocator.uncache(node.page)
        node.keys += keys
        node.end += len(keys)
        node.page = page
        return node

    def _drop(self, node: Node) -> bool:
        """Take a leaf out of the tree; return whether that freed its page."""
        page, parent = node.page, node.parent
        assert not node.children, f"the node that ends at {node.end} is not a leaf"
        assert page is not None, f"the leaf that ends at {node.end} has no page"
        assert parent is not None, "the root is not to be dropped"
        is_free = self._allocator.uncache(page)
        del self._order[node]
        self._snapshots.pop(node, None)
        del parent.children[node.keys[0]]
        if parent.parent is not None and parent.page is None and len(parent.children) == 1:
            (only,) = parent.children.values()  # nothing parts here any more
            only.keys = parent.keys + only.keys
            only.parent = parent.parent
            parent.parent.children[only.keys[0]] = only
        return is_free

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Mark nodes, and with each all nodes above it, as used just now."""
        for node in sorted(nodes, key=lambda node: node.end, reverse=True):
            self._order.move_to_end(node)


def _common(a: Keys, b: Keys) -> int:
    """Count the equal keys that ``a`` and ``b`` begin with."""
    if a == b:
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _split(node: Node, at: int) -> Node:
    """Part a node's keys in two; return the new upper node, which has no page."""
    parent = node.parent
    assert parent is not None, "the root has no keys to part"
    assert 0 < at < len(node.keys), f"{len(node.keys)} keys cannot be parted at {at}"
    upper = Node(node.keys[:at], parent.end + at, parent)
    parent.children[node.keys[0]] = upper
    upper.children[node.keys[at]] = node
    node.keys, node.parent = node.keys[at:], upper
    return upper
