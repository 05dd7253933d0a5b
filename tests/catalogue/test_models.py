"""What a `--model` may be. The Hub is a server on this machine: no test needs the network."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from autotune.catalogue import models
from autotune.catalogue.models import MAX_CONFIG_BYTES, catalogue, resolve
from autotune.errors import ConfigError

LLAMA = {"model_type": "llama", "hidden_size": 64}


def write_config(folder: Path, content: str | bytes | dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("entry", models.known(), ids=lambda entry: entry.hub_id)
def test_every_row_of_the_catalogue_resolves_and_is_sourced(entry: models.CatalogueEntry) -> None:
    source = resolve(entry.hub_id)
    assert source.name == entry.hub_id
    assert source.origin == "catalogue"
    assert source.num_parameters_known == entry.num_parameters
    assert entry.stated_source
    assert entry.config_source
    assert resolve(entry.short_name.upper()) == source


def test_every_configuration_in_the_package_has_its_row() -> None:
    folder = Path(models.__file__).with_name("data") / "models"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        entry.file for entry in catalogue()
    )
    assert len(catalogue()) == 87
    # Published on the model's card.
    assert resolve("polyglot-ko-1.3b").num_parameters_known == 1_331_810_304


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B"),
        ("QWEN/qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"),
        ("gpt2", "openai-community/gpt2"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
    ],
)
def test_names_of_the_catalogue(name: str, hub_id: str) -> None:
    source = resolve(name)
    assert source.name == hub_id
    assert source.short_name == hub_id.split("/")[1]


def test_a_variant_is_built_as_the_model_it_is_like() -> None:
    """Other weights alone, and another longest text where its row says so."""
    names = [entry.hub_id for entry in models.known()]
    assert len(names) == len({name.casefold() for name in names}) == 182
    assert {entry.short_name.casefold() for entry in models.known()}.isdisjoint(names)
    source, like = resolve("llama-3.1-8b-instruct"), resolve("meta-llama/Llama-3.1-8B")
    assert source.name == "meta-llama/Llama-3.1-8B-Instruct"
    assert (source.config, source.num_parameters_known) == (
        like.config,
        like.num_parameters_known,
    )
    thinking, qwen3 = resolve("Qwen/Qwen3-4B-Thinking-2507"), resolve("Qwen/Qwen3-4B")
    assert thinking.positions == 262_144
    assert thinking.config == qwen3.config | {"max_position_embeddings": 262_144}


def test_a_folder(tmp_path: Path) -> None:
    path = write_config(tmp_path / "my-model", LLAMA)
    source = resolve(str(tmp_path / "my-model"))
    assert (source.origin, source.path, source.config) == ("folder", path, LLAMA)
    assert source.short_name == "my-model"
    assert source.num_parameters_known is None


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write_config(tmp_path / "my-model", b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    source = resolve(str(path))
    assert (source.origin, source.config) == ("file", LLAMA)
    assert source.short_name == "my-model"
    other = path.rename(path.with_name("tiny.json"))
    assert resolve(str(other)).short_name == "tiny"


def test_a_path_comes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "gpt2", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").config == LLAMA


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "m", LLAMA)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m").config == LLAMA


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "Line 1, column 1"),
        ('{"model_type": "llama",\n "hidden_size": }', "Line 2, column 17"),
        (b'{"model_type": "\xff"}', "not UTF-8"),
        ("[1, 2]", "holds a list"),
        ("[" * 200_000, "nested too deeply"),
        ('{"model_type": "llama", "n": ' + "1" * 5000 + "}", "digits"),
        ("{" + " " * MAX_CONFIG_BYTES + "}", "larger than 1.0 MiB"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": " "}', "has no model_type"),
        ('{"auto_map": {"AutoConfig": "evil.Config"}}', "never runs"),
    ],
)
def test_a_configuration_that_cannot_be_used(
    tmp_path: Path, content: str | bytes, part: str
) -> None:
    write_config(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        resolve(str(tmp_path))
    assert part in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("number", ["Infinity", "1e999"])
def test_a_number_that_json_has_not_is_written_as_transformers_does(
    tmp_path: Path, number: str
) -> None:
    write_config(tmp_path, f'{{"model_type": "mamba2", "time_step_limit": [0.0, {number}]}}')
    config = resolve(str(tmp_path)).config
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    json.dumps(config, allow_nan=False)


def test_remote_code_is_named_for_the_worker_to_judge(tmp_path: Path) -> None:
    write_config(tmp_path, {**LLAMA, "auto_map": {"AutoModel": "modeling_x.Model"}})
    assert resolve(str(tmp_path)).config["auto_map"]


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    gguf, weights = tmp_path / "model-Q4_K_M.gguf", tmp_path / "model.safetensors"
    gguf.touch()
    weights.touch()
    for path in (tmp_path, gguf):
        with pytest.raises(ConfigError, match="Name the model that it was made from"):
            resolve(str(path))
    with pytest.raises(ConfigError, match="It holds weights, which are never read"):
        resolve(str(weights))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="base model"):
        resolve(str(tmp_path))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, LLAMA)

    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The superuser may read everything, so the refusal is played.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qwen2.5-1.5c", 'Did you mean "Qwen2.5-1.5B"'),
        ("", "Unknown model ''"),
        ("a\x00b", "Unknown model"),
        ("x" * 9000, "Unknown model"),
        ("Qwen/\nInjected", "Unknown model"),
        ("a/b/c", "Unknown model"),
        ("../x/y", "No such file or folder"),
        ("nowhere/config.json", "No such file or folder"),
    ],
)
def test_names_that_nothing_has(name: str, part: str, hub: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert hub == []


class HubHandler(BaseHTTPRequestHandler):
    """Answers as the Hub does (headers of huggingface_hub/file_download.py and utils/_http.py)."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        repository, _, rest = self.path.lstrip("/").partition("/resolve/")
        body = json.dumps(LLAMA).encode()
        failures = {
            "org/gated": (403, "GatedRepo"),
            "org/no-config": (404, "EntryNotFound"),
            "org/broken": (500, ""),
        }
        status, code = failures.get(repository, (200, ""))
        if repository not in (*failures, "org/good", "org/large") or not rest:
            status, code = 404, "RepoNotFound"
        size_bytes = 3 * MAX_CONFIG_BYTES if repository == "org/large" else len(body)
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 200:
            self.send_header("ETag", '"0123456789abcdef"')
            self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(size_bytes if status == 200 else 0))
        self.end_headers()
        if with_body and status == 200:
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Keep the test's output clean."""


