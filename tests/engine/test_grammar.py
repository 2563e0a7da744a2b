"""Constrained decoding: whatever is drawn at random fits, and nothing else is ruled out."""

import builtins
import codecs
import json
from dataclasses import replace

import jsonschema_rs
import pytest
import torch

from openv41.engine.grammar import AnswerConstraint, GrammarCompiler
from openv41.engine.prompt_format import AnswerReader
from openv41.engine.request import Event, FinishReason, Request
from openv41.engine.sampler import LogitsError, Sampler, SamplingConfig
from openv41.engine.tool_grammar import calls_lark
from openv41.errors import InputError, PromptError
from openv41.prompt import ToolCall, collect, parse
from openv41.prompt.tokens import DSML, EOS, THINK_END, Piece
from tests.engine.mini_engine import arm, engine_of, plain_logits
from tests.io.tiny_checkpoint import make_tokenizer
from tests.layers.mini import VOCAB

EOS_ID = 1
OPENING = "\n\n<MARK calls>\n"
TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "below": {"$ref": "#/$defs/tree"}},
    "required": ["value"],
    "additionalProperties": False,
}
SCHEMAS = {
    "texts": {
        "plain": {"type": "string", "maxLength": 5},
        "listed": {"enum": ["a/b", "</c", "", "caf\u00e9"]},
        "exact": {"const": "x"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/(\\\\d|b)+$", "maxLength": 6},
        "found": {"type": "string", "pattern": "b", "minLength": 2, "maxLength": 4},
    },
    "others": {
        "count": {"type": "integer", "minimum": 3, "maximum": 12, "format": "int32"},
        "listed": {"enum": [1, None, [True]]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "both": {
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "types": {"type": ["string", "boolean"], "maxLength": 3},
        "mixed": {"enum": ["one", 1]},
        "one": {"oneOf": [{"type": "null"}, {"type": "boolean"}, {"const": "text"}]},
    },
    "deep": {"tree": {"$ref": "#/$defs/tree"}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS_ID)


def schema_of(name, required):
    properties = SCHEMAS[name]
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if key in required],
        "additionalProperties": False,
        "$defs": {"tree": TREE},
    }


def tool(name, schema=None, **about):
    function = {"name": name, **about}
    return {"type": "function", "function": function | ({"parameters": schema} if schema else {})}


def rules(compiler, **options):
    tokenizer = compiler.tokenizer
    ids = {
        "think_end_id": tokenizer.special_id(THINK_END),
        "marker_id": tokenizer.special_id(DSML),
    }
    return AnswerConstraint(
        **{
            "compiler": compiler,
            "has_reasoning": False,
            "content": None,
            "calls": None,
            **ids,
            **options,
        }
    )


def drawn(constraint, seed, *, likely=(), temperature=1.0, most=3000):
    """Tokens of an answer from random logits, up to EOS."""
    compiler = constraint.compiler
    sampler = Sampler(
        SamplingConfig(seed=seed, temperature=temperature),
        compiler.num_tokens,
        guide=constraint.begin(),
    )
    generator = torch.Generator().manual_seed(seed)
    blanks = [compiler.tokenizer.encode(blank)[0] for blank in (" ", "\n", "\t", "\n\n")]
    tokens = []
    while len(tokens) < most:
        logits = torch.randn(compiler.num_tokens, generator=generator)
        logits[blanks] -= 4
        for token, gain in likely:
            logits[token] += gain
        token = sampler.draw(logits)
        if token == EOS_ID:
            return tokens
        tokens.append(token)
    raise AssertionError("the answer does not end")


def said(tokenizer, tokens, section):
    """What a reader of the stream makes of tokens."""
    reader = AnswerReader(tokenizer, section)
    decoder = texts_of(tokenizer)
    events = [
        one for token in tokens for one in reader.read(Event(token=token, text=decoder(token)))
    ]
    last = Event(text=decoder(None), finish_reason=FinishReason.STOP)
    return collect([*events, *reader.read(last)])


def texts_of(tokenizer):
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda token: (
        decoder.decode(b"", True) if token is None else decoder.decode(tokenizer.token_bytes(token))
    )


def strictly(tokenizer, tokens, section):
    """What the strict parser makes of them: it takes nothing that is not in the format."""
    pieces = [Piece(tokenizer.decode([t]), True) if tokenizer.is_special(t) else t for t in tokens]
    joined, run = [], []
    for piece in [*pieces, Piece(EOS, True)]:
        if isinstance(piece, Piece):
            joined += [Piece(tokenizer.decode(run), False), piece]
            run = []
        else:
            run.append(piece)
    return parse(joined, section)


@pytest.mark.parametrize("name", SCHEMAS)
def test_calls_fit_their_schema(compiler, tokenizer, name):
    """Random logits at temperature 1: the strict and the streaming parser agree, and it fits."""
    required = [key for key in SCHEMAS[name] if key in ("listed", "mixed", "tree", "code")]
    schema = schema_of(name, required)
    text = calls_lark([tool(name, schema)], tokenizer.special_id(DSML))
    constraint = rules(compiler, content=compiler.lark(text, "calls"))
    given = set()
    for seed in range(20):
        tokens = drawn(constraint, seed)
        message = said(tokenizer, tokens, "calls")
        calls = [replace(call, id="") for call in message.tool_calls]
        assert calls
        assert replace(message, tool_calls=calls) == strictly(tokenizer, tokens, "calls")
        for call in message.tool_calls:
            arguments = json.loads(call.arguments)
            assert call.name == name
            jsonschema_rs.validate(schema, arguments)
            given |= set(arguments)
    assert given == set(SCHEMAS[name])  # what may be left out is not always left out


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_fits_its_schema(compiler, tokenizer, name):
    schema = schema_of(name, ["listed"])
    constraint = rules(compiler, content=compiler.json(schema))
    for seed in range(20):
        answer = tokenizer.decode(drawn(constraint, seed))
        jsonschema_rs.validate(schema, json.loads(answer))


def test_a_choice_of_tools_or_an_answer(compiler, tokenizer):
    marker = tokenizer.special_id(DSML)
    tools = [tool("f"), tool("g", {"type": "object", "properties": {"a": {"type": "null"}}})]
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    text = calls_lark(tools, marker, opening=OPENING, answer=schema)
    constraint = rules(compiler, content=compiler.lark(text, "calls"))
    kinds = set()
    for seed in range(40):
        likely = [(marker, 3.0)] if seed % 2 else ()
        message = said(tokenizer, drawn(constraint, seed, likely=likely), "content")
        kinds |= {call.name for call in message.tool_calls} or {
            json.dumps(json.loads(message.content))
        }
    assert kinds == {"f", "g", "{}"}


@pytest.mark.parametrize("many", [False, True])
def test_how_many_calls(compiler, tokenizer, many):
    text = calls_lark([tool("f")], tokenizer.special_id(DSML), many=many)
    constraint = rules(compiler, content=compiler.lark(text, "calls"))
    counts = {len(said(tokenizer, drawn(constraint, s), "calls").tool_calls) for s in range(20)}
    assert (counts == {1}) == (not many)


def test_other_arguments_have_other_names(compiler, tokenizer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    }
    text = calls_lark([tool("f", schema)], tokenizer.special_id(DSML), many=False)
    constraint = rules(compiler, content=compiler.lark(text, "calls"))
    others = 0
    for seed in range(20):
        (call,) = said(tokenizer, drawn(constraint, seed, likely=[(6, 2)]), "calls").tool_calls
        arguments = json.loads(call.arguments)
        jsonschema_rs.validate(schema, arguments)
        others += bool(set(arguments) - {"a"})
    assert others


def test_names_that_the_model_gives_end(compiler, tokenizer):
    marker = tokenizer.special_id(DSML)
    text = calls_lark([tool("f", {"type": "object"})], marker)
    guide = rules(compiler, content=compiler.lark(text, "calls")).begin()
    parts = ["<", ' invoke name="f">\n<', ' parameter name="']
    for number, part in enumerate(parts):
        for token in ([marker] if number else []) + tokenizer.encode(part):
            guide.accept(token)
    (letter,), (quote,) = tokenizer.encode("z"), tokenizer.encode('"')
    for _ in range(64):
        assert guide.allowed()[letter]
        guide.accept(letter)
    assert not guide.allowed()[letter]
    assert guide.allowed()[quote]


def test_reasoning_is_free_until_it_ends(compiler, tokenizer):
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    constraint = rules(compiler, has_reasoning=True, content=compiler.json(schema))
    ends = tokenizer.special_id(THINK_END)
    for seed in range(10):
        tokens = drawn(constraint, seed, likely=[(ends, 5), (EOS_ID, 9)])
        place = tokens.index(ends)
        assert json.loads(tokenizer.decode(tokens[place + 1 :])) == {}
    guide = constraint.begin()
    mask = guide.allowed()
    assert mask[[ends, 5, 300]].all()
    assert not mask[EOS_ID]  # the format would be broken
    assert not mask[tokenizer.special_id(DSML)]  # there are no tools


@pytest.mark.parametrize("section", ["reasoning", "content"])
def test_a_block_opens_behind_a_bracket_alone(compiler, tokenizer, section):
    marker = tokenizer.special_id(DSML)
    calls = compiler.lark(calls_lark([tool("f")], marker, opening=" calls>\n"), "calls")
    guide = rules(compiler, has_reasoning=section == "reasoning", calls=calls).begin()
    assert not guide.allowed()[marker]
    assert guide.allowed()[EOS_ID]
    for token in tokenizer.encode("text <"):
        guide.accept(token)
    assert guide.allowed()[marker]
    guide.accept(marker)
    spelled = f' calls>\n<{DSML} invoke name="f">\n\n</{DSML} invoke>\n</{DSML} calls>'
    for number, part in enumerate(spelled.split(DSML)):
        for token in ([marker] if number else []) + tokenizer.encode(part):
            assert guide.allowed()[token]
            guide.accept(token)
    assert guide.allowed().nonzero().flatten().tolist() == [EOS_ID]
    guide.accept(EOS_ID)
    assert guide.allowed() is None


def test_spelled_markers_in_text_stay_text(compiler, tokenizer):
    """A text argument may spell the end of its own tag; only the token ends it."""
    marker = tokenizer.special_id(DSML)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    constraint = rules(
        compiler, content=compiler.lark(calls_lark([tool("f", schema)], marker), "c")
    )
    guide, tokens = constraint.begin(), []
    value = f"</{DSML} parameter>\n</{DSML} invoke> {EOS}"
    for part, is_special in [
        ("<", False), (DSML, True), (' invoke name="f">\n<', False), (DSML, True),
        (f' parameter name="a" string="true">{value}</', False), (DSML, True),
        (" parameter>\n</", False), (DSML, True), (" invoke>\n</", False), (DSML, True),
        (" calls>", False),
    ]:  # fmt: skip
        for token in [marker] if is_special else tokenizer.encode(part):
            assert guide.allowed()[token]
            guide.accept(token)
            tokens.append(token)
    (call,) = said(tokenizer, tokens, "calls").tool_calls
    assert call == ToolCall("f", json.dumps({"a": value}, ensure_ascii=False), id=call.id)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "texts"}, 'type is "texts"'),
        ({"not": {}}, "'not' cannot be enforced on text"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "allOf of several schemas"),
        ({"$ref": "#/properties/a"}, "must begin with '#/\\$defs/'"),
        ({"$ref": "#/$defs/none"}, "there is nothing at"),
        ({"type": "string", "pattern": "^a|b$"}, "put its alternatives into brackets"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "minLength": "1"}, "must be numbers of characters"),
        ({"type": "object", "patternProperties": {"a": {"not": {}}}}, "not"),
        ({"enum": []}, "no schema that a value can fit"),
        ({"anyOf": [{"type": "string"}], "maxLength": 3}, "'maxLength' beside 'anyOf'"),
        (False, "no schema that a value can fit"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ],
)
def test_schemas_that_cannot_be_enforced(compiler, tokenizer, schema, reason):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(InputError, match=reason):
        compiler.lark(calls_lark([tool("f", parameters)], tokenizer.special_id(DSML)), "calls")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "array"}, "must be the schema of an object"),
        ([1], "must be the schema of an object"),
        ({"properties": {}, "minProperties": 1}, "'minProperties' of its parameters"),
        ({"properties": [1]}, "properties must be an object"),
        ({"properties": {}, "required": [1]}, "required must be a list of names"),
        (
            {"properties": {}, "required": ["a"], "additionalProperties": False},
            "'a' is required and may not be given",
        ),
        ({"properties": {'a" string="true">': {}}}, "of 'f' would end its own tag"),
    ],
)
def test_parameters_that_cannot_be_enforced(parameters, reason):
    with pytest.raises((InputError, PromptError), match=reason):
        calls_lark([tool("f", parameters)], 5)


