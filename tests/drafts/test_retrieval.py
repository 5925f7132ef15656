"""Retrieval finds the longest match and its most frequent continuation, and knows how often its tokens are right."""

import random
from types import SimpleNamespace

import pytest

from drafts.draft import MAX_K
from drafts.retrieval import MAX_MATCH, MAX_OCCURRENCES, Match, RetrievalDraft, RowIndex, TextIndex
from drafts.retrieval import find_match as find


def match_length(text: list[int], end: int, tail: list[int]) -> int:
    """How many tokens before this position are also the end of `tail`."""
    most = min(MAX_MATCH, end, len(tail))
    return next((n for n in range(most) if text[end - n - 1] != tail[len(tail) - n - 1]), most)


def all_ends(text: list[int], tail: list[int]) -> list[int]:
    """All positions that follow an occurrence of the last two tokens, ascending."""
    return [end for end in range(2, len(text)) if match_length(text, end, tail) >= 2]


def check(match: Match, text: list[int], ends: list[int], tail: list[int], n: int):
    """Check a match of a search that has compared these ends."""
    lengths = [match_length(text, end, tail) for end in ends]
    if not ends:
        return check_empty(match)
    assert match.length == max(lengths) and len(match.tokens) == len(match.vote_shares) == n
    voters = [(text[end : end + n] * n)[:n] for end, length in zip(ends, lengths) if length == match.length]
    for i, (token, share) in enumerate(zip(match.tokens, match.vote_shares)):
        votes = [voter[i] for voter in voters]
        assert votes.count(token) == max(map(votes.count, votes))
        assert share == pytest.approx((votes.count(token) - (match.length + i) ** -0.8) / len(votes))
        voters = [voter for voter in voters if voter[i] == token]


def check_empty(match: Match):
    assert match == Match(0, [], [])


@pytest.mark.parametrize("text, n, expected", [
    ([5, 6, 7, 8, 5, 6], 9, [7, 8, 5, 6, 7, 8, 5, 6, 7]),  # the match overlaps its own continuation
    ([1, 2, 3, 4, 2, 3, 7, 2, 3, 7, 1, 2, 3], 1, [4]),  # the longest match: not the latest, or the most frequent
    ([2, 3, 4, 8, 2, 3, 5, 9, 2, 3], 1, [5]),  # of equal votes, the latest
    ([2, 3, 4, 8, 2, 3, 4, 6, 2, 3, 5, 9, 2, 3], 2, [4, 6]),  # two votes of three, and the latest of those two
    ([1, 2, 3, 1, 4, 2, 3, 5, 4, 1, 2, 6, 1], 3, []),  # a single token does not count as a match
    ([1, 2, 1, 2, 1], 0, []), ([1, 2, 1, 2, 1], -1, []), ([4], 3, []), ([], 3, []),
])  # fmt: skip
def test_a_row_continues_its_own_text(text, n, expected):
    assert find(RowIndex(text), text, n).tokens == expected


def test_matches_in_a_growing_text():
    """All matches are those of a slow search, whether the index grew token by token, in pieces or was built at once."""
    rng, long = random.Random(1), 0
    for case in range(150):
        alphabet, n = rng.choice((1, 2, 3, 6)), rng.choice((1, 4, MAX_K))
        text = [rng.randrange(alphabet) for _ in range(rng.randrange(120))]
        grown, in_pieces = RowIndex([]), RowIndex(text[: case % 7])
        for token in text:
            grown.extend([token])
        while len(in_pieces.tokens) < len(text):
            in_pieces.extend(text[len(in_pieces.tokens) :][: rng.randrange(5)])
        match, ends = find(RowIndex(text), text, n), all_ends(text, text)
        long += len(ends) > MAX_OCCURRENCES
        check(match, text, ends[-MAX_OCCURRENCES:], text, n)
        assert find(grown, text, n) == find(in_pieces, text, n) == match
    assert long > 5


def test_matches_in_a_text_that_does_not_grow():
    rng, long = random.Random(2), 0
    for case in range(200):
        alphabet, n = rng.choice((1, 2, 3, 6)), rng.choice((1, 4, MAX_K))
        text = [rng.randrange(alphabet) for _ in range(case if case < 5 else rng.randrange(300))]
        tail = [rng.randrange(alphabet) for _ in range(rng.randrange(30))]
        if case % 2 and text:
            start = rng.randrange(len(text))
            tail += text[start : start + rng.randrange(40)]
        match, ends = find(TextIndex(text), tail, n), all_ends(text, tail)
        if len(ends) <= MAX_OCCURRENCES:
            check(match, text, ends, tail, n)
            continue
        long += 1  # then it compares only some of the places, but always one with the longest match
        longest = max(match_length(text, end, tail) for end in ends)
        best = [end for end in ends if match_length(text, end, tail) == longest]
        assert match.length == longest
        assert match.tokens in [(text[end : end + n] * n)[:n] for end in best]
    assert long > 20


def test_ids_of_any_size():
    big = 2**31 - 1
    text = [big, big - 1, 7, 0, big, big - 1, 8, big - 1, big, 9, big, big, 0]
    for index in (RowIndex(text), TextIndex(text)):
        assert find(index, [0, big, big - 1], 1).tokens == [8]
        assert find(index, [5, big, big - 1], 1).tokens[0] in (7, 8)
        assert find(index, [big - 1, big], 1).tokens == [9]
        assert find(index, [big, big], 1).tokens == [0]
        check_empty(find(index, [8, big], 1))
        check_empty(find(index, [big], 1))
        check_empty(find(index, [big, 0], 1))  # nothing follows


