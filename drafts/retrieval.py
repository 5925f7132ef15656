"""A draft without a model: it finds the newest tokens in earlier text, and proposes what followed.

It searches the row's own tokens, prompt included (prompt lookup), and other texts, if there are any
(retrieval). The longest match wins. If it occurs several times, the tokens that followed each
occurrence are counted as votes. The share of the votes and the length of the match give the
probability that a proposed token is accepted. Both ideas are from SuffixDecoding
(arXiv:2411.04975).

A search runs no PyTorch operations, because each of them takes microseconds. If the last two tokens
have not occurred before, it is one lookup in a dictionary.

Read down: the two kinds of index; find_match; Calibration, which learns the probabilities;
RetrievalDraft.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul

import torch

from drafts.controller import Rate
from drafts.draft import MAX_K, Draft, Proposal
from engine import Batch, Engine

MAX_OCCURRENCES = 32  # a search compares at most this many occurrences of the last two tokens
MAX_MATCH = 16  # tokens that are compared at each occurrence

# RowIndex and TextIndex have `tokens`, and a function find(tail). It finds the last two tokens of
# `tail` in the text, and returns the positions of the tokens that follow them, at most
# MAX_OCCURRENCES. Matches of a single token would predict too little.


class RowIndex:
    """An index of a growing text: hash chains, as in zlib, for each pair of neighbouring tokens."""

    def __init__(self, tokens: list[int]):
        self.tokens: list[int] = []
        self.pair = (-1, -1)  # the last two tokens
        self.latest: dict[tuple[int, int], int] = {}  # pair -> the latest position that follows it
        # Position -> the latest position before it that follows the same pair, or 0
        self.previous = array("i")
        self.extend(tokens)

    def extend(self, tokens: list[int]):
        for end, token in enumerate(tokens, len(self.tokens)):
            self.previous.append(self.latest.get(self.pair, 0))
            self.latest[self.pair] = end
            self.tokens.append(token)
            self.pair = (self.pair[1], token)

    def find(self, tail: list[int]) -> list[int]:
        """The latest positions, in descending order."""
        found = []
        end = self.latest.get(tuple(tail[-2:]), 0)
        while end and len(found) < MAX_OCCURRENCES:
            found.append(end)
            end = self.previous[end]
        return found


class TextIndex:
    """A suffix array of a text that does not grow. Text and index take 16 bytes per token.

    The array holds the positions of the text, sorted by the MAX_MATCH tokens before them, of which
    the nearest counts first. So the positions with the longest match are neighbours.
    """

    def __init__(self, tokens: list[int]):
        self.tokens = array("i", tokens)
        ids = torch.tensor(tokens, dtype=torch.int64)
        pairs = ids[1:-1] << 32 | ids[:-2]  # those before the positions from 2 on
        keys = pairs
        # Prefix doubling: the ranks by `size` tokens of two positions make a key of twice as many
        for size in (2, 4, 8):
            _, rank = keys.unique(return_inverse=True)
            keys = rank * len(tokens)
            keys[size:] += rank[:-size] + 1
        order = keys.argsort(stable=True)
        self.sorted_ends = array("i", (order + 2).tolist())
        self.pairs = array("q", pairs[order].tolist())  # those before the sorted positions

    def find(self, tail: list[int]) -> list[int]:
        """The positions with the longest match, and their neighbours."""
        if len(tail) < 2:
            return []
        pair = tail[-1] << 32 | tail[-2]
        low = bisect_left(self.pairs, pair)
        high = bisect_right(self.pairs, pair, low)
        if high - low > MAX_OCCURRENCES:
            latest = array("i", tail[: -MAX_MATCH - 1 : -1])
            middle = bisect_left(self.sorted_ends, latest, low, high, key=self.tokens_before)
            low = max(low, middle - MAX_OCCURRENCES // 2)
            high = min(high, middle + MAX_OCCURRENCES // 2)
        return self.sorted_ends[low:high].tolist()

    def tokens_before(self, end: int) -> array:
        """The MAX_MATCH tokens before a position, the nearest one first. The array is sorted by
        these."""
        return self.tokens[max(0, end - MAX_MATCH) : end][::-1]


# After a match of m tokens, a token with v of n votes is accepted with a probability of about
# (v - m ** -0.8) / n. Such an absolute discount, as in Kneser-Ney smoothing, fits the answers of
# SmolLM2-135M to open prompts.
DISCOUNTS = [1.0, *(m**-0.8 for m in range(1, MAX_MATCH + MAX_K + 1))]


@dataclass
class Match:
    """The longest match with a text, and the tokens that it predicts."""

    length: int  # how many tokens match
    tokens: list[int]  # what followed them
    vote_shares: list[float]  # the discounted share of the votes of each of these tokens


def find_match(index: RowIndex | TextIndex, tail: list[int], n: int) -> Match:
    """Find the longest match with the end of `tail`, and choose n tokens that follow.

    The votes choose a token, and the occurrences that it followed vote on the next one. If fewer
    than n tokens follow an occurrence, they are repeated, which continues a loop.
    """
    text = index.tokens
    ends = index.find(tail)
    if not ends or n < 1:
        return Match(0, [], [])

    length = 2
    for token in tail[-3 : -MAX_MATCH - 1 : -1]:
        longer = [end for end in ends if end > length and text[end - length - 1] == token]
        if not longer:
            break
        ends = longer
        length += 1

    # The next n tokens -> the number of occurrences that they follow
    following = (tuple(text[end : end + n]) for end in ends)
    voters = Counter(ids if len(ids) == n else (ids * n)[:n] for ids in following)
    tokens = []
    vote_shares = []
    while len(voters) > 1:
        i = len(tokens)
        votes = {}  # token -> its votes
        for voter, count in voters.items():
            votes[voter[i]] = votes.get(voter[i], 0) + count
        token = max(votes, key=votes.get)  # of equal ones, the first
        tokens.append(token)
        vote_shares.append((votes[token] - DISCOUNTS[length + i]) / sum(votes.values()))
        voters = {voter: count for voter, count in voters.items() if voter[i] == token}

    # The rest is unanimous
    voter, count = next(iter(voters.items()))
    discounts = DISCOUNTS[length + len(tokens) : length + n]
    vote_shares += [1 - discount / count for discount in discounts]
    tokens += voter[len(tokens) :]
    return Match(length, tokens, vote_shares)


class Calibration:
    """Learns how many tokens of a text are accepted, relative to the sum of their vote shares.

    rates[b] is the rate after matches of 2 ** (b - 1) to 2 ** b - 1 tokens. A match grows with each
    accepted token. After matches of 2 and 3 tokens the rate starts lower, because many of them are
    accidental.
    """

    def __init__(self):
        self.rates = [Rate(0.6, 6.0), Rate(0.6, 6.0), Rate(0.6, 6.0)]
        self.rates += [Rate(1.0, 6.0), Rate(1.0, 6.0), Rate(1.0, 6.0)]

    def acceptance_probs(self, match: Match) -> list[float]:
        """For each token of the match, the probability that it is accepted if those before are."""
        rates = [rate.value for rate in self.rates]
        shares = enumerate(match.vote_shares, match.length)
        return [min(0.99, rates[n.bit_length()] * share) for n, share in shares]

    def update(self, match: Match, new_tokens: list[int]):
        """Compare the match with the tokens that were generated, up to the first difference."""
        for i, (token, new) in enumerate(zip(match.tokens, new_tokens)):
            self.rates[(match.length + i).bit_length()].add(token == new, match.vote_shares[i])
            if token != new:
                break


class RetrievalDraft(Draft):
    """Proposes for each row the tokens of the text that promises the most accepted tokens."""

    is_free = True

    def __init__(self, texts: list[list[int]] = (), name: str = "prompt-lookup"):
        self.name = name
        self.texts = [TextIndex(tokens) for tokens in texts]
        # One for the rows' own tokens, and one for each text
        self.calibrations = [Calibration() for _ in range(1 + len(texts))]
        self.rows: dict[int, RowIndex] = {}  # by cache row
        # Cache row -> its last matches: in the row's own tokens, and in each text
        self.matches: dict[int, list[Match]] = {}

    def begin(self, engine: Engine):
        config = engine.model.config
        self.length = engine.length
        self.vocab_size = config.n_token or config.vocab_size

    def add(self, row: int, tokens: list[int], cached: int):
        self.rows[row] = RowIndex(tokens)

    def remove(self, row: int):
        self.rows.pop(row, None)
        self.matches.pop(row, None)

    def accepted(self, row: int, tokens: list[int]):
        # Matches that were not proposed, or only in part, are compared with the new tokens as well
        for calibration, match in zip(self.calibrations, self.matches.pop(row, ())):
            calibration.update(match, tokens)
        self.rows[row].extend(tokens)

    def propose(self, batch: Batch, k: int) -> Proposal | None:
        found = [self.find_row(row.index, k) for row in batch.rows]
        tokens = [tokens for tokens, _ in found]
        longest = max(map(len, tokens))
        if longest == 0:
            return None
        return Proposal(tokens, longest, probs=[probs for _, probs in found])

    def find_row(self, row: int, k: int) -> tuple[list[int], list[float]]:
        """Up to k tokens that fit into the cache row, and for each the probability that it is
        accepted if those before it are."""
        tail = self.rows[row].tokens
        n = min(k, self.length - len(tail))
        matches = [find_match(index, tail, n) for index in (self.rows[row], *self.texts)]
        self.matches[row] = matches
        if not any(match.tokens for match in matches):
            return [], []

        found = []  # (expected number of accepted tokens, match, probabilities)
        for calibration, match in zip(self.calibrations, matches):
            probs = calibration.acceptance_probs(match)
            found.append((sum(accumulate(probs, mul)), match, probs))
        _, match, probs = max(found, key=itemgetter(0))
        # Ids beyond the vocabulary only pad the model's table
        n = next((i for i, token in enumerate(match.tokens) if token >= self.vocab_size), n)
        return match.tokens[:n], probs[:n]
