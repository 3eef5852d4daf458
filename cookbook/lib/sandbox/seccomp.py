"""The system calls that a program may not make, as a filter for the kernel (classic BPF, seccomp(2)).

A program is one process with threads: `fork` fails, so that nothing outlives it and its memory limit
is the whole of what it uses. No sockets but Unix ones (they end in its own network namespace; some
other families, AF_VSOCK for one, do not). And none of the calls that kernel exploits like best.
"""

from __future__ import annotations

import errno
import platform
import struct

# From the kernel's syscall tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "fork": 57, "vfork": 58, "semget": 64, "msgget": 68, "ptrace": 101,
        "syslog": 103, "personality": 135, "modify_ldt": 154, "pivot_root": 155, "chroot": 161, "acct": 163,
        "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
        "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116, "ptrace": 117,
        "reboot": 142, "sethostname": 161, "setdomainname": 162, "mq_open": 180, "msgget": 186, "semget": 190,
        "shmget": 194, "shmctl": 195, "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224,
        "swapoff": 225, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
DENIED_EVERYWHERE = {  # numbers above 423 are the same on all architectures
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
CLONE3 = 435
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CLONE_THREAD = 0x00010000
AF_UNIX = 1
X32_BIT = 0x40000000  # a second numbering of the same calls on x86-64

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def supported() -> bool:
    """Whether the table of this machine's architecture is here."""
    return platform.machine() in AUDIT_ARCH


def program() -> bytes:
    """The filter as bubblewrap's `--seccomp` reads it: 8 bytes an instruction."""
    machine = platform.machine()
    denied = sorted({*DENIED[machine].values(), *DENIED_EVERYWHERE.values()})
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),  # calls of another architecture have other numbers
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),  # its flags cannot be seen from here; libc then takes `clone`
    ]
    for number in denied:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    steps += [
        (EQUAL, 0, 4, CLONE[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, 3, SOCKET[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 1, 0, AF_UNIX),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
