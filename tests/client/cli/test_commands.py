"""Tests of all commands of `nereid` that start no server, such as `chat`, `bench` and `doctor`."""

import io
import json
import mimetypes
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from fakes.live_frontend import live_frontend
from nereid_client import __version__
from nereid_client.cli.bench_command import percentiles
from nereid_client.cli.doctor_command import config_rows
from nereid_client.cli.main import main
from nereid_client.console import CliError
from nereid_client.supervise.frontend_client import FrontendClient
from PIL import Image


@pytest.fixture(scope="module")
def backend():
    return FakeBackend()


@pytest.fixture(scope="module")
def url(backend):
    with live_frontend(backend, FakePooling(), api_key="s3cret") as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NEREID_API_KEY", "s3cret")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(url, capsys):
    """A function that runs a command with `--url`, and returns its exit code and its output."""

    def command(*arguments):
        code = main([*arguments, "--url", url])
        return code, capsys.readouterr().out

    return command


@contextmanager
def raw_server(response):
    """Run a server that answers each request with the bytes `response`, and yield its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            body_length = 0
            for line in iter(self.rfile.readline, b"\r\n"):
                if line.startswith(b"Content-Length: "):
                    body_length = int(line.removeprefix(b"Content-Length: "))
            self.rfile.read(body_length)
            self.wfile.write(response)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def json_response(text):
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def test_a_text_is_completed_in_a_stream_or_as_json(run, backend):
    code, out = run("complete", "one two three", "--max-tokens", "2")
    assert (code, out) == (0, "one two \n")
    code, out = run("complete", "one", "--json", "--temperature", "0.5")
    assert json.loads(out)["choices"][0]["text"] == "one"
    assert json.loads(backend.generations[-1].sampling_parameters)["temperature"] == 0.5


def test_an_escape_sequence_of_a_model_does_not_control_the_terminal(run, monkeypatch):
    text = "a\x1b[2Jb\x9b1m\r\u00e4\tc\r\n"
    assert run("complete", text) == (0, f"{text}\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run("complete", text) == (0, "a\\x1b[2Jb\\x9b1m\\x0d\u00e4\tc\r\n\n")


def test_the_standard_input_is_used_without_a_text(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert run("complete") == (0, "from a pipe\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("embed")[0] == 2


def test_a_piped_message_is_answered_as_text_or_as_json(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthere"))
    assert run("chat") == (0, "hello\nthere\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthere"))
    code, out = run("chat", "--json")
    assert code == 0
    assert json.loads(out)["choices"][0]["message"]["content"] == "hello\nthere"


def test_arrow_keys_edit_a_message_in_a_terminal(url, backend):
    pytest.importorskip("readline")
    program = "import sys; from nereid_client.cli.main import main; sys.exit(main())"
    controller, terminal = os.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-c", program, "chat", "--url", url],
        stdin=terminal,
        stdout=terminal,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(terminal)
    left_arrow_key = b"\x1b[D"
    os.write(controller, b"hllo" + left_arrow_key * 3 + b"e\n/quit\n")
    assert chat.wait(60) == 0
    os.close(controller)
    chat_request = json.loads(backend.generations[-1].chat_request)
    assert chat_request["messages"] == [{"role": "user", "content": "hello"}]


def test_a_chat_without_a_message_is_an_error(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run("chat")[0] == 2


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", "iVBOR"), ("jpg", "/9j/"), ("webp", "UklGR"), ("gif", "R0lG")]
)
def test_images_are_sent_with_the_first_message(run, backend, monkeypatch, tmp_path, suffix, start):
    file = tmp_path / f"drawing.{suffix}"
    Image.new("RGB", (2, 2)).save(file)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is this?"))
    # Some systems have no file with further MIME types. The test behaves as on such a system.
    monkeypatch.setattr(mimetypes, "_db", mimetypes.MimeTypes())
    code, _ = run("chat", "--image", str(file))
    assert code == 0
    (message,) = json.loads(backend.generations[-1].chat_request)["messages"]
    image, text = message["content"]
    assert re.fullmatch(f"data:image/[a-z]+;base64,{start}.*", image["image_url"]["url"])
    assert text == {"type": "text", "text": "What is this?"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("notes.txt", "does not end with .png"), ("absent.png", "No such file or directory")],
)
def test_a_file_that_is_no_image_is_named(run, capsys, tmp_path, name, problem):
    assert main(["chat", "--image", str(tmp_path / name), "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert problem in error


def test_texts_are_embedded_and_compared(run):
    code, out = run("embed", "a [b]", "a [b]", "zzz")
    assert code == 0
    assert "4 dimensions, model tiny-embed" in out
    assert out.count("a [b]") == 2
    assert out.count("1.000") == 5
    _, out = run("embed", "a", "--json")
    assert len(json.loads(out)["data"][0]["embedding"]) == 4


def test_documents_are_ranked(run):
    code, out = run("rerank", "a cat", "a dog", "a cat sat")
    assert code == 0
    assert out.index("a cat sat") < out.index("a dog")
    _, out = run("rerank", "a cat", "a dog", "--json")
    assert json.loads(out)["results"][0]["index"] == 0


def test_the_models_are_listed(run):
    _, out = run("models")
    assert "echo" in out
    assert "tiny-rerank" in out
    _, out = run("models", "--json")
    assert json.loads(out)["data"][0]["id"] == "echo"


def test_a_load_test_counts_requests_tokens_and_latencies(run):
    _, out = run(
        *("bench", "--requests", "6", "--concurrency", "3", "--prompt", "one two", "--json")
    )
    summary = json.loads(out)
    assert (summary["succeeded"], summary["failed"]) == (6, 0)
    assert summary["tokens_per_s"] > 0
    assert summary["time_to_first_token_ms"].keys() == {"mean", "p50", "p90", "p99"}
    code, out = run("bench", "--requests", "2", "--prompt", "one two")
    assert code == 0
    assert "2 of 2, 0 failed" in out


def test_a_load_test_with_a_failed_request_exits_with_1(run, capsys):
    code = main(["bench", "--requests", "2", "--prompt", "<fail UNAVAILABLE no engine>", "--json",
                 "--url", "http://127.0.0.1:1", "--model", "x"])  # fmt: skip
    assert code == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failed"] == 2
    assert "2 requests failed. The first error: Cannot connect to" in captured.err
    assert run("bench", "--requests", "1", "--prompt", "<fail UNAVAILABLE no engine>")[0] == 1


def test_percentiles():
    assert percentiles([1.0, 2.0, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert percentiles([]) == {}


def test_an_error_of_the_server_is_one_line(run, capsys, monkeypatch):
    monkeypatch.setenv("NEREID_API_KEY", "wrong")
    assert run("models")[0] == 1
    assert main(["models", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("nereid models: Cannot connect to http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["bench", "--requests", "0"], "--requests"),
        (["embed", "--modle", "x"], "No such option: --modle"),
    ],
)
def test_a_wrong_argument_exits_with_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_version_and_the_list_of_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nereid {__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("serve", "chat", "complete", "embed", "rerank", "models", "bench", "template"):
        assert f" {command} " in out


def test_help_and_two_dashes_reach_the_commands_with_flags(capsys):
    assert main(["serve", "--help"]) == 0
    assert "--max-model-len" in capsys.readouterr().out
    flags = ["--tritonserver", "/bin/true", "--model", "/missing"]
    assert main(["serve", *flags, "--", "--log-verbose=1"]) == 2
    assert "/missing does not exist" in capsys.readouterr().err


def test_doctor_accepts_the_flags_of_serve_and_names_the_failed_check(capsys):
    flags = ["--tritonserver", "/bin/true", "--model", "/missing"]
    assert main(["doctor", "--json", *flags]) == 1
    results = {result["check"]: result for result in json.loads(capsys.readouterr().out)}
    assert results["Python"]["ok"]
    assert not results["nereid serve"]["ok"]
    assert "/missing does not exist" in results["nereid serve"]["finding"]
    assert main(["doctor", *flags]) == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.long  # the test is slow, because two processes import torch
@pytest.mark.parametrize("command", [["convert", "a", "b", "int8"], ["doctor", "a"]])
def test_a_command_that_needs_the_backend_names_the_missing_package(monkeypatch, capsys, command):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(command) == 2
    assert "The package nereid-backend is not installed" in capsys.readouterr().err


def test_convert_writes_a_new_checkpoint(tmp_path, capfd):
    demo = str(Path(__file__).parents[3] / "demo" / "chat")
    assert main(["convert", demo, str(tmp_path / "new"), "int4"]) == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "new" / "tokenizer.json").exists()
    assert main(["convert", demo, str(tmp_path / "new"), "int4"]) == 2
    assert "new is not empty" in capfd.readouterr().err


@pytest.mark.long  # the test is slow, because two processes import torch
def test_doctor_describes_a_checkpoint(capsys):
    demo = Path(__file__).parents[3] / "demo" / "chat"
    assert main(["doctor", "--json", str(demo)]) == 0
    results = {result["check"]: result for result in json.loads(capsys.readouterr().out)}
    assert "Qwen3ForCausalLM" in results["architecture"]["finding"]
    assert main(["doctor", "/missing"]) == 1


def test_the_configuration_names_the_source_of_each_value_and_hides_the_key(capsys):
    environment = {"NEREID_API_KEY": "s3cret", "NEREID_OPENAI_PORT": "9100", "NEREID_DTYPE": "int8"}
    rows = {row["variable"]: row for row in config_rows(environment)}
    assert rows["NEREID_API_KEY"]["value"] == "***"
    assert rows["NEREID_OPENAI_PORT"] == {
        "variable": "NEREID_OPENAI_PORT",
        "value": "9100",
        "source": "environment",
    }
    assert rows["NEREID_DTYPE"]["value"] == "int8"
    assert rows["NEREID_MAX_PROMPTS"]["source"] == "default"
    with pytest.raises(CliError, match="NEREID_OPENAI_PORT"):
        config_rows({"NEREID_OPENAI_PORT": "many"})
    assert main(["config", "show", "--json"]) == 0
    assert "s3cret" not in capsys.readouterr().out


_CHUNK = b'data: {"choices": [{"text": "hel", "delta": {"content": "hel"}}]}\n\n'
_STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (
    len(_CHUNK),
    _CHUNK,
)


@pytest.mark.parametrize("partial_chunk", [b"", b"ff\r\nabc", b"5\r\ndata:"])
def test_a_connection_that_ends_during_an_answer_is_an_error_of_one_line(
    capsys, monkeypatch, partial_chunk
):
    with raw_server(_STREAM + partial_chunk) as url:
        assert main(["complete", "hi", "--model", "m", "--url", url]) == 1
        output, error = capsys.readouterr()
        assert output == "hel"
        assert "ended before the response was complete" in error
        assert error.count("\n") == 1

        monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
        assert main(["chat", "--model", "m", "--url", url]) == 1
        assert "ended before the response was complete" in capsys.readouterr().err

        assert main(["bench", "--requests", "1", "--json", "--model", "m", "--url", url]) == 1


_REASONING = b'data: {"choices": [{"delta": {"reasoning": "4."}}]}\n\n'


def test_the_answer_begins_on_a_new_line_after_the_reasoning(capsys, monkeypatch):
    stream = _REASONING + _REASONING + _CHUNK + b"data: [DONE]\n\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n" + stream) as url:
        assert main(["chat", "--model", "m", "--url", url]) == 0
    assert capsys.readouterr().out == "4.4.\nhel\n"


def test_a_terminal_is_not_dim_after_an_error_in_the_reasoning(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    chunk = b"%x\r\n%s\r\n" % (len(_REASONING), _REASONING)
    response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
    with raw_server(response) as url:
        assert main(["chat", "--model", "m", "--url", url]) == 1
    assert capsys.readouterr().out == "\x1b[2m4.\x1b[0m"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"\0\0\x06\x04\0\r\n", "is not HTTP"),  # the answer of a gRPC server
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "ended before the response"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\n{", "ended before the response"),
        (json_response("[]"), "answered without the list 'data'"),
        (json_response("{}"), "answered without the list 'data'"),
        (json_response('{"data": []}'), "serves no model"),
    ],
)
def test_an_answer_of_another_kind_of_server_is_an_error_of_one_line(capsys, response, message):
    with raw_server(response) as url:
        assert main(["complete", "hi", "--url", url]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_url_with_a_wrong_port_is_an_error_of_one_line(capsys):
    assert main(["models", "--url", "http://127.0.0.1:port"]) == 2
    assert "nonnumeric port: 'port'" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "localhost:9000", "", "file:///etc/passwd"])
@pytest.mark.parametrize("command", ["models", "chat"])
def test_a_url_without_http_is_a_wrong_argument(capsys, command, url):
    assert main([command, "--url", url]) == 2
    error = capsys.readouterr().err
    assert f"the URL must begin with http:// or https://, but it is {url!r}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["models"], ["models", "--json"], ["complete", "a"]])
def test_output_to_a_full_disk_is_an_error_of_one_line(url, command):
    program = "import sys; from nereid_client.cli.main import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-c", program, *command, "--url", url],
            env={"NEREID_API_KEY": "s3cret"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.returncode == 1
    assert "the output cannot be written (No space left on device)" in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_table_of_similarities_that_is_wider_than_the_terminal_is_refused(
    run, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "40")
    assert run("embed", *"abcdefg")[0] == 0
    assert main(["embed", *"abcdefgh", "--url", "http://127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "of 8 texts does not fit into the 40 columns" in error
    assert "at most 7 texts" in error
    assert run("embed", *"abcdefgh", "--json")[0] == 0


def test_a_load_test_has_no_time_to_the_first_token_of_a_response_without_text(capsys):
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(usage), usage)
    with raw_server(response) as url:
        assert main(["bench", "--requests", "1", "--json", "--model", "m", "--url", url]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["succeeded"] == 1
    assert summary["time_to_first_token_ms"] == summary["time_per_output_token_ms"] == {}


INTERRUPTED_IMPORT = """
import sys
from nereid_client.cli.main import main
def interrupt(event, arguments):
    if event == "import" and arguments[0] == "typer":
        raise KeyboardInterrupt
