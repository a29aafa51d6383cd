"""Decide whether the pass may change a graph. It may change only the graph of a whole module, for inference."""

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import Graph, GraphModule

_COLLECTIVES = "_c10d_functional."


def refusal(graph: Graph) -> str | None:
    """Return why the graph that is being compiled must stay unchanged, or None if the pass may change the graph."""
    # Torch uses these names for inputs of backward graphs, and of forward graphs that have a backward graph.
    if any(node.name.startswith(("primals", "tangents")) for node in graph.find_nodes(op="placeholder")):
        return "it has a backward graph, and sequence parallelism is for inference: compile under torch.no_grad()"
    translator = _translator()
    if translator is not None and _has_collectives_in_branches(translator):
        return (
            "it has collectives in branches (such as torch.cond), where the pass cannot know which values are equal on "
            "all ranks: move them out of the branches"
        )
    if translator is not None and _is_piece(translator):
        return (
            "it is a piece of a model, and the other pieces need all tokens: compile the model as one graph with "
            "fullgraph=True"
        )
    return None


def _translator() -> InstructionTranslator | None:
    """Return the translator that currently traces a Python frame, or None."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # no frame is being traced
        return None


def _has_collectives_in_branches(translator: InstructionTranslator) -> bool:
    """True if a graph nested in the traced graph has collectives. Torch calls passes separately for nested graphs."""
    modules = [each for each in translator.output.nn_modules.values() if isinstance(each, GraphModule)]
    return any(str(node.target).startswith(_COLLECTIVES) for module in modules for node in module.graph.nodes)


def _is_piece(translator: InstructionTranslator) -> bool:
    """True if a graph break precedes or ends this graph."""
    resumed = translator.f_code.co_name.startswith("torch_dynamo_resume_in")
    reason = getattr(translator.output, "compile_subgraph_reason", None)
    return resumed or bool(reason is not None and reason.graph_break)
