"""OpenAI's and vLLM's request fields for guided decoding. They constrain the format of an answer."""

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
    """JSON schema with a name."""

    name: Annotated[str, Field(max_length=256)] | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """OpenAI's field for the format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    """Schema of the answer, for the type `json_schema`."""

    def guide(self) -> Guide | None:
        """Return the guide, or None for text. Raises UserError for an invalid combination of fields."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise UserError(
                "response_format needs json_schema if its type is json_schema, and must not have it otherwise"
            )
        if self.json_schema is not None:
            return Guide.of_schema(self.json_schema.content)
        return Guide("json") if self.type == "json_object" else None


_UNSERVED = {  # unsupported fields of structured_outputs
    "structural_tag": Unserved((), "use grammar"),
    "whitespace_pattern": Unserved(),
    "disable_any_whitespace": Unserved((False,)),
    "disable_additional_properties": Unserved((False,), "set additionalProperties to false in the schema"),
}
_WITHOUT_EFFECT = ("disable_fallback", "backend", "_backend", "_backend_was_auto")  # select vLLM's implementation


class StructuredOutputs(BaseModel):
    """vLLM's field for the format of the answer. Set exactly one of the fields in this object."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
    content: Annotated[Schema | None, Field(alias="json")] = None
    """JSON schema."""
    regex: Text | None = None
    """Regular expression."""
    choice: Choices | None = None
    """Texts of which the answer must be one."""
    grammar: Text | None = None
    """Lark or GBNF grammar."""
    json_object: bool | None = None
    """True if the answer must be a JSON object with any content."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: object) -> object:
        """Drop vLLM's fields that have no effect here."""
        if not isinstance(given, dict):
            return given
        check_unserved(given, _UNSERVED)
        return {name: value for name, value in given.items() if name not in _UNSERVED and name not in _WITHOUT_EFFECT}


_MOST_STRUCTURED = len(StructuredOutputs.model_fields) + len(_UNSERVED) + len(_WITHOUT_EFFECT)


class GuidedBody(Body):
    """Fields for guided decoding. Set at most one of these fields."""

    guide_fields: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        *(f"guided_{kind}" for kind in _GUIDED),
    )

    response_format: ResponseFormat | None = None
    """Format of the answer, in OpenAI's notation."""
    structured_outputs: Annotated[StructuredOutputs, few(_MOST_STRUCTURED)] | None = None
    """Format of the answer, in vLLM's notation."""
    guided_json: Schema | None = None
    """JSON schema that the answer must follow."""
    guided_regex: Text | None = None
    """Regular expression that the answer must match."""
    guided_choice: Choices | None = None
    """Texts of which the answer must be one."""
    guided_grammar: Text | None = None
    """Grammar that the answer must follow."""

    @property
    def guide_field(self) -> str | None:
        """Name of the field that is set, or None if no field is set."""
        return next((name for name in self.guide_fields if getattr(self, name) is not None), None)

    def guide(self) -> Guide | None:
        """Return the guide of the answer, or None. Building a long guide takes time.

        Raises:
            UserError: the guide is invalid, or several fields are set.
        """
        found = self.guides()
        if len(found) > 1:
            raise UserError(
                f"several fields guide the answer: give only one of {', '.join(self.guide_fields[:-1])} and "
                f"{self.guide_fields[-1]}, with one guide in it"
            )
        return found[0] if found else None

    def guides(self) -> list[Guide]:
        """Return the guides of all fields that are set. Raises UserError for an invalid guide."""
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