sys.addaudithook(interrupt)
sys.exit(main(["--version"]))
"""


def test_ctrl_c_while_the_command_is_imported_prints_no_traceback():
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


BENCH = "import sys; from nereid_client.cli.main import main; sys.exit(main(sys.argv[1:]))"


def test_ctrl_c_during_a_load_test_waits_for_no_request():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", BENCH, "bench", "--url", url, "--model", "m"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = server.accept()  # the server never answers
            process.send_signal(signal.SIGINT)
            try:
                _, error = process.communicate(timeout=20)
            finally:
                process.kill()
                connection.close()
    assert process.returncode == 130
    assert "Traceback" not in error


def test_a_chunk_of_another_api_is_a_failed_request(capsys):
    text = b'data: {"text": "a"}\n\ndata: [DONE]\n\n'
    response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    with raw_server(response) as url:
        assert main(["bench", "--requests", "2", "--json", "--model", "m", "--url", url]) == 1
    assert "sent a chunk that is not a chat completion" in capsys.readouterr().err


CONVERT_WITH_ANOTHER_PYTHON = """
import sys
from nereid_client.cli.main import main
sys.executable = sys.argv.pop(1)
sys.exit(main(["convert", "a", "b", "int8"]))
"""


def test_ctrl_c_during_a_conversion_prints_no_traceback(tmp_path):
    converter = tmp_path / "python"
    converter.write_text(
        f"#!{sys.executable}\nimport time\nprint('started', flush=True)\ntime.sleep(60)\n"
    )
    converter.chmod(0o755)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", CONVERT_WITH_ANOTHER_PYTHON, str(converter)]
    with subprocess.Popen(command, text=True, process_group=0, **pipes) as process:
        assert process.stdout.readline() == "started\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


def test_characters_that_the_terminal_does_not_have_are_printed_as_escape_sequences(url):
    program = "import sys; from nereid_client.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "complete", "日本", "--url", url]
    environment = {"NEREID_API_KEY": "s3cret", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "\\u65e5\\u672c\n"), ended.stderr


def test_a_key_that_no_header_can_contain_is_named_without_its_value(capsys, monkeypatch, url):
    monkeypatch.setenv("NEREID_API_KEY", "s3cret\n")
    assert main(["models", "--url", url]) == 2
    error = capsys.readouterr().err
    assert "NEREID_API_KEY has a line end" in error
    assert "s3cret" not in error


@pytest.mark.parametrize("arguments", [["demo/chat"], ["demo/chat", "--", "--log-verbose=1"]])
def test_serve_refuses_a_checkpoint_without_its_flag(capsys, arguments):
    assert main(["serve", *arguments]) == 2
    message = "serve does not have the argument demo/chat. Give a checkpoint with --model"
    assert message in capsys.readouterr().err


def test_a_folder_is_not_a_server_program(capsys, tmp_path):
    assert main(["serve", "--tritonserver", str(tmp_path)]) == 2
    assert "is not an executable file" in capsys.readouterr().err


def test_a_limit_of_memory_with_a_comma_is_refused(capsys):
    assert main(["serve", "--max-process-memory", "4,096MiB"]) == 2
    assert "must be a number of bytes" in capsys.readouterr().err


def test_a_limit_of_memory_below_that_of_every_process_is_refused(capsys):
    assert main(["serve", "--max-process-memory", "8"]) == 2
    assert "must be at least 64MiB, such as 8GiB" in capsys.readouterr().err


def test_a_missing_key_is_refused_with_the_name_of_its_variable(capsys, monkeypatch):
    monkeypatch.delenv("NEREID_API_KEY", raising=False)
    with live_frontend(FakeBackend(), FakePooling(), api_key="s3cret") as port:
        assert main(["models", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "sends the key in the variable NEREID_API_KEY." in capsys.readouterr().err


def test_keys_with_characters_beyond_latin_1_are_sent(capsys, monkeypatch):
    monkeypatch.setenv("NEREID_API_KEY", "ключ")
    with live_frontend(FakeBackend(), FakePooling(), api_key="ключ") as port:
        url = f"http://127.0.0.1:{port}"
        assert main(["models", "--url", url]) == 0
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        assert FrontendClient(url, "m", "ключ").post("/v1/completions", body).status != 401


def test_doctor_names_an_unknown_flag_and_a_similar_one(capsys):
    assert main(["doctor", "--modle", "x"]) == 2
    assert "the argument --modle. Did you mean --model?" in capsys.readouterr().err


def test_doctor_names_an_unknown_argument_after_a_checkpoint(capsys):
    assert main(["doctor", "demo/chat", "--laod"]) == 2
    assert "the argument --laod is unknown" in capsys.readouterr().err
