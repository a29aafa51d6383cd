"""What is asked for, and what crosses from the scheduler to the runner: requests, steps and their results.

Steps carry deltas only: a worker keeps its own copy of every sequence (last token, blocks, lengths) and advances it by
what the step says (Medha, section 5: replicated sequence state).
"""

from array import array
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, NamedTuple, Protocol

import msgspec

from longhelix.errors import UserError
from longhelix.guide import Guide
from longhelix.kv.blocks import Block
from longhelix.values import entries, flag, items, real, refused, seconds, text, whole

MAX_LOGPROBS = 100
MOST_TOKENS = 2**31 - 1  # token ids and lengths travel in 32 bits
TOKEN_BYTES = 4
_MOST_STOPS, _LONGEST_STOP = 64, 1000  # strings, characters: every new token is looked at for all of them
_MOST_STOP_IDS = 1024
# Below, the logits' distances overflow float32, and the draw is greedy in all but name; above, they vanish, and all
# tokens are alike; a penalty likewise.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e30
_MOST_PENALTY = 1e6
_MOST_BIASED = 1024  # token ids
_MOST_BIAS, _MOST_SUBTRACTED = 100, 2  # of logits, as OpenAI has it
MOST_PRIORITY = 1_000_000
_LONGEST_NAME = 256  # characters
# Of rows of chunks a part has at least so many: fewer attend in less time than an exchange takes to start.
PART_ROWS = 64
# Of a row's logits the largest, which ranks gather: what top-k and top-p usually leave is among them.
CANDIDATES = 64

