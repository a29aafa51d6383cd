"""Whether a graph is one that the pass may change: a whole one, for inference."""

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import Graph, GraphModule

_COLLECTIVES = "_c10d_functional."


def refusal(graph: Graph) -> str | None:
    """Why the graph that is compiled now has to stay as it is, in words."""
    # So torch calls the inputs of graphs that have a backward one, and those of the backward one.
    if any(node.name.startswith(("primals", "tangents")) for node in graph.find_nodes(op="placeholder")):
        return "it has a backward graph, and sequence parallelism is for inference: compile under torch.no_grad()"
    translator = _translator()
    if translator is not None and _has_collectives_in_branches(translator):
        return (
            "it has collectives in branches (torch.cond and such), where nothing says what the ranks have alike: keep "
            "them out of branches"
        )
    if translator is not None and _is_piece(translator):
        return (
            "it is a piece of a model, whose other pieces need all tokens: compile the model as one graph, with "
            "fullgraph=True"
        )
    return None


def _translator() -> InstructionTranslator | None:
    """What makes a graph of a frame of Python now."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # no frame
        return None


def _has_collectives_in_branches(translator: InstructionTranslator) -> bool:
    """Whether any of the graphs inside of the graph that was traced has some. Passes see each of them by itself."""
    modules = [each for each in translator.output.nn_modules.values() if isinstance(each, GraphModule)]
    return any(str(node.target).startswith(_COLLECTIVES) for module in modules for node in module.graph.nodes)


def _is_piece(translator: InstructionTranslator) -> bool:
    """Whether a graph break came before this graph or ends it."""
    resumed = translator.f_code.co_name.startswith("torch_dynamo_resume_in")
    reason = getattr(translator.output, "compile_subgraph_reason", None)
    return resumed or bool(reason is not None and reason.graph_break)
