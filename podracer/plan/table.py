"""Plans for people: one slice as two tables, several as one line each."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from podracer.plan.chips import GIB
from podracer.plan.estimate import Collectives, Plan, ProgramPlan


def number(n: float | None, unit: str = "", step: int = 1000) -> str:
    """Three digits and a power of 1000 (of 1024 for memory); a dash for None."""
    if n is None:
        return "-"
    power = 0
    while abs(n) >= step and power < 5:
        n, power = n / step, power + 1
    prefix = ("", "K", "M", "G", "T", "P")[power] + ("i" if step == 1024 and power else "")
    return f"{n:.3g} {prefix}{unit}".strip()


def size(n: float) -> str:
    """Bytes of memory."""
    return number(n, "B", 1024)


def seconds(n: float | None) -> str:
    """In units of a size to read."""
    if n is None:
        return "-"
    return f"{n:.3g} s" if n >= 1 else f"{n * 1e3:.3g} ms" if n >= 1e-3 else f"{n * 1e6:.3g} us"


def _collectives(collectives: Collectives) -> str:
    return (
        f"{collectives.number:.3g} of {size(collectives.bytes)}" if collectives.number else "none"
    )


def _place(plan: Plan) -> str:
    return f"{plan.num_slices} x {plan.topology}" if plan.num_slices > 1 else plan.topology


def _program(program: ProgramPlan, plan: Plan) -> list[str]:
    memory = program.memory
    return [
        program.where,
        size(memory.arguments),
        size(memory.temporaries),
        size(memory.outputs - memory.aliased),
        size(memory.code),
        f"{size(memory.total)} ({memory.total / plan.memory:.1%})",
        number(program.flops),
        number(program.bytes, "B"),
        number(program.instructions),
        _collectives(program.per_gradient_step),
        _collectives(program.per_update),
        ", ".join(program.host) or "none",
        seconds(program.roofline_seconds),
        seconds(program.compiler_seconds),
        seconds(program.compile_seconds),
    ]


_ROWS = (
    "runs on", "memory: arguments", "temporaries", "new outputs", "code",
    "total (of what there is)", "flops an update", "main memory traffic an update",
    "instructions an update",
    "collectives a gradient step", "more of them an update", "waits for the host",
    "time by roofline", "time by compiler's cycles", "compiled in",
)  # fmt: skip


def one(plan: Plan, console: Console) -> None:
    """All of a plan; numbers are of one core."""
    console.print(
        f"{_place(plan)}: {plan.chips:,} chips, {plan.cores:,} cores with {size(plan.memory)} "
        f"each, {plan.hosts:,} hosts\n"
        f"{plan.arch}: {plan.num_envs:,} environments, {plan.envs_per_core:,} a core that learns, "
        f"x {plan.unroll_length} steps = {plan.steps_per_update:,} steps an update of "
        f"{plan.gradient_steps} gradient steps",
        highlight=False,
    )
    if plan.too_large:
        console.print(_refusal(plan), highlight=False)
        return
    table = Table("of one core", *(program.name for program in plan.programs))
    for row in zip(_ROWS, *(_program(p, plan) for p in plan.programs), strict=True):
        table.add_row(*row)
    console.print(table)
    loops = sum(program.uncounted for program in plan.programs)
    if loops:
        console.print(f"{loops} instructions are in loops of unknown length, counted as one round")
    console.print(
        f"ESTIMATE: at most {number(plan.roofline_steps_per_second)} steps a second by the "
        f"published peaks; about {number(plan.compiler_steps_per_second)} by the cycles that the "
        f"compiler expects.\nNot in it: {'; '.join(plan.not_included)}.",
        highlight=False,
    )


def _refusal(plan: Plan) -> str:
    fit = plan.too_large
    assert fit is not None
    over = f"{size(fit.needed)}, {size(fit.needed - fit.available)} more than" if fit.needed else ""
    what = f"needs {over or 'more than'} the {size(fit.available)} of a core"
    sizes = [f"{key}={n}" for key, n in fit.fits.items() if n]
    return f"TOO LARGE: {fit.program} {what}; " + (
        f"{' or '.join(sizes)} would fit" if sizes else "no smaller num_envs or unroll_length fits"
    )


def scaling(plans: Sequence[Plan], console: Console) -> None:
    """A line for each slice; what is of programs is of the one that learns."""
    table = Table(
        "slice", "chips", "cores", "hosts", "envs", "memory of a core", "flops of a core an update",
        "collectives a gradient step", "compiled in", "steps/s at most", "by compiler's cycles",
    )  # fmt: skip
    for plan in plans:
        sizes = [_place(plan), *map("{:,}".format, (plan.chips, plan.cores, plan.hosts))]
        sizes.append(f"{plan.num_envs:,}")
        if plan.too_large:
            table.add_row(*sizes, "too large")
            continue
        most = max(program.memory.total for program in plan.programs)
        learner = plan.programs[-1]
        table.add_row(
            *sizes,
            f"{size(most)} of {plan.memory / GIB:.0f} GiB",
            number(learner.flops),
            _collectives(learner.per_gradient_step),
            seconds(sum(program.compile_seconds for program in plan.programs)),
            number(plan.roofline_steps_per_second),
            number(plan.compiler_steps_per_second),
        )
    console.print(table)
    for plan in plans:
        if plan.too_large:
            console.print(f"{_place(plan)}: {_refusal(plan)}", highlight=False)
    console.print(
        f"Steps a second are ESTIMATES. Not in them: {'; '.join(plans[0].not_included)}.",
        highlight=False,
    )
