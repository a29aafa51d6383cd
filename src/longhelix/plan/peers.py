"""Commands that run a deployment with another engine, or the engine's limits that forbid it."""

from collections.abc import Mapping

from longhelix.plan import sglang, tensorrt_llm, vllm
from longhelix.plan.deployment import Deployment
from longhelix.plan.peer_command import Options, PeerCommand
from longhelix.values import refused, text

# The options of each engine that the commands here use.
OPTIONS: Mapping[str, Options] = {peer.NAME: peer.OPTIONS for peer in (vllm, tensorrt_llm, sglang)}
CONFIG_FILE = tensorrt_llm.CONFIG_FILE


def commands(deployment: Deployment, model_name: str) -> tuple[PeerCommand, ...]:
    """Each engine's command.

    Args:
        model_name: what the engines load: a folder or a name in a hub.

    Raises:
        UserError: the name is empty or starts with a dash.
    """
    name = text("the model's name", model_name)
    if not name or name.startswith("-"):
        raise refused("the model's name", model_name, "a folder or a name in a hub")
    return tuple(command(deployment, name) for command in (vllm.command, tensorrt_llm.command, sglang.command))