def test_json_schemas_say_why_they_cannot_be(compiler):
    with pytest.raises(InputError, match=r"cannot be enforced: .*uniqueItems"):
        compiler.json({"type": "array", "uniqueItems": True})
    with pytest.raises(InputError, match="uniqueItems"):  # no way around it
        compiler.json({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}})
    with pytest.raises(InputError, match="cannot be enforced"):
        compiler.json({"$ref": "#"})


def chain(length):
    """A reference to a reference to a reference."""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "null"}}}


def nested(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (chain(5000), "object of 5001 entries"),
        (nested(5000), "at most 64 levels"),
        ({"properties": {f"k{i}": {} for i in range(5000)}}, "object of 5000 entries"),
        ({"anyOf": [{}] * 5000}, "a choice of 5000"),
        ({"items": [[{"$ref": "#/$defs/a"}]] * 300, "$defs": {"a": {}}}, "256 references"),
        ({"items": [[{}]] * 9000}, "10,000 parts"),
    ],
)
def test_schemas_that_are_too_large(compiler, schema, reason):
    """Such ones would take the process down."""
    with pytest.raises(InputError, match=reason):
        compiler.json(schema)
    with pytest.raises(InputError, match=reason):
        calls_lark([tool("f", {"properties": {}, "$defs": {"x": schema}})], 5)
    with pytest.raises(InputError, match="257 tools, must be at most 256"):
        calls_lark([tool("f")] * 257, 5)


