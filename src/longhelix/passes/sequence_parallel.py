"""The pass that torch.compile runs over its graphs."""

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
from longhelix.passes.scales import Calibration, Quantisation, key_of, places
from longhelix.passes.stage import refusal
from longhelix.passes.tokens import any_number_of_tokens

logger = logging.getLogger(__name__)

DEFAULT_MIN_TOKENS = 1000


class SequenceParallel(CustomGraphPass):
    """Keeps what lies between an all-reduce and the products after it as token shards: the all-reduce becomes a
    reduce-scatter, norms and residuals are computed on each rank's own tokens, and what products need of them is
    all-gathered, quantised where the graph quantises it.

        sp = SequenceParallel(group, min_tokens=1000)
        compiled = torch.compile(module, fullgraph=True, options={"post_grad_custom_pre_pass": sp})

    group: the ranks whose functional collectives the graphs have; None: all. min_tokens: graphs for fewer tokens stay
    as they are; None: 1000. quantize: "int8" or "fp8": what is gathered travels as one byte a number with a scale for
    each token, which rounds it; scales: those of a `Calibration` in place of them, or one that takes notes. tokens: the
    least and the most tokens that graphs are for; None: what their shapes say. in_rank_order: sums are made in the
    order of ranks, by an all-to-all, so that their bits depend on no other token; None: where the group's backend is
    gloo, whose reduce-scatter sends as much as its all-reduce. own_chunks: the module cuts its rank's rows out of
    values by itself, as experts on token shards do, on all ranks alike: such a value is not gathered for it.
    token_wise: ops beside torch's own of which each row of results depends on the same row of the operands named alone.
    norms: those of them that are RMSNorms of their first operand.

    All ranks run the same code: their graphs are alike but for weights of products, and each rank plans by its own.
    Inputs and numbers of the graph that meet all-reduced values are taken to be the same on all ranks (norms' weights
    and eps, biases, residuals). A graph that it cannot change without doubt stays as it
    is, with a warning. Raises ValueError for values that cannot be.
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
        check_options(min_tokens, quantize, scales, tokens, in_rank_order, own_chunks, token_wise, norms)
        if not dist.is_initialized():
            raise ValueError("there are no ranks yet: call torch.distributed.init_process_group before this")
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise ValueError(f"group is a torch.distributed.ProcessGroup, not {type(group).__name__}")
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
            logger.warning("sequence parallelism is off: the group has one rank")

    def applies(self, tokens: int) -> bool:
        """Whether a graph for this many tokens and more keeps token shards."""
        return self.group.size > 1 and tokens >= self.min_tokens

    def uuid(self) -> str:
        """Of all that decides what it does, for torch's cache of compiled graphs."""
        self._expect_agreement()  # torch asks for this first, and then runs the pass or finds what it made before
        return self._of_options() + "-left" * agreement.differ(self.group)

    @property
    def _in_words(self) -> str:
        """What ranks have to be told alike."""
        own = f"min_tokens {self.min_tokens}, quantize {self.quantize}{self._of_scales}, tokens {self.tokens}"
        return f"{own}, in_rank_order {self.in_rank_order}, own_chunks {self.own_chunks}"

    @property
    def _of_scales(self) -> str:
        if self.scales is None:
            return ""
        if isinstance(self.scales, Calibration):
            return " noting scales"
        digest = hashlib.sha256(repr(sorted(self.scales.items())).encode()).hexdigest()
        return f" with {len(self.scales)} static scales {digest[:16]}"

    def _of_options(self) -> str:
        digest = hashlib.sha256(repr((torch.__version__, self.group, self.min_tokens, self.quantize)).encode())
        digest.update(repr((self.tokens, self.in_rank_order, self.in_pieces, self.own_chunks, self._norms)).encode())
        digest.update(repr(sorted((str(op), tuple(rows)) for op, rows in self._rules.rows.items())).encode())
        digest.update(self._of_scales.encode())
        if isinstance(self.scales, Calibration):
            digest.update(str(self.scales.number).encode())
        digest.update(_sources())
        return digest.hexdigest()

    def __call__(self, graph: Graph) -> None:
        """Change a graph, or leave it as it is."""
        if self.group.size == 1:
            return
        before = list(collectives(graph, self.group))
        if not before:
            return
        self._expect_agreement()
        reason = refusal(graph)
        if agreement.differ(self.group):
            reason = "ranks were found to differ in an earlier graph"
        changed: list[str] = []
        if reason is not None:
            self._leave(f"the graph stays as it is: {reason}")
        else:
            with any_number_of_tokens(graph):
                changed = self._change(graph)
        after = list(collectives(graph, self.group))
        self._counts.add_collectives(before, after)
        self._counts.add(agreement.KIND, agreement.summary(self._in_words, changed, after))

    def report(self) -> Report:
        """Of all graphs so far that passes with the same options have seen, those from torch's cache as well: matches
        by pattern, collectives by kind and the bytes that a rank sends by dtype, each before and after, and why
        collectives stayed. Graphs with a varying number of tokens count as many as they were traced with."""
        return self._counts.report()

    def explain(self) -> str:
        """Why collectives stayed as they were, a line for each."""
        return "\n".join(self.report()["left_alone"])

    def _expect_agreement(self) -> None:
        if self._has_peers:
            agreement.expect(self._counts.prefix, self.group)

    def _applies(self, count: int | torch.SymInt) -> bool:
        """Whether values of that many tokens are kept as shards."""
        if isinstance(count, int):
            return self.applies(count)
        if self.tokens is not None:
            return self.applies(self.tokens[0])
        least = count.node.shape_env.bound_sympy(count.node.expr).lower
        return bool(least.is_Integer) and self.applies(int(least))

    def _change(self, graph: Graph) -> list[str]:
        """What has become of the graph, as all ranks have to have it."""
        eliminate_no_ops(graph)
        plan = make_plan(
            graph, self.group, self._rules, self._norms, self._applies, self.quantize is not None, self.own_chunks
        )
        for sentence in plan.left_alone:
            self._counts.add("left_alone", sentence)
        if plan.sources or plan.chunks:
            return self._carry_out(graph, plan)
        if plan.left_alone:
            logger.warning("sequence parallelism is off for a graph: %s", "; ".join(plan.left_alone))
        return []

    def _carry_out(self, graph: Graph, plan: ShardingPlan) -> list[str]:
        changed = list(agreement.lines(graph, plan))
        quantisation = self._quantisation(places(graph, plan, changed))
        rewrite = Rewrite(graph, plan, self.group, self.in_rank_order, self.in_pieces, quantisation)
        try:
            rewrite.prepare()
            doubts = rewrite.doubts()
        except Exception as error:  # of ops on fake tensors, which may be any
            doubts = [f"{type(error).__name__}: {error}"]
        if doubts:
            rewrite.abandon()
            self._leave(f"the graph stays as it is: {doubts[0]}")
            return []
        for name, count in count_patterns(plan, quantisation and quantisation.how).items():
            self._counts.add("patterns", name, count)
        rewrite.finish()
        graph.lint()
        logger.debug("token shards:\n%s", "\n".join(changed))
        return changed

    def _quantisation(self, of_graph: list[str]) -> Quantisation | None:
        """Of what has these places in a graph."""
        if self.quantize is None:
            return None
        if isinstance(self.scales, Calibration):
            return Quantisation(self.quantize, noted=[f"{self.scales.number}/{place}" for place in of_graph])
        if self.scales is None or not of_graph:
            return Quantisation(self.quantize)
        keys = [key_of(self.quantize, place) for place in of_graph]
        if not self.scales.keys() >= set(keys):
            sentence = "no static scales are known for a graph, so that each token has its own: calibrate this module"
            logger.warning(sentence)
            self._counts.add("left_alone", sentence)
            return Quantisation(self.quantize)
        return Quantisation(self.quantize, [self.scales[key] for key in keys])

    def _leave(self, sentence: str) -> None:
        logger.warning("sequence parallelism is off for a graph: %s", sentence)
        self._counts.add("left_alone", sentence)

    @property
    def _counts(self) -> Counts:
        return Counts(self._of_options())


@cache
def _sources() -> bytes:
    """A digest of this package."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()
