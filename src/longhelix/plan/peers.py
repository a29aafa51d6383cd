"""Build the commands that run a deployment with other engines, or list the reasons why an engine cannot run it."""

from collections.abc import Mapping

from longhelix.plan import sglang, tensorrt_llm, vllm
from longhelix.plan.deployment import Deployment
from longhelix.plan.peer_command import Options, PeerCommand
from longhelix.values import refused, text

# By engine, the options that may occur in its commands.
OPTIONS: Mapping[str, Options] = {peer.NAME: peer.OPTIONS for peer in (vllm, tensorrt_llm, sglang)}
CONFIG_FILE = tensorrt_llm.CONFIG_FILE


def commands(deployment: Deployment, model_name: str) -> tuple[PeerCommand, ...]:
    """Return the command of each engine for a deployment.

    Args:
        model_name: folder of the model, or its name on a model hub.

    Raises:
        UserError: the name is empty or starts with a dash.
    """
    name = text("the model's name", model_name)
    if not name or name.startswith("-"):
        raise refused("the model's name", model_name, "a folder or a name on a model hub")
    return tuple(command(deployment, name) for command in (vllm.command, tensorrt_llm.command, sglang.command))
