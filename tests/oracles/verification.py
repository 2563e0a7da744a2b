"""Verification schedules by definition: every choice of lengths, one Python loop at a time."""

import itertools


def every_length(survivals):
    """All ways to verify drafts of each request."""
    return itertools.product(*(range(len(row) + 1) for row in survivals))


def rate(survivals, lengths, seconds):
    """Tokens per second of one choice."""
    tokens, drafts = 0.0, 0
    for row, length in zip(survivals, lengths, strict=True):
        tokens += 1.0
        for position in range(length):
            tokens += row[position]
            drafts += 1
    return tokens / seconds[drafts]


def best_rate(survivals, seconds):
    """The highest tokens per second of all choices."""
    return max(rate(survivals, lengths, seconds) for lengths in every_length(survivals))


def algorithm_1(survivals, seconds):
    """Lengths as Algorithm 1 finds them, candidate by candidate."""
    candidates = [
        (-survival, position, request)
        for request, row in enumerate(survivals)
        for position, survival in enumerate(row)
        if survival > 0
    ]
    lengths = [0] * len(survivals)
    tokens, drafts = float(len(survivals)), 0
    best = tokens / seconds[0]
    for negative, position, request in sorted(candidates):
        tokens, drafts = tokens - negative, drafts + 1
        if tokens / seconds[drafts] <= best:
            break
        best = tokens / seconds[drafts]
        lengths[request] = position + 1
    return lengths


def global_search(survivals, seconds):
    """The lengths of the best rate, wherever it is: not allowed with current survivals."""
    if not survivals:
        return []
    return list(max(every_length(survivals), key=lambda found: rate(survivals, found, seconds)))
