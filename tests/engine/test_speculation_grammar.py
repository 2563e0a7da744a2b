"""Constrained answers under speculation: only committed tokens advance a grammar."""

import json
from dataclasses import replace

import jsonschema_rs
import pytest
import torch

from openv41.engine.grammar import AnswerConstraint, GrammarCompiler
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.speculation import DraftChoice, SpeculationConfig
from openv41.engine.tool_grammar import calls_lark
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.prompt.tokens import DSML, THINK_END
from tests.engine.drafts import Script, plain_answers, speculating, target_config
from tests.io.tiny_checkpoint import make_tokenizer

EOS_ID = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a/b", "</c", ""]},
        "count": {"type": "integer", "minimum": 3, "maximum": 12},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer):
    size = tokenizer.vocab_size
    config = replace(target_config(), vocab_size=size, image_token_id=size - 1)
    made = CausalEncoderDecoder(config, dtype=torch.float64)
    made.set_token_map([i % 40 for i in range(size)])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.3, generator=generator)
    return made


@pytest.fixture(scope="module")
def requests(tokenizer):
    """Reasoning, then JSON; and calls of a tool."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS_ID)
    marker = tokenizer.special_id(DSML)
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    calls = compiler.lark(calls_lark([tool], marker), "calls")
    kinds = [(True, compiler.json(SCHEMA)), (False, compiler.json(SCHEMA)), (False, calls)]
    blanks = {tokenizer.encode(blank)[0] for blank in (" ", "\n", "\t", "\n\n")}
    bias = {tokenizer.special_id(THINK_END): 6.0, EOS_ID: 9.0} | dict.fromkeys(blanks, -9.0)
    return [
        Request(
            prompt=tuple(range(4, 9 + seed)),
            max_tokens=400,
            sampling=SamplingConfig(seed=seed, logit_bias=tuple(bias.items())),
            constraint=AnswerConstraint(
                compiler=compiler,
                has_reasoning=has_reasoning,
                content=content,
                calls=None,
                think_end_id=tokenizer.special_id(THINK_END),
                marker_id=marker,
            ),
        )
        for seed in (1, 4)
        for has_reasoning, content in kinds
    ]


def check(answers, tokenizer):
    ends = tokenizer.special_id(THINK_END)
    for number, answer in enumerate(answers):
        assert (answer.finish_reason, answer.error) == ("stop", None)
        if number % 3 < 2:
            begin = answer.tokens.index(ends) + 1 if number % 3 == 0 else 0
            jsonschema_rs.validate(SCHEMA, json.loads(tokenizer.decode(answer.tokens[begin:])))


def test_answers_fit_as_without_drafts(model, tokenizer, requests):
    """T23: also where reasoning ends inside a block, and where drafts fit no grammar."""
    options = {"tokenizer": tokenizer, "cache": {"max_requests": 9, "num_pages": 900}}
    want = plain_answers(model, requests, **options)
    check(want, tokenizer)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(requests, want, strict=True)]
    script = Script(
        dict(enumerate(texts)), lambda _, position: position * 7 % 6, vocab=model.config.vocab_size
    )
    greedy = SpeculationConfig(drafts=DraftChoice.GREEDY)
    engine = speculating(model, script, speculation=greedy, **options)
    found = engine.generate(requests)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in want]
    assert [answer.text for answer in found] == [answer.text for answer in want]
    assert sum(engine.stats().drafts_accepted) > 30

    def any_tokens(request, position, token):
        generator = torch.Generator().manual_seed(position)
        return torch.randn(5, model.config.vocab_size, generator=generator, dtype=torch.float64)

    engine = speculating(model, any_tokens, **options)
    check(engine.generate(requests), tokenizer)
    assert engine.stats().wasted_rows > 100
