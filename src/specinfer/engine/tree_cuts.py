"""Draft trees cut to what each tenant has room for in a step."""

from collections.abc import Callable, Mapping

from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.core.tree_shape import parse_tree
from specinfer.engine.parts import by_tenant, even_parts
from specinfer.engine.step_room import StepRoom


def asked_nodes(request: Request) -> int:
    """Return the draft tokens of the tree that a request asks for, 0 if it leaves that to a policy."""
    tree = request.params.tree
    return 0 if tree in (None, "auto", "off") else parse_tree(tree).max_nodes


def wanted_nodes(request: Request, budget: TreeBudget) -> int:
    """Return the draft tokens that a tree of this budget may be expected to have, if nothing cuts it.

    Trees without tokens that are unlikely, or do not repay their rows, are mostly as large as the last one, or larger
    if that one was cut.
    """
    last, is_selective = request.drafting.num_nodes, budget.min_path_prob or budget.row_prices
    return min(budget.max_nodes, last + last // 2 + 1) if is_selective else budget.max_nodes


def cut_evenly(
    budgets: Mapping[Request, TreeBudget],
    known: Mapping[str, float],
    room: StepRoom,
    may_read: Callable[[Request], bool],
) -> dict[Request, TreeBudget]:
    """Return the budgets cut to what is left of each tenant's part beside rows of known tokens.

    Args:
        known: Rows of known tokens, by tenant.
        room: Rows of the step.
        may_read: Returns whether drafters may read the tokens of a request.
    """
    tenants, demands, allowed = by_tenant(list(budgets)), dict(known), dict[Request, TreeBudget]()
    for tenant, requests in tenants.items():
        num_wanted = sum(request.drafting.num_wanted for request in requests)
        demands[tenant] = room.rows_of_tenant(tenant, known[tenant] + room.rows_of_node * num_wanted)
    parts = even_parts(demands, room.num_rows)
    for tenant, requests in tenants.items():
        wanted = {request: float(request.drafting.num_wanted) for request in requests if request.drafting.num_wanted}
        readable = {request: num_nodes for request, num_nodes in wanted.items() if may_read(request)}
        most = even_parts(readable, (parts[tenant] - known[tenant]) / room.rows_of_node)
        for request in requests:
            request.drafting.num_unread_steps += request in wanted and request not in readable
            allowed[request] = _cut(request, budgets[request], int(most.get(request, 0.0)))
    return allowed


def _cut(request: Request, budget: TreeBudget, num_nodes: int) -> TreeBudget:
    """Return the budget with at most so many nodes, and note in the request what was taken from it."""
    cut = budget.cut(budget.max_depth, num_nodes)
    if cut.max_nodes < budget.max_nodes:
        request.drafting.num_crowded_steps += not cut.max_nodes
        request.speculation.num_cut_steps += bool(asked_nodes(request))
    return cut
