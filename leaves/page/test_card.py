"""The model card of a run, and its way to the hub: a server on this machine stands in for huggingface.co."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT, TOY, toy_config
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import config
import report
import train
from infra import runfolder
from leaves.page import card
from settings.loader import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of a base model that has a card."""
    folder = tmp_path_factory.mktemp("card")
    base = folder / "base"
    base.mkdir()
    for path in Path(TOY).iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The toy\n")
    train.train(toy_config(folder / "run", f"model.path={base}", "rollout.max_new_tokens=8", "eval.max_new_tokens=8"))
    return folder / "run"


def test_the_card_has_method_data_figures_and_the_licence_of_the_base(run):
    path = card.write_card(run)
    read = ModelCard.load(path)  # by the hub's own reader, which checks the head
    assert (read.data.license, read.data.library_name, read.data.base_model) == ("apache-2.0", "transformers", None)
    first, last = (line for line in runfolder.read_log(run / "metrics.jsonl") if "eval/few/accuracy" in line)
    for line in (first, last):
        assert f"{line['eval/few/accuracy']:.1%} [{line['eval/few/low']:.1%}, {line['eval/few/high']:.1%}]" in read.text
    cfg = config.load(run / "config.yaml")
    assert f"| prune.completions.kind | {cfg.prune.completions.kind} |" in read.text
    assert "| reward | {'accuracy': 1.0} |" in read.text and f"| data.train | {cfg.data.train} |" in read.text
    assert config.dump(cfg) in read.text
    steps = [line for line in runfolder.read_log(run / "metrics.jsonl") if "train/tokens" in line]
    assert f"those with a gradient {sum(line['train/tokens'] for line in steps):,}" in read.text
    assert "apache-2.0, that of the base model." in read.text


def test_a_card_that_was_edited_is_not_written_over(run):
    path = card.write_card(run)
    mine = f"{path.read_text()}My own words.\n"
    path.write_text(mine)
    with pytest.raises(ConfigError, match="README.md has been edited, or is another's; move it away to have it"):
        card.write_card(run)
    assert path.read_text() == mine
    path.unlink()


def test_the_lines_of_code_in_the_card_run(run, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", card.write_card(run).read_text(), re.DOTALL)[1]
    monkeypatch.chdir(run / "hf")
    exec(code.replace("max_new_tokens=256", "max_new_tokens=4"), {})
    assert "<|im_start|>user\n" in capsys.readouterr().out


def test_without_a_card_of_the_base_no_licence_is_claimed(run, monkeypatch):
    monkeypatch.setattr(card, "licence_of", lambda base: None)
    (run / "hf" / "README.md").unlink()
    path = card.write_card(run)
    read = ModelCard.load(path)
    path.unlink()
    assert read.data.license is None and "states no licence where the run found it" in read.text


def test_a_run_without_a_model_has_no_card(tmp_path, run, command, capsys):
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    assert command(report, tmp_path, "--card") == command(report, run, tmp_path, "--card") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("(died) has no model for a card (hf/); let it finish first"), first
    assert "--card and --push-to-hub describe one run" in second


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that takes an upload."""

    files: dict[str, bytes] = {}
    made: list[dict] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer, home = {}, f"http://{self.headers['Host']}/someone/sums"
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            answer = {"url": home, "name": "someone/sums"}
        elif "/preupload/" in self.path:
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                                for f in json.loads(body)["files"]]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"success": True, "commitUrl": f"{home}/commit/1", "commitOid": "1" * 40}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *given):
        pass


def push(run: Path, address: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_ENDPOINT": address, "HF_TOKEN": "hf_none", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "report.py", run, "--push-to-hub", "someone/sums"], cwd=ROOT,
                          env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_export_and_card_go_to_the_hub_as_a_private_model(run, tmp_path):
    path = card.write_card(run)
    path.write_text(f"{path.read_text()}My own words.\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    done = push(run, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    assert done.returncode == 0 and "someone/sums" in done.stdout, done.stderr
    assert Hub.made == [{"organization": "someone", "name": "sums", "visibility": "private"}]
    exported = {path.name: path.read_bytes() for path in (run / "hf").iterdir()}
    path.unlink()
    assert Hub.files == exported and b"My own words." in exported["README.md"]
    for name, content in Hub.files.items():
        (tmp_path / name).write_bytes(content)
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow  # the hub's library tries five times
def test_a_hub_that_cannot_be_reached_is_one_line(run):
    done = push(run, "http://127.0.0.1:9")  # where nobody listens
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--push-to-hub someone/sums: " in done.stderr and "log in by `hf auth login`" in done.stderr
