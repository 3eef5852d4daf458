"""The life of a script: its end, Ctrl-C, a notebook's loop, a fork; each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = f"""
import sys, threading, time, traceback
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from bench.null_engine import NullHost
from trainsession.transport.embedded import open_embedded
import trainsession as ts
home = Path(sys.argv[1])
open_embedded(home, open_host=lambda: NullHost(seconds_per_pass=PASS)).close()
data = [ts.Datum([1, 2, 3], {{"target_tokens": [2, 3, 4]}})]
"""


def start(home: Path, script: str, *, seconds_per_pass: float = 0.0) -> subprocess.Popen[str]:
    code = SETUP.replace("PASS", str(seconds_per_pass)) + textwrap.dedent(script)
    env = {**os.environ, "TRAINSESSION_HOME": str(home), "PYTHONWARNINGS": "error::ResourceWarning"}
    env.pop("TRAINSESSION_BASE_URL", None)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(home)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(home: Path, script: str, **options: float) -> str:
    process = start(home, script, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == ""
    return out.strip()


def test_a_script_that_just_ends_says_nothing_and_loses_nothing(tmp_path: Path) -> None:
    session_id = run(
        tmp_path,
        """
        def loop():
            service = ts.ServiceClient()
            trainer = service.create_lora_training_client("null", rank=1)
            for row in range(5):
                trainer.forward_backward(data)
                trainer.optim_step(progress={"row": row})
            trainer.save_state("end")
            sampler = trainer.base_sampling_client()
            stream = sampler.stream([1], sampling_params=ts.SamplingParams(max_tokens=500))
            next(stream)
            samples = [sampler.sample([1], sampling_params=ts.SamplingParams(max_tokens=5)) for _ in range(10)]
            trainer.forward_backward(data)
            print(trainer.session_id)
        loop()  # no result(), no close()
        """,
        seconds_per_pass=0.05,
    )
    out = run(
        tmp_path,
        f"""
        service = ts.ServiceClient()
        trainer = service.attach({session_id!r})
        step = trainer.optim_step().result().metrics
        print(trainer.progress, trainer.next_seq, step["step"], step["grad_norm"])
        (checkpoint,) = service.list_checkpoints()
        resumed = service.create_training_client_from_state_with_optimizer(checkpoint.path)
        resumed.forward_backward(data)
        print(checkpoint.path.split("/")[-1], resumed.optim_step().result().metrics["step"])
        """,
    )
    assert out == "{'row': 4} 14 6.0 6.0\nend 6.0"


def test_ctrl_c_keeps_the_session_and_cancels_the_queue(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        service = ts.ServiceClient()
        trainer = service.create_lora_training_client("null", rank=1)
        futures = [trainer.forward_backward(data) for _ in range(100)]
        futures[0].result()
        main = threading.get_ident()

        def running():
            return [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]

        def say_when_inside():  # of `result`: the only place where Ctrl-C cancels
            while "result" not in running():
                time.sleep(0.001)
            print("inside", flush=True)

        try:
            threading.Thread(target=say_when_inside).start()
            futures[-1].result()
        except KeyboardInterrupt:
            pass
        errors = [type(future.exception(20)).__name__ for future in futures]
        trainer.zero_grad().result(20)
        print(errors.count("Cancelled"), errors.count("NoneType"), trainer.info().state)
        """,
        seconds_per_pass=0.3,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    cancelled, done, state = out.split()
    assert int(cancelled) + int(done) == 100
    assert int(cancelled) >= 10
    assert state == "running"


def test_a_notebook_cell_may_block_or_await_and_fork(tmp_path: Path) -> None:
    """A notebook runs cells inside a loop that is already running."""
    out = run(
        tmp_path,
        """
        import asyncio, os
        async def cells():
            service = ts.ServiceClient()
            trainer = service.create_lora_training_client("null", rank=1)   # blocks in a running loop
            blocked = trainer.forward_backward(data).result()
            awaited = await trainer.forward_backward(data)
            under_way = trainer.forward_backward(data)
            child = os.fork()
            if child == 0:
                try:
                    try:
                        under_way.result(20)
                    except ts.ConnectionFailed as error:
                        print("fork" in str(error), len(service.list_sessions()), flush=True)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            await under_way
            with trainer:
                sampler = trainer.save_weights_and_get_sampling_client()
                stream = sampler.stream([1], sampling_params=ts.SamplingParams(max_tokens=2))
                texts = [delta.text async for delta in stream]
            service.close()
            print(blocked.metrics == awaited.metrics, texts)
        asyncio.run(cells())
        """,
        seconds_per_pass=0.2,
    )
    assert out == "True 1\nTrue ['2 ', '3 ']"
