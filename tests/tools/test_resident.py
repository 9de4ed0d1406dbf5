"""The resident process: commands run in it as they would by themselves, for this user alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memstore.tools import resident
from tests.tools.conftest import Cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

Command = Callable[..., "subprocess.Popen[str]"]
SERVE = "from memstore.tools import resident; resident.LOOK_SECONDS = 0.2; {}; resident.serve(print)"
SERVE_DYING = "from memstore.tools import resident\n{}\nresident.serve({})"


def until(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the sockets; the processes that were started in it end with the tests."""
    folder = tmp_path_factory.mktemp("runtime")
    yield folder
    for lock in (folder / "memstore").glob("*.lock"):
        os.kill(int(lock.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def command(runtime: Path) -> Command:
    """Starts ``memstore`` in a new process, which may use a resident one.

    As an installed script does: ``python -m`` puts the working directory first in the path of imports.
    """
    script = runtime / "script.py"
    script.write_text("import sys\nfrom memstore.__main__ import main\nsys.exit(main())\n")

    def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
        given = {"env": {}, "cwd": None, **options}
        env = {**os.environ, resident.VARIABLE: "", "XDG_RUNTIME_DIR": str(runtime), **given.pop("env")}  # type: ignore[dict-item]
        line = [sys.executable, str(script), *map(str, arguments)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(line, text=True, env=env, **{**pipes, **given})  # type: ignore[call-overload,no-any-return]

    return start


@pytest.fixture(scope="module")
def server(command: Command, runtime: Path) -> Path:
    """The socket of a resident process that a first command has started."""
    first = command("ask", runtime / "nothing", "Who?")
    assert first.communicate()[1].startswith("memstore: there is no memory at")
    folder = runtime / "memstore"
    until(lambda: [each for each in folder.iterdir() if each.is_socket()])
    (path,) = (each for each in folder.iterdir() if each.is_socket())
    return path


@pytest.fixture
def text_memory(cli: Cli, model_folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("A text that is long enough. " * 20)
    assert cli("read", tmp_path / "text.txt", tmp_path / "text.mem", "--model", model_folder).code == 0
    return tmp_path / "text.mem"


def children(server: Path) -> list[int]:
    number = int(server.with_suffix(".lock").read_text())
    return [int(each) for each in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def test_a_command_says_what_it_says_by_itself(command: Command, server: Path, text_memory: Path) -> None:
    def asked(**options: object) -> subprocess.Popen[str]:
        line = ("ask", text_memory.name, "-", "--max-tokens", 3, "--json")
        return command(*line, cwd=text_memory.parent, umask=0o027, **options)

    served = asked()
    until(lambda: children(server))
    (child,) = children(server)
    until(lambda: "Umask:\t0027" in Path(f"/proc/{child}/status").read_text())
    assert Path(f"/proc/{child}/cwd").resolve() == text_memory.parent.resolve()
    told = []
    for each in (served, asked(env={resident.VARIABLE: "off"})):
        out, err = each.communicate("Who?")
        told.append((each.returncode, err, {**json.loads(out), "seconds": None}))
    assert told[0] == told[1]
    assert told[0][0] == 0


@pytest.mark.parametrize("arguments", [("ask", "nothing", "Who?"), ("ask",), ("ask", "--help"), ("chat", "--help")])
def test_its_exit_codes_and_errors_are_those_of_a_process_of_its_own(
    command: Command, server: Path, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    served, alone = command(*arguments, cwd=tmp_path), command(*arguments, cwd=tmp_path, env={resident.VARIABLE: "off"})
    assert (*served.communicate(), served.returncode) == (*alone.communicate(), alone.returncode)
    assert server.is_socket()


def test_ctrl_c_reaches_it(command: Command, server: Path, text_memory: Path) -> None:
    waits = command("ask", text_memory, "-")  # for its question
    until(lambda: children(server))
    time.sleep(0.5)
    waits.send_signal(signal.SIGINT)
    assert waits.wait(240) == 130  # before its input is closed, which would end it too
    assert "interrupted" in waits.communicate()[1]
    until(lambda: not children(server))


def test_it_ends_with_its_caller(command: Command, server: Path, text_memory: Path) -> None:
    waits = command("ask", text_memory, "-")
    until(lambda: children(server))
    waits.kill()
    until(lambda: not children(server))
    waits.communicate()


def test_a_caller_that_is_gone_at_once_leaves_no_child(server: Path, text_memory: Path) -> None:
    nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    reading, writing = os.pipe()  # the child waits for its question
    facts = {"arguments": ["ask", str(text_memory), "-"], "environment": dict(os.environ), "umask": 0o022}
    request = json.dumps(facts).encode()
    folder = os.open("/", os.O_RDONLY)
    number = int(server.with_suffix(".lock").read_text())
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(server))
        assert peer.recv(1) == resident.READY
        os.kill(number, signal.SIGSTOP)
        socket.send_fds(peer, [struct.pack("!I", len(request))], [reading, *nothing, folder])
        peer.sendall(request)
    os.kill(number, signal.SIGCONT)
    try:
        time.sleep(1)
        until(lambda: not children(server), seconds=10)
    finally:
        for each in (reading, writing, *nothing, folder):
            os.close(each)


@pytest.mark.parametrize("killed", [False, True])
def test_ctrl_z_stops_it_until_its_caller_goes_on_or_ends(
    command: Command, server: Path, text_memory: Path, killed: bool
) -> None:
    # In a group of its own, whose parent could continue it; otherwise the system ignores Ctrl-Z.
    waits = command("ask", text_memory, "-", "--max-tokens", 1, process_group=0)
    until(lambda: children(server))
    (child,) = children(server)
    time.sleep(0.5)
    waits.send_signal(signal.SIGTSTP)
    until(lambda: state(waits.pid) == "T")
    until(lambda: state(child) == "T")
    waits.send_signal(signal.SIGKILL if killed else signal.SIGCONT)
    waits.communicate("Who?")
    assert waits.returncode == (-signal.SIGKILL if killed else 0)
    until(lambda: not children(server))


def state(number: int) -> str:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-"])
def test_with_a_closed_stream_a_command_runs_by_itself(
    command: Command, server: Path, runtime: Path, stream: str
) -> None:
    ran = []
    for env in ({}, {resident.VARIABLE: "off"}):
        given = {**os.environ, resident.VARIABLE: "", "XDG_RUNTIME_DIR": str(runtime), **env}
        line = [sys.executable, str(runtime / "script.py"), "ask", "--help"]
        shell = ["sh", "-c", f'exec "$@" {stream}', "sh", *line]
        ran.append(subprocess.run(shell, env=given, capture_output=True, text=True, check=False, timeout=60))
    assert (ran[0].returncode, ran[0].stdout, ran[0].stderr) == (ran[1].returncode, ran[1].stdout, ran[1].stderr)
    assert server.is_socket()


def test_a_job_in_the_background_waits_for_the_terminal_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resident.VARIABLE, "")
    monkeypatch.setattr(resident, "_in_background", lambda: True)
    lines = (["ask", "a.mem", "-"], ["chat", "a.mem"], ["ask", "a.mem", "Who?"])
    assert [resident._wanted(each) for each in lines] == [False, False, True]


def test_it_keeps_no_secrets_of_its_first_caller(server: Path) -> None:
    number = int(server.with_suffix(".lock").read_text())
    names = {each.partition("=")[0] for each in Path(f"/proc/{number}/environ").read_text().split("\0") if each}
    assert "PYTEST_CURRENT_TEST" not in names  # a variable that no import needs
    assert "PATH" in names


def test_only_this_user_is_let_in(server: Path) -> None:
    assert stat.S_IMODE(server.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resident.VARIABLE, "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "memstore").mkdir(mode=0o755)
    (tmp_path / "memstore").chmod(0o755)
    assert resident.run_resident(["ask", "nothing", "Who?"]) is None
    assert [*(tmp_path / "memstore").iterdir()] == []
    (tmp_path / "memstore").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "memstore").symlink_to(tmp_path / "elsewhere")
    assert resident.run_resident(["ask", "nothing", "Who?"]) is None
    assert [*(tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize(
    "sent", [b"", b"1", struct.pack("!I", 4) + b"nope", struct.pack("!I", 2**31), b"\x00\x00\x00\x02{}"]
)
def test_other_bytes_do_it_no_harm(server: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(server))
        assert peer.recv(1) == resident.READY
        peer.sendall(sent)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(str(server))
        assert peer.recv(1) == resident.READY
    assert children(server) == []


def test_its_streams_take_the_bytes_that_usual_ones_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open(encoding="utf-8", errors="surrogateescape") as usual:  # as in a C locale
        monkeypatch.setattr(sys, "__stdin__", usual)
        assert resident._stream(0, "r").errors == "surrogateescape"


@pytest.mark.parametrize("changed", [{"OMP_NUM_THREADS": "7"}, {"LC_ALL": "C"}, {"PATH": "/nowhere"}])
def test_processes_that_import_differently_do_not_share_one(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    before = resident._identity()
    monkeypatch.setenv("TERM", "other")
    assert resident._identity() == before
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert resident._identity() != before


def test_a_process_that_the_system_ends_sooner_does_not_share_one() -> None:
    script = "from memstore.tools.resident import _identity\nprint(_identity())\n"
    sooner = "open('/proc/self/oom_score_adj', 'w').write('900')\n"
    told = [subprocess.check_output([sys.executable, "-c", each + script]) for each in ("", "", sooner)]
    assert told[0] == told[1] != told[2]


def test_what_ended_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("ended", "1\n"), ("lives", "2\n"), ("unable", resident.UNABLE)):
        (tmp_path / name).touch()
        (tmp_path / f"{name}.lock").write_text(said)
    lock = resident._locked(tmp_path / "lives.lock")
    late = os.open(tmp_path / "ended.lock", os.O_RDWR)  # a process that has not locked it yet
    try:
        resident._remove_others(tmp_path)
        assert {each.stem for each in tmp_path.iterdir()} == {"lives", "unable"}
        (tmp_path / "ended.lock").touch()
        monkeypatch.setattr(os, "open", lambda *_: os.dup(late))
        with pytest.raises(FileNotFoundError, match="another file"):
            resident._locked(tmp_path / "ended.lock")
    finally:
        os.close(late)
        os.close(lock)


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("ask", "nothing", "Who?"), {resident.VARIABLE: "off"}),
        (("--no-resident", "ask", "nothing", "Who?"), {}),
        (("ask", "nothing", "Who?", "--device", "cpu"), {}),
        (("ls", "nothing"), {}),
    ],
)
def test_whoever_does_not_want_one_starts_none(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    alone = command(*arguments, env={"XDG_RUNTIME_DIR": str(tmp_path), **env})
    alone.communicate()
    assert alone.returncode == 3
    assert [*tmp_path.glob("memstore/*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["resident.IDLE_SECONDS = 0", "resident.LEAST_FREE_KB = 1 << 50"])
def test_it_ends_when_idle_or_memory_is_short(tmp_path: Path, ends: str) -> None:
    path = tmp_path / "socket"
    assert subprocess.run([sys.executable, "-c", SERVE.format(ends), path], timeout=120, check=False).returncode == 0
    assert [each.name for each in tmp_path.iterdir()] == ["socket.lock"]


@pytest.mark.slow
def test_where_children_cannot_compute_none_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "socket"
    line = [sys.executable, "-c", SERVE.format("resident.TRIAL_SECONDS = 0.0"), str(path)]
    assert subprocess.run(line, timeout=120, check=False).returncode == 0
    assert path.with_suffix(".lock").read_text() == resident.UNABLE
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("one was started"))
    resident._start(path)


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
def test_it_ends_when_its_socket_is_gone(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "socket"
    serving = subprocess.Popen([sys.executable, "-c", SERVE.format("pass"), path])
    until(path.is_socket)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        if replaced:
            other.bind(str(path))
        assert serving.wait(240) == 0
    assert path.exists() is replaced


DIES = """
import os, signal
fork = os.fork
def dying():
    if fork(): os.kill(os.getpid(), signal.SIGKILL)
    return 0
resident._children_compute = lambda threads: setattr(os, "fork", dying) or True
"""


@pytest.mark.slow
def test_a_command_does_not_run_twice_if_the_process_dies_before_its_caller_knows_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "socket"
    ran = f"lambda **_: open({str(tmp_path / 'ran')!r}, 'w').close() or 0"
    serving = subprocess.Popen([sys.executable, "-c", SERVE_DYING.format(DIES, ran), path])
    until(path.is_socket)
    monkeypatch.setattr(resident, "_folder", lambda: tmp_path)
    monkeypatch.setattr(resident, "_identity", lambda: "socket")
    monkeypatch.delenv(resident.VARIABLE, raising=False)
    assert resident.run_resident(["ask", "nothing", "Who?"]) is None  # so it runs here
    assert serving.wait(240) == -signal.SIGKILL
    time.sleep(1)  # a child that began would have written by then
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_process_that_dies_is_told_and_replaced(command: Command, text_memory: Path, tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    command("ask", "nothing", "Who?", env=env).communicate()
    until(lambda: [each for each in (tmp_path / "memstore").iterdir() if each.is_socket()])
    (path,) = (each for each in (tmp_path / "memstore").iterdir() if each.is_socket())
    waits = command("ask", text_memory, "-", env=env)
    # Its child has begun: it has the command's input.
    until(lambda: [each for each in children(path) if str(Path(f"/proc/{each}/fd/0").readlink()).startswith("pipe:")])
    number = int(path.with_suffix(".lock").read_text())
    os.kill(number, signal.SIGKILL)
    assert "the resident process ended; run the command again" in waits.communicate()[1]
    assert waits.returncode == 1
    again = command("ask", "nothing", "Who?", env=env)
    assert "there is no memory" in again.communicate()[1]
    until(lambda: path.with_suffix(".lock").read_text().strip() not in ("", str(number)))
    os.kill(int(path.with_suffix(".lock").read_text()), signal.SIGKILL)
