"""Imitations of every family of chat templates, built offline: what each does is a row of ``FAMILIES``.

The templates in ``families/`` were written for these tests: each behaves as its family does, and says nothing
else. The tokenizers are small, with the family's control tokens. ``BROKEN`` are templates that nobody should
train on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers.hf import HFTokenizer
from tests.tools.imitation_tokenizers import CHATML

FOLDER = Path(__file__).parent / "families"
_CORPUS = ["Hello world, guess a digit from 0 to 9. Too low! user assistant system tool\n\n", "xx xx xx"] * 4


@dataclass(frozen=True)
class Family:
    """A tokenizer, a template, and what they do.

    Attributes:
        template: file in ``families/``.
        special: control tokens; the first ones are BOS and end.
        bos: whether there is a BOS.
        tags: added tokens that are not special.
        ends: tokens that a generation config would name beside the tokenizer's end.
        rstrip: tokens that swallow white space behind them.
        pieces: ``bytes``; ``legacy`` or ``first``: SentencePiece with a blank before every stretch or text.
        kwargs: variables of the template.
        prompt: text of the generation prompt; None: no suffix.
        user: text of the bridge to a user's "Oq7x" after a stop id.
        tool: text of the bridge to a tool's "Oq7x" after a stop id; None: the role is refused.
        closes: what a bridge supplies after a cut turn, if it is not the first stop id.
        opener: what the generation prompt leaves open.
        tool_close: what it supplies before a tool's message.
        system: ``role``, or ``merge`` where the renderer puts it into the first question.
        keeps: what history leaves as it was said: plain, white space, a think block, nothing at all.
        same_head: history shows the same text before a turn as its prompt had.
        kind: how a turn is closed in front of a user's message.
    """

    template: str
    special: tuple[str, ...]
    prompt: str | None
    user: str
    tool: str | None
    bos: bool = True
    tags: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    rstrip: tuple[str, ...] = ()
    pieces: str = "bytes"
    kwargs: dict[str, Any] = field(default_factory=dict)
    closes: str = ""
    tool_close: str = ""
    opener: str = ""
    system: str = "role"
    keeps: str = "pwte"
    same_head: bool = True
    kind: str = "normal"
    dialect: str | None = None
    tags_of_thoughts: tuple[str, str] = ("<think>", "</think>")


_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CHATML = {"special": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), "bos": False, "tags": _THINK}
_CHATML_PROMPT = "<|im_start|>assistant\n"
_CHATML_USER = "\n<|im_start|>user\nOq7x<|im_end|>\n<|im_start|>assistant\n"
_CHATML_TOOL = (
    "\n<|im_start|>user\n<tool_response>\nOq7x\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
_LLAMA = {
    "special": (
        "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>",
        "<|eom_id|>", "<|python_tag|>",
    ),
    "ends": ("<|end_of_text|>",),
}  # fmt: skip
_LLAMA_PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_LLAMA_USER = f"<|start_header_id|>user<|end_header_id|>\n\nOq7x<|eot_id|>{_LLAMA_PROMPT}"
_GEMMA = {
    "special": ("<bos>", "<end_of_turn>", "<start_of_turn>", "<eos>", "<start_of_image>"),
    "ends": ("<eos>",),
    "prompt": "<start_of_turn>model\n",
    "user": "\n<start_of_turn>user\nOq7x<end_of_turn>\n<start_of_turn>model\n",
    "tool": None,
    "keeps": "pte",
}
_DEEPSEEK = {
    "special": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "tags": (
        "<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>",
    ),
    "tool": (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>Oq7x<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    ),
}  # fmt: skip
_COHERE = {
    "special": (
        "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
        "<|START_THINKING|>", "<|END_THINKING|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>",
    ),
    "prompt": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
}  # fmt: skip
_COHERE_USER = (
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Oq7x<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)

_QWEN3 = Family(
    template="qwen3", prompt=_CHATML_PROMPT, user=_CHATML_USER, tool=_CHATML_TOOL, keeps="pwe",
    dialect="hermes", ends=("<|endoftext|>",), **_CHATML,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "Qwen3": _QWEN3,
    "Qwen3 no-think": replace(
        _QWEN3,
        kwargs={"enable_thinking": False},
        prompt=_CHATML_PROMPT + "<think>\n\n</think>\n\n",
        user=_CHATML_USER + "<think>\n\n</think>\n\n",
        tool=_CHATML_TOOL + "<think>\n\n</think>\n\n",
        keeps="",
        same_head=False,
    ),
    "Qwen2.5": replace(_QWEN3, template="qwen2_5", keeps="pwte"),
    "Qwen3.5": replace(
        _QWEN3,
        template="qwen3_5",
        prompt=_CHATML_PROMPT + "<think>\n",
        user=_CHATML_USER + "<think>\n",
        tool=_CHATML_TOOL + "<think>\n",
        keeps="",
        same_head=False,
        opener="<think>",
        dialect="qwen3_coder",
    ),
    "Nemotron 3": replace(
        _QWEN3,
        template="nemotron3",
        prompt=_CHATML_PROMPT + "<think>\n",
        user=_CHATML_USER + "<think>\n",
        tool=_CHATML_TOOL.replace("</tool_response>", "</tool_response>\n") + "<think>\n",
        keeps="",
        same_head=False,
        opener="<think>",
        dialect="qwen3_coder",
    ),
    "SmolLM2": replace(
        _QWEN3, template="smollm2", tool=_CHATML_USER.replace("user", "tool"), keeps="pwte", dialect=None
    ),
    "Llama 3": Family(
        template="llama3", prompt=_LLAMA_PROMPT, user=_LLAMA_USER,
        tool=_LLAMA_USER.replace("user", "tool"), keeps="pte", **_LLAMA,
    ),
    "Llama 3.1": Family(
        template="llama3_1", prompt=_LLAMA_PROMPT, user=_LLAMA_USER,
        tool=_LLAMA_USER.replace("user", "ipython").replace("Oq7x", '"Oq7x"'), keeps="pte",
        dialect="llama3_json", **{**_LLAMA, "ends": ("<|end_of_text|>", "<|eom_id|>")},
    ),
    "Gemma 1": Family(template="gemma1", system="merge", **_GEMMA),
    "Gemma 3": Family(template="gemma3", **_GEMMA),
    "DeepSeek-V3": Family(
        template="deepseek_v3", prompt="<｜Assistant｜>", user="<｜User｜>Oq7x<｜Assistant｜>", **_DEEPSEEK
    ),
    "R1 distill": Family(
        template="deepseek_r1", prompt="<｜Assistant｜><think>\n",
        user="<｜User｜>Oq7x<｜Assistant｜><think>\n", keeps="", same_head=False, opener="<think>",
        **_DEEPSEEK,
    ),
    "gpt-oss": Family(
        template="gptoss", prompt="<|start|>assistant", keeps="", same_head=False,
        user="<|start|>user<|message|>Oq7x<|end|><|start|>assistant",
        tool='<|start|>functions.f to=assistant<|channel|>commentary<|message|>"Oq7x"<|end|>'
             "<|start|>assistant",
        special=("<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>",
                 "<|call|>", "<|constrain|>", "<|endoftext|>"),
        ends=("<|endoftext|>", "<|call|>"), closes="<|end|>", tool_close="<|call|>",
        kind="history_close_differs", bos=False,
    ),
    "Mistral v1": Family(
        template="mistral_v1", special=("<s>", "</s>"), pieces="legacy", prompt="", system="merge",
        user="[INST] Oq7x [/INST]", tool=None,
    ),
    "Mistral v3": Family(
        template="mistral_v3", pieces="first", prompt="", system="merge", user="[INST]Oq7x[/INST]",
        special=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        tool='[TOOL_RESULTS]{"content": "Oq7x", "call_id": "call00000"}[/TOOL_RESULTS]', dialect="mistral",
    ),
    "Magistral": Family(
        template="magistral", prompt="", user="[INST]Oq7x[/INST]", tool=None,
        special=("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]",
                 "[/THINK]"),
        tags_of_thoughts=("[THINK]", "[/THINK]"),
    ),
    "GLM-4.5": Family(
        template="glm4_5", special=("[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|user|>",
                                    "<|assistant|>", "<|observation|>"),
        bos=False, tags=_THINK, ends=("<|user|>", "<|observation|>"), prompt="<|assistant|>",
        user="\nOq7x<|assistant|>", tool="\n<tool_response>\nOq7x\n</tool_response><|assistant|>",
        closes="<|user|>", tool_close="<|observation|>", keeps="", same_head=False, kind="header",
    ),
    "Phi-3": Family(
        template="phi3", special=("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>",
                                  "<|end|>"),
        bos=False, rstrip=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), prompt=None,
        user="<|user|>Oq7x<|end|><|assistant|>", tool=None,
    ),
    "Cohere": Family(
        template="cohere", user=_COHERE_USER, tool=None, keeps="pte", **_COHERE,
        tags_of_thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "Cohere 2": Family(
        template="cohere2", tool=None, closes="<|END_RESPONSE|>",
        user="<|END_OF_TURN_TOKEN|>" + _COHERE_USER + "<|START_RESPONSE|>",
        **{**_COHERE, "prompt": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"},
        tags_of_thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "Command R7B": Family(
        template="command_r7b", closes="<|END_RESPONSE|>", keeps="", same_head=False,
        user="<|END_OF_TURN_TOKEN|>" + _COHERE_USER,
        tool="<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>"
             '["Oq7x"]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>',
        **{**_COHERE, "prompt": ""}, tags_of_thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "Llama 2": Family(
        template="llama2", special=("<s>", "</s>"), pieces="legacy", prompt="",
        # A stretch of text behind a control token begins with a blank piece.
        user="<s> [INST] Oq7x [/INST]", tool=None, closes=" </s>", keeps="", same_head=False,
    ),
    "Seed-OSS": Family(
        template="seed_oss", special=("<seed:bos>", "<seed:eos>"), tags=("<seed:think>", "</seed:think>"),
        prompt="<seed:bos>assistant\n", user="<seed:bos>user\nOq7x<seed:eos><seed:bos>assistant\n",
        tool="<seed:bos>tool\nOq7x<seed:eos><seed:bos>assistant\n",
        tags_of_thoughts=("<seed:think>", "</seed:think>"),
    ),
}  # fmt: skip

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
#: name -> (template, settings, words of the refusal)
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "no end of turn": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}",
        {},
        r"no end of turn.*user message.*stop_ids=",
    ),
    "ignores the generation prompt": (
        f"{{% for m in messages %}}{_TURN}{{% endfor %}}",
        {},
        r"ignores add_generation_prompt.*role assistant.*template=",
    ),
    "drops a role": (
        f"{{% for m in messages if m.role != 'tool' %}}{_TURN}{{% endfor %}}"
        "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}",
        {"tool_role": "tool"},
        r"drops or repeats the text of role 'tool'.*tool_role='user'",
    ),
    "an unknown role falls into the assistant branch": (
        "{% for m in messages %}{% set role = m.role if m.role in ('system', 'user') else 'assistant' %}"
        "{{ '<|im_start|>' + role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}",
        {"tool_role": "tool"},
        r"'tool' as an assistant's turn.*tool_role='user'",
    ),
    "drops questions": (
        CHATML.replace("m.content", "('' if m.role == 'user' else m.content)"),
        {},
        r"drops or repeats the text of role 'user'.*template=",
    ),
    "says answers twice": (
        CHATML.replace("m.content", "(m.content + m.content if m.role == 'assistant' else m.content)"),
        {},
        r"drops or repeats the text of role 'assistant'.*template=",
    ),
}
#: Writes what follows a turn differently as the conversation grows: every turn is a segment of its own.
REWRITES = CHATML.replace("'<|im_end|>\\n'", "'<|im_end|>' + messages | length | string + '\\n'")


@cache
def family_tokenizer(name: str) -> HFTokenizer:
    """Returns the small tokenizer of a family; its model has 40 rows more than it has ids."""
    family = FAMILIES[name]
    hf = _byte_level(family) if family.pieces == "bytes" else _sentencepiece(family)
    hf.chat_template = (FOLDER / f"{family.template}.jinja").read_text(encoding="utf-8")
    ends = [*family.special[1:2], *family.ends]
    return HFTokenizer(
        hf,
        name,
        len(hf) + 40,
        source=None,
        eos_ids=[hf.convert_tokens_to_ids(end) for end in ends],
        rows_known=True,
    )


@cache
def family_renderer(name: str, **settings: Any) -> ChatRenderer:
    """Returns a family's renderer."""
    return ChatRenderer(family_tokenizer(name), template_kwargs=FAMILIES[name].kwargs, **settings)


def _byte_level(family: Family) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    # As today's families split: newlines go with what stands before them, never with a word behind.
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return _dressed(backend, family)


def _sentencepiece(family: Family) -> Any:
    """Returns a tokenizer that writes blanks as ▁ and falls back to bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", "H"), ("l", "l"), ("e", "ll"), ("▁H", "ell"), ("▁Hell", "o"), ("▁", "a"), ("▁", "▁")]
    merges += [("[", "I"), ("▁", "["), ("▁[", "I"), ("x", "x")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if family.pieces == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _dressed(backend, family)


def _dressed(backend: Any, family: Family) -> Any:
    """Returns a transformers tokenizer with the family's control tokens."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    def token(text: str, special: bool) -> Any:
        return AddedToken(text, rstrip=text in family.rstrip, normalized=False, special=special)

    backend.add_special_tokens([token(text, True) for text in family.special])
    backend.add_tokens([token(text, False) for text in family.tags])
    first, end = family.special[:2]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, **({"bos_token": first} if family.bos else {})
    )