Number = Any  # one, or an array of them


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the new tokens of one request.

    What is done to logits, in this order: logit_bias adds numbers to those of token ids; presence_penalty, and
    frequency_penalty as often as the request has generated the token, are subtracted from those that it has generated
    at all; repetition_penalty makes those that it has generated, or that are in its prompt, less likely; temperature
    and filters follow. temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties
    0 switch these off.
    Draws are keyed by (seed, position): the same seed gives the same tokens in any batch. `stop` strings end the
    text before themselves. Among the first min_tokens new tokens is none that ends a text, whatever ignore_eos says,
    and no stop string ends it within these. logprobs: the N best of the model's own distribution at each new token,
    before all of this (None: none); prompt_logprobs: the same at each token of the prompt, all of which is computed for
    it, whatever is cached. With it max_new_tokens may be 0.
    guide: what the text has to be; its last token ends the request, unless max_new_tokens or a stop does before. Of
    tokens that it does not allow none is chosen, whatever else is asked for: where it allows none but those that end
    the text, one of these comes in spite of min_tokens.
    Every value is checked for type and range, whoever makes it: Python, the command line, a message.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None

    def __post_init__(self) -> None:
        """Raises UserError for what no request can have; keeps plain Python values."""
        least, note = (1, " (0 needs prompt_logprobs)") if self.prompt_logprobs is None else (0, "")
        max_new_tokens = whole("max_new_tokens", self.max_new_tokens, least, MOST_TOKENS, note)
        checked = {
            "max_new_tokens": max_new_tokens,
            "temperature": real(
                "temperature",
                self.temperature,
                lambda value: value == 0 or _LEAST_TEMPERATURE <= value <= _MOST_TEMPERATURE,
                f"0 (greedy), or a number from {_LEAST_TEMPERATURE} to {_MOST_TEMPERATURE}",
            ),
            "top_k": whole("top_k", self.top_k, 0, MOST_TOKENS, " (0 is off)"),
            "top_p": real("top_p", self.top_p, lambda value: 0 < value <= 1, "a number above 0 and at most 1 (off)"),
            "min_p": real("min_p", self.min_p, lambda value: 0 <= value <= 1, "a number from 0 (off) to 1"),
            "repetition_penalty": real(
                "repetition_penalty",
                self.repetition_penalty,
                lambda value: 1 / _MOST_PENALTY <= value <= _MOST_PENALTY,
                f"a number from {1 / _MOST_PENALTY} to {_MOST_PENALTY} (1 is off)",
            ),
            "presence_penalty": _subtracted("presence_penalty", self.presence_penalty),
            "frequency_penalty": _subtracted("frequency_penalty", self.frequency_penalty),
            "logit_bias": _logit_bias(self.logit_bias),
            "seed": None if self.seed is None else whole("seed", self.seed, 0, 2**63 - 1),
            "stop": tuple(_stop_string(string) for string in items("stop", self.stop, _MOST_STOPS, "strings")),
            "stop_token_ids": tuple(
                whole("a stop token id", token_id, 0, MOST_TOKENS)
                for token_id in items("stop_token_ids", self.stop_token_ids, _MOST_STOP_IDS, "token ids")
            ),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "min_tokens": whole("min_tokens", self.min_tokens, 0, max_new_tokens, " (max_new_tokens)"),
            "logprobs": None if self.logprobs is None else whole("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": None
            if self.prompt_logprobs is None
            else whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            "guide": _guide(self.guide),
        }
        if checked["guide"] is not None and checked["ignore_eos"]:
            raise UserError("a text with a guide ends where the guide does: leave out ignore_eos or the guide")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def most_sampled(self) -> int:
        """The tokens that are sampled at most. One ends a request that wants none, and is dropped."""
        return max(self.max_new_tokens, 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how often the request has generated each token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_generated(self) -> bool:
        """Whether the next token depends on those that the request has generated, beside what the model says."""
        return self.counts_tokens or self.guide is not None


def _guide(value: object) -> Guide | None:
    if value is None or isinstance(value, Guide):
        return value
    raise refused("guide", value, 'a Guide, such as Guide("json"), or None')


def _subtracted(name: str, value: object) -> float:
    most = _MOST_SUBTRACTED
    return real(name, value, lambda number: -most <= number <= most, f"a number from {-most} to {most} (0 is off)")


def _logit_bias(value: object) -> dict[int, float]:
    allowed = f"a number from {-_MOST_BIAS} to {_MOST_BIAS}"
    found: dict[int, float] = {}
    for key, bias in entries("logit_bias", value, _MOST_BIASED, "token ids to numbers"):
        token_id = whole("a token id of logit_bias", key, 0, MOST_TOKENS)
        found[token_id] = real(
            f"the logit bias of token {token_id}", bias, lambda number: abs(number) <= _MOST_BIAS, allowed
        )
    return found


def _stop_string(value: object) -> str:
    string = text("a stop string", value)
    if not string:
        raise UserError("a stop string is empty: give at least one character")
    if len(string) > _LONGEST_STOP:
        raise UserError(f"a stop string has {len(string)} characters: give at most {_LONGEST_STOP}")
    return string


@dataclass(frozen=True)
class ServiceLevel:
    """What one request asks of the scheduler.

    ttft_slo_s: the time to its first token that it wants; tbt_slo_s: the most between two tokens. priority: requests
    with a higher one go first, whatever the policy. client: whose it is; clients have equal shares of prefill, or
    weighted ones, while they compete. cache_salt: it shares cached KV only with requests that have the same.
    growth_limit_tokens: the tokens of it that a KVP rank has before the next one joins, rounded down to KV blocks.
    """

    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    growth_limit_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError for what no request can ask; keeps plain Python values."""
        checked: dict[str, Any] = {
            "ttft_slo_s": None if self.ttft_slo_s is None else seconds("ttft_slo", self.ttft_slo_s),
            "tbt_slo_s": None if self.tbt_slo_s is None else seconds("tbt_slo", self.tbt_slo_s),
            "priority": whole("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY),
            "client": _name("client", self.client),
            "cache_salt": _name("cache_salt", self.cache_salt),
            "growth_limit_tokens": None
            if self.growth_limit_tokens is None
            else whole("growth_limit_tokens", self.growth_limit_tokens, 1, MOST_TOKENS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _name(name: str, value: object) -> str:
    string = text(name, value)
    if len(string) > _LONGEST_NAME:
        raise UserError(f"{name} has {len(string)} characters: give at most {_LONGEST_NAME}")
    return string


ANY_SERVICE = ServiceLevel()


class TokenIds(Protocol):
    """Token ids of which slices are taken, int32: an array, or what makes them when it is asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> "array[int]": ...

    def __add__(self, more: "array[int]", /) -> "TokenIds": ...


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a prompt, from `start` on, that an image takes: `rows` of its grid, one after the other, of
    `columns` each. digest: SHA-256 of what it shows, grid included."""

    start: int
    rows: int
    columns: int
    digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def shift(self) -> int:
        """What is added to the positions of what follows it."""
        return max(self.rows, self.columns) - self.num_tokens


@dataclass(frozen=True)
class Request:
    """One prompt on its way. `seed` is resolved (sampling.seed, or drawn at admission); times in seconds.

    images: what the prompt shows, in order. guide_s: what a rank takes to compile its guide.

    num_generated: of the prompt's last tokens, those that the request itself has generated, before it was preempted.
    """

    id: int
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    arrival_s: float
    service: ServiceLevel = ANY_SERVICE
    num_generated: int = 0
    images: tuple[ImageSpan, ...] = ()
    guide_s: float = 0.0

    @property
    def capacity_tokens(self) -> int:
        """The most tokens it can ever hold: prompt and new ones."""
        return len(self.prompt_token_ids) + self.sampling.most_sampled

    @property
    def given_tokens(self) -> int:
        """The tokens of the prompt that came with it."""
        return len(self.prompt_token_ids) - self.num_generated

    @property
    def generated_token_ids(self) -> bytes:
        """`generated_token_ids` of the `NewSequence`."""
        if not (self.num_generated and self.sampling.needs_generated):
            return b""
        return self.prompt_token_ids[self.given_tokens : len(self.prompt_token_ids)].tobytes()

    def resumed(self, generated: "array[int]") -> "Request":
        """The request that goes on after `generated`, more of its tokens than it began with."""
        left = replace(
            self.sampling,
            max_new_tokens=self.sampling.max_new_tokens - len(generated),
            min_tokens=max(self.sampling.min_tokens - len(generated), 0),
        )
        tokens = self.prompt_token_ids + generated
        return replace(self, prompt_token_ids=tokens, sampling=left, num_generated=self.num_generated + len(generated))


class Work(NamedTuple):
    """What a step computes; arrays where many steps are priced at once.

    decode_rows: sequences with one row each; decode_kv_tokens: the lengths of their KV, summed. chunk_rows: rows of
    prefill chunks; chunk_kv_tokens: the KV that they read; chunk_pairs: row and key, causal. sampled_rows: rows whose
    logits are wanted. parts: in how many its rows attend, of which each is exchanged while the next attends (HOP-B); 0:
    one KVP instance has all of them, and nothing is exchanged.

    KV and pairs are KVP times those of the fullest KVP rank, for which the others wait: the sums over all ranks, where
    KV is spread evenly, and more than these where it is not.
    """

    decode_rows: Number = 0
    decode_kv_tokens: Number = 0
    chunk_rows: Number = 0
    chunk_kv_tokens: Number = 0
    chunk_pairs: Number = 0
    sampled_rows: Number = 0
    parts: Number = 1

    @classmethod
    def decode(cls, batch: Number, context: Number) -> "Work":
        """One token for each of `batch` requests that hold `context` tokens, spread evenly."""
        return cls(decode_rows=batch, decode_kv_tokens=batch * context, sampled_rows=batch)

    @classmethod
    def chunk(cls, rows: Number, prefix: Number, *, sampled: bool = False) -> "Work":
        """`rows` tokens of a prompt after `prefix` others, spread evenly. sampled: the last of them is the prompt's
        last."""
        return cls(0, 0, rows, prefix + rows, rows * (prefix + (rows + 1) / 2), int(sampled))

    @classmethod
    def growing_chunk(cls, rows: float, prefix: float, kvp: int, alone_tokens: float) -> "Work":
        """The same where one of `kvp` ranks has up to `alone_tokens` of it alone, then the next one."""

        def counted(tokens: float) -> float:
            return max(tokens, kvp * min(tokens, alone_tokens))

        return cls(0, 0, rows, counted(prefix + rows), rows * counted(prefix + (rows + 1) / 2))

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]  # tuples are joined by it, work adds up
        """Both in one step, of one part."""
        return Work(*map(add, self[:-1], other[:-1]))

    @property
    def rows(self) -> Number:
        return self.decode_rows + self.chunk_rows

    @property
    def most_parts(self) -> Number:
        """In how many parts its rows can attend: they are cut evenly, in their order, decodes first. A part may be one
        decode; with rows of chunks among them it has PART_ROWS at least. May be 0."""
        return self.rows // (1 + (PART_ROWS - 1) * (self.chunk_rows > 0))


NO_WORK = Work()


class Cost(Protocol):
    """What time steps take, on the machine that is to run them."""

    def seconds(self, work: Work) -> float: ...


class NewSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that workers see for the first time; `capacity_tokens` freezes length-dependent RoPE.

    blocks_per_rank: the KV blocks that each KVP rank may ever hold of it. spread: every KVP rank takes part in its
    attention from the first row on; otherwise those that hold KV of it.
    cached_tokens: its first ones, whose KV is there when the step's layers run, in `cached_blocks`, in position order;
    its chunks bring the rest of the prompt. It only writes to the last of these blocks, and only if that is not full.
    seen_token_ids: the different ones among the cached tokens, where a repetition penalty asks for them; int32 in this
    machine's byte order.
    generated_token_ids: those that it had generated before it was preempted, where it matters which; int32 as well.
    instances: where KVP instances have clocks of their own, those that take part in it from now on. The first one
    samples its tokens. last_token: the last one of its tokens that was sampled, where it has any.
    images: what its prompt shows, in order; ranks that need it have what their digests stand for.
    """

    id: int
    sampling: SamplingParams
    seed: int
    capacity_tokens: int
    blocks_per_rank: tuple[int, ...]
    spread: bool
    cached_tokens: int = 0
    cached_blocks: tuple[Block, ...] = ()
    seen_token_ids: bytes = b""
    generated_token_ids: bytes = b""
    instances: tuple[int, ...] = ()
    last_token: int | None = None
    images: tuple[ImageSpan, ...] = ()


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a chunk after which log-probabilities of the prompt's next token are wanted: from the chunk's row `first`
    on, one for each of `targets`, which are these tokens; int32 in this machine's byte order. The last of them may be
    the first one of the next chunk."""

    first: int
    targets: bytes


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sequence's prompt, the KV blocks that they newly need, and whether to sample after them.

    token_ids: int32 in this machine's byte order. scored: where the request asks for `prompt_logprobs`.
    """

    id: int
    token_ids: bytes
    new_blocks: tuple[Block, ...]
    sample: bool
    scored: Scored | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A full KV block of a sequence goes from one KVP rank to another. place: how many blocks of the sequence lie
    before it on its new rank, after all moves of the step."""

    source: Block
    target: Block
    place: int


class Widened(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that decodes and takes other KVP ranks than it was to. moves: of its blocks, in position order.
    blocks_per_rank: as in its `NewSequence`, from now on."""

    id: int
    moves: tuple[Move, ...]
    blocks_per_rank: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One iteration of the engine over a mixed batch: a row for each sequence that decodes, then prefill chunks.

    Which sequences decode is said by changes alone. Each has a row, after which is sampled, in every step from the one
    that names it in `joining` until one names it in `leaving` or `ended`; workers know its last token. `grown`: the
    KV blocks that their new rows need. With pipeline stages the sequences that decode are dealt to as many
    microbatches: a step has rows of those of its own `microbatch`, which join it there.
    copies: KV blocks to copy, (source, target) each, all layers, before anything else is computed: from sources that
    earlier steps or swaps have filled to targets that nobody reads yet, so that none is both, or a target twice.
    swapped_out, swapped_in: KV blocks and their owner's slots, outside of its pool: before copies, first blocks that
    earlier steps have filled go to slots, then slots to blocks that nobody reads yet.
    widened: sequences of which blocks move with the copies. What a moved block had may be overwritten in this step, by
    what moves into it as well: all are read before one is written.
    most_tokens: no KVP rank has room for more tokens of one of its sequences, in the KV blocks that they have by then.
    work: the sum of it all, and in how many parts it attends. Both are chosen once, and not by ranks, which would wait
    for each other forever if they disagreed.

    instances: the KVP instances that take the step, each what concerns it (`of_instance`); empty: all take all of it.
    enlisted: sequences that run, and that another one of these takes part in from now on: to that one they are new, and
    their tokens cached.
    """

    id: int
    new: tuple[NewSequence, ...] = ()
    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    grown: tuple[tuple[int, Block], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    ended: tuple[int, ...] = ()
    most_tokens: int = 0
    work: Work = NO_WORK
    copies: tuple[tuple[Block, Block], ...] = ()
    swapped_out: tuple[tuple[Block, int], ...] = ()
    swapped_in: tuple[tuple[int, Block], ...] = ()
    microbatch: int = 0
    widened: tuple[Widened, ...] = ()
    instances: tuple[int, ...] = ()
    enlisted: tuple[NewSequence, ...] = ()

    def of_instance(self, instance: int, known: Container[int]) -> "Step":
        """What concerns one of its KVP instances, which has the `known` sequences so far: other sequences are left out,
        and those that it takes part in from now on are new to it."""
        new = tuple(one for one in self.new if instance in one.instances)
        new += tuple(one for one in self.enlisted if instance in one.instances and one.id not in known)
        ids = {one.id for one in new}

        def has(id: int) -> bool:
            return id in ids or id in known

        return msgspec.structs.replace(
            self,
            new=new,
            enlisted=tuple(one for one in self.enlisted if one.id in known and one.id not in ids),
            joining=tuple(filter(has, self.joining)),
            leaving=tuple(filter(has, self.leaving)),
            grown=tuple(one for one in self.grown if has(one[0])),
            chunks=tuple(chunk for chunk in self.chunks if has(chunk.id)),
            ended=tuple(id for id in self.ended if id in known),
        )

    @property
    def moved(self) -> tuple[tuple[Block, Block], ...]:
        """The blocks that move, each with where it goes."""
        return tuple((move.source, move.target) for one in self.widened for move in one.moves)


class SampledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence's next token; `logprobs` maps token ids to natural logs of the model's own distribution.

    error: why there is none, where choosing it failed; the request ends, and others go on. The id then means nothing.
    """

    sequence_id: int
    token_id: int
    logprobs: Mapping[int, float] = {}
    error: str = ""


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a sequence's prompt, for each token that a chunk asks for in `Chunk.scored`: token ids to natural logs of the
    model's own distribution before it. error: why there are none; the request ends, and others go on."""

    sequence_id: int
    logprobs: tuple[Mapping[int, float], ...]
    error: str = ""


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step gave: sampled tokens in the order of its work, rows that ran, bytes that ranks sent in the exchange.

    A rank reports its own bytes, the runner over all ranks their sum. parts: those of the step. exposed_s: seconds that
    a rank waited for exchanges with nothing left to attend to, of all ranks the longest; None where nobody measured.
    fingerprint: of the collectives that the rank ran for it, the same on all ranks. taken_s: seconds that the step
    took, of all ranks the longest; 0 where nobody measured. moved_s: those of them in which blocks moved between ranks.
    prompt_logprobs: in the order of its chunks.
    """

    step_id: int
    sampled: tuple[SampledToken, ...]
    num_tokens: int
    exchanged_bytes: int
    parts: int = 1
    exposed_s: float | None = None
    fingerprint: int = 0
    taken_s: float = 0.0
    moved_s: float = 0.0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
