"""`kvant chat`: history, commands, the status line, Ctrl-C, and pipes."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvant import LLM, SamplingParams
from kvant.cli.chat import Conversation, KeptConversation, chat, printable
from kvant.cli.main import app as kvant_app
from kvant.errors import BadValue, NotServable
from tests import forked
from tests.engine import tiny_chat
from tests.models import tiny

app = typer.Typer()
app.command()(chat)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, dtype="float32", kv_cache_memory="2MiB", max_num_seqs=1)


@pytest.fixture
def conversation(llm: LLM) -> Iterator[Conversation]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    console = Console(file=io.StringIO(), width=200)
    yield Conversation(llm, params, console)
    llm.engine.audit()
    assert llm.engine.stats.num_held_pages == 0


def said(conversation: Conversation, *lines: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything shown when these lines come through a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    conversation.run()
    file = conversation.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def answer_to(llm: LLM, *messages: str) -> str:
    roles = ("user", "assistant")
    history = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate(llm.encode_chat(history), params)[0].text


def test_the_second_answer_knows_the_first_turn(
    conversation: Conversation, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = said(conversation, "Hello", "", "again", monkeypatch=monkeypatch)
    first = answer_to(llm, "Hello")
    second = answer_to(llm, "Hello", first, "again")
    assert [m["content"] for m in conversation.messages] == ["Hello", first, "again", second]
    assert shown.index(printable(first)) < shown.index(printable(second))


def test_the_status_line_says_speed_kv_bytes_and_what_was_cached(
    conversation: Conversation, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = said(conversation, "Hello " * 20, "again", monkeypatch=monkeypatch)
    lines = [line for line in shown.splitlines() if "tokens/s" in line]
    assert len(lines) == 2
    assert all("8 tokens" in line and "KV" in line and "float32" in line for line in lines)
    assert "prompt tokens cached" in lines[1]
    ids = llm.encode_chat([{"role": "user", "content": ("Hello " * 20).strip()}])
    pages = -(-(len(ids) + 7) // llm.plan.page_size)
    assert f"{pages * llm.plan.page_bytes / 1024:.2f} KiB in use" in lines[0]


def test_reset_forgets_plan_shows_help_lists_and_exit_leaves(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = said(
        conversation, "Hello", "/reset", "/plan", "/help", "/nonsense", "/exit", "never",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert conversation.messages == []
    assert "0-3     full" in shown
    assert shown.count("/reset  ") == 2
    assert "unknown command /nonsense" in shown
    assert "never" not in shown


def test_a_conversation_beyond_the_context_drops_its_oldest_turns_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(path, dtype="float32", kv_cache_memory="2MiB", max_model_len=150)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    conversation = Conversation(llm, params, Console(file=io.StringIO(), width=200))
    shown = said(
        conversation, "one " * 8, "two " * 8, "three " * 8, "x" * 200, monkeypatch=monkeypatch
    )
    assert "dropped the oldest 1 turn(s)" in shown
    assert "cannot answer: the prompt has" in shown
    contents = [m["content"] for m in conversation.messages]
    assert not any("one" in c or "xxx" in c for c in contents)
    llm.engine.audit()


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\r\tc\n\x9b2J\x7fé") == "a[31mb\tc\n2Jé"


def test_a_model_without_template_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    path = tiny_chat.build(tmp_path)
    (path / "chat_template.jinja").unlink()
    result = CliRunner().invoke(app, [str(path), "--kv-cache-memory", "2MiB"])
    assert isinstance(result.exception, NotServable)
    (way,) = result.exception.ways_out
    kvant, command, *rest = way.arguments
    done = CliRunner().invoke(kvant_app, [command, *rest, "--max-tokens", "2"])
    assert (kvant, done.exit_code) == ("kvant", 0)


@pytest.mark.parametrize("command", [["chat"], ["generate", "Hello", "--model"]])
def test_a_model_without_tokenizer_is_refused_where_texts_are_typed(
    tmp_path: Path, command: list[str]
) -> None:
    path = str(tiny.build("llama", tmp_path))
    result = CliRunner().invoke(kvant_app, [*command, path, "--kv-cache-memory", "2MiB"])
    assert isinstance(result.exception, NotServable)
    assert [way.arguments for way in result.exception.ways_out] == [("kvant", "serve", path)]


def test_the_models_recommendation_holds_where_no_flag_is_given(tmp_path: Path) -> None:
    path = tiny_chat.build(tmp_path)
    said = '{"eos_token_id": 2, "do_sample": true, "temperature": 5.0, "top_k": 0}'
    (path / "generation_config.json").write_text(said)
    fixed = [str(path), "--dtype", "float32", "--kv-cache-memory", "2MiB", "--max-tokens", "20"]

    def answer(*flags: str) -> str:
        result = CliRunner().invoke(app, [*fixed, *flags], input="Hello\n")
        assert result.exit_code == 0, result.output
        return "\n".join(result.stdout.splitlines()[1:-1])

    greedy = answer("--temperature", "0")
    assert greedy == answer("--temperature", "0")
    assert answer("--seed", "1") != greedy
    assert answer("--seed", "1") == answer("--seed", "1")
    assert answer("--seed", "1") != answer("--seed", "2")


PROGRAM = """
import signal, sys, torch, typer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
torch.set_num_threads(1)
from kvant.cli.chat import chat
from kvant.engine.engine import Engine
step = Engine.step
def slow(self):
    import time
    time.sleep(0.05)
    return step(self)
