"""The embedded tokenizer: byte-level BPE in which a digit is always one token, and ChatML as chat template.

Any text survives encoding and decoding unchanged, since every byte has a token. Digits are cut apart before
merging, which makes arithmetic learnable for a small model. Written as a folder that `AutoTokenizer` reads.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def learn(texts: Iterable[str], vocab_size: int, max_positions: int) -> Any:
    """Learn a tokenizer of at most `vocab_size` entries from texts; a `PreTrainedTokenizerFast`.

    The special tokens get the ids 0 to 3, in the order of SPECIAL_TOKENS.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[TURN_START],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load(folder: Path) -> Any:
    """The tokenizer stored in `folder`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))
