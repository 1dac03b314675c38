"""A front that speaks OpenAI's API: agent programs that know nothing of training leave trainable groups."""

from __future__ import annotations

from atropos_gym.model_server.agents import AgentCollector
from atropos_gym.model_server.app import create_app
from atropos_gym.model_server.serve import ModelServer

__all__ = ["AgentCollector", "ModelServer", "create_app"]
