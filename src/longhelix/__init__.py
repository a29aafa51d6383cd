"""Exact LLM inference with contexts of millions of tokens: plan a parallel layout, run it, serve it.

The packages. Each imports only packages below it:

    cli        the command line
    serve      HTTP in the form of OpenAI's API, metrics, and the server's page
    figures    the papers' figures: published values next to predicted ones
    measure    measurements: benchmarks, and the calibration of this machine
    engine     ranks as processes, the token loop, `LLM`, prompts, saved contexts
    simulate   a trace of requests on a predicted clock
    plan       the search for the best layout, and its reports
    compute    what one rank computes: models, kernels, collectives, the bytes of the KV cache
    perf       what a step costs, in seconds and bytes
    scheduler  what runs next, and which rank holds each KV block
    spec       what a model, a layout, a system and a number format are
    passes     sequence parallelism for any torch module: needs torch alone

Modules: `errors`, `values` (checks of values from outside), `spans` (traces of what begins and ends).
"""

from typing import TYPE_CHECKING, Any

from longhelix.errors import EngineError, UserError
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.policy import Policy
from longhelix.scheduler.request import SamplingParams, ServiceLevel
from longhelix.spec.layout import Layout

if TYPE_CHECKING:
    __version__: str

    from longhelix.compute.kernels import merge_states
    from longhelix.engine.llm import LLM
    from longhelix.engine.prompt import ImagePrompt

__all__ = [
    "LLM",
    "EngineError",
    "Guide",
    "ImagePrompt",
    "Layout",
    "Policy",
    "SamplingParams",
    "ServiceLevel",
    "UserError",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # read only if asked for, because it takes milliseconds
        import importlib.metadata

        return importlib.metadata.version("longhelix")
    # Planning and estimating need no engine, so sockets and tokenizers load with the first `LLM`.
    if name == "LLM":
        from longhelix.engine.llm import LLM

        return LLM
    if name == "ImagePrompt":
        from longhelix.engine.prompt import ImagePrompt

        return ImagePrompt
    if name == "merge_states":  # loads torch
        from longhelix.compute.kernels import merge_states

        return merge_states
    raise AttributeError(f"module 'longhelix' has no attribute {name!r}")