Engine.step = slow
app = typer.Typer()
app.command()(chat)
app()
"""


class Terminal:
    """The program behind a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = forked.popen(
            ["-c", PROGRAM, *arguments],
            streams=(slave, slave, slave),
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, done: Callable[[str], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not done(self.shown):
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.shown}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert done(self.shown), f"{what} did not come before the end:\n{self.shown}"

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self.master)


@pytest.fixture
def terminal(path: Path) -> Iterator[Terminal]:
    shown = Terminal(
        str(path), "--dtype", "float32", "--kv-cache-memory", "2MiB", "--max-tokens", "400",
        "--temperature", "0",
    )  # fmt: skip
    yield shown
    shown.close()


def test_ctrl_c_stops_an_answer_and_at_the_prompt_leaves(terminal: Terminal) -> None:
    terminal.read_until(lambda s: "you> " in s, "the prompt")
    terminal.write("Hello\n")
    time.sleep(0.5)
    terminal.interrupt()
    terminal.read_until(lambda s: "stopped" in s and s.count("you> ") == 2, "the second prompt")
    assert "tokens/s" in terminal.shown
    # readline misses a signal that comes between its prompt and its first look at the keyboard.
    for _ in range(10):
        terminal.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(8)  # one that comes while Python ends would be its end
            break
    assert terminal.process.wait(20) == 130


def test_ctrl_c_twice_within_an_answer_leaves(terminal: Terminal) -> None:
    terminal.read_until(lambda s: "you> " in s, "the prompt")
    terminal.write("Hello\n")
    time.sleep(0.5)
    terminal.interrupt()
    time.sleep(0.01)
    terminal.interrupt()
    assert terminal.process.wait(20) == 130


def test_the_end_of_input_ends_the_conversation(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(prompt: str) -> str:
        assert prompt == "you> "
        raise EOFError

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", end)
    conversation.run()
    assert conversation.messages == []


def test_a_kept_conversation_goes_on_in_another_process(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = f"host:8MiB,disk:{tmp_path}:64MiB"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def talk(*lines: str) -> tuple[str, Conversation]:
        llm = LLM(
            path, dtype="float32", kv_cache_memory="2MiB", max_num_seqs=1, page_size=4,
            kv_offload=offload, batch_invariant=True,
        )  # fmt: skip
        console = Console(file=io.StringIO(), width=200)
        conversation = Conversation(llm, params, console)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        KeptConversation(llm, "sea").run(conversation)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue(), conversation

    first = "the sea is wide and the sky is high " * 6
    shown, _ = talk(first)
    assert "kept as sea" in shown
    resumed, conversation = talk("and deep?")
    assert "goes on with sea: 2 messages" in resumed
    assert "prompt tokens cached" in resumed
    assert len(conversation.messages) == 4
    whole = Conversation(conversation.llm, params, Console(file=io.StringIO(), width=200))
    said(whole, first, "and deep?", monkeypatch=monkeypatch)
    assert whole.messages == conversation.messages


def test_a_conversation_is_kept_only_beside_files(llm: LLM) -> None:
    with pytest.raises(BadValue, match="no directory"):
        KeptConversation(llm, "sea")
