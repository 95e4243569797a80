"""Grades, the processes that verify and may be killed, labelled cases, and programs that call `grade`."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import guests
import pytest
from respelling import ROOT, verdict

from verify import cases, workers
from verify import grade as grading
from verify.errors import VerifyError
from verify.grade import grade


def call(function, *args, **limits):
    return workers.call(function, *args, limits=replace(grading.ALGEBRA, **limits))


def test_an_answer_beside_another_that_cannot_be_read():
    assert verdict(r"x+1, \int\sum", r"\int\sum, 1+x") == "right"  # though the first comparison raises
    assert verdict(r"x+1, \int\sum", r"\int\sum, 2+x") == "unparsed"


def test_grades_are_strict_and_lenient():
    graded, = grade([("42", "I think 42")])
    assert graded == {"answer": None, "verdict": "unparsed", "last_number": True, "lenient": True}
    graded, = grade([("42", r"\boxed{42}, or 6 times 7")])
    assert (graded["verdict"], graded["last_number"], graded["lenient"]) == ("right", False, True)
    graded, = grade([("2,125", "<answer>2125 or so</answer> 7")])
    assert (graded["verdict"], graded["last_number"]) == ("wrong", True)


@pytest.mark.parametrize("answer", [
    "99**98**97", "9^{9^{9^{9}}}", r"\sum_{k=1}^{10^{9}}\sin(k!)", "x^{99999999}+1"])
def test_hostile_answers_are_wrong_and_their_process_is_replaced(answer, monkeypatch):
    """The limit is lowered so that the suite stays fast; what is killed is a real math-verify."""
    assert grading.finish_verdict(grading.begin_verdict("1", answer, 1.0)) != "right"
    assert verdict("a+1", "1+a") == "right"


@pytest.mark.parametrize(("generation", "once"), [(0, False), (1, False), (2, False), (1, True), (2, True)])
def test_a_call_whose_worker_or_host_is_killed_is_made_again_and_nothing_stays_behind(generation, once):
    """A worker, its host, and the one that forks hosts; by another call or from outside."""
    limits = {"workers": 1, "once": once, "size": (1 << 30) + generation}  # a host of this test's own
    call(os.getpid, **limits).result()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3 - generation):
        line = call(guests.ancestors, **limits).result()
        ends = [os.pidfd_open(pid) for pid in line[once:generation + 1]]
        os.kill(line[generation], signal.SIGKILL)
        for end in ends:  # until then the worker may answer
            assert wait([end], 60)
            os.close(end)
        workers_again = {call(guests.ancestors, **limits).result()[0] for _ in range(4)} - {line[0]}
        assert len(workers_again) == (4 if once else 2)  # the call's own, and one that serves on
    gc.collect()
    assert threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= files


def test_a_call_that_kills_its_host_ends_alone():
    limits = {"workers": 4, "once": True}
    calls = [call(exec, "import os, time; os.kill(os.getppid(), 9); time.sleep(9)", **limits),
             *(call(time.sleep, 0.2, **limits) for _ in range(3))]
    with pytest.raises(workers.OverLimit, match="signal 9"):
        calls[0].result()
    assert [each.result() for each in calls[1:]] == [None] * 3


# what a call does -> how it ends (None: with None, as any other)
ENDS = {
    "import os; os._exit(0)": "OverLimit an exit of its own", "exit()": "RuntimeError SystemExit",
    "raise KeyboardInterrupt": "RuntimeError KeyboardInterrupt", "import os; os.abort()": "OverLimit signal 6",
    "x = bytes(1 << 40)": "OverLimit too much memory", "while True: pass": "OverLimit too long",
    "import time; time.sleep(99)": "OverLimit too long",
    "import signal\nsignal.signal(27, signal.SIG_IGN)\nwhile True: pass": "OverLimit too long",
    "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)": "OverLimit too long",
    "import os; os.closerange(0, 99)": "OverLimit ",
    "import os\nif os.fork() == 0: os.setsid(); import time; time.sleep(99)": None,
    "import os\nos.fork()": None, "input()": "RuntimeError EOFError",
    "import threading, time; threading.Thread(target=time.sleep, args=[99]).start()": None,
    "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); os.chdir('/'); os.environ.clear()": None,
    "import pickle, sys; pickle.dumps = None; sys.setrecursionlimit(60)": None}


@pytest.mark.parametrize("code", ENDS)
def test_whatever_a_call_does_ends_with_it(code):
    limits = {"workers": 1, "seconds": 0.5, "once": True}
    before = call(guests.state, **limits).result()
    try:
        said = call(exec, code, **limits).result()
    except (workers.OverLimit, RuntimeError) as error:
        said = f"{type(error).__name__} {error}"
    assert said is ENDS[code] or said.startswith(ENDS[code])
    assert call(guests.state, **limits).result() == before


@pytest.mark.parametrize("ended", ["worker", "host"])
def test_what_a_call_has_started_ends_with_its_worker_or_its_host(ended):
    pid, host = call(guests.leave_behind, workers=1, once=True).result()
    if ended == "host":
        os.kill(host, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it has ended already
        assert wait([os.pidfd_open(pid)], 60)


def test_waiting_calls_take_the_longest_and_not_their_sum_and_a_busy_machine_is_no_waiting():
    """Sixteen wait at a time; and sixteen that compute take longer by the clock than their seconds, on any machine of
    fewer cores, and end well."""
    limits = {"workers": 16, "once": True}
    start = time.monotonic()
    waiting = [call(time.sleep, 1.0, **limits) for _ in range(16)]
    assert {each.result() for each in waiting} == {None} and time.monotonic() - start < 12
    computing = [call(exec, "import time\nwhile time.process_time() < 0.4: pass", seconds=0.6, **limits)
                 for _ in range(16)]
    assert {each.result() for each in computing} == {None}


def allocate(gibibytes: int) -> int:
    return len(bytes(gibibytes << 30))  # zeros that no page has to be found for: only the limit counts


def test_a_worker_gets_no_more_memory_than_it_may_have():
    assert call(allocate, 1).result() == 1 << 30
    with pytest.raises(workers.OverLimit, match="too much memory"):
        call(allocate, 3).result()


def ended(result: object) -> Future:
    future = Future()
    (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
    return future


def test_more_answers_than_the_cache_holds_are_each_verified_once(monkeypatch):
    started = []
    monkeypatch.setattr(grading, "call", lambda *asked, limits: started.append(asked) or ended("right"))
    count = grading.begin_verdict.cache_info().maxsize + 100
    assert {g["verdict"] for g in grade([("a+b", f"#### $b+a+{i}$") for i in range(count)])} == {"right"}
    assert len(started) == count
    grading.begin_verdict.cache_clear()


@pytest.mark.parametrize(("count", "again"), [(1, 3.0), (5, 3.0), (16, 15 / 16), (256, None)])
def test_a_batch_of_answers_that_take_for_ever_has_a_budget(count, again, monkeypatch):
    """Seconds of computing for each: so 256 of them take 26 s on one core, and 16 of them 17."""
    allowed = []
    monkeypatch.setattr(grading, "call", lambda *asked, limits: allowed.append(limits.seconds) or ended(
        workers.OverLimit(workers.TIME)))
    grading.begin_verdict.cache_clear()
    graded = grade([("a+b", rf"\boxed{{a+b+{i}}}") for i in range(count)])
    grading.begin_verdict.cache_clear()
    assert {one["verdict"] for one in graded} == {"timed_out"}
    assert allowed == [0.1] * count + ([again] * count if again else [])


@pytest.mark.slow
def test_a_batch_of_hostile_formulas_ends_and_an_honest_one_after_it_is_right():
    forms = r"\sum_{k=1}^{10^{9}}\sin(k!+%d)", "x^{99999999+%d}+1", "9^{9^{9^{9}}}+%d", r"\int_0^%d x^{x^{x}} dx"
    graded = grade([("1", rf"\boxed{{{forms[i % 4] % i}}}") for i in range(256)])
    assert {one["verdict"] for one in graded} <= {"wrong", "unparsed", "timed_out"}
    assert verdict("c+1", "1+c") == "right"


CASE = {"gold": "1", "completion": "1", "correct": True}


@pytest.mark.parametrize(("line", "message"), [
    (b"{", ":1: not valid JSON"), (b"\xff\xfe{", ":1: not valid JSON"),
    (b'{"x": ' + b"1" * 5001 + b"}", ":1: not valid JSON"),
    (b"[" * 100_000, ":1: not valid JSON"), (json.dumps(CASE | {"gold": "\ud800"}).encode(), ":1: not valid JSON"),
    (b"[]", ":1: the 'gold' of a case must be a str, not None"), (b"", " holds no cases"),
    (json.dumps(CASE | {"correct": "yes"}).encode(), ":1: the 'correct' of a case must be a bool, not 'yes'"),
    (json.dumps(CASE | {"category": ["x" * 1000]}).encode(), r"must be a str, not \['x{98} \.\.\. x{98}'\]$")])
def test_a_bad_case_is_named_by_its_line(line, message, tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(VerifyError, match=f"^{path}[^\n]*{message}"):
        cases.read_cases(path)
    with pytest.raises(VerifyError, match="--cases: file .*none.jsonl not found"):
        cases.read_cases(tmp_path / "none.jsonl")


def test_a_category_called_total_is_one_of_the_categories():
    labelled = [{"gold": "1", "completion": "1", "correct": True, "category": name} for name in ("total", "other")]
    counts = cases.count_outcomes(labelled, [{"verdict": "right", "answer": "1"}] * 2)
    assert [(name, count.total()) for name, count in counts] == [("total", 1), ("other", 1), ("total", 2)]


def run_program(folder: Path, program: str, **settings: object) -> subprocess.CompletedProcess:
    path = folder / "program.py"
    path.write_text(program)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env, **settings)


IMPORT = "from verify.grade import grade\n"
VERDICT = r"""print(grade([(r"\frac{x+1}{2}", r"\boxed{0.5x+0.5}")])[0]["verdict"])"""


def test_a_program_needs_no_main_guard_and_no_file(tmp_path):
    done = run_program(tmp_path, IMPORT + VERDICT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")
    done = subprocess.run([sys.executable, "-"], input=IMPORT + VERDICT, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


def test_a_library_that_is_missing_is_named(tmp_path):
    (tmp_path / "math_verify.py").write_text("import nowhere_to_be_found")
    done = run_program(tmp_path, IMPORT + VERDICT)  # beside it, and so before the library itself
    assert done.returncode == 1 and re.search(
        "VerifyError: no worker can be started: ModuleNotFoundError: No module named 'nowhere", done.stderr)


def test_sixty_answers_that_need_algebra_are_graded_from_another_folder(tmp_path):
    """Neither the current folder nor PYTHONPATH names the repository, as in a program that is taken away."""
    (tmp_path / "program.py").write_text(f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from verify.grade import grade
if __name__ == "__main__":
    pairs = [(rf"\\frac{{{{x+{{k}}}}}}{{{{2}}}}", rf"\\boxed{{{{0.5x+{{k / 2}}}}}}") for k in range(1, 61)]
    print([done["verdict"] for done in grade(pairs)].count("right"), "verify.algebra" in sys.modules)
""")
    done = subprocess.run([sys.executable, "-I", "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("60 False\n", "")


def test_verify_imports_nothing_else_of_this_repository():
    texts = [path.read_text() for path in (ROOT / "verify").glob("*.py")]
    imported = {name for text in texts for name in re.findall(r"(?m)^ *(?:from|import) (\w+)", text)}
    assert imported & {path.stem for path in ROOT.iterdir()} == {"verify"}


SIGNALLED = """
import os, signal, subprocess, time
from verify.workers import STOP_SIGNALS, Limits, call

for number in STOP_SIGNALS:
    signal.signal(number, lambda *_: None)
limits, processes = Limits(2 << 30, 1, 3.0), set()
for moment in ("starting", "working"):
    calls = [call(time.sleep, 0.3, limits=limits), call(os.getpid, limits=limits)]
    while not calls[0].done():  # at every moment
        for number in STOP_SIGNALS:
            os.killpg(0, number)
    processes.add(calls[1].result())
for number in STOP_SIGNALS:  # and to a worker alone
    os.kill([*processes][0], number)
processes.add(call(os.getpid, limits=limits).result())
child = call(subprocess.run, ["sh", "-c", "kill -TERM $$; echo lives"], limits=limits).result()
print(len(processes), child.returncode)
"""


def test_a_signal_to_all_processes_ends_no_worker_and_nothing_that_starts_them(tmp_path):
    """As `timeout`, SLURM and a closed terminal send one. What a function starts can still be ended by it."""
    done = run_program(tmp_path, SIGNALLED, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"1 {-signal.SIGTERM}\n", "")


def test_a_child_process_that_has_verified_ends(tmp_path):
    """Its workers heed no signal, and it would wait for them."""
    program = IMPORT + '''
import multiprocessing
from verify.grade import grade

def verify():
    assert grade([("2", r"\\\\boxed{\\\\sqrt{4}}")])[0]["verdict"] == "right"

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=verify)
    child.start()
    child.join()
    print("ended with", child.exitcode)
'''
    assert run_program(tmp_path, program, timeout=120).stdout == "ended with 0\n"
