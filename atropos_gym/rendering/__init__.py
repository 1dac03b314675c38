"""Messages to ids, and sampled ids to replies: what was sampled is never decoded and encoded again.

``renderer.py`` is what everybody uses. A *dialect* knows the form of a conversation: that of the bytes
tokenizer, or that of a chat template, derived by probing it.
"""

from __future__ import annotations

from atropos_gym.rendering.renderer import ChatRenderer, Past, Source, chat_renderer

__all__ = ["ChatRenderer", "Past", "Source", "chat_renderer"]