def point_hub_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A Hub on this machine with an empty cache; yields the paths that were asked for."""
    asked: list[str] = []
    handler = type("Handler", (HubHandler,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    point_hub_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_fetches_the_configuration_and_nothing_else(hub: list[str]) -> None:
    source = resolve("org/good")
    assert (source.origin, source.name, source.config) == ("hub", "org/good", LLAMA)
    # The Hub's client may ask its own API for news; of the repository it takes this alone.
    files = {path for path in hub if path.startswith("/org/")}
    assert files == {"/org/good/resolve/main/config.json"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("org/gated", "is gated"),
        ("org/absent", "no model org/absent"),
        ("org/no-config", "has no config.json"),
        ("org/broken", "could not be fetched"),
        ("org/large", "larger than 1.0 MiB"),
        ("Qwen/Qwen2.5-1.5C", 'Did you mean "Qwen/Qwen2.5-1.5B"'),
    ],
)
def test_what_the_hub_refuses(hub: list[str], name: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 700
    assert hub


def test_the_catalogue_answers_without_asking_the_hub(hub: list[str]) -> None:
    resolve("meta-llama/Llama-3.1-8B")
    assert hub == []


def test_the_hubs_cache_goes_before_the_catalogue_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are alike it is the catalogue's, whose number of parameters is known."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    name, key = "Qwen/Qwen2.5-0.5B", "num_hidden_layers"
    ours = resolve(name)
    assert ours.origin == "catalogue"
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B"
    for made in (folder / "refs", folder / "snapshots" / "abc"):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    file = folder / "snapshots" / "abc" / "config.json"
    alike = {**ours.config, "transformers_version": "9", "eos_token_id": 1, "rope_theta": 1.0}
    # The Hub's files say what is so by default, too.
    alike |= {"max_window_layers": 24, "sliding_window": 32768, "pretraining_tp": 1}
    alike["dtype"] = alike.pop("torch_dtype", None) or alike["dtype"]
    for written in (alike, {key: 3}, "no JSON"):
        file.write_text(json.dumps(written) if written != "no JSON" else "{")
        assert resolve(name) == ours
    file.write_text(json.dumps(alike | {key: 3}))
    found = resolve("qwen2.5-0.5b", asks_hub=False)
    assert (found.origin, found.path, found.config[key]) == ("hub", file, 3)
    assert (found.num_parameters_known, found.differs_in) == (None, (key,))
    file.write_text(json.dumps(alike | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert resolve(name).differs_in == ("quantization_config",)


def test_offline_the_hubs_cache_answers_else_one_error(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve("org/good")
    # Nothing listens on the discard port: what a machine without network sees.
    point_hub_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve("org/good").config == LLAMA
    with pytest.raises(ConfigError, match="could not be fetched"):
        resolve("org/other")


@pytest.mark.parametrize("text_only", [True, False])
def test_a_slip_in_the_number_of_layers(tmp_path: Path, text_only: bool) -> None:
    layers = {"num_hidden_layers": models.MAX_LAYERS + 1}
    config = {"model_type": "gemma3", **(layers if text_only else {"text_config": layers})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has 1,001 layers"):
        resolve(str(tmp_path))


def test_what_is_asked_of_a_model_that_sees_is_of_its_text(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 34, "hidden_size": 2560, "num_attention_heads": 8}
    config = {"model_type": "gemma3", "text_config": {**text, "torch_dtype": "float32"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve(str(tmp_path))
    assert (source.num_layers, source.head_size, source.is_float32) == (34, 320, True)
