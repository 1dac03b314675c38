"""Conversations that branch, ask for several replies, rewrite their past, call tools and speak at once.

1. Every trained id is one that was sampled, with its logprob, and is trained once in the whole group.
2. A history that says what was said goes on id for id, however it is spelt; another one is a new segment.
3. A failed or cancelled request changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atropos_gym.engines import SamplingParams, ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError
from atropos_gym.messages import Message
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.conversation import Conversation, GroupSession
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.tokenizers import load_tokenizer
from atropos_gym.trainers.batches import RowRules, read_batch
from tests.tools.imitation_families import family_renderer
from tests.tools.imitation_tokenizers import OPENS_THINK, tiny_tokenizer
from tests.unit.rollout_cases import END, say, saying
from tests.unit.session_cases import CALLS, babbling, check_group

HI: list[Message] = [{"role": "user", "content": "hi"}]
MORE: Message = {"role": "user", "content": "more"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = '<tool_call>\n{"name": "add",   "arguments": {"a": 2}}\n</tool_call>'


def play(
    engine: ScriptedEngine, loop: Callable[[GroupSession], Coroutine[Any, Any, Any]], **options: Any
) -> Any:
    async def inside() -> Any:
        async with GroupSession(engine, **options) as session:
            return await loop(session)

    return asyncio.run(inside())


def words(engine_words: list[str]) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, params, number: say(engine_words[number % len(engine_words)]))


def trained_ids(group: EpisodeGroup) -> list[list[int]]:
    """The trained ids of each row, one row after another."""
    return [[m for m in row.mask if m != -100] for episode in group.episodes for row in episode.rows]


# --- branches and several replies ---


@pytest.mark.parametrize(
    ("scores", "rows"), [([1.0, 2.0], ["ab", "c"]), ([None, 2.0], ["ac"]), ([1.0, None], ["ab"])]
)
def test_what_branches_share_is_trained_in_the_first_that_has_a_score(scores: Any, rows: list[str]) -> None:
    engine = words(["a", "b", "c"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        await chat.say()
        other = chat.branch()
        for one in (chat, other):
            one.add(MORE)
            await one.say()
        return session.group(scores)

    group = play(engine, loop)
    assert trained_ids(group) == [[i for word in row for i in say(word)] for row in rows]
    check_group(group, engine.calls)
    assert len({len(row.ids) for episode in group.episodes for row in episode.rows}) == 1  # all see all of it


def test_replies_that_nothing_follows_are_rows_of_their_own() -> None:
    engine = words(["a", "b", "c", "d"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        replies = await chat.say(n=3)
        assert [reply.text for reply in replies] == ["a", "b", "c"]
        chat.take(replies[1])
        chat.add(MORE)
        await chat.say()
        return session.group([1.0])

    group = play(engine, loop)
    assert trained_ids(group) == [say("a"), say("c"), [*say("b"), *say("d")]]
    assert check_group(group, engine.calls) == 4
    wire = group.to_wire()
    assert wire.group_overrides is not None and wire.group_overrides["segments"] is True
    assert wire.advantages is not None
    engine.calls.clear()
    dropped = play(words(["a", "b", "c", "d"]), loop, alternatives="drop")
    assert trained_ids(dropped) == [[*say("b"), *say("d")]]


def test_the_learner_reads_branches_and_segments() -> None:
    engine = words([*"abcdef"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        await chat.say()
        other = chat.branch()
        for one, n in ((chat, 2), (other, 1)):
            one.add(MORE)
            await one.say(n=n)
        await chat.say([MORE])
        return session.group([1.0, 0.0])

    group = play(engine, loop)
    batch = read_batch([group.to_wire()], RowRules(vocab_size=264))
    assert (len(batch.rows), batch.dropped, batch.refusals) == (4, {}, [])
    assert [played.score for played in batch.played] == [1.0, 0.0]  # an episode counts once in the baseline
    assert sum(len(row.positions) for row in batch.rows) == sum(map(len, trained_ids(group))) == 5 * 2


def test_a_branch_from_one_of_several_replies_takes_it_along() -> None:
    engine = words(["a", "b", "c", "d"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        first, second = await chat.say(n=2)
        other = chat.branch(second)
        assert other.messages[-1]["content"] == "b" and chat.messages[-1]["content"] == first.text
        for one in (chat, other):
            one.add(MORE)
            await one.say()
        return session.group([0.0, 1.0])

    group = play(engine, loop)
    assert trained_ids(group) == [[*say("a"), *say("c")], [*say("b"), *say("d")]]
    assert [episode.score for episode in group.episodes] == [0.0, 1.0]
    check_group(group, engine.calls)


def test_turns_can_have_rewards_of_their_own() -> None:
    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        first = await chat.say()
        chat.reward(0.25, first)
        chat.add(MORE)
        await chat.say()
        chat.reward(2)
        return session.group([9.0])

    episode = play(saying("ja"), loop).episodes[0]
    assert (episode.rewards, episode.score) == ([0.25, 2.0], 9.0)


def test_what_is_added_while_the_policy_speaks_comes_after_its_reply() -> None:
    engine = words(["a", "b"])

    async def loop(session: GroupSession) -> Any:
        chat = session.conversation(HI)
        speaking = asyncio.create_task(chat.say())
        await asyncio.sleep(0)
        chat.add(MORE)
        await speaking
        assert [message["content"] for message in chat.messages] == ["hi", "a", "more"]
        await chat.say()
        return session.group([1.0])

    assert trained_ids(play(engine, loop)) == [[*say("a"), *say("b")]]


# --- another past ---


def test_a_changed_past_is_a_new_segment_and_what_was_said_stays() -> None:
    engine = words(["a", "b", "c"])

    async def loop(session: GroupSession) -> tuple[EpisodeGroup, Any]:
        chat = session.conversation(HI)
        await chat.say()
        chat.add(MORE)
        await chat.say()
        await chat.say([{"role": "user", "content": "in short: a"}, MORE])
        return session.group([1.0]), chat.segments

    group, segments = play(engine, loop)
    assert trained_ids(group) == [[*say("a"), *say("b")], say("c")]
    assert group.episodes[0].rows[1].messages[0]["content"] == "in short: a"
    assert segments == {"another start": 1}
    check_group(group, engine.calls)


def test_a_changed_reply_is_context_that_is_not_trained() -> None:
    engine = words(["a", "b"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        await chat.say()
        chat.messages[-1] = {"role": "assistant", "content": "something else"}
        chat.add(MORE)
        await chat.say()
        return session.group([1.0])

    group = play(engine, loop)
    assert trained_ids(group) == [say("a"), say("b")]
    assert bytes(i for i in group.episodes[0].rows[1].ids if i < 256).startswith(b"hisomething elsemore")
    check_group(group, engine.calls)


def test_a_template_that_rewrites_history_gives_a_segment_a_turn() -> None:
    tokenizer = load_tokenizer(tiny_tokenizer(OPENS_THINK))
    renderer = ChatRenderer(tokenizer, past="template")
    engine = ScriptedEngine(
        lambda p, s, n: renderer.say(f"thought {n}</think>answer {n}"), tokenizer=tokenizer
    )

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        for turn in range(3):
            if turn:
                chat.add(MORE)
            await chat.say()
        return session.group([1.0])

    group = play(engine, loop, tokenizer=renderer)
    assert [len(row.turns) for row in group.episodes[0].rows] == [1, 1, 1]
    assert "thought 0" not in tokenizer.decode(group.episodes[0].rows[2].ids)
    check_group(group, engine.calls)


# --- whole histories, as programs send them ---


async def ask(chat: Conversation, messages: Any, **options: Any) -> Any:
    [said] = await chat.ask(messages, **options)
    return json.loads(json.dumps(said.message))


@pytest.mark.parametrize(
    "spell",
    [
        lambda m: m,
        lambda m: {**m, "content": f"  {m['content'].strip()}\n\n"},
        lambda m: {**m, "content": [{"type": "text", "text": m["content"]}]},
        lambda m: {**m, "refusal": None, "audio": None, "tool_calls": None},
        lambda m: {**m, "content": f"<think>hm</think>{m['content']}"},
    ],
)
def test_a_reply_is_known_however_it_is_spelt(spell: Callable[[Any], Any]) -> None:
    engine = words(["<think>hm</think>\n\nyes,  sir ", "b"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        message = await ask(chat, HI)
        assert message["content"] == "yes,  sir " and message["reasoning_content"] == "hm"
        await ask(chat, [*HI, spell(message), MORE])
        return session.group([1.0])

    group = play(engine, loop)
    assert len(group.episodes[0].rows) == 1
    check_group(group, engine.calls)


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {**call, "id": "other"},
        lambda call: {**call, "function": {"name": "add", "arguments": '{"a": 3}'}},
        lambda call: {**call, "function": {"name": "sub", "arguments": '{"a": 2}'}},
    ],
)
@pytest.mark.parametrize("family", ["template", "bytes"])
def test_calls_are_known_by_what_they_are(family: str, change: Callable[[Any], Any]) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer(CALLS) if family == "template" else "bytes")
    renderer = ChatRenderer(tokenizer)
    spoken = [f"Well. {CALL}", "four", "five"]
    engine = ScriptedEngine(lambda p, s, n: renderer.say(spoken[n]), tokenizer=tokenizer)

    async def loop(session: GroupSession) -> tuple[EpisodeGroup, EpisodeGroup]:
        chat = session.conversation()
        message = await ask(chat, HI, tools=[ADD])
        [call] = message["tool_calls"]
        assert message["content"] == "Well."
        assert call["function"] == {"name": "add", "arguments": '{"a": 2}'}
        compact = {**call, "function": {"name": "add", "arguments": '{"a":2}'}}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        await ask(
            chat, [*HI, {"role": "assistant", "tool_calls": [compact], "content": None}, result], tools=[ADD]
        )
        known = session.group([1.0])
        await ask(chat, [*HI, {**message, "tool_calls": [change(call)]}, result], tools=[ADD])
        return known, session.group([1.0])

    known, changed = play(engine, loop)
    assert trained_ids(known) == [[*renderer.say(spoken[0]), *renderer.say("four")]]
    assert [len(row.turns) for row in changed.episodes[0].rows] == [2, 1]
    check_group(changed, engine.calls)


def test_a_loop_calls_tools() -> None:
    tokenizer = load_tokenizer(tiny_tokenizer(CALLS))
    renderer = ChatRenderer(tokenizer)
    engine = ScriptedEngine(lambda p, s, n: renderer.say([CALL, "4"][n]), tokenizer=tokenizer)

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI, tools=[ADD])
        reply = await chat.say()
        [call] = reply.tool_calls
        assert (call.name, call.arguments) == ("add", {"a": 2})
        chat.add({"role": "tool", "tool_call_id": str(call.id), "content": "4"})
        assert (await chat.say()).tool_calls == ()
        return session.group([1.0])

    group = play(engine, loop)
    text = tokenizer.decode(group.episodes[0].rows[0].ids)
    assert text.count(CALL) == 1 and "<tool_response>4</tool_response>" in text
    check_group(group, engine.calls)


@pytest.mark.parametrize(
    ("said", "content", "calls", "broken"),
    [
        (f"{CALL}{CALL}", "", 2, 0),
        ('<tool_call>{"name": "nope", "arguments": {"a": "x"}}</tool_call>', "", 1, 0),
        ('Hm <tool_call>{"name": </tool_call>', 'Hm <tool_call>{"name": </tool_call>', 0, 1),
        (f"{CALL}<tool_call>{{</tool_call>", "", 1, 1),
        ("no call", "no call", 0, 0),
    ],
)
def test_calls_are_answered_as_they_were_said(said: str, content: str, calls: int, broken: int) -> None:
    async def loop(session: GroupSession) -> Any:
        chat = session.conversation()
        message = await ask(chat, HI, tools=[ADD])
        return message, session.counts["unread calls"]

    message, unread = play(words([said]), loop)
    assert (message["content"], len(message.get("tool_calls", ())), unread) == (content, calls, broken)
    assert len({call["id"] for call in message.get("tool_calls", ())}) == calls


def test_what_is_not_the_tools_of_before_is_a_new_segment() -> None:
    engine = words(["a", "b", "c"])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        message = await ask(chat, HI)
        await ask(chat, [*HI, message, MORE], tools=[ADD])
        await ask(chat, [*HI, message, MORE])
        return session.group([1.0])

    group = play(engine, loop)
    assert sorted(trained_ids(group)) == [[*say("a"), *say("c")], say("b")]
    check_group(group, engine.calls)


def test_one_history_goes_on_in_several_ways_at_a_time() -> None:
    gates = [asyncio.Event() for _ in range(4)]
    engine = ScriptedEngine(lambda p, s, n: say("abcd"[n]), delay=lambda number: gates[number].wait())

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        gates[0].set()
        message = await ask(chat, HI)
        asked = [
            asyncio.create_task(ask(chat, [*HI, message, {"role": "user", "content": text}]))
            for text in ("x", "x", "y")
        ]
        for gate in reversed(gates):  # the last one is answered first
            gate.set()
            await asyncio.sleep(0)
        assert [one["content"] for one in await asyncio.gather(*asked)] == ["b", "c", "d"]
        return session.group([1.0])

    group = play(engine, loop)
    assert sorted(map(len, trained_ids(group))) == [2, 2, 4]
    check_group(group, engine.calls)


def test_what_somebody_else_says_is_no_echo() -> None:
    engine = saying("ja")

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        await ask(chat, HI)
        await ask(chat, [*HI, {"role": "user", "content": "ja"}])
        return session.group([1.0])

    group = play(engine, loop)
    assert [len(row.turns) for row in group.episodes[0].rows] == [1, 1]
    check_group(group, engine.calls)


@pytest.mark.parametrize("back", [None, "th0", "th1", "th2"])
def test_equal_replies_are_told_apart_by_their_thoughts(back: str | None) -> None:
    engine = ScriptedEngine(lambda p, s, n: say(f"<think>th{n}</think>yes"))

    async def loop(session: GroupSession) -> Any:
        chat = session.conversation()
        replies = await chat.ask(HI, n=3)
        message: Any = {**replies[0].message, "reasoning_content": back}
        return replies, chat.find([*HI, message, MORE]).after

    replies, after = play(engine, loop)
    assert after is replies[2 if back is None else int(back[2:])]


@pytest.mark.parametrize(
    "message", [{"content": None}, {}, {"content": ""}, {"content": [], "tool_calls": None}]
)
def test_who_said_nothing_is_known_by_it(message: Any) -> None:
    engine = ScriptedEngine(lambda p, s, n: [END])

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        await ask(chat, HI)
        await ask(chat, [*HI, {"role": "assistant", **message}, MORE])
        return session.group([1.0])

    assert trained_ids(play(engine, loop)) == [[END, END]]


@pytest.mark.parametrize(
    "more",
    [[], [MORE], [{**MORE, "role": "system"}], [MORE, {**MORE, "role": "system"}]],
    ids=["results alone", "a user after them", "the system after them", "both after them"],
)
@pytest.mark.parametrize("family", ["Gemma 3", "Mistral v3", "Llama 2", "Qwen3"])
@pytest.mark.filterwarnings("ignore:the chat template")
def test_several_results_and_who_speaks_after_them(family: str, more: list[Message]) -> None:
    """Templates that want roles to alternate get one message of all that is told between two replies."""
    renderer = family_renderer(family)
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]' if family == "Mistral v3" else CALL * 2
    encode: Any = renderer.tokenizer
    spoken = encode.hf.encode(call, add_special_tokens=False)
    engine = ScriptedEngine(
        lambda p, s, n: [*(spoken if n == 0 else []), renderer.stop_ids[0]],
        tokenizer=renderer.tokenizer,
        max_context=10**5,
    )

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        first = await ask(chat, HI, tools=[ADD])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {place}"}
            for place, call in enumerate(first["tool_calls"])
        ]
        talk = [*HI, first, *results, *more]
        second = await ask(chat, talk, tools=[ADD])
        await ask(chat, [{"role": "system", "content": "S"}, *talk, second, MORE], tools=[ADD])
        return session.group([1.0])

    group = play(engine, loop, tokenizer=renderer)
    grown, other = group.episodes[0].rows
    assert (len(grown.turns), len(other.turns)) == (2, 1)
    check_group(group, engine.calls)
    for row, asked in ((grown, 0), (other, 1)):
        text = renderer.tokenizer.decode(row.ids)
        wanted = [text.count("result 0"), text.count("result 1"), text.count("more")]
        assert wanted == [1, int(family != "Mistral v3"), len(more) + asked]


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_real_families_go_on_after_a_call(family: str, tokenizer_folder: Callable[[str], Any]) -> None:
    renderer = ChatRenderer(load_tokenizer(str(tokenizer_folder(family))))
    spoken = [CALL, "4", "bye", "again"]
    engine = ScriptedEngine(lambda p, s, n: renderer.say(spoken[n]), tokenizer=renderer.tokenizer)

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        first = await ask(chat, HI, tools=[ADD])
        [call] = first["tool_calls"]
        talk = [*HI, first, {"role": "tool", "tool_call_id": call["id"], "content": "4"}]
        second = await ask(chat, talk, tools=[ADD])
        await ask(chat, [*talk, second, MORE], tools=[ADD])
        await ask(chat, [{"role": "system", "content": "S"}, *talk], tools=[ADD])  # another past
        return session.group([1.0])

    group = play(engine, loop)
    assert [len(row.turns) for row in group.episodes[0].rows] == [3, 1]
    check_group(group, engine.calls)
    text = renderer.tokenizer.decode(group.episodes[0].rows[1].ids)
    assert text.count(CALL) == 1  # in the new segment the call stands as it was said


# --- stop strings, texts and ids of the program's own ---


@pytest.mark.parametrize(
    ("stop", "seen"), [(["Obs"], "do it\n"), (["zzz"], None), (["\n", "Obs"], "do it"), ([""], None)]
)
def test_a_reply_ends_with_the_id_that_completes_a_stop_string(stop: list[str], seen: str | None) -> None:
    engine = words(["do it\nObs: 4\nObs: 5"])

    async def loop(session: GroupSession) -> Any:
        chat = session.conversation()
        message = await ask(chat, HI, stop=stop)
        await ask(chat, [*HI, message, MORE])
        return message["content"], session.group([1.0])

    content, group = play(engine, loop)
    assert content == (seen if seen is not None else "do it\nObs: 4\nObs: 5")
    assert len(group.episodes[0].rows) == 1
    check_group(group, engine.calls, cut=True)


@pytest.mark.parametrize("as_ids", [True, False])
def test_a_prompt_of_the_programs_own_goes_on_where_it_begins_with_what_was_said(as_ids: bool) -> None:
    engine = ScriptedEngine(lambda p, s, n: [*b"ab", END] if n == 2 else list(b"ab"))

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation()
        text = "Q: 1\nA:"
        for _ in range(4):
            [said] = await chat.ask(chat.find_raw(text.encode() if as_ids else text))
            text += said.reply.text + "\nA:"
        return session.group([1.0])

    group = play(engine, loop)
    # The end that was sampled third is not in the program's text: the fourth prompt is another one.
    assert [len(row.turns) for row in group.episodes[0].rows] == [3, 1]
    check_group(group, engine.calls)


# --- what does not work ---


def test_a_failed_request_changes_nothing() -> None:
    faults = {0: EngineError("down"), 2: RuntimeError("broken"), 4: "abort"}
    engine = saying("ja", faults=faults)  # type: ignore[arg-type]

    async def loop(session: GroupSession) -> Any:
        chat = session.conversation(HI)
        with pytest.raises(EngineError, match="down"):
            await chat.say()
        await chat.say()
        chat.add(MORE)
        with pytest.raises(EngineError, match="RuntimeError: broken"):
            await chat.say()
        assert chat.messages[-1] == MORE
        await chat.say()
        chat.add(MORE)
        await chat.say(n=2)  # one of them is aborted and asked for again
        return session.group([1.0]), session.counts

    group, counts = play(engine, loop)
    assert check_group(group, engine.calls) == 4
    assert (counts["requests"], counts["replies"], counts["failed: EngineError"]) == (5, 4, 2)
    assert counts["aborted"] == 1


def test_a_cancelled_request_changes_nothing() -> None:
    gate = asyncio.Event()
    engine = saying("ja", delay=lambda number: gate.wait() if number == 0 else asyncio.sleep(0))

    async def loop(session: GroupSession) -> Any:
        chat = session.conversation(HI)
        speaking = asyncio.create_task(chat.say())
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match=r"conversation 0 is speaking: await its say\(\)"):
            await chat.say()
        with pytest.raises(ConfigError, match="is speaking"):
            session.group([1.0])
        speaking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await speaking
        await chat.say()
        return session.group([1.0]), session.counts

    group, counts = play(engine, loop)
    assert trained_ids(group) == [say("ja")]
    assert counts["cancelled"] == 1


def test_what_is_sampled_otherwise_is_context_and_counted() -> None:
    engine = words(["a", "b", "c"])

    async def loop(session: GroupSession) -> Any:
        chat = session.conversation()
        first = await ask(chat, HI, sampling=SamplingParams(max_tokens=8, temperature=0))
        talk = [*HI, first, MORE]
        second = await ask(chat, talk, sampling=SamplingParams(max_tokens=8, temperature=0.5))
        with pytest.raises(ConfigError, match="no reply that can be trained on"):
            session.group([1.0])
        await ask(chat, [*talk, second, MORE])
        return session.group([1.0]), session.counts

    group, counts = play(engine, loop)
    assert trained_ids(group) == [say("c")]
    assert counts["untrainable: temperature=0"] == counts["untrainable: temperature=0.5"] == 1


async def _take_late(session: GroupSession) -> None:
    chat = session.conversation(HI)
    replies = await chat.say(n=2)
    chat.add(MORE)
    chat.take(replies[1])


async def _take_foreign(session: GroupSession) -> None:
    chat, other = session.conversation(HI), session.conversation(HI)
    await chat.say()
    chat.take(await other.say())


async def _reward_early(session: GroupSession) -> None:
    session.conversation(HI).reward(1.0)


async def _none(session: GroupSession) -> None:
    await session.conversation(HI).say(n=0)


async def _empty(session: GroupSession) -> None:
    session.conversation().find_raw("")


async def _image(session: GroupSession) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    session.conversation([{"role": "user", "content": parts}])


async def _bad_tools(session: GroupSession) -> None:
    session.conversation(HI, tools=[{"type": "function"}])


@pytest.mark.parametrize(
    ("attempt", "problem"),
    [
        (_take_late, r"take\(\) comes right after say"),
        (_take_foreign, "this reply is none of those"),
        (_reward_early, r"say\(\) before reward\(\)"),
        (_none, "n must be >= 1, got 0"),
        (_empty, "the prompt is empty"),
        (_image, "an engine gets ids alone"),
        (_bad_tools, "a tool must be a mapping with name and parameters"),
    ],
)
def test_misuse_is_explained(attempt: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        play(saying("ja"), attempt)


def test_unequal_starts_are_counted_where_they_may_differ() -> None:
    async def loop(session: GroupSession) -> int:
        for text in ("a", "a", "b"):
            await ask(session.conversation(), [{"role": "user", "content": text}])
        return session.counts["unequal starts"]

    assert play(saying("ja"), loop, same_start=False) == 1


def test_nothing_that_babbles_loses_an_id() -> None:
    engine = babbling(longest=12)

    async def loop(session: GroupSession) -> EpisodeGroup:
        chat = session.conversation(HI)
        for _ in range(40):
            await chat.say()
            chat.add(MORE)
        return session.group([1.0])

    group = play(engine, loop)
    assert len(group.episodes[0].rows) == 1
    check_group(group, engine.calls)
