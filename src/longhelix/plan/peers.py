"""Other engines that have layouts like ours: with what they start a deployment, or which limit of theirs forbids it."""

from collections.abc import Mapping

from longhelix.plan import sglang, tensorrt_llm, vllm
from longhelix.plan.deployment import Deployment
from longhelix.plan.peer_command import Options, PeerCommand
from longhelix.values import refused, text

# Each engine's own options, as far as commands here use them.
OPTIONS: Mapping[str, Options] = {peer.NAME: peer.OPTIONS for peer in (vllm, tensorrt_llm, sglang)}
CONFIG_FILE = tensorrt_llm.CONFIG_FILE


def commands(deployment: Deployment, model_name: str) -> tuple[PeerCommand, ...]:
    """Each peer's command. model_name: what the peers load, a folder or a name in a hub; raises UserError for one that
    would be empty or an option."""
    name = text("the model's name", model_name)
    if not name or name.startswith("-"):
        raise refused("the model's name", model_name, "a folder or a name in a hub")
    return tuple(command(deployment, name) for command in (vllm.command, tensorrt_llm.command, sglang.command))
