"""Prints plans: one plan with all its numbers, or several as a table with a column for each."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column, Table

from podracer.monitoring.formatting import duration, metric, seconds, size
from podracer.plan.chips import is_offered
from podracer.plan.estimate import Collectives, Plan, ProgramPlan


def _known(formatter: Callable[[float], str], x: float | None) -> str:
    """A formatted number, or a dash for None."""
    return "-" if x is None else formatter(x)


def _collectives(collectives: Collectives) -> str:
    if not collectives.number:
        return "none"
    return f"{collectives.number:.3g} of {size(collectives.bytes)}"


def _sent(collectives: Collectives) -> str:
    """What a core sends per update; an average of groups is a part of an update."""
    return size(round(collectives.bytes)) if collectives.number else "none"


def _slice_name(plan: Plan) -> str:
    return f"{plan.num_slices} x {plan.topology}" if plan.num_slices > 1 else plan.topology


def _not_offered(plan: Plan) -> str:
    """That the slice can't be rented; nothing if it can."""
    if is_offered(plan.topology):
        return ""
    return f"{plan.topology} is not among the slices that can be rented (docs/guides/plan.md).\n"


def _program_rows(program: ProgramPlan, plan: Plan) -> dict[str, str]:
    """The labels and values of a program's column in the table."""
    memory = program.memory
    return {
        "runs on": program.where,
        "memory: arguments": size(memory.arguments),
        "memory: of these, replay": size(memory.replay) if memory.replay else "none",
        "memory: temporaries": size(memory.temporaries),
        "memory: new outputs": size(memory.outputs - memory.aliased),
        "memory: code": size(memory.code),
        "memory: total": f"{size(memory.total)} ({memory.total / plan.memory:.1%})",
        "flops per update": metric(program.flops),
        "main memory traffic per update": metric(program.bytes, "B"),
        "instructions per update": metric(program.instructions),
        "collectives per gradient step": _collectives(program.per_gradient_step),
        "other collectives per update": _collectives(program.per_update),
        "of these, sent to other slices per update": _sent(program.between_slices),
        "instructions waiting for the host": ", ".join(program.host) or "none",
        "time per update, roofline": seconds(program.roofline_seconds),
        "time per update, compiler": _known(seconds, program.compiler_seconds),
        "compile time": seconds(program.compile_seconds),
    }


def _agents(plan: Plan) -> str:
    """The learners and where they learn; nothing for one."""
    if plan.learners == 1:
        return ""
    each, cores = plan.learners // plan.num_groups, plan.cores // plan.num_groups
    turns = f", {plan.agents_at_once:,} at a time" * (plan.agents_at_once < each)
    several = plan.num_agents > 1
    what, whose = ("agents", "for each agent") if several else ("averaged groups", "together")
    return (
        f"{plan.learners:,} {what}, {each:,} on each of {plan.num_groups:,} groups of "
        f"{cores:,} core{'s' * (cores > 1)}{turns}; {whose}: "
    )


def _unrolls(plan: Plan) -> str:
    """How many unrolls an update has; nothing for one."""
    unrolls = plan.steps_per_update // (plan.num_envs * plan.unroll_length)
    return f" x {unrolls:,} unrolls" if unrolls > 1 else ""


def print_plan(plan: Plan, console: Console) -> None:
    """Prints all numbers of a plan."""
    console.print(
        f"{_slice_name(plan)}: {plan.chips:,} chips, {plan.cores:,} cores with "
        f"{size(plan.memory)} each, {plan.hosts:,} host{'s' * (plan.hosts > 1)}\n"
        f"{_not_offered(plan)}"
        f"{plan.arch}: {_agents(plan)}{plan.num_envs:,} environments "
        f"({plan.envs_per_core:,} per learner core) x {plan.unroll_length} steps{_unrolls(plan)} = "
        f"{plan.steps_per_update:,} steps per update, {plan.gradient_steps} gradient steps per "
        "update",
        highlight=False,
    )
    if plan.too_large:
        console.print(_too_large(plan), highlight=False)
        return
    columns = [_program_rows(program, plan) for program in plan.programs]
    table = Table("per core", *(program.name for program in plan.programs))
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)
    uncounted = sum(program.uncounted for program in plan.programs)
    if uncounted:
        console.print(
            f"{uncounted} instructions are in loops whose trip count depends on data; they are "
            "counted for one iteration."
        )
    expected = "the compiler's cycles are no time, because this chip's clock is not published"
    if plan.compiler_steps_per_second is not None:
        speed = metric(plan.compiler_steps_per_second)
        expected = f"about {speed} steps/s by the compiler's estimate of cycles"
    whose = " of all agents together" * (plan.num_agents > 1)
    console.print(
        f"ESTIMATE{whose}: at most {_known(metric, plan.roofline_steps_per_second)} steps/s by the "
        f"published peaks (roofline); {expected}.\n"
        f"{_whole_run(plan)}\n"
        f"Not included: {'; '.join(plan.not_included)}.",
        highlight=False,
    )


