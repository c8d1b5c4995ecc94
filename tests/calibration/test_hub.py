"""The hub out of reach: mistyped names fail at once and in words, cached files are used. In reach, it is used."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
from huggingface_hub import constants, hf_api
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scalewright.calibration.hub import hub_asked_once
from scalewright.calibration.sources import DataOptions, open_source
from scalewright.checkpoint.loading import load_companions, load_model
from scalewright.errors import DataError, ModelError

COMMIT = "0" * 40
NOWHERE = "http://127.0.0.1:9"


def set_hub(monkeypatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of the hub, empty; and nobody waits to try again."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_hub(cache, monkeypatch):
    """A hub that does not answer."""
    set_hub(monkeypatch, NOWHERE)


@pytest.fixture
def hub(cache, tmp_path, monkeypatch):
    """A hub that has the one model `someone/tiny`; gives the paths that it was asked for."""
    folder = tmp_path / "on the hub"
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(folder)
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            file = folder / self.path.rpartition("/")[2]
            is_there = self.path.startswith("/someone/tiny/resolve/") and file.is_file()
            body = file.read_bytes() if is_there else b""
            self.send_response(200 if is_there else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{file.name}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if not is_there:
                named = "EntryNotFound" if "/someone/tiny/" in self.path else "RepoNotFound"
                self.send_header("X-Error-Code", named)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        set_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["tinny", "someone/tinny"])
def test_a_model_of_no_such_name_fails_at_once_where_the_hub_is_out_of_reach(name, tmp_path):
    (tmp_path / name).with_name("tiny").mkdir(parents=True)
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert str(caught.value) == (
        f"{name}: there is no such folder, and no model of that name could be loaded (the hub cannot be reached: "
        "[Errno 111] Connection refused). Did you mean 'tiny'? Give the folder of a Hugging Face model, or its name on "
        "the hub."
    )
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("no_hub")
def test_so_does_a_tokenizer():
    with pytest.raises(ModelError) as caught:
        load_companions(None, "someone/tiny")
    assert str(caught.value) == (
        "someone/tiny: there is no tokenizer that could be loaded (the hub cannot be reached: [Errno 111] Connection "
        "refused). Give the folder of a tokenizer, or its name on the hub."
    )


@pytest.mark.usefixtures("no_hub")
def test_so_does_a_dataset(tmp_path):
    (tmp_path / "calib.txt").write_text("a")
    with pytest.raises(DataError) as caught:
        open_source("calib:raw", DataOptions())
    assert str(caught.value) == (
        "calib:raw: neither a file nor a dataset that can be loaded (the hub cannot be reached: [Errno 111] Connection "
        "refused). Did you mean 'calib.txt'? Check its name, or give a file."
    )
    assert not datasets.config.HF_HUB_OFFLINE


LOADING = """
from scalewright.checkpoint.loading import load_companions, load_model
load_model("someone/tiny")
print(type(load_companions("someone/tiny", None)[0]).__name__)
"""


def test_a_model_is_loaded_from_the_hub_and_later_from_the_cache(hub, tmp_path):
    """In a process of its own, for libraries remember the address."""
    words = [sys.executable, "-c", LOADING]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": constants.ENDPOINT}
    first = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "/someone/tiny/resolve/main/model.safetensors" in hub
    assert "Tokenizer" in first.stdout
    environment["HF_ENDPOINT"] = NOWHERE
    again = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "Retrying" not in again.stderr
    assert again.stdout == first.stdout


def test_what_the_hub_says_of_a_name_is_told(hub):
    with pytest.raises(ModelError) as caught:
        load_model("someone/else")
    assert str(caught.value).startswith(
        "someone/else: there is no such folder, and no model of that name could be loaded (someone/else is not a "
    )


def test_a_folder_is_not_asked_for(hub, tmp_path):
    with hub_asked_once(tmp_path) as reason:
        assert reason is None
    with hub_asked_once("./no/name/of/the/hub") as reason:
        assert reason is None
    assert hub == []
