"""What flags make of how tokens are chosen."""

import pytest
from cyclopts import App

from longhelix import Guide, SamplingParams, UserError
from longhelix.cli.options import SamplingOptions

pytestmark = pytest.mark.unit


def parsed(*flags):
    app = App()

    @app.default
    def verb(sampling: SamplingOptions = SamplingOptions()) -> SamplingParams:  # noqa: B008 - frozen
        return sampling.params()

    return app(flags, exit_on_error=False, print_error=False, result_action="return_value")


def test_flags_are_the_settings_of_the_same_names():
    asked = "--presence-penalty", "-0.5", "--frequency-penalty=1.5", "--min-tokens", "1k", "--max-new-tokens", "2k"
    assert parsed(*asked, "--logit-bias", '{"42": -100, "7": 1.5}') == SamplingParams(
        2000, presence_penalty=-0.5, frequency_penalty=1.5, min_tokens=1000, logit_bias={42: -100, 7: 1.5}
    )
    assert parsed() == SamplingParams()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("42", '--logit-bias must be a JSON object, such as {"42": -100}'),
        ("[[42, 1]]", "--logit-bias must be a JSON object"),
        ("{42: 1}", "--logit-bias is not valid JSON"),
        ('{"42": ' + "9" * 5000 + "}", "--logit-bias is not valid JSON"),
        ("[" * 100_000, "--logit-bias is not valid JSON"),
        ('{"42": NaN}', "the logit bias of token 42 is nan: set it to a number from -100 to 100"),
        ('{"42": "1"}', "the logit bias of token 42 is '1'"),
        ('{"42": true}', "the logit bias of token 42 is True"),
        ('{"4_2": 1}', "a token id of logit_bias is '4_2': set it to an integer"),
        ('{"-42": 1}', "a token id of logit_bias is '-42'"),
        ('{"9999999999": 1}', "a token id of logit_bias is 9999999999"),
        ('{"' + "9" * 5000 + '": 1}', "a token id of logit_bias is '9"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_logit_bias_is_refused_in_words(value, words):
    with pytest.raises(UserError) as refused:
        parsed("--logit-bias", value)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


def test_flags_say_what_the_answer_is(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"type": "array"}')
    grammar.write_text('root ::= "a"')
    assert parsed("--json-object").guide == Guide("json")
    assert parsed("--json-schema", str(schema)).guide == Guide("json_schema", '{"type": "array"}')
    assert parsed("--regex", "[ab]+").guide == Guide("regex", "[ab]+")
    assert parsed("--grammar", str(grammar)).guide == Guide("grammar", 'root ::= "a"')
    assert parsed("--choice", "yes", "--choice", "no").guide == Guide.of_choices(["yes", "no"])
    with pytest.raises(UserError, match="--json-object and --regex all constrain the answer: give only one of them"):
        parsed("--json-object", "--regex", "a")
    with pytest.raises(UserError, match="missing"):
        parsed("--json-schema", str(tmp_path / "missing"))
