"""What the demo says of its drafter: rounds are told from each other, loops are seen."""

from types import SimpleNamespace

from demo.drafting import Rounds, first_repeated, mean_before_loops, repeated_share


def answer(*tokens):
    return SimpleNamespace(tokens=tokens)


def test_the_first_4_gram_that_repeats():
    assert first_repeated(answer(1, 2, 3, 4, 1, 2, 3, 4, 1)) == 7
    assert first_repeated(answer(5, 5, 5, 5, 5)) == 4
    assert first_repeated(answer(1, 2, 3)) == 3
    assert repeated_share(answer(5, 5, 5, 5, 5)) == 0.5


def test_rounds_that_begin_in_a_loop_do_not_count():
    rounds = Rounds()
    rounds.verified([9, 8], [5, 5], [0, 2])
    rounds.verified([8], [5], [5])
    rounds.verified([8], [5], [1])
    assert rounds.in_order() == [[2, 5, 1], [0]]
    looping = answer(1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4)  # place 7 is the first that repeats
    counted = [3, 6, 1]  # from places 1 and 4; the third round begins at 10
    found = mean_before_loops([looping, answer(1, 2)], rounds.in_order())
    assert found == sum(counted) / len(counted)