def test_probabilities_of_a_text_of_phrases():
    """In random phrases with random mistakes, they are right after short and after long matches, of which the long
    ones are worth more, and for tokens with few and with many votes."""
    rng, draft, groups = random.Random(4), make_draft(), {}
    phrases = [[rng.randrange(9) for _ in range(15)] for _ in range(20)]
    text = [token if rng.random() < 0.97 else 0 for _ in range(400) for token in rng.choice(phrases)]
    draft.add(0, text[:2], 0)
    for position in range(2, len(text)):
        tokens, probs = draft.find_row(0, 4)
        if tokens and position > 1000:
            n = draft.matches[0][0].length
            by_length = "long" if n > 6 else "short" if n < 5 else "middle"
            for key in ("all", by_length, "likely" if probs[0] > 0.8 else "doubtful"):
                groups.setdefault(key, []).append((probs[0], tokens[0] == text[position]))
        draft.accepted(0, [text[position]])
    means = {key: [sum(column) / len(pairs) for column in zip(*pairs)] for key, pairs in groups.items()}
    assert all(abs(chance - rate) < 0.05 and len(groups[key]) > 300 for key, (chance, rate) in means.items()), means
    assert means["short"][0] < means["long"][0] - 0.2 and abs(means["all"][0] - means["all"][1]) < 0.01, means


def make_draft(texts=(), length=10_000, n_token=None) -> RetrievalDraft:
    draft, config = RetrievalDraft(texts), SimpleNamespace(n_token=n_token, vocab_size=99)
    draft.begin(SimpleNamespace(length=length, model=SimpleNamespace(config=config)))
    return draft


def propose(draft: RetrievalDraft, rows: list[int], k: int):
    """The proposed tokens and their probabilities, as lists for each row."""
    proposal = draft.propose(SimpleNamespace(rows=[SimpleNamespace(index=i) for i in rows]), k)
    if proposal is None:
        return [([], [])] * len(rows)
    assert proposal.k == max(map(len, proposal.tokens)) <= k
    for tokens, probs in zip(proposal.tokens, proposal.probs, strict=True):
        assert len(tokens) == len(probs) and all(0 < chance < 1 for chance in probs)
    return list(zip(proposal.tokens, proposal.probs))


def test_proposals():
    """Never beyond the cache, and nothing where the last two tokens are new."""
    draft = make_draft([[1, 2, 3, 4, 5, 6]], length=12)
    for row, tokens in enumerate(([8, 1, 2, 3], [8, 7], [2, 3, 9, 2], [5] * 11, [5] * 12)):
        draft.add(row, tokens, 0)
    draft.accepted(2, [3])
    found = [tokens for tokens, _ in propose(draft, [3, 0, 1, 2, 4], 3)]
    assert found == [[5], [4, 5, 6], [], [9, 2, 3], []], "of equal matches, the row's own text"
    draft.remove(2)
    draft.add(2, [2, 9], 0)
    assert propose(draft, [2], 3) == [([], [])]


def test_padding_of_the_vocabulary_is_never_proposed():
    text = [1, 2, 3, 4, 88, 5, 1, 2]
    for n_token, expected in ((None, [3, 4, 88, 5]), (88, [3, 4]), (4, [3])):
        draft = make_draft(n_token=n_token)
        draft.add(0, text, 0)
        assert propose(draft, [0], 4)[0][0] == expected
    draft = make_draft(n_token=3)
    draft.add(0, text, 0)
    assert propose(draft, [0], 4) == [([], [])]


def test_the_more_promising_text_answers():
    """It is the text whose matches were right before, also if they were not proposed."""
    ours, theirs = [10, 11, 12, 13], [10, 11, 22, 23]
    draft = make_draft([theirs])
    draft.add(0, [*ours, 10, 11], 0)
    first = propose(draft, [0], 2)[0]
    assert first[0] == [12, 13]
    draft.remove(0)
    for row in range(20):
        draft.add(row, [*ours, 10, 11], 0)
        draft.find_row(row, 2)
        draft.accepted(row, [22])
    draft.add(0, [*ours, 10, 11], 0)
    tokens, probs = propose(draft, [0], 2)[0]
    assert tokens == [22, 23] and probs[0] > first[1][0] + 0.1
    assert draft.calibrations[0].acceptance_probs(draft.matches[0][0])[0] < first[1][0] - 0.1


def test_more_tokens_are_better_than_a_likelier_first_token():
    draft = make_draft([[9, 8, 1, 2, 21, 22, 23, 24]])
    draft.add(0, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 9, 8, 1, 2], 0)
    tokens, probs = propose(draft, [0], 4)[0]
    own, other = draft.matches[0]
    assert tokens == other.tokens == [21, 22, 23, 24] and own.tokens[0] == 3 and own.vote_shares[0] > probs[0]


def test_a_match_is_verified_once():
    draft = make_draft()
    draft.add(0, [1, 2, 3, 1, 2], 0)
    draft.find_row(0, 2)
    draft.accepted(0, [3, 1])
    before = [rate.expected for rate in draft.calibrations[0].rates]
    draft.accepted(0, [2, 3])  # a step for which nothing was proposed
    assert before == [rate.expected for rate in draft.calibrations[0].rates] != [6.0] * len(before)
    assert draft.rows[0].tokens == [1, 2, 3, 1, 2, 3, 1, 2, 3]
    draft.find_row(0, 2)
    draft.remove(0)
    draft.add(0, [4, 5], 0)
    draft.accepted(0, [7])  # the match of the request before does not count
    assert before == [rate.expected for rate in draft.calibrations[0].rates]
