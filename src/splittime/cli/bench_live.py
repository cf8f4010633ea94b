"""What `splittime bench run` shows on standard error while it goes on. Nothing where that is no terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from splittime.bench.share import OnProgress, Progress


@contextmanager
def shown_live(console: Console, is_closed: bool) -> Iterator[OnProgress | None]:
    """Gives what is to be called with the progress; None where nobody would see it."""
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(view(progress, is_closed))


def view(progress: Progress, is_closed: bool) -> RenderableType:
    """One bar, and the figures in as many lines as they need: none is broken in two."""
    done, whole = _share(progress)
    bar = Table.grid(padding=(0, 1))
    end = f" / {progress.ends_at_s:.0f} s" if progress.ends_at_s is not None else " s"
    bar.add_row(ProgressBar(total=whole, completed=done, width=40), f"{progress.elapsed_s:.0f}{end}")
    figures = [Text.from_markup(figure) for figure in _figures(progress, is_closed)]
    return Group(bar, Columns(figures, padding=(0, 2)))


def _share(progress: Progress) -> tuple[float, float]:
    if progress.ends_at_s:
        return min(progress.elapsed_s, progress.ends_at_s), progress.ends_at_s
    return progress.ended, max(1, progress.planned)


def _figures(progress: Progress, is_closed: bool) -> list[str]:
    rate = f"sent [bold]{progress.begun_per_s:.1f}/s[/bold]"
    if not is_closed:
        rate += f" of {progress.due_per_s:.1f}/s"
    ttft = "TTFT [bold]-[/bold]"
    if progress.ttft_p50_s is not None and progress.ttft_p99_s is not None:
        ttft = f"TTFT p50 [bold]{progress.ttft_p50_s * 1e3:.0f} ms[/bold]  p99 {progress.ttft_p99_s * 1e3:.0f} ms"
    failed = f"[red]{progress.failed} failed[/red]" if progress.failed else "0 failed"
    return [rate, f"in flight [bold]{progress.in_flight}[/bold]", ttft, f"{progress.ended} ended", failed]
