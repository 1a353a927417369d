"""What holds for every test: a generated example may take as long as the machine takes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Hypothesis by itself fails an example that takes 0.2 s and a test whose examples are drawn slowly: a machine that
# stands still for a moment is no finding. A failure prints what repeats it.
settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("agentrl")
