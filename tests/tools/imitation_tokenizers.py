"""A tiny byte-level BPE tokenizer with ChatML control tokens, built offline, and templates to try on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Trims every message, as Llama 3 does.
TRIMS = CHATML.replace("m.content", "m.content | trim")
#: A system prompt that nobody asked for, as SmolLM2 has.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
#: Think tags opened by the generation prompt and stripped from history.
OPENS_THINK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content.split('</think>')[-1] "
    "if m.role == 'assistant' else m.content) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
#: Raises on roles that it does not know and wraps tool results.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_TOOL = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}",
)
NO_SYSTEM = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}",
)
#: The next role's header ends a turn, as GLM has it.
HEADERS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
#: Writes the number of messages behind every turn: what follows a turn changes as the conversation grows.
COUNTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' "
    "+ messages | length | string + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
DATED = "{{ '<|im_start|>system\\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\\n' }}" + CHATML

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_response>", "</tool_response>"]
_CORPUS = [
    "Hello world, guess a digit from 0 to 9. Too low! Too high!",
    "user assistant system tool\n\n",
    "xx xx xx",
] * 4


HEADER_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
HARMONY_TOKENS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")


def tiny_tokenizer(template: str | None = CHATML, special: Sequence[str] = ()) -> Any:
    """Returns a transformers tokenizer: ids 0-2 special, then bytes and some merges, then tags.

    Args:
        template: its chat template.
        special: further special tokens; their ids are the last ones, in order.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    backend.add_special_tokens(list(special))
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    hf.chat_template = template
    return hf
