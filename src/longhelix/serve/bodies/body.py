"""What all bodies have in common."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from longhelix.cache.context_folder import context_name
from longhelix.request import MOST_TOKENS

TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
ContextName = Annotated[str, AfterValidator(context_name)]
ModelName = Annotated[str, Field(max_length=4096)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