def _speed(plan: Plan) -> float:
    """The lower one of the two speeds that is known."""
    speed = plan.compiler_steps_per_second or plan.roofline_steps_per_second
    assert speed is not None
    return speed


def _run_time(plan: Plan) -> str:
    """How long the run would take at this speed."""
    time = plan.num_updates * plan.steps_per_update * plan.num_agents / _speed(plan)
    return duration(time) if time >= 60 else seconds(time)


def _whole_run(plan: Plan) -> str:
    steps = plan.num_updates * plan.steps_per_update
    return (
        f"The run: {steps:,} steps{' of each agent' * (plan.num_agents > 1)}, {plan.num_updates:,} "
        f"updates, about {_run_time(plan)} at this speed{_environments(plan)}."
    )


def _environments(plan: Plan) -> str:
    """How fast the environments on hosts must be for this speed."""
    if plan.arch != "sebulba":
        return ""
    needed = metric(_speed(plan) / plan.hosts)
    return f", for which the environments of each host must make {needed} steps/s"


def _too_large(plan: Plan) -> str:
    """Why a run does not fit, and which sizes would."""
    excess = plan.too_large
    assert excess is not None
    memory = f"the {size(excess.available)} of a core"
    needs = f"more than {memory}"
    if excess.needed:
        over = size(excess.needed - excess.available)
        needs = f"{size(excess.needed)}, {over} more than {memory}"
    sizes = [f"{key}={n}" for key, n in excess.fits.items() if n]
    if num_envs := excess.fits.get("num_envs"):
        sizes[0] += f" ({num_envs * plan.envs_per_core // plan.num_envs:,} per learner core)"
    return f"TOO LARGE: the program {excess.program} needs {needs}; " + (
        f"{' or '.join(sizes)} would fit"
        if sizes
        else f"no smaller {' or '.join(excess.fits)} fits"
    )


def _scaling_column(plan: Plan) -> dict[str, str]:
    """The labels and values of a slice's column; flops and collectives are those of the program
    that learns."""
    sizes = {"chips": plan.chips, "cores": plan.cores, "hosts": plan.hosts}
    if plan.num_agents > 1:
        sizes["agents"] = plan.num_agents
    sizes["environments" + " of each" * (plan.num_agents > 1)] = plan.num_envs
    column = {label: f"{value:,}" for label, value in sizes.items()}
    if plan.too_large:
        return column | {"memory per core": "too large"}
    most = max(program.memory.total for program in plan.programs)
    learner = plan.programs[-1]
    return column | {
        "memory per core": f"{size(most)} of {size(plan.memory)}",
        "flops per core and update": metric(learner.flops),
        "collectives per gradient step": _collectives(learner.per_gradient_step),
        "sent to other slices per update": _sent(learner.between_slices),
        "steps/s, roofline": _known(metric, plan.roofline_steps_per_second),
        "steps/s, compiler": _known(metric, plan.compiler_steps_per_second),
        "time of the run": _run_time(plan),
    }


def print_scaling(plans: Sequence[Plan], console: Console) -> None:
    """Prints a table with a column for each plan."""
    columns = list(map(_scaling_column, plans))
    table = Table("", *(Column(_slice_name(plan), overflow="fold") for plan in plans))
    for label in max(columns, key=len):
        table.add_row(label, *(column.get(label, "") for column in columns))
    console.print(table)
    for plan in plans:
        console.print(_not_offered(plan), end="", highlight=False)
        if plan.too_large:
            console.print(f"{_slice_name(plan)}: {_too_large(plan)}", highlight=False)
    console.print(
        "ESTIMATES: roofline is an upper bound by the chip's published peaks, compiler uses the "
        "compiler's estimate of cycles.\n"
        f"Not included: {'; '.join(plans[0].not_included)}.",
        highlight=False,
    )