def test_schemas_that_are_just_not_too_large(compiler, tokenizer):
    marker = tokenizer.special_id(DSML)
    optional = {"properties": {f"k{i}": {"type": "null"} for i in range(256)}}
    for seed in range(3):
        tokens = drawn(
            rules(
                compiler,
                content=compiler.json(
                    {**optional, "type": "object", "additionalProperties": False}
                ),
            ),
            seed,
            most=9000,
        )
        assert set(json.loads(tokenizer.decode(tokens))) <= set(optional["properties"])
    text = calls_lark([tool(f"f{i}", optional) for i in range(8)], marker, many=False)
    constraint = rules(compiler, content=compiler.lark(text, "calls"))
    assert said(tokenizer, drawn(constraint, 0, most=9000), "calls").tool_calls


def test_the_model_must_be_able_to_go_on(compiler):
    schema = {"const": True}
    guide = rules(compiler, content=compiler.json(schema)).begin()
    sampler = Sampler(SamplingConfig(), compiler.num_tokens, guide=guide)
    logits = torch.zeros(compiler.num_tokens)
    logits[guide.allowed()] = -torch.inf
    with pytest.raises(LogitsError, match="that the constraint allows next can be drawn"):
        sampler.draw(logits)


def test_greedy_takes_the_best_that_fits(compiler, tokenizer):
    guide = rules(compiler, content=compiler.json({"enum": [7, 5]})).begin()
    sampler = Sampler(SamplingConfig(temperature=0.0), compiler.num_tokens, guide=guide)
    logits = torch.linspace(1, 0, compiler.num_tokens)
    wanted = min(tokenizer.encode(digit)[0] for digit in "57")
    assert sampler.draw(logits) == wanted
    assert sampler.draw(logits) == EOS_ID


