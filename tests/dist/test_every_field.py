"""Every route, every field of its body, every wrong kind of value: what the published schema does not allow is refused,
what it allows never fails the server, and it serves as before."""

import copy
import json
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator
from served import served, settled

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PLACE, UNKNOWN = "@the value@", "never_heard_of"
DEPTHS = (300, 3000)  # more than serializers take, and than readers of JSON do
HEAD = {"content-type": "application/json"}
# As JSON, by kind, each with a small value of its kind where the text itself is too much for a validator.
DEEP = {
    f"{kind} of {depth} levels": (opening * depth + inside + closing * depth, small)
    for depth in DEPTHS
    for kind, opening, inside, closing, small in (
        ("list", "[", "", "]", [[[]]]),
        ("object", '{"a":', "1", "}", {"a": {"a": 1}}),
    )
}
VALUES = {
    "huge": ["9" * 400, "1e400", "-" + "9" * 400, str(2**63), str(2**31)],
    "negative": ["-1", "-0.5"],
    "NaN": ["NaN", "Infinity", "-Infinity"],
    "wrong type": ["true", "false", "null", '"x"', '"3"', "1.5", "[]", "{}", "[[]]", "[null]", '{"a": 1}', "[true]"],
    "too many": [
        json.dumps(["x"] * 20_000),
        json.dumps([1] * 20_000),
        json.dumps([{}] * 20_000),
        json.dumps({str(index): 1 for index in range(20_000)}),
    ],
    "too long": [json.dumps("x" * 300_000), json.dumps("\u6f22" * 20_000), json.dumps("\x00\x1b\u202e")],
    "surrogate": ['"\\ud800"', '["\\udfff"]', '{"\\ud800": "\\ud800"}'],
}
# What answers are short by, in each route's words.
SHORT = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts")
    with served(max_model_len=256, kv_cache_tokens=4096, contexts_dir=folder) as both:
        yield both


@pytest.fixture(scope="module")
def api(server):
    client, _ = server
    return client.get("/openapi.json").json()


def _resolved(api, schema):
    """Without references at its top."""
    while "$ref" in schema:
        schema = api["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def _forms(api, schema):
    """The alternatives of which a value has one."""
    schema = _resolved(api, schema)
    found = [each for name in ("anyOf", "oneOf") for each in schema.get(name, []) if "properties" not in schema]
    return [form for each in found for form in _forms(api, each)] if found else [schema]


def _sample(api, schema):
    """The smallest value that a schema has."""
    form = next((each for each in _forms(api, schema) if each.get("type") != "null"), {})
    if "const" in form or "enum" in form:
        return form.get("const", form.get("enum", [None])[0])
    match form.get("type"):
        case "object":
            return {name: _sample(api, form["properties"][name]) for name in form.get("required", [])}
        case "array":
            return [_sample(api, form.get("items", {}))] * form.get("minItems", 0)
        case "string":
            return "a" * max(form.get("minLength", 0), 1)
        case "integer" | "number":
            return max(form.get("minimum", 1), 1)
        case "boolean":
            return False
    return "a"


def _bodies(api, schema):
    """Pairs of a field's name and the smallest body in which PLACE stands for its value, at every depth; and of a field
    that nobody knows."""
    for form in _forms(api, schema):
        if form.get("type") == "object":
            smallest = _sample(api, form)
            if "properties" in form:
                yield UNKNOWN, smallest | {UNKNOWN: PLACE}
            for name, field in form.get("properties", {}).items():
                yield name, smallest | {name: PLACE}
                for inner, body in _bodies(api, field):
                    yield f"{name}.{inner}", smallest | {name: body}
        elif form.get("type") == "array" and form.get("items"):
            yield "0", [PLACE]
            for inner, body in _bodies(api, form["items"]):
                yield f"0.{inner}", [body]


def _with(body, value):
    """`body` with a value in its place."""
    if body == PLACE:
        return value
    if isinstance(body, dict):
        return {name: _with(each, value) for name, each in body.items()}
    return [_with(each, value) for each in body] if isinstance(body, list) else body


def _routes(api):
    return {
        path: routes["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, routes in api["paths"].items()
        if "post" in routes
    }


def _allowed(validator, body, kind, text):
    """Whether the published schema takes it. JSON has no NaN, and no half of a surrogate pair is text."""
    if text.startswith('{"\\ud800"'):  # inside of an object of anything, such as a call's arguments
        return validator.is_valid(_with(body, {"a": "a"}))
    if kind in ("NaN", "surrogate"):
        # Where anything may be, that may be too.
        return all(validator.is_valid(_with(body, value)) for value in (1, "a", [], {}, None))
    value = DEEP[kind][1] if kind in DEEP else json.loads(text)
    return validator.is_valid(_with(body, value))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/contexts",
        "/tokenize",
        "/detokenize",
    ],
)
def test_no_value_of_a_field_fails_the_server(server, api, path):
    client, llm = server
    schema = _routes(api)[path]
    validator = Draft202012Validator(copy.deepcopy(schema) | {"components": api["components"]})
    values = [(kind, text) for kind, texts in VALUES.items() for text in texts]
    values += [(kind, text) for kind, (text, _) in DEEP.items()]
    fields = list(_bodies(api, schema))
    assert len({name for name, _ in fields}) >= 2
    wrong, refused, answered = [], 0, 0
    for name, body in fields:
        short = {field: value for field, value in SHORT.get(path, {}).items() if field not in body}
        sent = json.dumps(body | short)
        for kind, text in values:
            answer = client.post(path, content=sent.replace(json.dumps(PLACE), text), headers=HEAD)
            refused += 400 <= answer.status_code < 500
            answered += answer.status_code < 300
            told = answer.status_code < 300 or answer.json()["error"]["message"]
            may_pass = _allowed(validator, body, kind, text)
            if answer.status_code >= 500 or not told or (answer.status_code < 300 and not may_pass):
                wrong.append((name, kind, text[:60], answer.status_code, answer.text[:200]))
    assert wrong == []
    assert refused > 0 < answered
    for context in client.get("/v1/contexts").json()["data"]:
        assert client.delete(f"/v1/contexts/{context['id']}").status_code == 200
    assert settled(client, llm)
    good = client.post(
        "/v1/completions", json={"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    )
    assert good.json()["choices"][0]["text"].startswith(" Paris")


def test_every_route_with_a_body_is_walked(api):
    marks = test_no_value_of_a_field_fails_the_server.pytestmark
    (walked,) = (mark.args[1] for mark in marks if mark.name == "parametrize")
    assert sorted(_routes(api)) == sorted(walked)


NAMES = ["", ".", "..", "../../etc/passwd", "a/b", "a" * 5000, "\x00", "\x1b[2J", "\u6f22", "-1", "a" * 255, "a/" * 500]


@pytest.mark.parametrize("name", [quote(name, safe="") for name in NAMES] + ["%ff", "%ed%a0%80", "%2e%2e%2fetc", "%"])
def test_no_name_in_an_address_fails_the_server(server, api, name):
    client, _ = server
    for path, routes in api["paths"].items():
        if "{" not in path:
            continue
        for method in routes:
            answer = client.request(method, path[: path.index("{")] + name)
            # Without a name it is the list's own address.
            assert 400 <= answer.status_code < 500 or (name in ("", ".") and method == "get"), (path, answer.text)
    for path in ("/", "/page/", "/assets/"):
        answer = client.get(path + name)
        assert answer.status_code < 500
        assert "root:" not in answer.text
