"""The sequence-parallel pass that torch.compile runs over its graphs."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch.fx import Graph

from longhelix.passes import agreement
from longhelix.passes.collectives import PassGroup, collectives
from longhelix.passes.counts import Counts, Report
from longhelix.passes.no_ops import eliminate_no_ops
from longhelix.passes.options import check_options
from longhelix.passes.patterns import count_patterns
from longhelix.passes.plan import ShardingPlan, make_plan
from longhelix.passes.rewrite import Rewrite
from longhelix.passes.rules import Rules
from longhelix.passes.scales import Calibration, SentFormat, key_of, places
from longhelix.passes.stage import refusal
from longhelix.passes.tokens import any_number_of_tokens

logger = logging.getLogger(__name__)

DEFAULT_MIN_TOKENS = 1000


class SequenceParallel(CustomGraphPass):
    """Compiler pass that computes norms and residuals after an all-reduce on token shards.

    The pass replaces the all-reduce with a reduce-scatter. Each rank computes norms and residuals for its own tokens
    only. The ranks then all-gather the values that the next matrix products need. If the graph quantises these values,
    the ranks gather them in quantised form.

        sp = SequenceParallel(group, min_tokens=1000)
        compiled = torch.compile(module, fullgraph=True, options={"post_grad_custom_pre_pass": sp})

    All ranks must run the same code, because each rank plans the changes from its own graph. The graphs may differ only
    in the weights of matrix products. The pass assumes that all ranks have the same values for those graph inputs that
    are combined with all-reduced values: weights and eps of norms, biases, and residuals. If the pass cannot change a
    graph safely, it logs a warning and leaves the graph unchanged.

    Args:
        group: Ranks that run the functional collectives of the graphs. None: all ranks.
        min_tokens: Leave graphs for fewer tokens unchanged. None: 1000.
        quantize: "int8" or "fp8" sends gathered values as one byte per number, with a scale per token. This rounds the
            values.
        tokens: Smallest and largest number of tokens of the graphs' inputs. None: the pass reads the number from the
            shapes in each graph.
        scales: Static scales from `Calibration.scales`, which replace the scale per token. Alternatively, a
            `Calibration`, which records numbers while the module runs.
        in_rank_order: Replace the reduce-scatter with an all-to-all and a sum in rank order, so that the result for a
            token does not depend on other tokens. None: do this only if the group's backend is gloo, because the
            reduce-scatter of gloo sends as many bytes as its all-reduce.
        own_chunks: Whether the module itself selects the rows of its rank from values, in the same way on all ranks.
            Experts on token shards do this. The pass then does not gather these values.
        token_wise: Custom ops, each with the names of operands that hold tokens. Row i of an op's results may depend
            only on row i of these operands.
        norms: Custom ops among `token_wise` that are RMSNorms of their first operand.

    Raises:
        ValueError: An option has an invalid value, or torch.distributed is not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        min_tokens: int | None = None,
        quantize: str | None = None,
        *,
        tokens: tuple[int, int | None] | None = None,
        scales: Calibration | Mapping[str, float] | None = None,
        in_rank_order: bool | None = None,
        own_chunks: bool = False,
        token_wise: Mapping[OpOverload, Sequence[str]] | None = None,
        norms: Sequence[OpOverload] = (),
    ) -> None:
        if min_tokens is None:
            min_tokens = DEFAULT_MIN_TOKENS
        check_options(
            min_tokens=min_tokens,
            quantize=quantize,
            scales=scales,
            tokens=tokens,
            in_rank_order=in_rank_order,
            own_chunks=own_chunks,
            token_wise=token_wise,
            norms=norms,
        )
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise ValueError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
        self.min_tokens = min_tokens
        self.quantize = quantize
        self.scales = scales if scales is None or isinstance(scales, Calibration) else dict(scales)
        self.tokens = tokens
        self.own_chunks = own_chunks
        self.group = PassGroup(found.group_name, found.size(), found.rank())
        on_gloo = dist.get_backend(found) == "gloo"
        self._has_peers = found.size() > 1 and dist.get_backend(found) != "fake"
        self.in_pieces = on_gloo
        self.in_rank_order = on_gloo if in_rank_order is None else in_rank_order
        self._rules = Rules(dict(token_wise or {}))
        self._norms = tuple(norms)
        if self.group.size == 1:
            logger.warning("sequence parallelism is off: the group has one rank, and nothing to shard")

    def applies(self, tokens: int) -> bool:
        """True if the pass uses token shards in graphs for at least this many tokens."""
        return self.group.size > 1 and tokens >= self.min_tokens

    def uuid(self) -> str:
        """Return a key for torch's cache of compiled graphs that covers everything that affects the pass."""
        self._expect_agreement()  # torch calls uuid before it runs the pass or takes a graph from its cache
        return self._options_digest() + "-left" * agreement.found_difference(self.group)

    @property
    def _options_in_words(self) -> str:
        """Describe the options that must be equal on all ranks."""
        own = f"min_tokens {self.min_tokens}, quantize {self.quantize}{self._scales_in_words}, tokens {self.tokens}"
        return f"{own}, in_rank_order {self.in_rank_order}, own_chunks {self.own_chunks}"

    @property
    def _scales_in_words(self) -> str:
        if self.scales is None:
            return ""
        if isinstance(self.scales, Calibration):
            return " recording scales"
        digest = hashlib.sha256(repr(sorted(self.scales.items())).encode()).hexdigest()
        return f" with {len(self.scales)} static scales {digest[:16]}"

    def _options_digest(self) -> str:
        digest = hashlib.sha256(repr((torch.__version__, self.group, self.min_tokens, self.quantize)).encode())
        digest.update(repr((self.tokens, self.in_rank_order, self.in_pieces, self.own_chunks, self._norms)).encode())
        digest.update(repr(sorted((str(op), tuple(rows)) for op, rows in self._rules.rows.items())).encode())
        digest.update(self._scales_in_words.encode())
        if isinstance(self.scales, Calibration):
            digest.update(str(self.scales.number).encode())
        digest.update(_sources())
        return digest.hexdigest()

    def __call__(self, graph: Graph) -> None:
        """Change a graph, or leave it unchanged."""
        if self.group.size == 1:
            return
        before = list(collectives(graph, self.group))
        if not before:
            return
        self._expect_agreement()
        reason = refusal(graph)
        if agreement.found_difference(self.group):
            reason = "ranks were found to differ in an earlier graph. Make all ranks run the same code"
        changed: list[str] = []
        if reason is not None:
            self._leave(f"the graph stays unchanged: {reason}")
        else:
            with any_number_of_tokens(graph):
                changed = self._change(graph)
        after = list(collectives(graph, self.group))
        self._counts.add_collectives(before, after)
        self._counts.add(agreement.KIND, agreement.summary(self._options_in_words, changed, after))

    def report(self) -> Report:
        """Report on all graphs that passes with the same options have processed, including graphs from torch's cache.

        If a graph accepts a varying number of tokens, its bytes are those for the number that it was traced with.
        """
        return self._counts.report()

    def explain(self) -> str:
        """Return the reasons why the pass left collectives unchanged, one per line."""
        return "\n".join(self.report()["left_alone"])

    def _expect_agreement(self) -> None:
        if self._has_peers:
            agreement.expect(self._counts.prefix, self.group)

    def _applies(self, count: int | torch.SymInt) -> bool:
        """True if the pass keeps values of this many tokens as shards."""
        if isinstance(count, int):
            return self.applies(count)
        if self.tokens is not None:
            return self.applies(self.tokens[0])
        least = count.node.shape_env.bound_sympy(count.node.expr).lower
        return bool(least.is_Integer) and self.applies(int(least))

    def _change(self, graph: Graph) -> list[str]:
        """Change a graph. Return a description of its nodes on token shards, which must be equal on all ranks."""
        eliminate_no_ops(graph)
        plan = make_plan(
            graph,
            self.group,
            rules=self._rules,
            norm_ops=self._norms,
            applies=self._applies,
            quantises=self.quantize is not None,
            own_chunks=self.own_chunks,
        )
        for sentence in plan.left_alone:
            self._counts.add("left_alone", sentence)
        if plan.sources or plan.chunks:
            return self._carry_out(graph, plan)
        if plan.left_alone:
            logger.warning("sequence parallelism is off for a graph: %s", "; ".join(plan.left_alone))
        return []

    def _carry_out(self, graph: Graph, plan: ShardingPlan) -> list[str]:
        changed = list(agreement.shard_lines(graph, plan))
        quantisation = self._quantisation(places(graph, plan, changed))
        rewrite = Rewrite(
            graph,
            plan,
            self.group,
            in_rank_order=self.in_rank_order,
            in_pieces=self.in_pieces,
            quantisation=quantisation,
        )
        try:
            rewrite.prepare()
            doubts = rewrite.doubts()
        except Exception as error:  # ops on fake tensors may raise any exception
            doubts = [f"{type(error).__name__}: {error}"]
        if doubts:
            rewrite.abandon()
            self._leave(f"the graph stays unchanged: {doubts[0]}")
            return []
        for name, count in count_patterns(plan, quantisation and quantisation.how).items():
            self._counts.add("patterns", name, count)
        rewrite.finish()
        graph.lint()
        logger.debug("token shards:\n%s", "\n".join(changed))
        return changed

    def _quantisation(self, graph_places: list[str]) -> SentFormat | None:
        """Return how to send the values at these places of a graph."""
        if self.quantize is None:
            return None
        if isinstance(self.scales, Calibration):
            return SentFormat(self.quantize, noted=[f"{self.scales.number}/{place}" for place in graph_places])
        if self.scales is None or not graph_places:
            return SentFormat(self.quantize)
        keys = [key_of(self.quantize, place) for place in graph_places]
        if not self.scales.keys() >= set(keys):
            sentence = "no static scales are known for a graph, so each token has its own: calibrate this module"
            logger.warning(sentence)
            self._counts.add("left_alone", sentence)
            return SentFormat(self.quantize)
        return SentFormat(self.quantize, [self.scales[key] for key in keys])

    def _leave(self, sentence: str) -> None:
        logger.warning("sequence parallelism is off for a graph: %s", sentence)
        self._counts.add("left_alone", sentence)

    @property
    def _counts(self) -> Counts:
        return Counts(self._options_digest())


@cache
def _sources() -> bytes:
    """Return a digest of this package's sources."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()
