"""A front that speaks OpenAI's API: agent programs that know nothing of training leave trainable groups.

The trainer's side opens a group and finishes it; its members' programs only get a base URL and a key::

    POST   /sessions              {"group_size": 4, "name": …, "temperature": …, "max_tokens": …}
           -> {"id", "version", "members": [{"member": 0, "base_url": ".../s/ID/0/v1", "api_key": "ID.0"}, …]}
    POST   /sessions/ID/finish    {"scores": [1.0, 0.0, null, 1.0]}   -> the group, or where it was posted
    GET    /sessions/ID           what was said and counted so far
    DELETE /sessions/ID           gives it up

``/v1/chat/completions``, ``/v1/completions`` (texts and ids) and ``/v1/models`` are there under a member's
base URL, and at the root for whoever sends the member's key as ``Authorization: Bearer ID.0`` or in the
header ``X-Atropos-Session``.

Which row a request belongs to is decided by what it says, never by when it comes:

- Messages that are what was said so far, and more behind them, go on: the ids so far, the sampled ids as they
  were sampled, and a bridge. A reply is known by the ids, names and arguments of its calls and by the letters
  of its text: white space, the spelling of a call's JSON, and what a program leaves out of thoughts and of
  words beside calls do not matter. Of several equal replies it is the latest.
- The same history asked again, or followed in several ways, is a branch: a row of its own, in which what it
  shares with another row is context. No sampled id is trained twice.
- Anything else (a changed or shortened past, other tools, another thread) is a new segment, rendered from the
  messages; what stands in it of earlier replies is context.
- Texts of ``/v1/completions`` go on where they begin with all that was said, with the end where one was
  sampled; ids where they begin with all of its ids.
- A reply ends with the id that completes a stop string; the program does not see the string.
- All that a template takes only as one message (several results of tools, a user after them) is told as one.

What a program asks of sampling is a wish (``wishes`` of ``create_app``): ``temperature``, ``seed`` and such,
and a ``tool_choice`` or ``response_format`` that only constrained decoding could keep; the schema of a
``response_format`` is told to the model in the system message. What is not followed is named in the header
``X-Atropos-Ignored`` and counted in the session's report, fields that nobody knows among it.

Streams are told when a reply is whole, piece by piece; until then there is a comment every ten seconds.

Every reply that a program was given is trained, once, with its member's score; ``alternatives="drop"`` leaves
out those that it did not go on from. A request that is cancelled before its answer leaves nothing behind; a
stream that is closed after its first piece was answered.
"""

from __future__ import annotations

from atropos_gym.model_server.agents import AgentCollector
from atropos_gym.model_server.app import create_app
from atropos_gym.model_server.serve import ModelServer

__all__ = ["AgentCollector", "ModelServer", "create_app"]
