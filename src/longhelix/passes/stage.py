"""Whether a graph is one that the pass may change: a whole one, for inference."""

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import Graph


def refusal(graph: Graph) -> str | None:
    """Why the graph that is compiled now has to stay as it is, in words."""
    # So torch calls the inputs of graphs that have a backward one, and those of the backward one.
    if any(node.name.startswith(("primals", "tangents")) for node in graph.find_nodes(op="placeholder")):
        return "it has a backward graph, and sequence parallelism is for inference: compile under torch.no_grad()"
    if _is_piece():
        return (
            "it is a piece of a model, whose other pieces need all tokens: compile the model as one graph, with "
            "fullgraph=True"
        )
    return None


def _is_piece() -> bool:
    """Whether a graph break came before this graph or ends it."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # not from a frame of Python
        return False
    if translator is None:
        return False
    resumed = translator.f_code.co_name.startswith("torch_dynamo_resume_in")
    reason = getattr(translator.output, "compile_subgraph_reason", None)
    return resumed or bool(reason is not None and reason.graph_break)
