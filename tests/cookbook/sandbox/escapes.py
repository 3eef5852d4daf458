"""Programs that look for a way out. Each has a function `escaped()` that lists what it managed to do."""

from __future__ import annotations

TRY = """
import os
done = []
def attempt(name, work):
    try:
        if work() not in (None, -1, False, [], b"", ""):
            done.append(name)
    except (Exception, SystemExit):
        pass
def escaped(): return done
"""

SYSCALL = (
    TRY
    + """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
numbers = %r
def syscall(name, *args):
    attempt(name, lambda: libc.syscall(numbers[name], *args) + 1)
"""
)

PEEK = (
    TRY
    + """
import glob
for path in ("environ", "mem", "cmdline", "fd", "maps"):
    for process in ("self", str(os.getppid()), "1"):
        attempt(f"read {process}/{path}", lambda: glob.glob(f"/proc/{process}/{path}"))
attempt("list processes", lambda: glob.glob("/proc/[0-9]*"))
"""
)

NETWORK = (
    TRY
    + """
import socket
def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(0.5)
        s.connect(address)
        s.send(b"x")
        return True
attempt("tcp", lambda: connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", PORT)))
attempt("udp", lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 53)))
attempt("metadata", lambda: connect(socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)))
attempt("ipv6", lambda: connect(socket.AF_INET6, socket.SOCK_DGRAM, ("::1", 53)))
attempt("abstract", lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, ABSTRACT))
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket", "/run/user"):
    attempt(path, lambda: os.path.exists(path))
for family in (16, 17, 38, 40):  # netlink, packet, crypto, virtual machine
    attempt(f"family {family}", lambda: socket.socket(family, socket.SOCK_RAW))
attempt("bluetooth", lambda: socket.socket(31, socket.SOCK_RAW, 1))
"""
)

FILES = (
    TRY
    + """
import sys
def text_of(path):
    with open(path, errors="replace") as file: return file.read(1 << 20)
for folder in ("/scratch", "/tmp", "/inside", os.getcwd(), "/dev/shm", "/var", "/home", "/run", "/etc"):
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            attempt(f"tests in {path}", lambda: "NEEDLE" in text_of(path))
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "CANARY"):
    attempt(f"read {path}", lambda: text_of(path))
attempt("delete", lambda: os.unlink("CANARY") or True)
for folder in ("/", "/usr", "/usr/lib", "/inside", "/dev", "/etc", "/dev/shm", os.path.dirname(os.__file__)):
    for name in ("x", "conftest.py", "sitecustomize.py", "usercustomize.py", "x.pth", "pytest.ini"):
        attempt(f"write {folder}/{name}", lambda: open(os.path.join(folder, name), "w"))
for path in ("/inside/program.py", "/inside/judge.py", os.__file__, sys.executable, "/usr/bin/env"):
    attempt(f"overwrite {path}", lambda: open(path, "r+"))
    attempt(f"chmod {path}", lambda: os.chmod(path, 0o777) or True)
attempt("raw disk", lambda: os.mknod("/scratch/disk", 0o60600, os.makedev(8, 0)) or True)
"""
)

PROCESSES = (
    TRY
    + """
import subprocess, multiprocessing, signal, time
attempt("fork", lambda: os.fork() + 1)
attempt("forkpty", lambda: os.forkpty())
attempt("spawn", lambda: os.posix_spawn("/usr/bin/env", ["env"], {}))
attempt("subprocess", lambda: subprocess.run(["/usr/bin/env"]))
attempt("shell", lambda: subprocess.Popen("true", shell=True))
attempt("system", lambda: os.system("true") == 0)
attempt("multiprocessing", lambda: multiprocessing.Process(target=print).start() or True)
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    for target in (1, os.getppid()):
        attempt(f"kill {target}", lambda: os.kill(target, number))
    attempt("kill group 1", lambda: os.killpg(1, number) or True)
    attempt("kill all", lambda: os.kill(-1, number))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20) or True)
attempt("nice", lambda: os.nice(-5) < 0)
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)) or True)
import resource
for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
    attempt(f"raise {name}", lambda: resource.setrlimit(getattr(resource, name), (-1, -1)) or True)
attempt("root", lambda: os.setuid(0) or True)
attempt("groups", lambda: os.setgroups([0]) or True)
attempt("is root", lambda: os.getuid() == 0)
"""
)

TERMINAL = (
    TRY
    + """
import fcntl
for fd in (0, 1, 2):
    attempt(f"type into {fd}", lambda: fcntl.ioctl(fd, 0x5412, b"x") == b"x")
for path in ("/dev/tty", "/dev/console", "/dev/pts/0", "/dev/ptmx"):
    attempt(path, lambda: open(path, "w"))
os.symlink("CANARY", "/scratch/result.json")
os.symlink("/etc/passwd", "/scratch/stdout")
"""
)

MEMORY = (
    TRY
    + """
import mmap
attempt("100 GB", lambda: bytearray(100 << 30))
attempt("mmap", lambda: mmap.mmap(-1, 100 << 30))
attempt("shared", lambda: mmap.mmap(-1, 2 << 30, mmap.MAP_SHARED))
attempt("memfd", lambda: os.memfd_create("x"))
attempt("shm", lambda: open("/dev/shm/x", "wb"))
attempt("sparse", lambda: os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 1 << 40) or True)
def fill(limit):
    total = 0
    try:
        for number in range(200):
            with open(f"big{number}", "wb") as file:
                total += file.write(bytes(1 << 20))
    except OSError:
        pass
    return total > limit
attempt("fill", lambda: fill(40 << 20))
"""
)

THREADS = """
import threading, time
def escaped():
    count = 0
    try:
        while count < 500:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    return count
"""

TINY_FILES = """
import os
def escaped():
    os.mkdir("tiny")
    count = 0
    try:
        while True:
            os.close(os.open(f"tiny/{count}", os.O_CREAT))
            count += 1
    except OSError:
        return count
"""

STAY = """
import os
def escaped():
    seen = [p for p in ("/scratch/seen", "/tmp" + "/seen", "/dev/shm/seen") if os.path.exists(p)]
    for path in ("/scratch/seen", "/tmp" + "/seen", "/dev/shm/seen"):
        try: open(path, "w").write("9173")
        except OSError: pass
    return seen + [name for name in os.listdir("/scratch") if name != "seen"]
"""
