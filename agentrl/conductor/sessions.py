"""Joins rollouts to an endpoint: a session for each spec."""

from __future__ import annotations

from agentrl.endpoint.app import Endpoint
from agentrl.rollout.session import OpenSession, Session, SessionSpec


def sessions_of(endpoint: Endpoint) -> OpenSession:
    """Opens sessions at `endpoint`."""

    def open_session(spec: SessionSpec) -> Session:
        return endpoint.open(
            spec.id,
            seed=spec.seed,
            training=spec.training,
            temperature=spec.temperature,
            max_tokens=spec.max_tokens,
            deadline=spec.deadline,
        )

    return open_session
