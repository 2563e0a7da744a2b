"""The prompt format: conversations to prompts, and answers back to messages.

The technical report does not describe it. Its rules are those of the released encoder
(``encoding.py`` beside the released checkpoint); choices of tools, prefixes and streaming, which
that one leaves out, follow ``deepseek-recipe`` 0.2.

Needs nothing but the standard library; the tokenizer is an object that the caller brings.
"""

from openv41.errors import PromptError as PromptError
from openv41.prompt.dsml import Parameter as Parameter
from openv41.prompt.encoder import encode as encode
from openv41.prompt.messages import Conversation as Conversation
from openv41.prompt.messages import Image as Image
from openv41.prompt.messages import Message as Message
from openv41.prompt.messages import ToolCall as ToolCall
from openv41.prompt.parser import parse as parse
from openv41.prompt.pieces import Prompt as Prompt
from openv41.prompt.pieces import PromptTokenizer as PromptTokenizer
from openv41.prompt.pieces import Section as Section
from openv41.prompt.request import from_request as from_request
from openv41.prompt.stream import ArgumentsDelta as ArgumentsDelta
from openv41.prompt.stream import CallStart as CallStart
from openv41.prompt.stream import End as End
from openv41.prompt.stream import Event as Event
from openv41.prompt.stream import ReasoningDelta as ReasoningDelta
from openv41.prompt.stream import StreamParser as StreamParser
from openv41.prompt.stream import TextDelta as TextDelta
from openv41.prompt.stream import collect as collect
from openv41.prompt.stream import join as join
from openv41.prompt.tokens import MARKERS as MARKERS
from openv41.prompt.tokens import Piece as Piece