def test_without_the_library_it_says_what_to_install(tokenizer, monkeypatch):
    import_ = builtins.__import__

    def refuse(name, *args, **options):
        if name == "llguidance":
            raise ImportError(name)
        return import_(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"pip install 'openv41\[grammar\]'"):
        GrammarCompiler(tokenizer, 10, EOS_ID).json({})


class Counting:
    """A constraint that needs no library: the tokens 2, 3, ... in turn, one choice each."""

    def __init__(self):
        self.begun = 0

    def begin(self):
        self.begun += 1
        return self.Guide()

    class Guide:
        def __init__(self):
            self.place = 0

        def allowed(self):
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[[2 + 2 * self.place, 3 + 2 * self.place]] = True
            return mask

        def accept(self, token):
            assert self.allowed()[token]
            self.place += 1


def test_a_preempted_request_goes_on_where_its_constraint_was():
    """Its cache is dropped and computed anew; nothing of the answer is drawn twice."""
    model = arm(torch.float64, bitwise=False)
    counting = Counting()
    requests = [
        Request(
            prompt=tuple(range(4, 4 + length)),
            max_tokens=14,
            constraint=counting,
            sampling=SamplingConfig(seed=length),
            logprobs=0,
            ignore_eos=True,
        )
        for length in (5, 9, 7)
    ]
    roomy = engine_of(model)
    wanted = roomy.generate(requests)
    assert roomy.stats().preemptions == 0
    tight = engine_of(model, cache={"num_pages": 9}, prefix_cache=False)
    answers = tight.generate(requests)
    assert tight.stats().preemptions > 0
    assert counting.begun == 2 * len(requests)
    for answer, want in zip(answers, wanted, strict=True):
        assert [(token - 2) // 2 for token in answer.tokens] == list(range(14))
        assert answer.tokens == want.tokens
    for request, answer in zip(requests, wanted, strict=True):  # of the model, all tokens counted
        logits = plain_logits(model, request.prompt, answer.tokens)
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        found = torch.tensor([entry.logprob for entry in answer.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, own, rtol=0, atol=1e-5)
