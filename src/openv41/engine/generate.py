"""Text from a model, one token at a time. Report §2.2."""

import codecs
from collections.abc import Iterable, Iterator, Sequence

import torch

from openv41.engine.sampler import Sampler, SamplingConfig
from openv41.errors import InputError
from openv41.io.tokenizer import TextTokenizer
from openv41.layers.batch import Batch
from openv41.model.cache import DenseStore
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder


def generate(
    model: CausalEncoderDecoder,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    *,
    max_tokens: int,
    num_tokens: int | None = None,
) -> Iterator[int]:
    """Yield new token ids after ``prompt`` until EOS (not yielded), a limit or the last position.

    Ids from ``num_tokens`` on have no text and are never drawn.
    """
    config = model.config
    if not prompt:
        raise InputError("the prompt holds no token; give at least BOS")
    if len(prompt) > config.max_position:
        raise InputError(
            f"the prompt has {len(prompt)} tokens; the model allows {config.max_position}"
        )
    if max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens}, must be at least 1")
    num_tokens = min(num_tokens or config.vocab_size, config.vocab_size)
    sampler = Sampler(sampling, num_tokens, prompt)
    return _tokens(model, list(prompt), sampler, max_tokens)


@torch.inference_mode()
def _tokens(
    model: CausalEncoderDecoder,
    new: list[int],
    sampler: Sampler,
    max_tokens: int,
) -> Iterator[int]:
    store = DenseStore(model.config.compress_ratios)
    device, position = model.norm.weight.device, 0
    for _ in range(max_tokens):
        ids = torch.tensor(new, dtype=torch.int64, device=device)
        hidden = model(Batch(ids, (0,), (position,), (len(new),)), store).hidden
        position += len(new)
        token = sampler.draw(model.logits(hidden[-1:])[0, : sampler.num_tokens])
        if token == model.config.eos_token_id:
            return
        yield token
        if position == model.config.max_position:
            return
        new = [token]


def as_text(tokens: Iterable[int], tokenizer: TextTokenizer) -> Iterator[str]:
    """Turn tokens into pieces of text; the bytes of an unfinished character wait for the rest."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if piece := decoder.decode(tokenizer.token_bytes(token)):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest
