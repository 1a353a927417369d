"""The environment checker: `check_env`, also as `agentrl check my_env.py:MyEnv`; docs/environments.md has the codes."""

from agentrl.check.checker import check_env
from agentrl.check.findings import Code, Cost, Finding, Report

__all__ = ["Code", "Cost", "Finding", "Report", "check_env"]
