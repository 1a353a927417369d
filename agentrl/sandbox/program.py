"""The child's side of the fork server: from a fork of it to the program. Standard library only, Python >= 3.9."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import errno
import gc
import os
import random
import signal
import stat
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from agentrl.sandbox import confine
from agentrl.sandbox.confine import Config

_FORK = ctypes.PyDLL(None, use_errno=True).fork
PROPER = ("PYTHON", "LC_", "LANG", "LD_", "TZ")
"""Variables that an interpreter reads while it starts: programs that set them get a fresh one."""
Program = Callable[[], int]


def fork() -> int:
    """os.fork of a process with one thread: without Python's hooks, which renew locks that nobody holds and cost a
    short program a fifth of its time. What else they do is done by `_as_new`."""
    pid = int(_FORK())
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _as_new() -> None:
    random.seed()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def child(
    header: dict[str, Any], pipes: list[tuple[int, int]], config: Config, confinement: confine.Confinement
) -> Program:
    """Become the program. What fails before it starts is told through the setup pipe and ends with code 1."""
    setup, confined = pipes[3][1], False
    try:
        os.setsid()
        for number, end in enumerate((pipes[0][0], pipes[1][1], pipes[2][1], setup)):
            os.dup2(end, number + 100, inheritable=True)
        for number in range(4):
            os.dup2(number + 100, number, inheritable=number < 3)
        setup = 3
        os.closerange(4, 4096)
        if config.uid is not None:
            for number in range(3):
                os.fchown(number, config.uid, config.uid)  # so that /dev/stdin and its like can be opened
        confinement.apply()
        os.umask(0o022)
        confined = True
        os.chdir(header.get("cwd") or config.workdir)
        if header["op"] == "read":
            return _quietly(lambda: _read_file(header["path"]))
        if header["op"] == "write":
            return _quietly(lambda: _write_file(header["path"]))
        return _program(header, config)
    except BaseException as error:
        number = (error.errno or 0) if confined and isinstance(error, OSError) else 0
        os.write(setup, f"{number} {type(error).__name__}: {error}".encode()[:4000])
        os._exit(1)


def _quietly(act: Callable[[], None]) -> Program:
    try:
        act()
    except OSError as error:
        os.write(3, f"{error.errno} {error.strerror}".encode())
    os._exit(0)


def _read_file(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    kind = os.fstat(file).st_mode
    if not stat.S_ISREG(kind):
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(number, os.strerror(number))
    while part := os.read(file, 1 << 20):
        while part:
            part = part[os.write(1, part) :]


def _write_file(path: str) -> None:
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    while part := os.read(0, 1 << 20):
        while part:
            part = part[os.write(file, part) :]
    os.close(file)


def _program(header: dict[str, Any], config: Config) -> Program:
    argv, extra = header["argv"], header.get("env", {})
    if extra:
        os.environ.update(extra)  # it is the box's own until here
    warm = None if extra and any(key.startswith(PROPER) for key in extra) else _warm(argv)
    if warm is not None:
        os.close(3)
        return warm
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, {**config.env, **extra})
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        os._exit(126 if error.errno not in (errno.ENOENT, errno.ENOTDIR) else 127)


def _warm(argv: list[str]) -> Program | None:
    """`argv` as a Python program for this interpreter, or None where only a fresh one does it right."""
    if len(argv) < 2 or argv[0] not in ("python", "python3", sys.executable):
        return None
    if argv[1] == "-c" and len(argv) > 2:
        return lambda: _run("<string>", argv[2].encode("utf-8", "surrogateescape"), ["-c", *argv[3:]], "")
    if argv[1].startswith("-"):
        return None
    try:
        with open(argv[1], "rb") as file:
            source = file.read()
    except OSError:
        return None
    return lambda: _run(
        os.path.join(os.getcwd(), argv[1]), source, argv[1:], os.path.dirname(os.path.realpath(argv[1]))
    )


def _run(name: str, source: bytes, argv: list[str], folder: str) -> int:
    """Run `source` as __main__, told apart from a fresh interpreter by little but its speed."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __doc__=None)
    if name != "<string>":
        main.__dict__.update(__file__=name, __cached__=None)
    sys.modules["__main__"] = main
    _as_new()
    sys.argv = argv
    sys.orig_argv = [sys.executable, *argv]
    sys.path.insert(0, folder)
    code = 0
    try:
        exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error, trace)
        else:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
    os._exit(_finish(main.__dict__) or code)


def practise() -> None:
    """Do what every program does, often enough for the interpreter to have adapted: it does so by writing, and what a
    fork writes to is copied for it."""
    null = os.open("/dev/null", os.O_RDWR)
    for _ in range(20):
        for inheritable in (True, False):
            os.close(os.dup2(null, 100, inheritable=inheritable))
        os.write(null, b"500")
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __doc__=None)
        exec(compile(b"None", "<string>", "exec", dont_inherit=True), main.__dict__)
        _as_new()
        main.__dict__.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
    os.close(null)


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish(names: dict[str, Any]) -> int:
    """What an interpreter does when it ends, in its order, less the freeing of memory: that takes 10 ms of a fork."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    names.clear()
    gc.collect()  # closes the files that the program forgot; the server's own objects are frozen
    failed = 0
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            failed = 120
    return failed
