"""Messages to token ids, by the tokenizer's own chat template.

What a user typed is text. A message that contains `<|im_end|>` must not end the turn, yet a tokenizer that
sees only the rendered conversation cannot tell the template's control tokens from the user's. So where a
message contains one:

1. it is replaced by a placeholder before the template is rendered;
2. in the result, the template's own control tokens are renamed to aliases, and the placeholders become text
   again;
3. a copy of the tokenizer that knows the control tokens by their aliases alone encodes the whole string in
   one piece.

One encoding, with no seams, gives the ids that a tokenizer without those tokens would give. Messages without
control tokens, nearly all, are encoded directly. Control tokens are the special ones, and other added tokens
that the template writes (such as `<think>`), save in the assistant's turns, where the latter are the model's
own words.

Special tokens are never added on top of a template, which writes its own BOS. Not covered: tools, images,
truncation.
"""

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from sparkbench.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PRIVATE_USE = range(0xE000, 0xF900)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, str]], thinking: bool = False
) -> tuple[int, ...]:
    """Token ids of a conversation, ready for the model's answer.

    `messages` are `{"role": ..., "content": ...}`. `thinking` is passed to templates that know it
    (`enable_thinking`) and has no effect on others. A tokenizer without a template gives BOS, if it has one,
    and the plain contents; an empty prompt then gives `()` where there is no BOS. RunError: the template
    refuses the conversation.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    controls = _control_tokens(tokenizer, template or "")
    typed = _pattern(controls)
    if typed is None or not any(typed.search(message["content"]) for message in messages):
        return _head(tokenizer, template) + _ids(tokenizer, _render(tokenizer, template, messages, thinking))

    everything = "".join([template or "", *controls, *(message["content"] for message in messages)])
    hide, alias = islice((mark for mark in map(chr, _PRIVATE_USE) if mark not in everything), 2)
    names = list(controls)
    special = _pattern({name: True for name, is_special in controls.items() if is_special})

    def hidden(message: dict[str, str]) -> dict[str, str]:
        pattern = special if message["role"] == "assistant" else typed
        if pattern is None:
            return message
        content = pattern.sub(lambda match: f"{hide}{names.index(match[0])}{hide}", message["content"])
        return {**message, "content": content}

    def shown(match: re.Match[str]) -> str:
        return names[int(match["hidden"])] if match["hidden"] else f"{alias}{names.index(match[0])}{alias}"

    rendered = _render(tokenizer, template, [hidden(message) for message in messages], thinking)
    aliased = re.sub(f"{typed.pattern}|{hide}(?P<hidden>[0-9]+){hide}", shown, rendered)
    aliases = {name: f"{alias}{index}{alias}" for index, name in enumerate(names)}
    return _head(tokenizer, template) + _ids_by_alias(tokenizer, aliased, aliases)


def prompt_hash(ids: Sequence[int]) -> str:
    """SHA-256, in hex, of token ids as little-endian int32."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def _control_tokens(tokenizer: "PreTrainedTokenizerBase", template: str) -> dict[str, bool]:
    """Control tokens by text, and whether each is a special token. White space is never one."""
    return {
        token.content: token.special
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (token.content in template and not token.content.isspace())
    }


def _pattern(tokens: dict[str, bool]) -> re.Pattern[str] | None:
    """Matches the longest token at a place, as tokenizers do; None where there is no token."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _head(tokenizer: "PreTrainedTokenizerBase", template: str | None) -> tuple[int, ...]:
    return () if template is not None or tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    template: str | None,
    messages: Sequence[dict[str, str]],
    thinking: bool,
) -> str:
    """The conversation as one string; without a template, the contents with a blank line between them."""
    if template is None:
        return "\n\n".join(message["content"] for message in messages)
    from jinja2 import TemplateError

    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
    if "enable_thinking" in template:
        options["enable_thinking"] = thinking
    try:
        # As a string: what a tokenized result looks like has changed between versions of transformers.
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except TemplateError as error:
        raise RunError(f"the chat template of the target refuses the conversation: {error}") from error


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _ids_by_alias(tokenizer: "PreTrainedTokenizerBase", text: str, aliases: dict[str, str]) -> tuple[int, ...]:
    """Encode with a copy of the tokenizer that matches each control token by its alias and not by its own
    text.

    Ids of the copy's added tokens can differ from the original's (an alias is not in the vocabulary, its
    token may be), so they are mapped back.
    """
    from tokenizers import Tokenizer

    if not tokenizer.is_fast:
        raise RunError("a prompt holds a control token as text, which needs a fast tokenizer")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.update(truncation=None, padding=None, post_processor=None)
    original = {}
    for token in state["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
        original[token["content"]] = token["id"]
    copy = Tokenizer.from_str(json.dumps(state))
    back = {copy.token_to_id(content): identity for content, identity in original.items()}
    return tuple(back.get(identity, identity) for identity in copy.encode(text, add_special_tokens=False).ids)
