"""What a round of speculative decoding does: loops over all drafts and outcomes."""

import itertools
import math


def sequences(vocab, length):
    return itertools.product(range(vocab), repeat=length)


def joint(target, vocab, length):
    """Chance of each sequence of ``length`` tokens under the model itself."""
    return {
        tokens: math.prod(float(target[tokens[:i]][tokens[i]]) for i in range(length))
        for tokens in sequences(vocab, length)
    }


def continue_with(found, target, length, prefix, chance):
    """Add what follows a committed prefix: the rest is drawn from the model in later rounds."""
    for rest in sequences(len(target[()]), length - len(prefix)):
        tokens, share = prefix, chance
        for token in rest:
            share *= float(target[tokens][token])
            tokens += (token,)
        found[tokens] += share


def round_outcomes(target, drafted, vocab, most, *, rule, length_of):
    """Chance of each sequence of ``most`` + 1 tokens after a round and plain decoding behind it.

    ``target`` and ``drafted`` give the chances after each prefix. ``length_of(x)`` says how many
    drafts of x are verified. ``rule(x)`` returns [(accepted, chance, shares of what is drawn next)]
    for the verified drafts x.
    """
    found = dict.fromkeys(sequences(vocab, most + 1), 0.0)
    for drafts in sequences(vocab, most):
        chance = math.prod(float(drafted[drafts[:i]][drafts[i]]) for i in range(most))
        if not chance:
            continue
        verified = drafts[: length_of(drafts)]
        for accepted, share, following in rule(verified):
            total = sum(following)
            for token in range(vocab):
                part = chance * share * following[token] / total
                if part:
                    prefix = (*verified[:accepted], token)
                    continue_with(found, target, most + 1, prefix, part)
    return found


def distance(found, want):
    """Total variation."""
    return sum(abs(found[tokens] - want[tokens]) for tokens in want) / 2
