"""Fields that say what an answer has to be: OpenAI's and vLLM's."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.serve.bodies.body import Body, Text, few
from longhelix.serve.bodies.unserved import Unserved, check_unserved

Schema = dict[str, Any] | str
Choices = Annotated[list[Text], Field(min_length=1, max_length=10_000, fail_fast=True)]
_GUIDED = ("json", "regex", "choice", "grammar")


class NamedSchema(Body):
    name: Annotated[str, Field(max_length=256)] | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """What OpenAI's answers are."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def guide(self) -> Guide | None:
        """Raises UserError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise UserError(
                "response_format needs json_schema if its type is json_schema, and must not have it otherwise"
            )
        if self.json_schema is not None:
            return Guide.of_schema(self.json_schema.content)
        return Guide("json") if self.type == "json_object" else None


_UNSERVED = {  # of structured_outputs
    "structural_tag": Unserved((), "use grammar"),
    "whitespace_pattern": Unserved(),
    "disable_any_whitespace": Unserved((False,)),
    "disable_additional_properties": Unserved((False,), "set additionalProperties to false in the schema"),
}
_WITHOUT_EFFECT = ("disable_fallback", "backend", "_backend", "_backend_was_auto")  # how vLLM follows a guide


class StructuredOutputs(BaseModel):
    """What vLLM's answers are."""

    model_config = ConfigDict(strict=True, extra="forbid")
    content: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: object) -> object:
        """Drop fields of vLLM that ask for nothing."""
        if not isinstance(given, dict):
            return given
        check_unserved(given, _UNSERVED)
        return {name: value for name, value in given.items() if name not in _UNSERVED and name not in _WITHOUT_EFFECT}


_MOST_STRUCTURED = len(StructuredOutputs.model_fields) + len(_UNSERVED) + len(_WITHOUT_EFFECT)


class Guided(Body):
    """One of these fields says it, or none. guide_fields: their names."""

    guide_fields: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        *(f"guided_{kind}" for kind in _GUIDED),
    )

    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs, few(_MOST_STRUCTURED)] | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def guide_field(self) -> str | None:
        """The field that says what the answer has to be."""
        return next((name for name in self.guide_fields if getattr(self, name) is not None), None)

    def guide(self) -> Guide | None:
        """What the answer has to be. Takes a while where that is long. Raises UserError for what nothing can be, and
        where two fields say it."""
        found = self.guides()
        if len(found) > 1:
            raise UserError(
                f"several fields say what the answer has to be: give one of {', '.join(self.guide_fields[:-1])} and "
                f"{self.guide_fields[-1]}, and one thing in it"
            )
        return found[0] if found else None

    def guides(self) -> list[Guide]:
        """All that fields say the answer has to be. Raises UserError."""
        other = self.structured_outputs or StructuredOutputs()
        found = [
            Guide.of_schema(schema) for schema in (self.guided_json, other.content) if schema is not None
        ]  # fmt: skip
        found += [Guide("regex", regex) for regex in (self.guided_regex, other.regex) if regex is not None]
        found += [Guide.of_choices(choices) for choices in (self.guided_choice, other.choice) if choices is not None]
        found += [Guide("grammar", text) for text in (self.guided_grammar, other.grammar) if text is not None]
        found += [Guide("json")] if other.json_object else []
        asked = None if self.response_format is None else self.response_format.guide()
        return found if asked is None else [*found, asked]
