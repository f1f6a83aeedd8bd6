"""How a command ends: which exit code, what is said, and that it ends at all.

An error is one line on stderr, whatever characters a file or tensor name puts into it. Tracebacks are for `--debug`.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType

import typer

from headrace import HeadraceError, OptionError
from headrace.cli._screen import printable
from headrace.cli._words import spoken, spoken_error

DATA, USAGE, BUG, INTERRUPTED, PIPE_CLOSED = 1, 2, 70, 130, 141
EXIT_CODES = (
    "Exit codes: 0 done; 1 the checkpoint cannot be read, breaks the format, is not what its digests say, or has no tensor "
    "of a name asked for; "
    "2 an option or argument that cannot be used; 130 stopped by Ctrl-C; 141 the reader of a pipe left; 70 a bug in headrace."
)

_LAST_S = 1.5  # readers of a stalled disk do not come back; after that the process ends without them


def say(kind: str, text: str) -> None:
    """One line on stderr."""
    print(f"headrace: {kind}: {printable(text)}" if kind else f"headrace: {printable(text)}", file=sys.stderr)  # noqa: T201


@contextmanager
def endings(*, debug: bool, flags: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Turn what a command raises into a line on stderr and an exit code.

    Args:
        debug: show the traceback.
        flags: {argument of the API: option of the command}.
    """
    for handler in logging.getLogger("headrace").handlers:
        if isinstance(handler, _Warnings):
            handler.flags = flags
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("\n" if sys.stderr.isatty() else "")  # the terminal has echoed ^C
        raise _ended("", "interrupted", INTERRUPTED, debug=debug) from None
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except HeadraceError as error:
        raise _ended(
            "error", spoken_error(error, flags), USAGE if isinstance(error, OptionError) else DATA, debug=debug
        ) from None
    except (OSError, MemoryError) as error:
        _discard_stdout()  # it may be what failed, on a full disk
        raise _ended("error", _of_the_system(error), DATA, debug=debug) from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "numpy"):
            text = f"loading needs {error.name}, which is not installed here; try: pip install 'headrace[torch]'"
            raise _ended("error", text, DATA, debug=debug) from None
        text = f"{type(error).__name__}: {error}; this is a bug in headrace, and --debug shows where"
        raise _ended("internal error", text, BUG, debug=debug) from error


def _of_the_system(error: OSError | MemoryError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"cannot write the output: {error.strerror}; free some, or send it elsewhere"
    return str(error) or type(error).__name__


def _ended(kind: str, text: str, code: int, *, debug: bool) -> typer.Exit:
    if debug:
        for line in traceback.format_exc().splitlines():
            print(printable(line), file=sys.stderr)  # noqa: T201
    say(kind, text)
    return typer.Exit(code)


def _discard_stdout() -> None:
    """Nothing gets out by stdout any more: what is still buffered must not fail again when the interpreter flushes it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# -- the process, set up once by main() ------------------------------------------------------------------------------------------


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End within two seconds of Ctrl-C, even where a reader is stuck in a system call; a second Ctrl-C ends at once."""
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # all is closed by now; torch's own taking down lasts a second on a busy machine


def _on_interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, lambda *_: _leave())
    timer = threading.Timer(_LAST_S, _leave)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def _leave() -> None:
    """End without another look at what this process is doing."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar has hidden it
    os.write(2, f"{show_cursor}headrace: interrupted, without waiting for reads that are under way\n".encode())
    os._exit(INTERRUPTED)


def speak_plainly() -> None:
    """Warnings are lines like all others, and no character is one that stdout or stderr cannot print."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by who started this (>&-); lives as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("headrace").addHandler(_Warnings(logging.WARNING))
    warnings.showwarning = lambda message, *_, **__: say("warning", str(message))


class _Warnings(logging.Handler):
    flags: Mapping[str, str] = MappingProxyType({})  # of the command that runs

    def emit(self, record: logging.LogRecord) -> None:
        say("warning", spoken(record.getMessage(), self.flags))
