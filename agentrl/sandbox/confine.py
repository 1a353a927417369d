"""What a program loses before it starts. Runs inside the box, in the child: standard library only, Python >= 3.9.

User, groups, capabilities, the way to new ones, system calls that open namespaces, keyrings, tracing or kernel
modules, and resource limits. The order matters: each step needs a right that a later one takes away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from typing import NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL = _LIBC.prctl
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2
_CLONE_NEW = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

# Numbers of the refused calls. unshare setns mount umount2 pivot_root ptrace keyctl add_key request_key bpf
# perf_event_open userfaultfd kexec_load init_module finit_module delete_module open_by_handle_at process_vm_readv
# process_vm_writev reboot acct; then io_uring and the new mount calls, numbered alike everywhere.
_ALIKE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
_REFUSED = {
    "x86_64": [272, 308, 165, 166, 155, 101, 250, 248, 249, 321, 298, 323, 246, 175, 313, 176, 304, 310, 311, 169, 163],
    "aarch64": [97, 268, 40, 39, 41, 117, 219, 217, 218, 280, 241, 282, 104, 105, 273, 106, 265, 270, 271, 142, 89],
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_MEMFD = {"x86_64": 319, "aarch64": 279}
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE3 = 435


class Config(NamedTuple):
    """What the host decided about the box; sent once."""

    workdir: str
    writable: tuple[str, ...]
    """Cleaned between users; the first is the workdir."""
    uid: int | None
    """Of programs; None: the server's own (it is then the box's first process, or the box is no boundary)."""
    namespace: bool
    """Every other process of this pid namespace belongs to the box."""
    mounts: bool
    """The server mounts the writable folders itself."""
    cgroup: bool
    """Memory and processes are limited by a cgroup."""
    seccomp: bool
    memory: int
    disk: int
    """Bytes, as memory and output."""
    inodes: int
    pids: int
    output: int
    env: dict[str, str]


Arguments = tuple[ctypes.c_ulong, ...]


def _arguments(*values: int) -> Arguments:
    return tuple(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:5])


def _call_prctl(arguments: Arguments) -> None:
    if _PRCTL(*arguments) != 0:
        given, error = [argument.value for argument in arguments], ctypes.get_errno()
        raise OSError(error, f"prctl{given}: {os.strerror(error)}")


def become_reaper() -> None:
    """Orphans of the box come to this process; nobody in the box may trace it or read its memory."""
    _call_prctl(_arguments(_PR_SET_CHILD_SUBREAPER, 1))
    _call_prctl(_arguments(_PR_SET_DUMPABLE, 0))


def spare_from_oom() -> None:
    """When the box runs out of memory a program of it is to die, not this process; needs a right that not all have."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("-900")
    except OSError:
        pass


def mount_tmpfs(folder: str, size: int, inodes: int, uid: int) -> None:
    """A new, empty, sized tmpfs over `folder`, owned by `uid`; whatever was mounted there before goes away."""
    if os.path.ismount(folder) and _LIBC.umount2(folder.encode(), _MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), f"umount {folder}: {os.strerror(ctypes.get_errno())}")
    data = f"size={size},nr_inodes={inodes},mode=700,uid={uid},gid={uid}".encode()
    if _LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), data) != 0:
        raise OSError(ctypes.get_errno(), f"mount {folder}: {os.strerror(ctypes.get_errno())}")


class Confinement:
    """Everything that a program gives up, computed before the first fork: what a child computes it pays for in pages
    that are copied for it, and that is most of what a short program costs."""

    def __init__(self, config: Config) -> None:
        self._uid, self._capset = config.uid, _LIBC.capset
        self._limits = _limits(config)
        self._no_capabilities = struct.pack("6I", *([0] * 6))
        self._capabilities_of = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
        self._dumpable, self._no_new_rights = _arguments(_PR_SET_DUMPABLE, 1), _arguments(_PR_SET_NO_NEW_PRIVS, 1)
        self._filter = _filter_of_calls(memfd=config.cgroup) if config.seccomp else None

    def apply(self) -> None:
        """Give it up, in the child."""
        # Raised while the right to lower it is still there, which also sets the floor: a program cannot hide from the
        # kernel's out-of-memory killer behind the server's exemption.
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"500")
        os.close(score)
        for kind, value in self._limits:
            resource.setrlimit(kind, value)
        uid = self._uid
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if self._capset(self._capabilities_of, self._no_capabilities) != 0:
            raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")
        _call_prctl(self._dumpable)
        _call_prctl(self._no_new_rights)
        if self._filter is not None:
            _call_prctl(self._filter.arguments)


def _limits(config: Config) -> list[tuple[int, tuple[int, int]]]:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, config.disk),
        (resource.RLIMIT_NOFILE, 512),
        (resource.RLIMIT_MEMLOCK, 1 << 16),
        (12, 0),  # RLIMIT_MSGQUEUE: message queues would outlive the program and cannot be listed
    ]
    if not config.cgroup:
        limits.append((resource.RLIMIT_AS, config.memory))
        # Counted by user id (since Linux 5.14 in each user namespace): only where nobody else has the box's.
        if config.namespace:
            limits.append((resource.RLIMIT_NPROC, config.pids))
    hard = {kind: resource.getrlimit(kind)[1] for kind, _ in limits}
    lowest = [(kind, value if hard[kind] < 0 else min(value, hard[kind])) for kind, value in limits]
    return [(kind, (value, value)) for kind, value in lowest]


class Filter(NamedTuple):
    """Of system calls."""

    arguments: Arguments
    """Of prctl. They point into `memory`."""
    memory: object


def _filter_of_calls(*, memfd: bool) -> Filter:
    machine = platform.machine()
    if machine not in _ARCH:
        raise OSError(errno.ENOTSUP, f"no system call filter for {machine}; expected one of {sorted(_ARCH)}")
    program = _program(machine, (*_REFUSED[machine], *_ALIKE, *(() if memfd else (_MEMFD[machine],))))
    buffer = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer)))
    return Filter(_arguments(_PR_SET_SECCOMP, 2, ctypes.addressof(header)), (buffer, header))


def _program(machine: str, refused: tuple[int, ...]) -> list[bytes]:
    """Classic BPF over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}."""
    load, jump_eq, jump_ge, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    refuse, absent = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    lines = [op(load, 4), op(jump_eq, _ARCH[machine], 1, 0), op(give, kill), op(load, 0)]
    if machine == "x86_64":
        lines += [op(jump_ge, 0x40000000, 0, 1), op(give, absent)]  # the x32 calls are the same under other numbers
    # clone3's flags are behind a pointer that a filter cannot read: callers fall back to clone on ENOSYS.
    lines += [op(jump_eq, _CLONE3, 0, 1), op(give, absent)]
    for number in refused:
        lines += [op(jump_eq, number, 0, 1), op(give, refuse)]
    lines += [op(jump_eq, _CLONE[machine], 0, 3), op(load, 16), op(jump_set, _CLONE_NEW, 0, 1)]
    return [*lines, op(give, refuse), op(give, allow)]
