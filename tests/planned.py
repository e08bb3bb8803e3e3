"""A plan in one call, from facts that are read for it."""

from __future__ import annotations

from dataclasses import replace

from kvant.plan.facts import DeviceMemory
from kvant.plan.plan import Plan, PlanRequest
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts


def plan_of(
    request: PlanRequest, memory: DeviceMemory | None = None, *, weights: bool = False
) -> Plan:
    """memory: of the device that it is planned for, as if it were here."""
    return make_plan(request, replace(read_facts(request, weights=weights), memory=memory))
