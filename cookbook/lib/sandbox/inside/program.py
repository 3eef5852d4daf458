"""Runs inside, and runs the program: as a script, or as functions that tests call from another sandbox.

Nothing here decides anything. What the program prints, returns or does to this process is only ever its
answer, which is compared elsewhere.

    program.py SEED LIMIT UP SOURCE                     script: stdin and stdout are its own
    program.py SEED LIMIT UP SOURCE CALLS REPLIES       functions
"""

import builtins
import os
import random
import sys
import types

from values import Channel, Gone, decode, encode


def main():
    seed, limit, up, source, *functions = (int(argument) for argument in sys.argv[1:])
    sys.path.pop(0)  # this folder
    sys.argv = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # scripts use them; `site`, which brings them, is not loaded
    random.seed(seed)
    with open(source, "rb") as file:
        text = file.read()
    os.write(up, b"up")
    os.close(up)
    if functions:
        calls, replies = functions
        serve(Channel(calls, replies, limit), text)
    else:
        load("__main__", text)


def load(name, text):
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(text, "program.py", "exec"), module.__dict__)
    return module


def serve(channel, text):
    objects = []  # what the tests hold a reference to; number 0 is the program's module

    def refer(value):
        objects.append(value)
        return {"ref": len(objects) - 1}

    def operands_of(request):
        return list(decode(request, objects.__getitem__))  # type: ignore[arg-type]

    def perform(kind, target, *operands):
        if kind == "call":
            return target(*operands[0], **operands[1])
        return (setattr if kind == "set" else getattr)(target, *operands)

    def answer(work):
        try:
            return {"value": encode(work(), refer)}
        except BaseException as error:  # SystemExit is no way out
            return {"error": type(error).__name__, "text": description(error)}

    reply = answer(lambda: load("program", text))
    while True:
        try:
            channel.send(reply)
        except Gone:
            return
        except Exception as error:
            channel.send({"error": type(error).__name__, "text": description(error)})
        try:
            request = channel.receive()
        except Gone:
            return
        reply = answer(lambda request=request: perform(*operands_of(request)))


def description(error):
    try:
        return str(error)[:300]
    except BaseException:
        return ""


if __name__ == "__main__":
    main()
