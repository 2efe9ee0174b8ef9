"""Suffix decoding: drafts from how texts continued after the current last tokens, weighted by how often they did.

Texts are searched: the request's own, outputs of running requests with the same prompt, the answers of finished
requests with the same cache salt, and a corpus of the operator. In each, the longest stretch that is a suffix of the
current text is found, and a tree of its continuations grows, the likeliest token first. The continuation of a long
stretch gets a high confidence, so a text that repeats itself gets one long chain.
Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975).
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specinfer.core.lookups import SOURCE
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Prospect
from specinfer.drafters.lookup.corpus import Corpus
from specinfer.drafters.lookup.passage import Alignment
from specinfer.drafters.lookup.siblings import Siblings
from specinfer.drafters.lookup.source_scores import SourceScores
from specinfer.drafters.lookup.suffix_automaton import SuffixAutomaton
from specinfer.drafters.lookup.suffix_growth import Match, follow, grow
from specinfer.verify import Acceptance

MAX_MATCH = 32  # length of the suffix that is looked up in other texts; longer ones add little
STEP_TOKENS = 2048  # read in one step at most, so that a long prompt delays no step: 4 ms of ordinary text
REPEATED = 6  # tokens that an output repeats of its prompt, from which on it is taken to repeat a passage
PIECE_TOKENS = 512  # tokens of an answer that are read into the store at once
# The charge for a salt and for each of its generations, in addition to their tokens: an empty automaton already takes
# as much memory as this many tokens.
SALT_TOKENS = 16
GENERATION_TOKENS = 16
SALT_CHARACTERS = 32  # characters of a salt's name that are charged as one token
NAME = "suffix"  # of the drafter, and of draft tokens from the request's own text
PROMPT = f"{NAME}{SOURCE}prompt"  # the name of those from a passage of the prompt that the output repeats
SIBLING = f"{NAME}{SOURCE}sibling"  # the name of those from outputs of running requests with the same prompt
EARLIER = f"{NAME}{SOURCE}earlier"  # the name of draft tokens from answers of finished requests
CORPUS = f"{NAME}{SOURCE}corpus"  # the name of draft tokens from the operator's texts


class SuffixStore:
    """The answers of finished requests, by salt, within one limit of tokens for all of them together.

    Each salt has two generations; when the younger is full, the older is dropped. The least recently used salts are
    dropped to keep to the limit. Salts and generations are charged as tokens too, so that many salts with little text
    stay within the same memory. Any number of threads and engines may share one store.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, not {max_tokens}")
        self.lock = threading.RLock()  # must be held while a match from this store is used
        self._max_tokens = max_tokens
        self._charged = 0  # sum of the charges of all salts
        self._salts: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()  # the younger generation first

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all texts, without the charges for salts."""
        with self.lock:
            return sum(text.num_tokens for texts in self._salts.values() for text in texts)

    @property
    def salts(self) -> tuple[str, ...]:
        """The salts with stored text, the least recently used first."""
        with self.lock:
            return tuple(self._salts)

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Read a text into the store; only the end of a text that is longer than a generation is read."""
        half = (self._max_tokens - _charge(salt, ())) // 2 - GENERATION_TOKENS
        tokens = tokens[-half:] if half > 0 else ()
        if not tokens:
            return
        with self.lock:
            texts = self._salts.pop(salt, None)
            if texts is None:
                texts = [SuffixAutomaton()]
            else:
                self._charged -= _charge(salt, texts)
            if texts[0].num_tokens + len(tokens) > half:
                texts = [SuffixAutomaton(), texts[0]]
            texts[0].start_text()
            texts[0].extend(tokens)
            self._salts[salt] = texts
            self._charged += _charge(salt, texts)
            while self._charged > self._max_tokens:  # never drops this salt, whose two halves are within the limit
                self._charged -= _charge(*self._salts.popitem(last=False))

    def match(self, salt: str, tokens: Sequence[int]) -> Match | None:
        """Return the longest suffix of `tokens` in the salt's texts, or None if it has none.

        The younger generation wins a tie.
        """
        with self.lock:
            texts = self._salts.get(salt)
            if texts is None:
                return None
            self._salts.move_to_end(salt)
            return max((Match(text, *text.match(tokens), EARLIER) for text in texts), key=lambda match: match.length)


def _charge(salt: str, texts: Sequence[SuffixAutomaton]) -> int:
    """Return the charge of a salt with these generations, in tokens."""
    fixed = SALT_TOKENS + len(salt) // SALT_CHARACTERS
    return fixed + sum(GENERATION_TOKENS + text.num_tokens for text in texts)


@dataclass(slots=True)
class _Reading:
    """A request and the part of its text that has been read."""

    request: Request
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    scores: SourceScores = field(default_factory=SourceScores)
    alignment: Alignment | None = None  # of the output in the prompt, once it repeats a passage

    def passages(self, num_repeated: int) -> list[Match]:
        """Return where the output may go on in the prompt.

        Args:
            num_repeated: Tokens at the end of the text that also occur earlier in it.
        """
        request = self.request
        if self.alignment is None:
            if min(num_repeated, request.num_output) < REPEATED:
                return []
            self.alignment = Alignment(request.prompt_ids, begins=False)
        new_tokens = request.token_ids[len(request.prompt_ids) + self.alignment.num_read :]
        self.alignment.read(new_tokens, REPEATED)
        return self.alignment.matches(PROMPT)


