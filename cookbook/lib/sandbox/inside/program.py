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

NAME = "program"


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
        serve(Channel(*functions, limit), text)
    else:
        exec(compile(text, "program.py", "exec"), sys.modules["__main__"].__dict__)


def serve(channel, text):
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module  # dataclasses look their module up
    objects = [module]  # what the tests hold a reference to; number 0 has the program's names

    def refer(value):
        objects.append(value)
        return {"ref": len(objects) - 1}

    def load():
        exec(compile(text, "program.py", "exec"), module.__dict__)

    def perform(kind, target, *operands):
        if kind == "call":
            return target(*operands[0], **operands[1])
        return (setattr if kind == "set" else getattr)(target, *operands)

    def answer(work):
        try:
            return {"value": encode(work(), refer)}
        except BaseException as error:  # SystemExit is no way out
            return {"error": type(error).__name__, "text": description(error)}

    reply = answer(load)
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
        reply = answer(lambda: perform(*decode(request, objects.__getitem__)))


def description(error):
    try:
        return str(error)[:300]
    except BaseException:
        return ""


if __name__ == "__main__":
    main()