class SuffixDrafter:
    """A drafter that proposes what followed the same tokens before, in this text, in a sibling or an earlier answer."""

    name = NAME

    def __init__(
        self,
        max_tokens: int = 200_000,
        store: SuffixStore | None = None,
        min_match: int = 1,
        corpus: Corpus | None = None,
        *,
        keeps_seeded: bool = True,
    ) -> None:
        """Make a drafter with its own store, or with one that others share.

        Args:
            max_tokens: The limit of tokens of earlier answers, and that of tokens of siblings. A token of source code
                takes about 125 bytes, a random one 200, and 300 at worst. A given `store` has its own limit.
            min_match: The shortest match that is used. One token is worth using: on held-out Python files it gives 1.80
                tokens per pass for 16 nodes, and matches of two or more tokens give 1.52.
            corpus: Texts of the operator, which all requests search, or None.
            keeps_seeded: Whether the answers of sampled requests that name a seed are kept. Another request with the
                seed has the random numbers that made the answer, and rules that draw need draft tokens that do not
                depend on these (docs/verification.md, condition B).
        """
        if min_match < 1:
            raise ValueError(f"min_match must be at least 1, not {min_match}")
        self.store = SuffixStore(max_tokens) if store is None else store
        self._siblings = Siblings(SIBLING, max_tokens)
        self._min_match, self._corpus, self._keeps_seeded = min_match, corpus, keeps_seeded
        self._readings: dict[str, _Reading] = {}
        # Salts and pieces of answers that are not in the store yet; if they come too fast, the oldest are lost.
        self._unread: deque[tuple[str, list[int]]] = deque(maxlen=256)

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        num_left = STEP_TOKENS - self._read_others()
        trees = []
        for span, budget in zip(spans, budgets, strict=True):
            if not (budget.max_nodes and budget.max_depth):
                trees.append(TokenTree.root(span.request.token_ids[-1]))
                continue
            num_left -= self._read(span.request, num_left)
            trees.append(self._draft_one(span.request, budget))
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the text is read when drafting

    def forget(self, request_id: str) -> None:
        self._siblings.leave(request_id)
        reading = self._readings.pop(request_id, None)
        if reading is None or reading.request.cache_salt is None:
            return
        if reading.request.params.is_seeded and not self._keeps_seeded:
            return
        if reading.request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            salt, answer = reading.request.cache_salt, reading.request.output_ids
            # A piece begins with the end of the one before, so that a match can continue across pieces.
            for start in range(0, len(answer), PIECE_TOKENS):
                self._unread.append((salt, answer[max(start - MAX_MATCH, 0) : start + PIECE_TOKENS]))

    def _read_others(self) -> int:
        """Read what siblings and finished requests generated, and return the number of tokens read."""
        num_read = self._siblings.read(STEP_TOKENS // 2)
        while self._unread and num_read < STEP_TOKENS // 2:
            salt, piece = self._unread.popleft()
            self.store.add(salt, piece)
            num_read += len(piece)
        return num_read

    def _read(self, request: Request, num_left: int) -> int:
        """Read more of the request's text and return the number of tokens read."""
        reading = self._readings.get(request.request_id)
        if reading is None or reading.request is not request:
            reading = self._readings[request.request_id] = _Reading(request)
            self._siblings.join(request)
        start = reading.text.num_tokens
        new_tokens = request.token_ids[start : start + max(num_left, MAX_MATCH)]
        reading.text.extend(new_tokens)
        return len(new_tokens)

    def prospects(self, spans: Sequence[Span]) -> list[Prospect]:
        num_left = STEP_TOKENS - self._read_others()
        prospects = []
        for span in spans:
            num_left -= self._read(span.request, num_left)
            with self.store.lock:
                prospects.append(follow(self._matches(span.request), self._min_match))
        return prospects

    def _draft_one(self, request: Request, budget: TreeBudget) -> TokenTree:
        with self.store.lock:
            return grow(request.token_ids[-1], self._matches(request), budget, self._min_match)

    def _matches(self, request: Request) -> list[Match]:
        """Return the matches in the request's own text and in the store; the caller holds the store's lock."""
        tail = request.token_ids[-MAX_MATCH:]
        reading = self._readings[request.request_id]
        text = reading.text
        if text.num_tokens == len(request.token_ids):
            state = text.links[text.last]  # the longest suffix that also occurs at another place
            in_text = Match(text, state, text.lengths[state], self.name)
        else:  # a long prompt, still being read
            in_text = Match(text, *text.match(tail), self.name)
        stored = None if request.cache_salt is None else self.store.match(request.cache_salt, tail)
        others = (self._siblings.match(request), stored)
        matches = [*reading.passages(in_text.length), in_text, *(match for match in others if match is not None)]
        # A large corpus has any short stretch often: what requests themselves have predicts better at the same length.
        longest = max(match.length for match in matches)
        in_corpus = None if self._corpus is None else self._corpus.match(tail, CORPUS, longer_than=longest)
        matches += [in_corpus] if in_corpus else []
        return reading.scores.trusted(request, matches, self._min_match)
